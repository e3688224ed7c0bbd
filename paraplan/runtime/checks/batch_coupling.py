"""Whether the loss of a batch is made up of those of the parts that a plan cuts it into: measured, and told.

It is not where sequences are compared with each other (batch statistics, contrastive losses, the balance of experts),
nor where the mean of `loss_fn` goes over other targets than were counted. Parts are then computed by themselves, as
DistributedDataParallel does.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import reduce
from typing import Any, Literal

import torch
from torch.distributed.tensor import DTensor

from paraplan.errors import UnsupportedPlanError
from paraplan.plan.parallel import ParallelPlan
from paraplan.plan.training import TrainingPrecision
from paraplan.runtime.agreement import FailedElsewhereError
from paraplan.runtime.batch_norm import batch_norms
from paraplan.runtime.checks.batch_parts import (
    FEWEST_SEQUENCES,
    BatchParts,
    copied,
    halves,
    in_two,
    joined,
    num_sequences_of,
    turned,
)
from paraplan.runtime.checks.fixed_noise import FixedNoise
from paraplan.runtime.checks.gaps import gaps_between
from paraplan.runtime.checks.trials import (
    Piece,
    gathered_numbers,
    modes,
    not_compiled,
    nothing_changed,
)
from paraplan.runtime.data.batches import MicroBatch, TargetCounter
from paraplan.runtime.mesh import Mesh
from paraplan.runtime.precision import half_type, without_autocast
from paraplan.runtime.rank_part import RankPart
from paraplan.runtime.seeds import seed_generators
from paraplan.runtime.step.loss import Number, read_loss

Coupling = Literal["warn", "refuse", "gather"]

# The same sequence beside another one is computed by other kernels: some 1e-7 of a loss in fp32, 2**-8 in 16 bits. How
# far that goes shows where parts are all the same; more than the last is no rounding.
_LEAST = {torch.float32: 1e-6, torch.bfloat16: 1e-3, torch.float16: 1e-3}
_MOST = {torch.float32: 2e-5, torch.bfloat16: 1e-2, torch.float16: 1e-2}
# Of gradients it is some 1e-6 in fp32; how far it goes shows where the same sequences stand in another order.
_LEAST_GRADIENT = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 3e-2}
_MOST_GRADIENT = {torch.float32: 1e-3, torch.bfloat16: 0.3, torch.float16: 0.3}
_OF_ROUNDING = 8.0
_SLACK = 1.5
_OF_ERROR = 0.02  # of what the loss is off: what it may be off as a mean over other targets
_ROUNDING = 1e-7
_TELLING = 1e-3  # how far losses of parts are apart in which their counts show
_COUNT = "return (loss_sum, count) from loss_fn, or give job.prepare(count_targets=...)"
COMPARES = "this model compares samples"
_BY_PARTS = (
    "parts are computed by themselves, as DDP does; batch_coupling='gather' compares those of the global batch, "
    "'refuse' ends the training here"
)
_CAUSES = (
    (COMPARES, _BY_PARTS),
    ("loss_fn returns a sum, and is taken for a mean over its micro-batch", _COUNT),
    ("the mean of loss_fn goes over other targets than are counted", _COUNT),
)


@dataclass(frozen=True)
class Losses:
    """What a pass came to on one rank: the sum and the number of targets of each of its batches, by mean or by sum."""

    sums: tuple[float, ...]
    counts: tuple[float, ...]

    @property
    def mean(self) -> float:
        """The loss of all of them together."""
        total = math.fsum(self.counts)
        return (
            math.fsum(one for one, count in zip(self.sums, self.counts, strict=True) if count) / total if total else 0.0
        )

    @property
    def means(self) -> list[float]:
        """The loss of each, 0 of one that counts nothing."""
        return [one / by if by else 0.0 for one, by in zip(self.sums, self.counts, strict=True)]


class BatchCoupling:
    """Compares losses of parts of real batches with those of the same sequences at once. Every rank calls it."""

    def __init__(
        self,
        part: RankPart,
        *,
        plan: ParallelPlan,
        mesh: Mesh,
        precision: TrainingPrecision,
        counter: TargetCounter,
    ) -> None:
        self._part = part
        self._plan = plan
        self._mesh = mesh
        self._counter = counter
        self.batch = BatchParts(plan, mesh)
        stored = {one.dtype for one in part.module.parameters() if one.is_floating_point()}
        self._loss_fn = part.execution.loss.loss_fn
        self._are_counted = False
        self._num_runs = plan.pp if plan.pipeline_schedule not in (None, "gpipe") else 1  # that a schedule needs
        self._has_halves = any(dtype in stored for dtype in (torch.bfloat16, torch.float16))
        # Where nothing but the context casts, trials do without: rounding of 16 bits hides small terms.
        self._is_exact = (
            not self._has_halves and plan.pp == 1 and not plan.zero_stage and half_type(precision) is not None
        )
        self._dtype = torch.bfloat16 if self._has_halves or half_type(precision) else torch.float32

    def measure(self, parts: Sequence[Piece], *, is_random: bool, gradients: bool, where: str = "") -> str | None:
        """Return what is to be said of the loss of `parts` together, None where it is made up of theirs.

        `is_random` says that passes draw random numbers; `gradients` has those of some parts compared too, in which
        small terms show, and what couples sequences in the backward pass alone. `where` says at which weights.
        """
        if len(parts) < 2:
            return None
        with self._in_training(parts[0], is_random=is_random):
            self._forget_peak()
            apart = self.losses(parts)
            if not self._has_room(parts):
                parts = halves(parts)
                apart = self.losses(parts)
            words = self._judged(parts, apart, where) if len(parts) > 1 else None
            if words is None and gradients and len(parts) > 1:
                fewest = max(2, -(-FEWEST_SEQUENCES // num_sequences_of(parts[0])))
                words = self._judged_by_gradients(parts[:fewest], where, is_random=is_random)
            return words

    def _judged_by_gradients(self, parts: Sequence[Piece], where: str, *, is_random: bool) -> str | None:
        self._forget_peak()
        apart = self._gradients(parts, is_random=is_random)
        if not self._has_room(parts):
            parts = halves(parts)
            if len(parts) < 2:
                return None
            apart = self._gradients(parts, is_random=is_random)
        whole = reduce(joined, parts)
        together = self._gradients([whole], is_random=is_random)
        gaps, least = gaps_between(apart, together), _LEAST_GRADIENT[self._dtype]
        if not self._anywhere(any(gap > least for gap in gaps.values())):
            return None
        noise = gaps_between(self._gradients([whole], is_random=is_random, turn=1), together)
        most = _MOST_GRADIENT[self._dtype]
        over = {name: gap / min(max(least, _OF_ROUNDING * noise[name]), most) for name, gap in gaps.items()}
        worst = max(over, key=over.__getitem__, default="")
        rows = gathered_numbers([over.get(worst, 0.0), gaps.get(worst, 0.0)], self._mesh)
        rank = max(range(len(rows)), key=lambda one: rows[one])
        if not rows[rank][0] > 1.0:
            return None
        name = worst if rows[rank] == [over.get(worst), gaps.get(worst)] else f"a parameter of rank {rank}"
        return (
            f"{COMPARES}: the gradient of {name} is {rows[rank][1]:.1e} off in {len(parts)} parts{where}, and the "
            f"loss is alike; {_BY_PARTS}"
        )

    def _gradients(self, parts: Sequence[Piece], *, is_random: bool, turn: int = 0) -> dict[str, torch.Tensor]:
        """Return this rank's part of the gradients of the loss of `parts`, each in a pass of its own.

        The rows of each part are turned by `turn`.
        """
        execution, reductions = self._part.execution, self._part.reductions
        found: dict[str, torch.Tensor] = {}
        counts = [float(self._counter.count(*one)) for one in parts]
        copies = self._num_runs * self._mesh.size("dp")
        total, first = math.fsum(counts), 0
        for one, count in zip(parts, counts, strict=True):
            size = num_sequences_of(one)
            numbers = torch.arange(first, first + size).roll(turn).tolist()
            first += size
            weight = count / total / copies if total else 0.0
            self._part.forget_gradients()
            with self._nothing_changed(), not_compiled(), execution.loss.replaced(total=total * copies):
                for reduction in reductions:
                    reduction.begin()
                seed_generators(0)
                with FixedNoise(numbers) if is_random else nullcontext():
                    execution.train(self._rows(turned(one, turn), weight))
                for reduction in reductions:
                    reduction.complete()
            for name, held in self._part.parameters.items():
                if held.grad is not None:
                    gradient = held.grad.to_local() if isinstance(held.grad, DTensor) else held.grad.to_dense()
                    found[name] = found[name].add_(gradient) if name in found else gradient.clone()
        self._part.forget_gradients()
        return found

    def _rows(self, piece: Piece, weight: float = 1.0) -> list[MicroBatch]:
        """Return as many micro-batches of a piece as a schedule needs, each of which a model may write into."""
        size = num_sequences_of(piece)
        return [MicroBatch(*copied(piece), num_sequences=size, weight=weight) for _ in range(self._num_runs)]

    def _nothing_changed(self) -> AbstractContextManager[None]:
        return nothing_changed(self._part.module, functions=[self._loss_fn])

    def _forget_peak(self) -> None:
        if self._mesh.world.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._mesh.world.device)

    def _judged(self, parts: Sequence[Piece], apart: Losses | None, where: str) -> str | None:
        together = self.losses([reduce(joined, parts)])
        error = _gap(apart, together)
        if not self._anywhere(error > _LEAST[self._dtype]):
            # Losses of parts that differ, and add up as they are counted: no weights change over what their mean goes.
            means = () if apart is None else [one for one, by in zip(apart.means, apart.counts, strict=True) if by]
            self._are_counted |= len(means) > 1 and _relative(min(means), max(means)) > _TELLING
            return None
        # The same part several times: what is another loss there is rounding, or no mean.
        same = self.losses([reduce(joined, [parts[0]] * len(parts))])
        rounding = 0.0 if apart is None or same is None else _relative(same.mean, apart.means[0])
        allowed = min(max(_LEAST[self._dtype], _OF_ROUNDING * rounding), _MOST[self._dtype])
        if not self._anywhere(error > allowed):
            return None
        # Of three pieces, a mean over some targets of each has in any two of them what shows in the other two pairs.
        counting = sorted(parts, key=lambda one: not float(self._counter.count(*one)))
        is_cut = num_sequences_of(counting[0]) > 3 or not batch_norms(self._part.module)  # one row has no statistics
        three = counting[:3] if len(parts) > 2 or not is_cut else [*in_two(counting[0]), counting[1]]
        alone = self.losses(three)
        pairs = [self.losses([joined(one, other)]) for one, other in itertools.combinations(three, 2)]
        numbers = [0.0] * 4
        if apart is not None and together is not None and same is not None and alone is not None:
            cause = self._cause(apart, same, alone, [math.nan if one is None else one.mean for one in pairs])
            numbers = [error / allowed, apart.mean, together.mean, float(cause)]
        _, of_parts, whole, number = max(gathered_numbers(numbers, self._mesh), key=lambda row: row[0])
        name = "the whole batch" if len(parts) >= self._plan.dp * self._plan.num_microbatches else "them together"
        losses = f"loss {whole:.8g} of {name}, {of_parts:.8g} in {len(parts)} parts{where}"
        return f"{_CAUSES[int(number)][0]}: {losses}; {_CAUSES[int(number)][1]}"

    def _cause(self, apart: Losses, same: Losses, alone: Losses, pairs: Sequence[float]) -> int:
        """Return which of `_CAUSES` shows in losses of parts, of the first one in the place of each, and of pieces.

        `pairs` are the losses of two of the pieces each.
        """
        first, most = apart.means[0], _MOST[self._dtype]
        if _relative(same.mean, first) > most:
            return 1 if _relative(same.mean, len(apart.sums) * first) <= most else 0
        if self._are_counted or batch_norms(self._part.module):
            return 0
        means = alone.means
        ratios = [
            (pair - means[0]) / (other - pair) if other != pair else math.nan
            for pair, other in zip(pairs, means[1:], strict=False)
        ]
        if not all(ratio >= 0.0 for ratio in ratios):
            return 0
        if len(means) < 3:
            return 2
        expected = (ratios[0] * means[1] + ratios[1] * means[2]) / (sum(ratios) or 1.0)
        counted = Losses(alone.sums[1:], alone.counts[1:]).mean
        off = abs(pairs[2] - expected)
        return 2 if off <= _OF_ERROR * abs(pairs[2] - counted) + _ROUNDING * abs(counted) else 0

    def check_gathered(self, pieces: Sequence[MicroBatch]) -> None:
        """Raise `UnsupportedPlanError` where the loss from gathered outputs is not that of the whole batch."""
        copies = self._mesh.size("dp")
        parts = self.batch.take(pieces, start=0, most=copies)
        if len(parts) != copies:
            return
        loss = self._part.execution.loss
        with self._in_training(parts[0], is_random=True):
            numbers = [index * num_sequences_of(parts[0]) for index in range(copies)]
            own = parts[self._mesh.coordinate("dp")]
            first = numbers[self._mesh.coordinate("dp")]
            noise = FixedNoise(range(first, first + num_sequences_of(own)))
            with self._nothing_changed(), not_compiled(), loss.replaced(gathers=True):
                seed_generators(0)
                with noise:
                    self._part.execution.evaluate([MicroBatch(*copied(own), num_sequences=num_sequences_of(own))])
                found = float(loss.tally.loss)
            together = self.losses([reduce(joined, parts)])
        assert together is not None
        if self._anywhere(_relative(found, together.mean) > _MOST[self._dtype]):
            raise UnsupportedPlanError(
                f"the loss of a batch is {together.mean:.8g}, and {found:.8g} where its outputs are gathered from "
                f"dp={copies} ranks: loss_fn does not compute it from the outputs alone",
                hint="compute the loss in loss_fn, from what the model returns for each sequence",
            )

    def losses(
        self,
        parts: Sequence[Piece],
        *,
        seed: int = 0,
        earlier: Sequence[Piece] = (),
        seen: Callable[[], None] | None = None,
    ) -> Losses | None:
        """Return the losses of `parts`, each in a pass of its own, None on a rank without the end of the model.

        Random numbers start from `seed`. What passes write is put back behind each; `seen` is called before that.
        Passes of `earlier` come first.
        """
        counts, sums, first = [], [], 0
        for one in parts:
            size = num_sequences_of(one)
            returned = self._returned(one, range(first, first + size), seed=seed, earlier=earlier, seen=seen)
            first += size
            if returned is None:
                continue
            value, count = returned
            if count is None:
                count = self._counter.count(*one)
                value = value * count if float(count) else 0.0
            counts.append(float(count))
            sums.append(float(value))
        return Losses(tuple(sums), tuple(counts)) if counts else None

    def _returned(
        self,
        piece: Piece,
        numbers: Sequence[int],
        *,
        seed: int,
        earlier: Sequence[Piece],
        seen: Callable[[], None] | None,
    ) -> tuple[Number, Number | None] | None:
        execution, found, failures = self._part.execution, list[tuple[Number, Number | None]](), list[Exception]()
        loss_fn = execution.loss.loss_fn

        def noted(outputs: Any, targets: Any) -> torch.Tensor:
            try:  # other stages of a pipeline are to finish what they began
                with execution.loss.watch():
                    returned = read_loss(loss_fn(outputs, targets))
                found.append((returned.value.float(), returned.count))
            except Exception as error:  # raised again below, on every rank
                if self._plan.tp * self._plan.cp > 1:  # where others wait for this rank in the loss
                    raise
                failures.append(execution.loss.explained(error))
            return torch.zeros((), device=self._mesh.world.device)

        with self._nothing_changed(), not_compiled(), execution.loss.replaced(noted):
            for one in earlier:
                execution.evaluate(self._rows(one))
            found.clear()
            seed_generators(seed)
            with FixedNoise(numbers):
                execution.evaluate(self._rows(piece))
            if seen is not None:
                seen()
        if self._anywhere(bool(failures)):
            raise failures[0] if failures else FailedElsewhereError
        return found[0] if found else None

    def _in_training(self, piece: Piece, *, is_random: bool) -> ExitStack:
        """Return a context in which modules are in training, or in evaluation where draws cannot be fixed in that."""
        stack = ExitStack()
        if self._is_exact:
            stack.enter_context(without_autocast())
            try:
                self.losses([piece])
                self._dtype = torch.float32
            except RuntimeError:  # kernels for 16 bits alone; so they are on all ranks
                stack.close()
                self._is_exact = False
        if is_random and self._anywhere(_gap(self.losses([piece]), self.losses([piece])) > 0.0):
            stack.enter_context(modes(self._part.module, training=False))
        return stack

    def _anywhere(self, mine: bool) -> bool:
        return any(row[0] for row in gathered_numbers([float(mine)], self._mesh))

    def _has_room(self, parts: Sequence[Piece]) -> bool:
        """Whether all parts at once fit into the memory of a GPU, on every rank, by what the last pass took."""
        device = self._mesh.world.device
        if device.type != "cuda":
            return True
        taken = torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device)
        free = torch.cuda.mem_get_info(device)[0]
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return not self._anywhere(_SLACK * len(parts) * taken > free)


def _gap(one: Losses | None, other: Losses | None) -> float:
    return 0.0 if one is None or other is None else _relative(one.mean, other.mean)


def _relative(one: float, other: float) -> float:
    if not (math.isfinite(one) and math.isfinite(other)):
        return 0.0 if math.isfinite(one) == math.isfinite(other) else math.inf
    return abs(one - other) / max(abs(one), abs(other), 1e-3)
