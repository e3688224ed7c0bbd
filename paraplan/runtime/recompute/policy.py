"""Which blocks are run again in the backward pass, and what they keep all the same: recompute in part."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch

from paraplan.errors import PlanError, UnsupportedPlanError, UsageError
from paraplan.plan.parallel import ParallelPlan, Recompute
from paraplan.plan.stages import stage_blocks, stage_bounds
from paraplan.runtime.seeds import kept_random_numbers
from paraplan.runtime.torch_private import (
    HigherOrderOperator,
    OpOverload,
    OpOverloadPacket,
    TorchDispatchMode,
    following_writes,
    pytree,
    schema_of,
    tensors_in,
    version_of,
)

BlockChoice = int | slice | Collection[int] | Callable[[int, str], bool]

_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "_grouped_mm", "_scaled_grouped_mm")
_KERNELS = ("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention")
_ATTENTION = tuple(f"_scaled_dot_product_{name}" for name in (*_KERNELS, "fused_attention_overrideable"))
# What torch takes apart before it calls an operator, by the operators that it may then call.
_LINEAR = frozenset({"aten::mm", "aten::addmm"})
_TAKEN_APART = {"linear": _PRODUCTS, "matmul": _PRODUCTS, "scaled_dot_product_attention": _ATTENTION}


@dataclass(frozen=True)
class RecomputePolicy:
    """Which blocks are run again in the backward pass in place of keeping what they computed, and what they keep.

    It refines the plan's `recompute`: with "none" or "full" the chosen blocks are run again but for what `keep` names,
    and so with "selective_ops", where without `keep` it is what the plan keeps by itself; with "selective" it chooses
    the blocks whose attention core is run again, and `keep` is refused.
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
    every_second: frozenset[str] = frozenset()
    """Operators ("aten::mm"), counted together in the order in which a block calls them; the second, the fourth and so
    on are not kept."""


def recompute_kind(policy: RecomputePolicy | None, plan: ParallelPlan) -> Recompute:
    """Return what of blocks is run again under `plan` refined by `policy`."""
    if plan.recompute == "selective_ops":
        return "full"
    return plan.recompute if policy is None or plan.recompute == "selective" else "full"


def recomputed_blocks(policy: RecomputePolicy | None, plan: ParallelPlan, names: Sequence[str]) -> RecomputedBlocks:
    """Return which of the blocks `names` are run again.

    Under recompute=selective_ops they keep attention kernels and every second product of linear layers, as torchtitan's
    policy has it (torchtitan/distributed/activation_checkpoint.py); there products with a bias are not counted.
    Raises `UsageError` for blocks or operators that there are not, and `PlanError` for a model without blocks or a plan
    that `policy` contradicts.
    """
    chooses_itself = plan.recompute == "selective_ops"
    if policy is None:
        if not chooses_itself:
            return RecomputedBlocks(plan.recompute, frozenset(range(len(names))))
        policy = RecomputePolicy()
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
    numbers = _numbers(policy.blocks, plan, names)
    if chooses_itself and keeps is None:
        keeps = _keeps((*(name.removeprefix("aten::") for name in _LINEAR), "scaled_dot_product_attention"))
        return RecomputedBlocks("full", numbers, keeps, every_second=_LINEAR)
    return RecomputedBlocks(recompute_kind(policy, plan), numbers, keeps)


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
        if isinstance(entry, HigherOrderOperator) or (isinstance(entry, OpOverload) and not _parts_of(_name_of(entry))):
            _check_keepable(entry)
            exact.add(entry)
        else:
            names |= _names_of(entry)
    if not names and not exact:
        return None
    return lambda operator: operator in exact or (isinstance(operator, OpOverload) and _name_of(operator) in names)


def _names_of(entry: Any) -> set[str]:
    """Return the names ("aten::mm") of the operators that a name, or an operator that torch takes apart, stands for."""
    if isinstance(entry, OpOverload):
        return _parts_of(_name_of(entry))
    if isinstance(entry, str):
        name = entry.removeprefix("aten.").removeprefix("aten::")
        packet = getattr(torch.ops.aten, name, None) if name.isidentifier() else None
        if packet is None:
            raise UsageError(
                f"RecomputePolicy(keep=) names {entry!r}, which torch.ops.aten has not",
                hint="name operators such as mm, addmm, bmm or scaled_dot_product_attention",
            )
    elif isinstance(entry, OpOverloadPacket):
        packet = entry
    else:
        raise UsageError(
            f"RecomputePolicy(keep=) holds a {type(entry).__name__}",
            hint="name operators: torch.ops.aten.mm, or 'mm'",
        )
    overloads = [getattr(packet, name) for name in packet.overloads()]
    qualified = _name_of(overloads[0])
    parts = _parts_of(qualified)
    if parts:
        return parts
    if not any(is_keepable(overload) for overload in overloads):
        _check_keepable(overloads[0])
    return {qualified}


def _name_of(operator: OpOverload) -> str:
    """Return `aten::add` of the operator `aten::add.Tensor`."""
    name: str = operator.name()  # type: ignore[no-untyped-call]
    return name.partition(".")[0]


def _parts_of(qualified: str) -> set[str]:
    return {f"aten::{name}" for name in _TAKEN_APART.get(qualified.removeprefix("aten::"), ())}


def _check_keepable(operator: Any) -> None:
    if not is_keepable(operator):
        raise UsageError(
            f"RecomputePolicy(keep=) names {operator}, which writes its arguments or returns a view of them",
            hint="name operators that return new tensors",
        )


Operator = OpOverload | HigherOrderOperator


def is_keepable(operator: Any) -> bool:
    """Whether an operator returns new tensors, and writes none of its arguments."""
    if isinstance(operator, HigherOrderOperator):
        return True
    schema = schema_of(operator)
    return not schema.is_mutable and all(returned.alias_info is None for returned in schema.returns)


@dataclass
class OperatorChoice:
    """Which operators' results blocks keep; `num_kept` counts them, and `others` are those called until the first."""

    keeps: Callable[[Operator], bool]
    every_second: frozenset[str] = frozenset()
    """See `RecomputedBlocks`."""
    num_kept: int = 0
    others: set[str] = field(default_factory=set)
    _known: dict[Any, bool] = field(default_factory=dict)

    def is_kept(self, operator: Any) -> bool:
        """Whether the results of `operator` are kept."""
        known = self._known.get(operator)
        if known is None:
            known = self._known[operator] = is_keepable(operator) and self.keeps(operator)
        return known

    def takes_turns(self, operator: Any) -> bool:
        """Whether of `operator` and others only every second result is kept."""
        return bool(self.every_second) and isinstance(operator, OpOverload) and _name_of(operator) in self.every_second

    def contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """Return the contexts of a run that keeps results, and of the one in the backward pass that takes them.

        Those of torch (`create_selective_checkpoint_contexts`, 2.13) raise in the backward pass where a kept result was
        written in place, and draw other random numbers behind a kept result that was drawn.
        """
        kept: dict[Any, _Result] = {}
        return _Keeping(self, kept), _Taking(self, kept)


@dataclass(frozen=True)
class _Result:
    """The result of an operator, when it was written last, and the random numbers behind it where it draws some."""

    value: Any
    versions: tuple[int, ...]
    restore_random_numbers: Callable[[], None] | None

    @property
    def is_unchanged(self) -> bool:
        return self.versions == tuple(version_of(leaf) for leaf in tensors_in(self.value))


class _Calls:
    """Tells the calls of one operator apart: by the shapes of their arguments, and how many there were before."""

    def __init__(self) -> None:
        self._counts: Counter[Any] = Counter()

    def key(self, operator: Any, args: Any, kwargs: Any) -> Any:
        kind = (operator, *((leaf.shape, leaf.dtype, leaf.device) for leaf in tensors_in((args, kwargs))))
        self._counts[kind] += 1
        return (*kind, self._counts[kind])


class _Keeping(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """Keeps results in the first run."""

    supports_higher_order_operators = True

    def __init__(self, choice: OperatorChoice, kept: dict[Any, _Result]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._choice, self._kept, self._calls = choice, kept, _Calls()
        self._turns = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self._choice.is_kept(func):
            if not self._choice.num_kept and is_keepable(func):
                self._choice.others.add(str(func).rsplit(".", 1)[0])
            return result
        tensors = tensors_in(result)
        if not tensors or tensors[0].is_meta:  # code that finds out shapes
            return result
        key = self._calls.key(func, args, kwargs)
        if self._choice.takes_turns(func):
            self._turns += 1
            if self._turns % 2 == 0:
                return result
        self._choice.num_kept += 1
        value = pytree.tree_map(_same_values, result)
        draws = torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())
        self._kept[key] = _Result(
            value=value,
            versions=tuple(version_of(leaf) for leaf in tensors_in(value)),
            restore_random_numbers=kept_random_numbers([tensors[0].device]) if draws else None,
        )
        return result


class _Taking(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """Takes the kept results in the second run, each once."""

    supports_higher_order_operators = True

    def __init__(self, choice: OperatorChoice, kept: dict[Any, _Result]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._choice, self._kept, self._calls = choice, kept, _Calls()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self._choice.is_kept(func):
            known = self._kept.pop(self._calls.key(func, args, kwargs), None)
            if known is not None and known.is_unchanged:
                if known.restore_random_numbers is not None:
                    known.restore_random_numbers()
                return known.value
        return func(*args, **(kwargs or {}))


def _same_values(leaf: Any) -> Any:
    """Return a tensor of the same values, without the graph that `leaf` will have, that sees writes to it."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    with following_writes():
        return leaf.detach()
