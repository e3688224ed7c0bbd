from __future__ import annotations

import pytest

from paraplan.model.config_file import ModelConfig
from paraplan.model.model_names import plain_name, same_layers
from paraplan.model.named import known_configs, named_config
from paraplan.model.reader import bundled_models, read_fields


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("Qwen3_30B_a3B", "qwen3-30b-a3b"),
        ("GPT OSS 120B", "gpt-oss-120b"),
        ("DeepSeekV3 (w/o MTP)", "deepseek-v3"),
        ("deepseekv2-4L", "deepseek-v2"),
        ("Kimi_K2", "kimi-k2"),
        ("mistralai/Mixtral-8x7B-Instruct", "mixtral-8x7b"),
        ("meta-llama/Llama-3.1-8B", "llama-3-8b"),
    ],
)
def test_tables_name_models_in_their_own_spelling(name: str, model: str) -> None:
    known = known_configs()
    fields = named_config(known, name, num_layers=None)
    assert fields == known[plain_name(model)]


def test_a_model_with_fewer_layers_keeps_one_of_its_dense_ones() -> None:
    known = known_configs()
    fields = named_config(known, "deepseekv3-4L", num_layers=4)
    assert fields is not None
    assert (fields["num_hidden_layers"], fields["first_k_dense_replace"]) == (4, 1)
    assert known["deepseekv3"]["num_hidden_layers"] == 61
    shorter = named_config(known, "gpt2", num_layers=3)
    assert shorter is not None
    assert shorter["n_layer"] == 3


def test_an_unknown_name_is_not_guessed() -> None:
    assert named_config(known_configs(), "Kimi_Linear", num_layers=None) is None
    assert named_config(known_configs(), "qwen3-30b", num_layers=None) is None


def test_a_layer_for_multi_token_prediction_is_a_block_a_projection_and_the_head_again() -> None:
    fields = known_configs()["deepseekv3"]
    plain, more = (
        read_fields(ModelConfig("deepseek-v3", fields | {"mtp_num_layers": count}, "deepseek-v3", 4096))
        for count in (0, 1)
    )
    added = more.parameters.total - plain.parameters.total
    last = plain.runs[-1].block.num_parameters
    assert added == last + 2 * 7168 * 7168 + 2 * 7168
    # Published: 1,640 TFLOP/s at 6,304 tokens/s with it, 961 at 3,848 without (Megatron-Bridge's page): 1.042 times.
    ratio = more.training_flops_per_token(4096) / plain.training_flops_per_token(4096)
    assert ratio == pytest.approx(1.042, abs=0.005)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("llama-3.1-70b", "llama-3.3-70b"),
        ("Qwen/Qwen2.5-7B", "qwen2.5-7b"),
        ("Qwen/Qwen3-32B", "qwen3-32b"),
        ("Qwen/Qwen3-9B", None),
    ],
)
def test_a_model_on_the_hub_has_the_layers_of_a_bundled_one(name: str, expected: str | None) -> None:
    assert same_layers(name, bundled_models()) == expected
