"""Finding out how the losses of micro-batches make up that of a batch, before the first step that divides one.

What `loss_fn` computes is followed (`loss_counts`), and then tried: two sequences one by one, and both together. A loss
that compares the sequences of a batch with each other shows there, and is refused.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import torch
from torch import nn

from paraplan.errors import UnsupportedPlanError
from paraplan.plan.parallel import ParallelPlan
from paraplan.runtime.agreement import FailedElsewhereError
from paraplan.runtime.checks.trials import (
    Piece,
    gathered_numbers,
    joined,
    not_compiled,
    nothing_changed,
    num_sequences_of,
)
from paraplan.runtime.data.batches import MicroBatch, TargetCount, counted_targets
from paraplan.runtime.mesh import Mesh
from paraplan.runtime.seeds import seed_generators
from paraplan.runtime.step.execution import Execution
from paraplan.runtime.step.loss import (
    HINT,
    LossKind,
    LossRule,
    Returned,
    term_kind,
)
from paraplan.runtime.step.loss_counts import Number
from paraplan.runtime.torch_private import pytree

_LOGGER = logging.getLogger(__name__)
_KINDS: tuple[LossKind, ...] = ("whole", "sum", "sequences", "targets", "counted", "probe")
# The same sequence beside another one is computed by other kernels: some 1e-7 of a loss in fp32, 2**-8 in 16 bits. How
# far that goes shows where a sequence stands beside itself; more than the last is no rounding.
_LEAST = {torch.float32: 1e-6, torch.bfloat16: 1e-3, torch.float16: 1e-3}
_MOST = {torch.float32: 2e-5, torch.bfloat16: 1e-2, torch.float16: 1e-2}
_OF_ROUNDING = 8.0

Tried = tuple[Returned | None, Returned | None]
"""What two pieces gave, None on a rank without the end of the model."""


@dataclass(frozen=True)
class _Finding:
    """What one rank with the end of the model has found: a rule, and the losses together and from the parts.

    `rounding` is how far a sequence beside itself is from that sequence alone, relative to the loss. `is_followed`: the
    code of the loss has shown the rule.
    """

    kind: LossKind
    is_known: bool
    together: float
    from_parts: float
    count: float = 0.0
    num_others: int = 0
    in_model: bool = False
    rounding: float = 0.0
    is_followed: bool = False

    def numbers(self) -> list[float]:
        """Return it as numbers that travel."""
        flags = [float(_KINDS.index(self.kind)), float(self.is_known), self.together, self.from_parts]
        return [
            *flags,
            *(self.count, float(self.num_others), float(self.in_model), self.rounding, float(self.is_followed)),
        ]

    @classmethod
    def of(cls, numbers: Sequence[float]) -> _Finding:
        """Return what `numbers` gave."""
        kind, is_known, together, from_parts, count, num_others, in_model, rounding, is_followed = numbers
        return cls(
            kind=_KINDS[int(kind)],
            is_known=bool(is_known),
            together=together,
            from_parts=from_parts,
            count=count,
            num_others=int(num_others),
            in_model=bool(in_model),
            rounding=rounding,
            is_followed=bool(is_followed),
        )


class LossProbe:
    """Tries the loss of one engine on two sequences. Every rank calls it together with the others."""

    def __init__(
        self,
        execution: Execution,
        module: nn.Module,
        *,
        mesh: Mesh,
        plan: ParallelPlan,
        count_targets: TargetCount | None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self._execution = execution
        self._module = module
        self._mesh = mesh
        self._plan = plan
        self._count_targets = count_targets
        self._dtype = dtype

    def find(
        self, pieces: tuple[Piece, Piece], *, num_sequences: int, is_strict: bool = True, tried: Tried | None = None
    ) -> LossRule:
        """Return the rule of the loss, tried on two sequences; `num_sequences` is how many the global batch has.

        `tried` is what `value` has given for each of them, where it has. Without `is_strict` a sequence may be computed
        by statistics of those beside it. Otherwise this raises `UnsupportedPlanError` on every rank where the loss of a
        batch is not made up of those of its parts.
        """
        first, in_model = self.value(pieces[0]) if tried is None else tried[0], False
        if not self._is_known(first):
            in_the_model = self.value(pieces[0], in_model=True)
            in_model = self._is_known(in_the_model)
            first = in_the_model if in_model else first
        second = self.value(pieces[1], in_model=in_model) if tried is None or in_model else tried[1]
        returned = [first, second, self.value(joined(*pieces), in_model=in_model)]
        own = self._finding(returned, pieces, in_model=in_model)
        is_near = own is None or self._fits(own)
        if not all(row[0] for row in gathered_numbers([float(is_near)], self._mesh)):
            returned.append(self.value(joined(pieces[0], pieces[0]), in_model=in_model))
            own = self._finding(returned, pieces, in_model=in_model)
        return self._agreed(own, num_sequences=num_sequences, is_strict=is_strict)

    def check_gathered(self, pieces: tuple[Piece, Piece]) -> LossRule:
        """Return the rule of a loss over the global batch, once it has been seen to be one.

        Ranks have either piece in turns. Raises `UnsupportedPlanError` where the loss from their outputs is another one
        than that of the same batch on one rank.
        """
        copies = self._mesh.size("dp")
        rule, loss = LossRule(kind="gathered"), self._execution.loss
        own = pieces[self._mesh.coordinate("dp") % 2]
        with nothing_changed(self._module), loss.under(rule), not_compiled():
            self._execution.evaluate([MicroBatch(*own, num_sequences=1, weight=1.0)])
            found = float(loss.tally.loss)
        returned = self.value(reduce(joined, [pieces[index % 2] for index in range(copies)]))
        assert returned is not None
        together = _Finding("whole", True, float(returned.value), found)
        if not all(row[0] for row in gathered_numbers([float(self._fits(together))], self._mesh)):
            raise UnsupportedPlanError(
                f"the loss of a batch is {together.together:.8g}, and {found:.8g} where its outputs are gathered from "
                f"dp={copies} ranks: loss_fn does not compute it from the outputs alone",
                hint="compute the loss in loss_fn, from what the model returns for each sequence",
            )
        return rule

    def value(
        self,
        piece: Piece,
        *,
        in_model: bool = False,
        seed: int | None = None,
        seen: Callable[[], None] | None = None,
        earlier: Sequence[Piece] = (),
    ) -> Returned | None:
        """Return what `loss_fn` gives for one piece, None on a rank without the end of the model.

        Random numbers start from `seed`. `seen` is called while buffers are as the forward pass left them. Passes of
        `earlier` pieces come before, whose losses nobody reads.
        """
        count = self._plan.pp if self._plan.pipeline_schedule not in (None, "gpipe") else 1
        size = num_sequences_of(piece)
        micro_batch = MicroBatch(*piece, num_sequences=size)
        loss = self._execution.loss
        with nothing_changed(self._module), loss.under(LossRule(kind="probe", in_model=in_model)), not_compiled():
            for one in earlier:
                self._execution.evaluate([MicroBatch(*one, num_sequences=num_sequences_of(one))] * count)
            if seed is not None:
                seed_generators(seed)
            self._execution.evaluate([micro_batch] * count)
            returned, failure = loss.tally.returned, loss.tally.failure
            if seen is not None:
                seen()
        failed = any(row[0] for row in gathered_numbers([float(failure is not None)], self._mesh))
        if failure is not None:
            raise failure
        if failed:
            raise FailedElsewhereError
        return returned[0] if returned else None

    def _is_known(self, returned: Returned | None) -> bool:
        is_known = returned is not None and term_kind(returned) is not None
        return any(row[0] for row in gathered_numbers([float(is_known)], self._mesh))

    def _finding(self, found: Sequence[Returned | None], pieces: Sequence[Piece], *, in_model: bool) -> _Finding | None:
        """Return what the losses of two pieces, of both and of the first one twice show, None without the end.

        Without the last of them rounding is not known, and the likeliest rule alone is tried.
        """
        returned = [one for one in found if one is not None]
        if not returned:
            return None
        first, second, both, *twice = returned
        kinds = {term_kind(one) for one in returned}
        known = kinds.pop() if len(kinds) == 1 else None
        candidates: list[LossKind] = [known] if known is not None else ["targets", "sequences", "sum"]
        if self._count_targets is not None and not first.is_sum:
            candidates = ["targets"]
        elif known is None and not _has_plain_targets(pieces[0][1]):
            candidates.remove("targets")
        own = None
        for kind in candidates if twice else candidates[:1]:
            together, from_parts = self._tried(kind, (first, second), both, pieces)
            rounding = 0.0
            for again in twice:
                rounding = _relative(*self._tried(kind, (first, first), again, (pieces[0], pieces[0])))
            is_known = known is not None or kind == "targets"
            own = _Finding(kind, is_known, together, from_parts, rounding=rounding, in_model=in_model)
            own = replace(own, is_followed=kind == known and all(one.is_followed for one in returned))
            if self._fits(own):
                break
        else:
            if known is None and "sequences" in candidates:
                tried = self._tried("sequences", (first, second), both, pieces)
                own = _Finding("sequences", False, *tried, in_model=in_model)
        assert own is not None
        if own.kind != "counted":
            return own
        totals = [one.total_and_count for one in (first, second)]
        count = sum(float(total[1]) for total in totals if total is not None) / 2
        num_others = max(len(first.sums(1)) - 1, 0)
        return replace(own, count=count, num_others=num_others)

    def _tried(
        self, kind: LossKind, parts: Sequence[Returned], both: Returned, pieces: Sequence[Piece]
    ) -> tuple[float, float]:
        """Return the loss of both sequences, and what those of each make together by a rule."""
        values = [float(part.value) for part in parts]
        if kind == "sum":
            return float(both.value), sum(values)
        if kind == "counted":
            found = [one.sums(num_sequences_of(piece)) for one, piece in zip(parts, pieces, strict=True)]
            whole = both.sums(sum(num_sequences_of(piece) for piece in pieces))
            return _sum_of_means([whole]), _sum_of_means(found)
        counts = [1.0, 1.0]
        if kind == "targets":
            count = self._count_targets or counted_targets
            counts = [float(count(targets)) for _, targets in pieces]
        terms = [value * by for value, by in zip(values, counts, strict=True) if by]
        return float(both.value), sum(terms) / sum(counts) if sum(counts) else float(both.value)

    def _fits(self, found: _Finding) -> bool:
        if not (math.isfinite(found.together) and math.isfinite(found.from_parts)):
            return not math.isfinite(found.together)
        allowed = min(max(_LEAST[self._dtype], _OF_ROUNDING * found.rounding), _MOST[self._dtype])
        return _relative(found.together, found.from_parts) <= allowed

    def _agreed(self, own: _Finding | None, *, num_sequences: int, is_strict: bool) -> LossRule:
        """Return the rule of all ranks with the end of the model; raise on every rank where there is none."""
        width = len(_Finding("whole", False, 0.0, 0.0).numbers()) + 1
        mine = [0.0] * width if own is None else [1.0, *own.numbers()]
        rows = [row for row in gathered_numbers(mine, self._mesh) if row[0]]
        findings = [_Finding.of(row[1:]) for row in rows]
        divided = f"dp={self._plan.dp} x num_microbatches={self._plan.num_microbatches}"
        for found in findings:
            if is_strict and not self._fits(found):
                raise UnsupportedPlanError(
                    f"the loss of two sequences together is {found.together:.8g}, and {found.from_parts:.8g} from "
                    f"those of each: it does not add up over the parts of a batch, which {divided} divides",
                    hint=HINT,
                )
        first = findings[0]
        if any((one.kind, one.num_others) != (first.kind, first.num_others) for one in findings):
            raise UnsupportedPlanError("loss_fn computes another kind of mean on some ranks than on others", hint=HINT)
        if not first.is_known and self._mesh.world.rank == 0:
            _LOGGER.warning(
                "what loss_fn returns is taken for a %s over the sequences of a micro-batch, as it was for the first "
                "two; return (loss_sum, count) if it leaves some targets out",
                "sum" if first.kind == "sum" else "mean",
            )
        expected = max(1.0, max(one.count for one in findings) * num_sequences)
        provisional = 2.0 ** round(math.log2(expected))
        return LossRule(
            kind=first.kind,
            in_model=first.in_model,
            provisional=provisional,
            num_others=first.num_others,
            is_followed=all(one.is_followed for one in findings),
        )


def _sum_of_means(batches: Sequence[Sequence[tuple[torch.Tensor, Number]]]) -> float:
    """Return the sum of means of which each of `batches` has sums and counts."""
    means = []
    for pairs in zip(*batches, strict=True):
        counts = [float(count) for _, count in pairs]
        totals = [float(total) for total, _ in pairs]
        total = sum(one for one, count in zip(totals, counts, strict=True) if count)
        means.append(total / sum(counts) if sum(counts) else 0.0)
    return sum(means)


def _relative(one: float, other: float) -> float:
    return abs(one - other) / max(abs(one), abs(other), 1e-3)


def _has_plain_targets(targets: Any) -> bool:
    """Whether one tensor of whole numbers is all that could say which targets are left out."""
    leaves = [leaf for leaf in pytree.tree_leaves(targets) if isinstance(leaf, torch.Tensor)]
    return sum(not leaf.is_floating_point() and leaf.dtype != torch.bool for leaf in leaves) == 1
