"""How tensor parallelism shares out the heads of a model: which degrees divide them, and what then stays whole."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cache
from itertools import takewhile
from math import gcd
from typing import NamedTuple

from paraplan.model.spec import BlockModule, BlockSpec, Matmul, ModelSpec, Parameter, SavedTensor
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
            if one.elements_per_token == widths.get(one.role)
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


_ATTENTION = ("self_attn", "linear_attn", "q_norm", "k_norm", "v_norm")
_MLPS = ("mlp", "feed_forward")
_PRODUCTS_OF_STATES = ("delta rule", "lightning")


def module_of(block: BlockSpec, name: str) -> BlockModule | None:
    """Return the module of a parameter or a product of a block by its name.

    None stands for norms and what else is whole, and for routed experts, which go over ranks by themselves.
    """
    owner = name.partition(".")[0]
    if owner in _ATTENTION or owner.startswith(_PRODUCTS_OF_STATES):
        return "linear_attn" if block.attention is None else "self_attn"
    if owner not in _MLPS or name.startswith(f"{owner}.experts"):
        return None
    return "shared_experts" if name.startswith(f"{owner}.shared") else "mlp"


class PlannedModules(NamedTuple):
    """Modules of a family that transformers' plan does not divide by heads or inner units.

    It divides `gathered` ones product by product, with whole tensors between them, and `whole` ones not at all.
    """

    gathered: frozenset[BlockModule]
    whole: frozenset[BlockModule]


@cache
def planned_modules(model_type: str) -> PlannedModules:
    """Return these modules of a family (`profiles/tensor_plans.json`)."""
    table = json.loads((profiles_folder() / "tensor_plans.json").read_text(encoding="utf-8"))
    gathered, whole = (
        frozenset(entry["module"] for entry in table[kind] if model_type in entry["model_types"])
        for kind in ("gathered", "whole")
    )
    return PlannedModules(gathered, whole)


def as_planned(model: ModelSpec) -> ModelSpec:
    """Return the model as transformers' own plan of its family divides it: some modules have whole tensors inside.

    Weights of gathered modules are divided all the same. Whole attention has all heads on each rank, so that heads
    limit no degree.
    """
    modules = planned_modules(model.model_type)
    if not modules.gathered and not modules.whole:
        return model
    return model.replace(runs=tuple(run.replace(block=_as_planned(run.block, modules)) for run in model.runs))


def _as_planned(block: BlockSpec, modules: PlannedModules) -> BlockSpec:
    either = modules.gathered | modules.whole
    if block.is_traced or not either & {module_of(block, one.name) for one in block.matmuls}:
        return block

    has_experts = any(one.num_experts > 1 for one in block.matmuls)

    def is_whole(tensor: SavedTensor) -> bool:
        module: BlockModule | None = "shared_experts" if tensor.module == "mlp" and has_experts else tensor.module
        return module in either and tensor.split == "tensor" and not tensor.is_of_expert_rows

    def saved(tensors: tuple[SavedTensor, ...]) -> tuple[SavedTensor, ...]:
        return tuple(one.replace(split="none") if is_whole(one) else one for one in tensors)

    divided = {
        one.name
        for one in block.matmuls
        if module_of(block, one.name) not in modules.whole and one.split != "none" and not one.of_activations
    }

    def stays(parameter: Parameter) -> bool:
        return module_of(block, parameter.name) in either and parameter.name.rpartition(".")[0] not in divided

    limit, attention = block.tp_limit, block.attention
    if attention is None and "linear_attn" in either:
        limit = None
    if attention is not None and "self_attn" in either:
        attention, limit = attention.replace(is_whole=True), None
    return block.replace(
        attention=attention,
        tp_limit=limit,
        parameters=tuple(one.replace(tp_dim=None) if stays(one) else one for one in block.parameters),
        matmuls=tuple(_planned_product(block, one, modules) for one in block.matmuls),
        saved=saved(block.saved),
        saved_fused=saved(block.saved_fused),
    )


def _planned_product(block: BlockSpec, product: Matmul, modules: PlannedModules) -> Matmul:
    """Return a product as planned; a last one of attention takes a share of what is whole before it."""
    module = module_of(block, product.name)
    if module in modules.whole or (module in modules.gathered and product.of_activations):
        return product.replace(split="none")
    if module not in modules.gathered or product.split == "none":
        return product
    is_last = product.split == "row" and module == "linear_attn"
    return product.replace(split="column" if is_last else product.split, gathers=True)
