"""Heads over ranks: more ranks than heads of keys, and what transformers' plans leave whole between products."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_variants import VARIANTS, random_config
from transformers import AutoConfig, AutoModelForCausalLM

from paraplan.model.config_file import ModelConfig
from paraplan.model.family_table import READERS
from paraplan.model.reader import read_fields, read_model
from paraplan.model.spec import BlockModule, ModelSpec
from paraplan.model.tensor_split import (
    allowed_degrees,
    as_planned,
    module_of,
    planned_modules,
    projected_width,
    split_reason,
    with_key_heads,
)
from paraplan.model.tp_plan import splits, style_of

_TEXT_OF = {"qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text", "glm4v": "glm4v_text"}
WITHOUT_A_CLASS = {"bailing_moe_v2", "kimi_k2"}
_GATHERING = ("_gather_output", "_rep", "split_input")


def _config_and_fields(family: str) -> tuple[Any, dict[str, Any]]:
    fields = random_config(family, 1)
    return AutoConfig.for_model(**fields), fields


@pytest.mark.parametrize("family", sorted(VARIANTS.keys() & READERS.keys() - WITHOUT_A_CLASS))
def test_the_table_of_planned_modules_is_that_of_the_plans_of_transformers(family: str) -> None:
    config, fields = _config_and_fields(family)
    plan = dict(getattr(config, "base_model_tp_plan", None) or {})
    found = planned_modules(family)
    if not plan:  # transformers divides nothing of it, and refuses
        assert found == (frozenset(), frozenset())
        return
    for run in read_fields(ModelConfig(family, fields)).runs:
        styles: dict[BlockModule, set[str | None]] = {}
        for one in run.block.matmuls:
            owner = "feed_forward" if family == "llama4_text" else "mlp"
            name = f"{owner}.experts.{one.name}" if one.num_experts > 1 else one.name
            module = "mlp" if one.num_experts > 1 else module_of(run.block, name)
            if module is not None and one.split != "none" and not one.of_activations:
                style = style_of(plan, f"layers.0.{name}") or style_of(plan, f"h.0.{name}")
                styles.setdefault(module, set()).add(style)
        for module, own in styles.items():
            assert (module in found.whole) == (own == {None})
            assert (module in found.gathered) == any(one and one.endswith(_GATHERING) for one in own)


def _split_elements(model: ModelSpec, tp: int) -> float:
    """Return the elements of a rank's blocks, norms and routers left out."""
    return sum(
        one.num_elements / (1 if one.tp_dim is None else tp) * run.count
        for run in model.runs
        for one in run.block.parameters
    )


@pytest.mark.parametrize(
    "family",
    [
        "qwen3_5_text",
        "qwen3_next",
        "olmo2",
        "phi3",
        "glm4",
        "minimax",
        "kimi_linear",
        "deepseek_v3",
        "bailing_hybrid",
        "llama4_text",
        "deepseek_v4",
        "glm4_moe_lite",
        "qwen2_moe",
    ],
)
def test_ranks_hold_what_the_plan_of_transformers_leaves_them(family: str) -> None:
    fields: dict[str, Any] = random_config(family, 0)
    model = as_planned(read_fields(ModelConfig(family, fields)))
    config = AutoConfig.for_model(**fields)
    with torch.device("meta"):
        built = AutoModelForCausalLM.from_config(config)
    plan, tp, expected = config.base_model_tp_plan, 2, 0.0
    for name, parameter in built.named_parameters():
        if ".layers." not in name:
            continue
        style = style_of(plan, name) or style_of(plan, name.rpartition(".")[0])
        is_whole = not splits(style) or (name.endswith("bias") and "rowwise" in (style or ""))
        expected += parameter.numel() / (1 if is_whole else tp)
    assert _split_elements(model, tp) == expected


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 8), st.integers(0, 4), st.integers(1, 32))
def test_megatrons_rule_of_more_ranks_than_heads_of_keys(groups: int, power: int, tp: int) -> None:
    heads = groups * 2**power
    fields = {"model_type": "llama", "hidden_size": 8 * heads, "intermediate_size": 16, "vocab_size": 32}
    fields |= {"num_hidden_layers": 1, "num_attention_heads": heads, "num_key_value_heads": groups}
    model = read_fields(ModelConfig("llama", fields))
    megatron = heads % tp == 0 and (groups % tp == 0 or tp % groups == 0)
    assert (split_reason(model, tp, shares_key_heads=True) is None) == megatron
    assert (split_reason(model, tp) is None) == (groups % tp == 0)
    assert (tp in allowed_degrees(model, most=32, shares_key_heads=True)) == megatron


def test_shared_heads_of_keys_are_kept_once_a_rank_and_their_projections_gathered_whole() -> None:
    model = read_model("qwen3.5-27b")
    shared = with_key_heads(model, 8)
    for before, after in zip(model.runs, shared.runs, strict=True):
        if before.block.attention is None:
            assert after == before
            continue
        sizes = [
            {one.role: one.elements_per_token for one in run.block.saved_fused if one.kernels == ("flash", "sdpa")}
            for run in (before, after)
        ]
        heads = {"query": 24, "attention_output": 24, "softmax_statistics": 24 / 256}
        assert sizes[0] == {name: count * 256 for name, count in (heads | {"key": 4, "value": 4}).items()}
        assert sizes[1] == {name: count * 256 for name, count in (heads | {"key": 8, "value": 8}).items()}
        assert after.block.gathered_per_token == projected_width(before.block) == (2 * 24 + 2 * 4) * 256
        assert after.block.parameters == before.block.parameters


def test_heads_that_leave_a_rest_are_rounded_as_the_class_rounds_them() -> None:
    fields = random_config("glm4_moe", 0) | {"hidden_size": 128, "num_attention_heads": 12, "num_key_value_heads": 2}
    fields.pop("head_dim")
    model = read_fields(ModelConfig("glm4_moe", fields))
    with torch.device("meta"):
        built = AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields))
    assert model.parameters.total == sum(one.numel() for one in built.parameters())
