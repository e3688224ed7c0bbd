"""Which weights a storage format reaches, by tool: counted by transformers' own modules."""

from __future__ import annotations

from typing import Any

import pytest

from paraplan.errors import PlanError
from paraplan.model.freezing import FrozenStorage, freeze
from paraplan.model.quantizers import is_reached, quantizer_of, quantizers, reached_weights
from paraplan.model.reader import bundled_models, read_model
from paraplan.model.spec import ModelSpec
from paraplan.model.trainable import parse_trainable
from paraplan.model.weight_formats import stored_bytes

GIB = 2**30
MIXTURES = [
    "qwen3-30b-a3b",
    "gpt-oss-20b",
    "mixtral-8x7b",
    "deepseek-v3",
    "kimi-k2",
    "moonlight-16b-a3b",
    "llama-3-8b",
    "gpt2",
]


def frozen_bytes(model: str, weights: Any, quantizer: str) -> float:
    spec = read_model(model)
    storage = FrozenStorage(weights=weights, reached=reached_weights(weights, quantizer, spec.model_type))
    frozen = freeze(spec, parse_trainable("lora:r=8"), storage)
    return sum((one.frozen_bytes or 0.0) * count for one, count in frozen.all_parameters)


def reached_elements(model: ModelSpec, layers: frozenset[Any]) -> int:
    return sum(
        run.count * one.num_elements for run in model.runs for one in run.block.parameters if is_reached(one, layers)
    )


@pytest.mark.parametrize("name", MIXTURES)
def test_linear_layers_and_fused_experts_are_those_that_transformers_builds(name: str) -> None:
    pytest.importorskip("transformers", reason="builds the models")
    import torch

    from paraplan.model.config_file import load_config
    from paraplan.model.transformers_model import library_factory

    build = library_factory(load_config(bundled_models()[name]))
    with torch.device("meta"):
        module = build()
    linear = (
        one.weight
        for path, one in module.named_modules()
        if type(one).__name__ in ("Linear", "Conv1D") and "lm_head" not in path
    )
    experts = (one for path, one in module.named_parameters() if one.dim() == 3 and "expert" in path)
    model = read_model(name)
    assert reached_elements(model, frozenset({"linear"})) == sum(one.numel() for one in linear)
    assert reached_elements(model, frozenset({"experts"})) == sum(one.numel() for one in experts)


@pytest.mark.parametrize(
    ("model", "quantizer", "gib"),
    [
        ("qwen3-30b-a3b", "transformers", 55.6),
        ("qwen3-30b-a3b", "axolotl", 15.6),
        ("qwen3-30b-a3b", "unsloth", 15.6),
        ("qwen3-30b-a3b", "transformers-4", 15.6),
        ("gpt-oss-20b", "transformers", 38.0),
        ("gpt-oss-20b", "transformers-4", 38.0),
        ("gpt-oss-20b", "axolotl", 11.7),
        ("mixtral-8x7b", "transformers", 85.1),
        ("mixtral-8x7b", "transformers-4", 22.8),
        ("llama-3-8b", "transformers", 5.3),
    ],
)
def test_weights_in_four_bits_take_what_the_tool_makes_of_them(model: str, quantizer: str, gib: float) -> None:
    assert frozen_bytes(model, "nf4:double", quantizer) / GIB == pytest.approx(gib, rel=0.01)


@pytest.mark.parametrize("name", sorted(quantizers()))
def test_no_format_of_a_tool_takes_more_than_16_bits_nor_less_than_its_own(name: str) -> None:
    tool, spec = quantizer_of(name), read_model("qwen3-30b-a3b")
    whole = frozen_bytes("qwen3-30b-a3b", "bf16", name)
    for weights in tool.formats:
        found = frozen_bytes("qwen3-30b-a3b", weights, name)
        assert (
            sum(
                stored_bytes(weights, (run.count, one.num_elements))
                for run in spec.runs
                for one in run.block.parameters
            )
            < found
            < whole
        )


def test_every_value_of_a_tool_has_a_source_and_a_layer_to_reach() -> None:
    assert quantizers()
    for tool in quantizers().values():
        assert tool.sources
        assert all(tool.reached(weights, "qwen3_moe") for weights in tool.formats)


def test_mxfp4_reaches_experts_alone_so_a_dense_model_has_none() -> None:
    storage = FrozenStorage(weights="mxfp4", reached=reached_weights("mxfp4", "transformers", "llama"))
    with pytest.raises(PlanError, match="mxfp4 is a format of experts, which llama-3-8b has none of"):
        freeze(read_model("llama-3-8b"), parse_trainable("lora:r=8"), storage)


def test_an_unknown_tool_is_named_with_those_near_it() -> None:
    with pytest.raises(PlanError, match="there is no quantizer 'unsloh'") as caught:
        quantizer_of("unsloh")
    assert caught.value.hint == "did you mean unsloth?"


def test_a_tool_without_a_format_says_which_it_has() -> None:
    with pytest.raises(PlanError, match="torchao stores no weights in mxfp4"):
        quantizer_of("torchao").reached("mxfp4", "gpt_oss")
