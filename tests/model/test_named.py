from __future__ import annotations

import pytest

from paraplan.model.named import known_configs, named_config, plain_name


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
