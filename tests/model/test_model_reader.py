from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paraplan.errors import ModelError
from paraplan.model.config_file import ModelConfig, load_config
from paraplan.model.family_table import READERS
from paraplan.model.model_names import same_layers, spelled
from paraplan.model.reader import bundled_config, bundled_models, is_factory, read_fields, read_model, tuned_sibling

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
WriteConfig = Callable[..., Path]


@pytest.fixture
def write_config(tmp_path: Path) -> WriteConfig:
    def write(name: str = "config.json", **changes: object) -> Path:
        path = tmp_path / name
        fields = {key: value for key, value in (LLAMA | changes).items() if value is not ...}
        path.write_text(json.dumps(fields), encoding="utf-8")
        return path

    return write


def test_a_file_and_its_folder_are_the_same_model(write_config: WriteConfig) -> None:
    path = write_config()
    by_file, by_folder = read_model(str(path)), read_model(str(path.parent))
    assert by_file.replace(source="") == by_folder.replace(source="")
    assert by_file.num_blocks == 3
    assert by_file.name == path.parent.name


def test_every_bundled_model_reads_and_says_where_its_shapes_come_from() -> None:
    for name, path in bundled_models().items():
        model = read_model(name)
        assert (model.name, model.source) == (name, name)
        assert json.loads(path.read_text(encoding="utf-8"))["source"]


@pytest.mark.parametrize(
    ("scaling", "longest"),
    [
        ({}, 256),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, 1024),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}, 256),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}}, 1024),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 16}}, 256),
    ],
)
def test_rope_scaling_makes_the_longest_sequence(
    write_config: WriteConfig, scaling: dict[str, Any], longest: int
) -> None:
    assert read_model(str(write_config(**scaling))).max_seq_length == longest


def test_a_near_name_is_offered_for_an_unknown_model() -> None:
    with pytest.raises(ModelError, match=r"did you mean llama-3-8b"):
        read_model("lama-3-8b")


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("llama3 8B", "llama-3-8b"),
        ("gpt-oss:20b", "gpt-oss-20b"),
        ("Qwen3_30B_A3B", "qwen3-30b-a3b"),
        ("phi4", "phi-4"),
        ("gemma3:27b", "gemma-3-27b"),
        ("gemma-3-1b-it", "gemma-3-1b"),
        ("qwen2.5-7b-instruct", "qwen2.5-7b"),
        ("Llama-2-7b-chat-hf", "llama-2-7b"),
        ("llama-3.1-405b", "llama-3-405b"),
        ("llama-3.1-70b-instruct", "llama-3.3-70b"),
        ("mistral-small-24b-base-2501", "mistral-small-24b"),
    ],
)
def test_a_bundled_model_is_known_however_it_is_spelled(written: str, name: str) -> None:
    assert read_model(written).name == name


@pytest.mark.parametrize(
    ("name", "layers_of"),
    [
        ("deepseek-ai/DeepSeek-R1", "deepseek-v3"),
        ("DeepSeek-R1-0528", "deepseek-v3"),
        ("deepseek-ai/DeepSeek-V3.1-Terminus", "deepseek-v3.1"),
        ("deepseek-ai/DeepSeek-R1-Distill-Llama-8B", "llama-3-8b"),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-32B", "qwen2.5-32b"),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B", None),
        ("deepseek-ai/DeepSeek-R1-0528-Qwen3-8B", "qwen3-8b"),
        ("Qwen/QwQ-32B", "qwen2.5-32b"),
        ("Qwen/Qwen3-Coder-30B-A3B-Instruct", "qwen3-30b-a3b"),
        ("qwen3-coder-480b-a35b", "qwen3-coder-480b-a35b"),
        ("Qwen/Qwen2.5-Math-7B", "qwen2.5-7b"),
        ("unsloth/gpt-oss-20b-unsloth-bnb-4bit", "gpt-oss-20b"),
        ("meta-llama/Llama-4-Scout-17B-16E-Instruct", "llama-4-scout"),
        ("NousResearch/Hermes-3-Llama-3.1-8B", "llama-3.1-8b"),
        ("NousResearch/Hermes-2-Pro-Llama-3-8B", "llama-3-8b"),
        ("nvidia/Llama-3.1-Nemotron-70B-Instruct", "llama-3.3-70b"),
        ("NousResearch/Hermes-3-Llama-3.1-405B", "llama-3-405b"),
        ("someone/qwen2.5-7b-instruct-tuned", None),
        ("nvidia/Llama-3_3-Nemotron-Super-49B", None),
        ("nvidia/Llama-3.1-Minitron-4B", None),
        ("meta-llama/Llama-3.2-11B-Vision", None),
        ("google/gemma-3-270m", None),
    ],
)
def test_a_release_has_the_layers_of_what_it_was_made_from(name: str, layers_of: str | None) -> None:
    assert same_layers(name, bundled_models()) == layers_of


@pytest.mark.parametrize("name", bundled_models())
def test_a_bundled_model_has_its_own_layers(name: str) -> None:
    assert same_layers(name, bundled_models()) == name


def test_no_two_bundled_models_are_spelled_alike() -> None:
    assert len({spelled(name) for name in bundled_models()}) == len(bundled_models())


@pytest.mark.parametrize("method", ["fp8", "mxfp4"])
def test_a_model_released_in_a_narrow_format_is_read_as_it_trains(write_config: WriteConfig, method: str) -> None:
    released = read_model(str(write_config(quantization_config={"quant_method": method})))
    assert released == read_model(str(write_config())).replace(released_in=method)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": ...}, r"the field 'hidden_size' is missing"),
        ({"hidden_size": "64"}, r"hidden_size='64', expected a whole number above 0"),
        ({"hidden_size": 64.5}, r"hidden_size=64\.5, expected a whole number above 0"),
        ({"num_hidden_layers": 0}, r"num_hidden_layers=0, expected a whole number above 0"),
        ({"num_hidden_layers": 10**12}, r"expected at most 10000 layers"),
        ({"num_attention_heads": True}, r"num_attention_heads=True, expected a whole number above 0"),
        ({"num_attention_heads": 7}, r"num_attention_heads=7 does not divide hidden_size=64"),
        ({"num_key_value_heads": 3}, r"num_key_value_heads=3 does not divide num_attention_heads=8"),
        ({"attention_bias": "yes"}, r"attention_bias='yes', expected true or false"),
        ({"attention_dropout": 7}, r"attention_dropout=7, expected a number from 0 to 1"),
        ({"architectures": "LlamaForCausalLM"}, r"architectures='LlamaForCausalLM', expected a list of texts"),
        ({"architectures": ["LlamaForTelepathy"]}, r"'LlamaForTelepathy', which is not described for llama"),
        ({"layer_types": ["full_attention"]}, r"layer_types names 1 layers, num_hidden_layers is 3"),
        ({"model_type": ...}, r"the field 'model_type' is missing"),
        ({"model_type": "lama"}, r"no reader knows model_type='lama'; hint: did you mean llama"),
        ({"quantization_config": {"bits": 4}}, r"quantization_config describes a quantized checkpoint"),
    ],
)
def test_a_wrong_config_is_told_by_file_and_field(
    write_config: WriteConfig, changes: dict[str, object], message: str
) -> None:
    path = write_config(**changes)
    with pytest.raises(ModelError, match=message) as caught:
        read_model(str(path))
    assert str(path) in str(caught.value)
    assert caught.value.hint


def test_more_experts_for_a_token_than_there_are_is_an_error(write_config: WriteConfig) -> None:
    path = write_config(model_type="mixtral", num_local_experts=4, num_experts_per_tok=5)
    with pytest.raises(ModelError, match="num_experts_per_tok=5 is more than the 4 experts"):
        read_model(str(path))


@pytest.mark.parametrize(
    ("written", "read"), [("Infinity", math.inf), ("-Infinity", -math.inf), ("NaN", math.nan), ("much", None)]
)
def test_numbers_that_json_has_no_word_for_are_read_as_transformers_writes_them(
    write_config: WriteConfig, written: str, read: float | None
) -> None:
    config = load_config(write_config(time_step_limit=[0.0, {"__float__": written}]))
    found = config.fields["time_step_limit"][1]
    assert found == ({"__float__": "much"} if read is None else pytest.approx(read, nan_ok=True))


@pytest.mark.parametrize(
    ("text", "message"), [("{", "is no JSON"), ("[1]", "holds no JSON object"), ("\xff", "is no JSON")]
)
def test_a_file_that_is_no_config_is_told(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ModelError, match=message):
        read_model(str(path))


def test_a_folder_without_config_is_told(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"holds no config\.json"):
        read_model(str(tmp_path))


def test_code_named_by_a_config_is_never_executed(write_config: WriteConfig, tmp_path: Path) -> None:
    trap = tmp_path / "modeling_trap.py"
    trap.write_text("raise SystemExit('executed')", encoding="utf-8")
    path = write_config(model_type="trap", auto_map={"AutoModelForCausalLM": "modeling_trap.TrapModel"})
    with pytest.raises(ModelError, match="the code that auto_map names is never executed"):
        read_model(str(path))
    known = write_config(auto_map={"AutoModelForCausalLM": "modeling_trap.TrapModel"})
    assert read_model(str(known)).model_type == "llama"


@pytest.mark.parametrize(
    ("reference", "expected"),
    [
        ("train.py:make", True),
        ("package.module:make", True),
        ("folder/train.py:make", True),
        ("llama-3-8b", False),
        ("owner/name", False),
        ("C:\\models\\config.json", False),
        ("train.py:make model", False),
    ],
)
def test_factories_are_told_from_configs(reference: str, expected: bool) -> None:
    assert is_factory(reference) is expected


_VALUES = (
    st.none()
    | st.booleans()
    | st.integers(-5, 300)
    | st.floats(allow_nan=False)
    | st.text(max_size=3)
    | st.lists(st.integers(-2, 2), max_size=2)
)


@given(
    family=st.sampled_from(sorted(READERS)),
    changes=st.dictionaries(
        st.sampled_from(
            [*LLAMA, "n_embd", "n_layer", "n_head", "num_layers", "num_heads", "d_model", "d_ff", "id2label"]
        ),
        _VALUES,
        max_size=8,
    ),
)
def test_any_config_is_a_model_or_a_model_error(family: str, changes: dict[str, object]) -> None:
    fields = LLAMA | {"n_embd": 64, "n_layer": 2, "n_head": 4} | changes | {"model_type": family}
    try:
        model = read_fields(ModelConfig("config.json", fields))
    except ModelError:
        return
    assert model.parameters.total > 0


def test_reading_a_known_model_imports_neither_torch_nor_transformers() -> None:
    code = (
        "import sys; from paraplan.model.reader import read_model; read_model('llama-3-8b');"
        "print([name for name in ('torch', 'transformers', 'huggingface_hub') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("name", sorted(bundled_models()))
@pytest.mark.parametrize("words", ["-Instruct", "-Chat", "-it", "-Base"])
def test_a_tuned_sibling_of_a_bundled_model_is_read_without_a_network(name: str, words: str) -> None:
    hub_id = json.loads(bundled_models()[name].read_text(encoding="utf-8")).get("hub_id")
    if hub_id is None or bundled_config(hub_id + words) is not None:
        return
    found = tuned_sibling(hub_id + words)
    siblings = {"gemma-3-4b", "gemma-3-12b", "gemma-3-27b"}  # text alone, and with the tower of the tuned release
    assert found == bundled_models()[name] or name.removesuffix("-it") in siblings
    assert tuned_sibling(hub_id) is None


@pytest.mark.parametrize(
    ("repository", "name"),
    [
        ("meta-llama/Meta-Llama-3-8B-Instruct", "llama-3-8b"),
        ("mistralai/Mistral-7B-Instruct-v0.3", "mistral-7b"),
        ("NousResearch/Llama-2-70b-chat-hf", "llama-2-70b"),
        ("mistralai/Mistral-7B-Instruct-v0.2", None),  # another vocabulary
        ("Qwen/Qwen2.5-Coder-32B-Instruct", None),
        ("owner/none-Instruct", None),
    ],
)
def test_hub_ids_are_siblings_where_words_of_tuning_alone_differ(repository: str, name: str | None) -> None:
    found = tuned_sibling(repository)
    assert (None if found is None else found.stem) == name
