"""How tensor parallelism shares out the heads of a model: which degrees divide them, and what then stays whole."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cache
from itertools import takewhile
from math import gcd
from typing import NamedTuple

from paraplan.model.spec import BlockModule, BlockSpec, Matmul, ModelSpec, SavedTensor
from paraplan.resources import profiles_folder


def split_reason(model: ModelSpec, tp: int, *, shares_key_heads: bool = False) -> str | None:
    """Return why `tp` tensor-parallel ranks cannot share out the blocks of `model`, None where they can.

    With `shares_key_heads` several ranks may attend to the same keys and values.
    """
    blocks = [run.block for run in model.runs]
    if all(tp in _degrees(block, (tp,), shares_key_heads=shares_key_heads) for block in blocks):
        return None
    if any(block.is_traced and block.tp_limit == 1 for block in blocks):
        return "how tensor parallelism divides a traced module is not known before it runs"
    heads = {(one.num_heads, one.num_kv_heads) for block in blocks if (one := block.attention)}
    words = " and ".join(f"{own} attention and {shared} key-value heads" for own, shared in sorted(heads))
    return f"{tp} does not divide the {words} of {model.name}"


def allowed_degrees(model: ModelSpec, *, most: int, shares_key_heads: bool = False) -> tuple[int, ...]:
    """Return the degrees of tensor parallelism up to `most` that share out the blocks of `model`."""
    degrees: tuple[int, ...] = tuple(range(1, most + 1))
    for run in model.runs:
        degrees = tuple(_degrees(run.block, degrees, shares_key_heads=shares_key_heads))
    return degrees


def _degrees(block: BlockSpec, degrees: Iterable[int], *, shares_key_heads: bool) -> list[int]:
    limit, core = block.tp_limit, block.attention
    if limit is None:
        return list(degrees)
    if not shares_key_heads or core is None or block.is_traced or limit != gcd(core.num_heads, core.num_kv_heads):
        return [tp for tp in degrees if limit % tp == 0]
    return [tp for tp in degrees if not core.num_heads % tp and (not core.num_kv_heads % tp or not tp % limit)]


def with_key_heads(model: ModelSpec, tp: int) -> ModelSpec:
    """Return the model as each of `tp` ranks has a head of keys and values to itself, where they have fewer.

    The ranks divide all weights, gather what the projections of queries, keys and values give, and take their heads of
    it (megatron/core/transformer/attention.py, `get_query_key_value_tensors`).
    """
    return model.replace(runs=tuple(run.replace(block=_with_key_heads(run.block, tp)) for run in model.runs))


def _with_key_heads(block: BlockSpec, tp: int) -> BlockSpec:
    core = block.attention
    if core is None or core.num_kv_heads >= tp:
        return block
    widths = {"key": core.num_kv_heads * core.qk_head_dim, "value": core.num_kv_heads * core.v_head_dim}

    def shared(tensors: tuple[SavedTensor, ...]) -> tuple[SavedTensor, ...]:
        factor = tp / core.num_kv_heads
        return tuple(
            one.replace(elements_per_token=one.elements_per_token * factor)
            if one.elements_per_token == widths.get(one.name)
            else one
            for one in tensors
        )

    before = block.before_freezing
    return block.replace(
        attention=core.replace(num_kv_heads=tp),
        saved=shared(block.saved),
        saved_fused=shared(block.saved_fused),
        gathered_per_token=projected_width(block),
        before_freezing=None if before is None else _with_key_heads(before, tp),
    )


def projected_width(block: BlockSpec) -> float:
    """Return the elements of a token that the projections of queries, keys and values give."""
    before_output = takewhile(lambda one: one.split != "row", block.matmuls)
    return float(sum(one.n for one in before_output if one.split == "column"))


_OTHER_NAMES = {"q_norm": "self_attn", "k_norm": "self_attn", "delta rule": "linear_attn"}
"""The modules of what is not named for one."""


class GatheredModule(NamedTuple):
    """A module that transformers' plan of a family divides product by product, with whole tensors between them."""

    module: BlockModule
    model_types: tuple[str, ...]


@cache
def gathered_modules() -> tuple[GatheredModule, ...]:
    """Return the modules of families whose plans gather what a product gives (`profiles/tensor_plans.json`)."""
    table = json.loads((profiles_folder() / "tensor_plans.json").read_text(encoding="utf-8"))["gathered"]
    return tuple(GatheredModule(one["module"], tuple(one["model_types"])) for one in table)


def with_gathered_modules(model: ModelSpec) -> ModelSpec:
    """Return the model as transformers' own plan of its family divides it: some modules have whole tensors inside.

    Their weights are divided all the same. Their attention has all heads on each rank, so that heads limit no degree.
    """
    modules = {one.module for one in gathered_modules() if model.model_type in one.model_types}
    if not modules:
        return model
    return model.replace(runs=tuple(run.replace(block=_gathered(run.block, modules)) for run in model.runs))


def _gathered(block: BlockSpec, modules: set[BlockModule]) -> BlockSpec:
    if block.is_traced:
        return block

    def is_inside(name: str) -> bool:
        owner = name.partition(".")[0]
        return next((module for other, module in _OTHER_NAMES.items() if owner.startswith(other)), owner) in modules

    def whole(tensors: tuple[SavedTensor, ...]) -> tuple[SavedTensor, ...]:
        return tuple(
            one.replace(split="none") if one.module in modules and one.split == "tensor" else one for one in tensors
        )

    products = {one.name for one in block.matmuls if is_inside(one.name) and one.split != "none"}
    attention, limit = block.attention, block.tp_limit
    if any(name.startswith("linear_attn.") for name in products):
        limit = None
    if attention is not None and any(name.startswith("self_attn.") for name in products):
        attention, limit = attention.replace(is_whole=True), None
    return block.replace(
        attention=attention,
        tp_limit=limit,
        parameters=tuple(
            one.replace(tp_dim=None) if is_inside(one.name) and one.name.rpartition(".")[0] not in products else one
            for one in block.parameters
        ),
        matmuls=tuple(_gathered_product(one) if is_inside(one.name) else one for one in block.matmuls),
        saved=whole(block.saved),
        saved_fused=whole(block.saved_fused),
    )


def _gathered_product(product: Matmul) -> Matmul:
    """Return a product whose outputs are gathered: a last one of attention takes a share of what is whole before it."""
    if product.of_activations or product.split == "none":
        return product.replace(split="none")
    is_last = product.split == "row" and product.name.startswith("linear_attn.")
    return product.replace(split="column" if is_last else product.split, gathers=True)
