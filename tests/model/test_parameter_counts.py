from __future__ import annotations

import json
from pathlib import Path

import pytest

from paraplan.model.config_file import ModelConfig, load_config
from paraplan.model.family_table import READERS
from paraplan.model.reader import bundled_models, read_config, read_fields, read_model

COUNTED = json.loads((Path(__file__).parent / "counted_variants.json").read_text(encoding="utf-8"))["variants"]

# Counted by transformers 5.23 on the meta device from each model's public config.json; GPT-3 by hand below.
PUBLISHED = {
    "gemma-3-4b-it": 4_300_079_472,
    "gemma-3-12b-it": 12_187_325_040,
    "gemma-3-27b-it": 27_432_406_640,
    "qwen2.5-vl-3b": 3_754_622_976,
    "qwen2.5-vl-7b": 8_292_166_656,
    "qwen2.5-vl-32b": 33_452_718_336,
    "qwen2.5-vl-72b": 73_410_777_344,
    "qwen3-vl-2b": 2_127_532_032,
    "qwen3-vl-8b": 8_767_123_696,
    "qwen3-vl-30b-a3b": 31_070_754_032,
    "glm-4-32b": 32_566_081_536,
    "gemma-4-31b": 30_697_345_280,
    "qwen3-vl-32b": 33_357_390_064,
    "dots.llm1": 142_774_373_888,
    "hunyuan-a13b": 80_393_183_232,
    "llama-4-scout": 107_769_861_120,
    "llama-4-maverick": 400_711_848_960,
    "ling-3.0-flash": 124_414_191_072,
    "gemma-3n-e4b": 6_835_235_568,
    "granite-3.0-8b": 8_170_848_256,
    "gpt2": 124_439_808,
    "gpt2-xl": 1_557_611_200,
    "llama-2-7b": 6_738_415_616,
    "llama-3-8b": 8_030_261_248,
    "llama-3.2-1b": 1_235_814_400,
    "mistral-7b": 7_248_023_552,
    "mixtral-8x7b": 46_702_792_704,
    "qwen2.5-0.5b": 494_032_768,
    "mixtral-8x22b": 140_620_634_112,
    "qwen3-0.6b": 596_049_920,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "deepseek-v2": 235_741_434_880,
    "deepseek-v3": 671_026_404_352,
    "kimi-k2": 1_026_408_209_408,
}


@pytest.mark.parametrize("family", sorted({case["config"]["model_type"] for case in COUNTED}))
def test_every_part_counts_as_transformers_builds_it(family: str) -> None:
    for number, case in enumerate(COUNTED):
        if case["config"]["model_type"] == family:
            parameters = read_fields(ModelConfig(f"variant {number}", case["config"])).parameters
            parts = {"embedding": parameters.embedding, "blocks": parameters.blocks, "head": parameters.head}
            assert parts == case["parameters"], number


def test_every_family_has_counted_variants() -> None:
    without_a_class = {"bailing_moe_v2"}  # counted by hand below
    assert {case["config"]["model_type"] for case in COUNTED} == set(READERS) - without_a_class


def test_ling_counts_by_hand() -> None:
    h, heads, groups, d, inner, vocabulary = 2048, 16, 4, 128, 512, 157_184
    attention = h * (heads + 2 * groups) * d + 2 * d + heads * d * h
    dense, expert = 3 * h * 5120, 3 * h * inner
    mixture = 256 * expert + expert + 256 * h
    layers = 20 * (attention + 2 * h) + dense + 19 * mixture
    assert read_model("ling-mini-2.0").parameters.total == layers + 2 * vocabulary * h + h


@pytest.mark.parametrize(("name", "parameters"), PUBLISHED.items())
def test_bundled_models_have_their_published_size(name: str, parameters: int) -> None:
    assert read_model(name).parameters.total == parameters


def test_gpt3_counts_by_hand() -> None:
    h, layers, vocabulary, positions = 12_288, 96, 51_200, 2_048
    weights, biases, norms = 12 * h * h, 9 * h, 4 * h
    assert read_model("gpt3-175b").parameters.total == (
        layers * (weights + biases + norms) + (vocabulary + positions) * h + 2 * h
    )


def test_an_untied_head_is_counted_and_a_tied_one_is_not(tmp_path: Path) -> None:
    fields = json.loads(bundled_models()["llama-3-8b"].read_text(encoding="utf-8"))
    tied = tmp_path / "tied.json"
    tied.write_text(json.dumps(fields | {"tie_word_embeddings": True}), encoding="utf-8")
    untied = read_model("llama-3-8b")
    assert untied.parameters.total - read_config(tied).parameters.total == 128_256 * 4096
    assert read_config(tied).tied_embeddings
    assert not untied.tied_embeddings


def test_a_tied_head_still_multiplies() -> None:
    gpt2 = read_model("gpt2")
    assert [(matmul.k, matmul.n) for matmul in gpt2.head.matmuls] == [(768, 50_257)]
    assert gpt2.head.num_parameters == 2 * 768


def test_first_dense_layers_stand_before_the_experts() -> None:
    case = next(
        case
        for case in COUNTED
        if case["config"]["model_type"] == "deepseek_v3" and case["config"]["first_k_dense_replace"] == 1
    )
    model = read_fields(ModelConfig("variant", case["config"]))
    assert [(run.block.kind, run.count) for run in model.runs] == [
        ("transformer", 1),
        ("moe", case["config"]["num_hidden_layers"] - 1),
    ]


def test_experts_are_marked_and_shaped_by_expert() -> None:
    block = read_model("mixtral-8x7b").blocks[0]
    experts = [parameter for parameter in block.parameters if parameter.is_expert]
    assert {parameter.shape[0] for parameter in experts} == {8}
    assert sum(parameter.num_elements for parameter in experts) == 8 * 3 * 4096 * 14_336


@pytest.mark.parametrize(("name", "limit"), [("llama-3-8b", 8), ("gpt2", 12), ("qwen2.5-0.5b", 2)])
def test_key_value_heads_limit_tensor_parallelism(name: str, limit: int) -> None:
    assert {block.tp_limit for block in read_model(name).blocks} == {limit}


def test_tensor_parallel_dimensions_exist_and_cut_heads_and_widths() -> None:
    for name in ("gpt2", "llama-3-8b", "mixtral-8x7b"):
        model = read_model(name)
        for block in (model.embedding, *model.blocks, model.head):
            for parameter in block.parameters:
                assert parameter.tp_dim is None or parameter.tp_dim < len(parameter.shape)
    cut = {parameter.name: parameter.tp_dim for parameter in read_model("llama-3-8b").blocks[0].parameters}
    assert cut["self_attn.q_proj.weight"] == 0
    assert cut["self_attn.o_proj.weight"] == 1
    assert cut["input_layernorm.weight"] is None


MODELS_BY_TOTAL = {
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-14b": 14_768_307_200,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "llama-3.2-3b": 3_212_749_824,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.3-70b": 70_553_706_496,
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
    "smollm2-1.7b": 1_711_376_384,
    "mistral-nemo-12b": 12_247_782_400,
    "mistral-small-24b": 23_572_403_200,
    "phi-4": 14_659_507_200,
    "olmo-2-7b": 7_298_617_344,
    "olmo-2-13b": 13_716_198_400,
    "gemma-2-2b": 2_614_341_888,
    "gemma-2-9b": 9_241_705_984,
    "gemma-2-27b": 27_227_128_320,
    "gemma-3-1b": 999_885_952,
    # Published with the vision tower and its projector: 4,300,079,472, 12,187,325,040 and 27,432,406,640.
    "gemma-3-4b": 4_300_079_472 - 416_866_032 - (1152 * 2560 + 1152),
    "gemma-3-12b": 12_187_325_040 - 416_866_032 - (1152 * 3840 + 1152),
    "gemma-3-27b": 27_432_406_640 - 416_866_032 - (1152 * 5376 + 1152),
    "phi-4-mini": 3_836_021_760,
    "phi-3.5-mini": 3_821_079_552,
    "phi-3-medium": 13_960_238_080,
    "olmo-2-32b": 32_234_279_936,
    "qwen3-coder-480b-a35b": 480_154_875_392,
    # Without layers for multi-token prediction, which transformers' classes leave out.
    "smollm3-3b": 3_075_098_624,
    "minimax-m2": 228_689_748_992,
    "ernie-4.5-21b-a3b": 21_825_437_888,
    "glm-4-9b": 9_400_279_040,
    "glm-4.5-air": 106_852_245_504,
    "glm-4.5": 352_797_814_784,
    "glm-4.6": 352_797_814_784,
    "glm-4.7-flash": 29_943_390_976,
    "glm-5": 743_911_199_232,
    "deepseek-v3.1": 671_026_404_352,
    "deepseek-v3.2": 671_877_929_216,
    "ministral-3-8b": 8_489_553_920,
    "mistral-small-4": 118_972_826_624,
    "olmoe-1b-7b": 6_919_161_856,
    "seed-oss-36b": 36_151_104_512,
    # Its published file of 15,992,595,884 bytes has 55,050,240 more, of keys and values that no layer uses.
    "gemma-4-e4b-it": 7_941_100_832,
    "kimi-linear-48b-a3b": 49_133_074_464,
}


def test_every_bundled_model_says_where_its_figures_are_from() -> None:
    sources = {name: load_config(path).fields.get("source", "") for name, path in bundled_models().items()}
    assert not [name for name, source in sources.items() if not source or "memory" in source]


@pytest.mark.parametrize("name", MODELS_BY_TOTAL)
def test_models_that_people_fine_tune_have_their_published_number_of_parameters(name: str) -> None:
    assert read_model(name).parameters.total == MODELS_BY_TOTAL[name]


def test_a_bundled_model_is_found_by_its_hub_id_however_its_letters_are_written() -> None:
    assert read_model("qwen/qwen3-14b").parameters.total == read_model("qwen3-14b").parameters.total
    assert read_model("meta-llama/Llama-3.2-3B").parameters.total == 3_212_749_824
