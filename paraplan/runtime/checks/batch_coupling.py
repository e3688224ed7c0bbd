"""Whether the loss of a batch is made up of those of the parts that a plan cuts it into: measured, and told.

It is not where sequences are compared with each other (batch statistics, contrastive losses, the balance of experts),
nor where the mean of `loss_fn` goes over other targets than were counted. Parts are then computed by themselves, as
DistributedDataParallel does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import reduce
from typing import Any, Literal

import torch
import torch.distributed as dist

from paraplan.errors import UnsupportedPlanError
from paraplan.plan.parallel import ParallelPlan
from paraplan.plan.training import TrainingPrecision
from paraplan.runtime.agreement import FailedElsewhereError
from paraplan.runtime.batch_norm import batch_norms
from paraplan.runtime.checks.fixed_noise import FixedNoise
from paraplan.runtime.checks.trials import (
    Piece,
    gathered_numbers,
    joined,
    modes,
    not_compiled,
    nothing_changed,
    num_sequences_of,
)
from paraplan.runtime.data.batches import MicroBatch, TargetCounter, is_of_batch
from paraplan.runtime.mesh import Mesh
from paraplan.runtime.precision import half_type, without_autocast
from paraplan.runtime.rank_part import RankPart
from paraplan.runtime.seeds import seed_generators
from paraplan.runtime.step.loss import Number, read_loss
from paraplan.runtime.torch_private import pytree

Coupling = Literal["warn", "refuse", "gather"]

# The same sequence beside another one is computed by other kernels: some 1e-7 of a loss in fp32, 2**-8 in 16 bits. How
# far that goes shows where parts are all the same; more than the last is no rounding.
_LEAST = {torch.float32: 1e-6, torch.bfloat16: 1e-3, torch.float16: 1e-3}
_MOST = {torch.float32: 2e-5, torch.bfloat16: 1e-2, torch.float16: 1e-2}
_OF_ROUNDING = 8.0
_FEWEST_SEQUENCES = 8  # of which a batch consists that shows what compares them
_SLACK = 1.5
_OF_ERROR = 0.02  # of what the loss is off: what it may be off as a mean over other targets
_ROUNDING = 1e-7
_TELLING = 1e-3  # how far losses of parts are apart in which their counts show
_COUNT = "return (loss_sum, count) from loss_fn, or give job.prepare(count_targets=...)"
COMPARES = "this model compares samples"
_CAUSES = (
    (
        COMPARES,
        "parts are computed by themselves, as DDP does; batch_coupling='gather' compares those of the global batch, "
        "'refuse' ends the training here",
    ),
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
        stored = {one.dtype for one in part.module.parameters() if one.is_floating_point()}
        self._are_counted = False
        self._has_halves = any(dtype in stored for dtype in (torch.bfloat16, torch.float16))
        # Where nothing but the context casts, trials do without: rounding of 16 bits hides small terms.
        self._is_exact = (
            not self._has_halves and plan.pp == 1 and not plan.zero_stage and half_type(precision) is not None
        )
        self._dtype = torch.bfloat16 if self._has_halves or half_type(precision) else torch.float32

    def parts(self, pieces: Sequence[MicroBatch], *, start: int, most: int) -> list[Piece]:
        """Return parts of the global batch, from number `start` on, the same on all ranks; at most `most` of one size.

        Where ranks have sequences of other lengths, each takes parts of its own share: its micro-batches, or the halves
        of one.
        """
        own = [(one.inputs, one.targets) for one in pieces if one.num_sequences]
        size = num_sequences_of((pieces[0].inputs, pieces[0].targets))
        rows = gathered_numbers([float(len(own)), float(size)], self._mesh)
        held = {self._mesh.grid.coordinates(rank)["dp"]: int(count) for rank, (count, _) in enumerate(rows)}
        fewest = min(held.values())
        if len(held) > 1 and self.are_alike(pieces[0]):
            turns = [(place, turn) for turn in range(max(held.values())) for place in sorted(held)]
            places = [(place, turn) for place, turn in turns if turn < held[place]]
            chosen = [places[(start + one) % len(places)] for one in range(min(most, len(places)))]
            return [self.fetched(pieces[index], place) for place, index in chosen]
        if fewest > 1:
            return [own[(start + one) % fewest] for one in range(min(most, fewest))]
        if len(held) == 1 or not fewest or min(size for _, size in rows) < 2:
            return own[:1] if fewest else []
        return [_cut(own[0], 0, size // 2), _cut(own[0], size // 2, 2 * (size // 2))]

    def most(self, size: int, count: int, *, is_first: bool) -> int:
        """Return how many parts of `size` sequences are looked at, in a step of `count` micro-batches."""
        in_step = 2 * count // self._plan.pp if is_first else 2
        return max(2, -(-_FEWEST_SEQUENCES // size), in_step)

    def measure(self, parts: Sequence[Piece], *, is_random: bool) -> str | None:
        """Return what is to be said of the loss of `parts` together, None where it is made up of theirs.

        `is_random` says that passes draw random numbers.
        """
        if len(parts) < 2:
            return None
        if self._mesh.world.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._mesh.world.device)
        with self._in_training(parts[0], is_random=is_random):
            apart = self.losses(parts)
            if not self._has_room(parts):
                return None
            return self._judged(parts, apart)

    def _judged(self, parts: Sequence[Piece], apart: Losses | None) -> str | None:
        together = self.losses([reduce(joined, parts)])
        error = _gap(apart, together)
        if not self._anywhere(error > _LEAST[self._dtype]):
            # Losses of parts that differ, and add up as they are counted: no weights change over what their mean goes.
            means = () if apart is None else [one / by for one, by in zip(apart.sums, apart.counts, strict=True) if by]
            self._are_counted |= len(means) > 1 and _relative(min(means), max(means)) > _TELLING
            return None
        # The same part several times: what is another loss there is rounding, or no mean.
        same = self.losses([reduce(joined, [parts[0]] * len(parts))])
        rounding = 0.0 if apart is None or same is None else _relative(same.mean, _first(apart).mean)
        allowed = min(max(_LEAST[self._dtype], _OF_ROUNDING * rounding), _MOST[self._dtype])
        if not self._anywhere(error > allowed):
            return None
        # A mean over some targets of A and of B has, with A twice, those of A twice.
        pair = [self.losses([reduce(joined, chosen)]) for chosen in (parts[:2], [parts[0], *parts[:2]])]
        numbers = [0.0] * 4
        if apart is not None and together is not None and same is not None:
            numbers = [error / allowed, apart.mean, together.mean, float(self._cause(apart, same, pair, len(parts)))]
        _, of_parts, whole, cause = max(gathered_numbers(numbers, self._mesh), key=lambda row: row[0])
        name = "the whole batch" if len(parts) >= self._plan.dp * self._plan.num_microbatches else "them together"
        losses = f"loss {whole:.8g} of {name}, {of_parts:.8g} in {len(parts)} parts"
        return f"{_CAUSES[int(cause)][0]}: {losses}; {_CAUSES[int(cause)][1]}"

    def _cause(self, apart: Losses, same: Losses, pair: Sequence[Losses | None], count: int) -> int:
        """Return which of `_CAUSES` shows in losses of parts, of the first one `count` times, and of A B and A A B."""
        first, second = (one / by if by else 0.0 for one, by in zip(apart.sums[:2], apart.counts[:2], strict=True))
        most = _MOST[self._dtype]
        if _relative(same.mean, first) > most:
            return 1 if _relative(same.mean, count * first) <= most else 0
        both, twice = (math.nan if one is None else one.mean for one in pair)
        if self._are_counted or batch_norms(self._part.module) or second == both:
            return 0
        ratio = (both - first) / (second - both)
        off = abs(twice - (2 * first + ratio * second) / (2 + ratio)) if ratio >= 0.0 else math.inf
        counted = math.fsum(apart.sums[:2]) / (math.fsum(apart.counts[:2]) or 1.0)
        return 2 if off + _ROUNDING * abs(both) <= _OF_ERROR * abs(both - counted) else 0

    def check_gathered(self, pieces: Sequence[MicroBatch]) -> None:
        """Raise `UnsupportedPlanError` where the loss from gathered outputs is not that of the whole batch."""
        copies = self._mesh.size("dp")
        parts = self.parts(pieces, start=0, most=copies)
        if len(parts) != copies:
            return
        loss = self._part.execution.loss
        with self._in_training(parts[0], is_random=True):
            numbers = [index * num_sequences_of(parts[0]) for index in range(copies)]
            own = parts[self._mesh.coordinate("dp")]
            first = numbers[self._mesh.coordinate("dp")]
            noise = FixedNoise(range(first, first + num_sequences_of(own)))
            with nothing_changed(self._part.module), not_compiled(), loss.replaced(gathers=True):
                seed_generators(0)
                with noise:
                    self._part.execution.evaluate([MicroBatch(*own, num_sequences=num_sequences_of(own))])
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
                failures.append(execution.loss.explained(error))
            return torch.zeros((), device=self._mesh.world.device)

        times = self._plan.pp if self._plan.pipeline_schedule not in (None, "gpipe") else 1
        with nothing_changed(self._part.module), not_compiled(), execution.loss.replaced(noted):
            for one in earlier:
                execution.evaluate([MicroBatch(*one, num_sequences=num_sequences_of(one))] * times)
            found.clear()
            seed_generators(seed)
            with FixedNoise(numbers):
                execution.evaluate([MicroBatch(*piece, num_sequences=len(numbers))] * times)
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

    def are_alike(self, piece: MicroBatch) -> bool:
        """Whether all ranks have sequences of the same lengths."""
        leaves = [leaf for leaf in pytree.tree_leaves((piece.inputs, piece.targets)) if isinstance(leaf, torch.Tensor)]
        own = [float(size) for leaf in leaves for size in leaf.shape]
        width = gathered_numbers([float(len(own))], self._mesh)
        if any(row != width[0] for row in width):
            return False
        rows = gathered_numbers(own, self._mesh)
        return all(row == rows[0] for row in rows)

    def fetched(self, piece: MicroBatch, place: int) -> Piece:
        """Return this micro-batch of rank `place` of dp."""
        group = self._mesh.group("dp")

        def sent(leaf: Any) -> Any:
            if group is None or not is_of_batch(leaf):
                return leaf
            shape = torch.tensor(leaf.shape, device=leaf.device)
            dist.broadcast(shape, group=group, group_src=place)
            value = leaf.detach().contiguous()
            if self._mesh.coordinate("dp") != place:
                value = leaf.new_empty(shape.tolist())
            dist.broadcast(
                value.view(torch.uint8) if value.dtype == torch.bool else value, group=group, group_src=place
            )
            return value

        inputs, targets = pytree.tree_map(sent, (piece.inputs, piece.targets))
        return inputs, targets

    def _has_room(self, parts: Sequence[Piece]) -> bool:
        """Whether all parts at once fit into the memory of a GPU, on every rank, by what the last pass took."""
        device = self._mesh.world.device
        if device.type != "cuda":
            return True
        taken = torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device)
        free = torch.cuda.mem_get_info(device)[0]
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return not self._anywhere(_SLACK * len(parts) * taken > free)


def _first(losses: Losses) -> Losses:
    return Losses(losses.sums[:1], losses.counts[:1])


def _gap(one: Losses | None, other: Losses | None) -> float:
    return 0.0 if one is None or other is None else _relative(one.mean, other.mean)


def _relative(one: float, other: float) -> float:
    if not (math.isfinite(one) and math.isfinite(other)):
        return 0.0 if math.isfinite(one) == math.isfinite(other) else math.inf
    return abs(one - other) / max(abs(one), abs(other), 1e-3)


def _cut(piece: Piece, start: int, end: int) -> Piece:
    inputs, targets = pytree.tree_map(lambda leaf: leaf[start:end] if is_of_batch(leaf) else leaf, piece)
    return inputs, targets
