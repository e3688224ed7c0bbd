"""Which blocks are run again in the backward pass, and what they keep all the same: recompute in part."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from paraplan.errors import PlanError, UnsupportedPlanError, UsageError
from paraplan.plan.parallel import ParallelPlan, Recompute
from paraplan.plan.stages import stage_blocks, stage_bounds
from paraplan.runtime.kept_operators import Operator, is_keepable

BlockChoice = int | slice | Collection[int] | Callable[[int, str], bool]

_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "_grouped_mm", "_scaled_grouped_mm")
_KERNELS = ("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention")
_ATTENTION = tuple(f"_scaled_dot_product_{name}" for name in (*_KERNELS, "fused_attention_overrideable"))
# What torch takes apart before it calls an operator, by the operators that it may then call.
_TAKEN_APART = {"linear": _PRODUCTS, "matmul": _PRODUCTS, "scaled_dot_product_attention": _ATTENTION}


@dataclass(frozen=True)
class RecomputePolicy:
    """Which blocks are run again in the backward pass in place of keeping what they computed, and what they keep.

    It refines the plan's `recompute`: with "none" or "full" the chosen blocks are run again but for what `keep` names;
    with "selective" it chooses the blocks whose attention core is run again, and `keep` is refused.
    """

    blocks: BlockChoice | None = None
    """The blocks, all by default. A number is that of the first blocks of every pipeline stage (Megatron-LM's
    recompute_num_layers with recompute_method=block); a slice or a collection of numbers is of the whole model, so that
    `slice(0, None, 2)` is every second block; a function is given each block's number and name.
    """
    keep: Iterable[str | Operator] | Callable[[Operator], bool] = ()
    """Operators whose results are kept; the others are run again. Names of `torch.ops.aten` ("mm"), operators, or a
    function of the operator. "matmul" are all products of matrices, "scaled_dot_product_attention" all its kernels.
    """


@dataclass(frozen=True)
class RecomputedBlocks:
    """The blocks of a model that are run again, by their numbers, and which of their operators' results are kept."""

    recompute: Recompute
    numbers: frozenset[int]
    keeps: Callable[[Operator], bool] | None = None


def recompute_kind(policy: RecomputePolicy | None, plan: ParallelPlan) -> Recompute:
    """Return what of blocks is run again under `plan` refined by `policy`."""
    return plan.recompute if policy is None or plan.recompute == "selective" else "full"


def recomputed_blocks(policy: RecomputePolicy | None, plan: ParallelPlan, names: Sequence[str]) -> RecomputedBlocks:
    """Return which of the blocks `names` are run again.

    Raises `UsageError` for blocks or operators that there are not, and `PlanError` for a model without blocks or a plan
    that `policy` contradicts.
    """
    if policy is None:
        return RecomputedBlocks(plan.recompute, frozenset(range(len(names))))
    if not names:
        raise PlanError(
            "a recompute policy, but the model has no repeated blocks to recompute",
            hint="keep the blocks in an nn.ModuleList or nn.Sequential, or leave out recompute",
        )
    keeps = _keeps(policy.keep)
    if keeps is not None and plan.recompute == "selective":
        raise PlanError(
            "the plan's recompute=selective keeps all but the attention core, and the recompute policy names "
            "operators to keep",
            hint="use a plan with recompute=full, or leave out keep",
        )
    return RecomputedBlocks(recompute_kind(policy, plan), _numbers(policy.blocks, plan, names), keeps)


def check_operators(policy: RecomputePolicy | None, *, compiled: bool) -> None:
    """Raise `UnsupportedPlanError` where blocks are compiled, whose operators the compiler chooses."""
    if compiled and policy is not None and _keeps(policy.keep) is not None:
        raise UnsupportedPlanError(
            "a recompute policy that keeps operators, with blocks under torch.compile, which chooses itself what to "
            "run again",
            hint="leave out keep, or train without compile_backend",
        )


def _numbers(chosen: BlockChoice | None, plan: ParallelPlan, names: Sequence[str]) -> frozenset[int]:
    everyone = range(len(names))
    if chosen is None:
        found = frozenset(everyone)
    elif isinstance(chosen, int):
        if chosen < 1:
            raise UsageError(f"RecomputePolicy(blocks={chosen})", hint="give a number of blocks, from 1")
        bounds = stage_bounds(stage_blocks(plan, len(names)))
        found = frozenset(number for start, end in bounds for number in range(start, end)[:chosen])
    elif isinstance(chosen, slice):
        found = frozenset(everyone[chosen])
    elif callable(chosen):
        found = frozenset(number for number in everyone if chosen(number, names[number]))
    else:
        wanted = list(chosen)
        outside = [number for number in wanted if number not in everyone]
        if outside:
            raise UsageError(
                f"RecomputePolicy(blocks=) names block {outside[0]}, and the model has {len(names)} blocks",
                hint=f"use numbers from 0 to {len(names) - 1}",
            )
        found = frozenset(wanted)
    if not found:
        raise UsageError("RecomputePolicy(blocks=) chooses no block", hint="choose some, or leave out recompute")
    return found


def _keeps(named: Iterable[str | Operator] | Callable[[Operator], bool]) -> Callable[[Operator], bool] | None:
    """Return whether the results of an operator are kept, by what a policy names; None where it names nothing."""
    if isinstance(named, str):
        named = (named,)
    if not isinstance(named, Iterable):
        chosen = named
        return lambda operator: bool(chosen(operator))
    names: set[str] = set()
    exact: set[Any] = set()
    for entry in named:
        if isinstance(entry, torch._ops.HigherOrderOperator) or (
            isinstance(entry, torch._ops.OpOverload) and not _parts_of(entry._schema.name)
        ):
            _check_keepable(entry)
            exact.add(entry)
        else:
            names |= _names_of(entry)
    if not names and not exact:
        return None
    return lambda operator: operator in exact or getattr(getattr(operator, "_schema", None), "name", None) in names


def _names_of(entry: Any) -> set[str]:
    """Return the names ("aten::mm") of the operators that a name, or an operator that torch takes apart, stands for."""
    if isinstance(entry, torch._ops.OpOverload):
        return _parts_of(entry._schema.name)
    if isinstance(entry, str):
        name = entry.removeprefix("aten.").removeprefix("aten::")
        packet = getattr(torch.ops.aten, name, None) if name.isidentifier() else None
        if packet is None:
            raise UsageError(
                f"RecomputePolicy(keep=) names {entry!r}, which torch.ops.aten has not",
                hint="name operators such as mm, addmm, bmm or scaled_dot_product_attention",
            )
    elif isinstance(entry, torch._ops.OpOverloadPacket):
        packet = entry
    else:
        raise UsageError(
            f"RecomputePolicy(keep=) holds a {type(entry).__name__}",
            hint="name operators: torch.ops.aten.mm, or 'mm'",
        )
    overloads = [getattr(packet, name) for name in packet.overloads()]
    qualified = overloads[0]._schema.name
    parts = _parts_of(qualified)
    if parts:
        return parts
    if not any(is_keepable(overload) for overload in overloads):
        _check_keepable(overloads[0])
    return {qualified}


def _parts_of(qualified: str) -> set[str]:
    return {f"aten::{name}" for name in _TAKEN_APART.get(qualified.removeprefix("aten::"), ())}


def _check_keepable(operator: Any) -> None:
    if not is_keepable(operator):
        raise UsageError(
            f"RecomputePolicy(keep=) names {operator}, which writes its arguments or returns a view of them",
            hint="name operators that return new tensors",
        )
