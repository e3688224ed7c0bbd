"""Runs of real sequences that nothing is trained on: what they come to, with all that they write put back."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from paraplan.errors import UsageError
from paraplan.plan.training import TrainingPrecision
from paraplan.runtime.agreement import FailedElsewhereError
from paraplan.runtime.checks.batch_parts import Part
from paraplan.runtime.checks.comparison import MOST, Comparison, Tolerance
from paraplan.runtime.checks.fixed_noise import FixedNoise
from paraplan.runtime.checks.trials import anywhere, not_compiled
from paraplan.runtime.data.batches import MicroBatch, TargetCounter
from paraplan.runtime.mesh import Mesh
from paraplan.runtime.precision import half_type, without_autocast
from paraplan.runtime.rank_part import RankPart
from paraplan.runtime.seeds import python_numbers, seed_generators
from paraplan.runtime.step.loss import LossFunction, Tally, add_metrics, read_loss
from paraplan.runtime.structure.snapshots import nothing_changed
from paraplan.runtime.torch_private import NO_GRAPH


@dataclass
class Record:
    """The result of a run on one rank: the loss, 0 without the end of the model, and its part of the gradients.

    `metrics` are those of a tally. `draws` says that it has drawn random numbers, `has_halves` that it
    has computed in 16 bits: both are known as long as draws are looked for.
    """

    loss: float
    gradients: Mapping[str, torch.Tensor] = field(default_factory=dict)
    metrics: dict[str, torch.Tensor] = field(default_factory=dict)
    draws: bool = False
    has_halves: bool = False


class _NeedsGraphError(RuntimeError):
    """The loss on the last stage of a pipeline takes gradients, as all ranks are told."""


def compared(found: Record, expected: Record) -> Comparison:
    """Return how far two records are apart."""
    return Comparison.of(found.loss, expected.loss, found.gradients, expected.gradients)


def mixture(records: Sequence[Record], weights: Sequence[float]) -> Record:
    """Return the sum of losses and gradients with these weights."""
    gradients: dict[str, torch.Tensor] = {}
    for record, weight in zip(records, weights, strict=True):
        for name, one in record.gradients.items():
            gradients[name] = gradients[name] + weight * one if name in gradients else weight * one
    loss = sum(weight * one.loss for one, weight in zip(records, weights, strict=True))
    return Record(loss, gradients)


class TrialRuns:
    """Runs `part` of a rank on parts of batches. Every rank calls it together with the others.

    `draws` says that random numbers are to belong to sequences: until it is known that none are drawn.
    """

    def __init__(self, part: RankPart, mesh: Mesh, *, precision: TrainingPrecision, counter: TargetCounter) -> None:
        self.part = part
        self.mesh = mesh
        self.plan = plan = mesh.plan
        self.precision = precision
        self.counter = counter
        self.num_runs = plan.pp if plan.pipeline_schedule not in (None, "gpipe") else 1  # that a schedule needs
        self.loss = part.execution.loss
        self._has_halves = any(one.dtype in (torch.bfloat16, torch.float16) for one in part.module.parameters())
        self.computes_in_halves = self._has_halves or half_type(precision) is not None
        self.draws = True
        self._has_tried = self._needs_graph = False
        # Where nothing but the context casts, trials do without: rounding of 16 bits hides small terms.
        self._is_exact = self.computes_in_halves and not self._has_halves and plan.pp == 1 and not plan.zero_stage

    @property
    def most(self) -> Tolerance:
        """How far two runs may be apart that differ in more than the order of sums."""
        return MOST[self.computes_in_halves]

    @contextmanager
    def exactly(self, piece: Part) -> Iterator[bool]:
        """Do without the casts of the precision in this context, where the model runs so; yield whether any is left."""
        if self._is_exact and not self._has_tried:
            self._has_tried = True
            draws, self.draws = self.draws, True  # what is looked for draws is looked for casts too
            try:
                with without_autocast():
                    self._is_exact = not anywhere(self.run([piece]).has_halves, self.mesh)
            except RuntimeError:  # kernels for 16 bits alone; so they are on all ranks
                self._is_exact = False
            finally:
                self.draws = draws
        with without_autocast() if self._is_exact else nullcontext():
            yield self.computes_in_halves and not self._is_exact

    def run(
        self,
        parts: Sequence[Part],
        *,
        trains: bool = False,
        seed: int = 0,
        earlier: Sequence[Part] = (),
        seen: Callable[[], None] | None = None,
        gathers: bool = False,
    ) -> Record:
        """Run each of `parts` by itself, from the same state; return what all of them come to together.

        Random numbers belong to sequences, and start from `seed`. `seen` is called before what a part has written is
        put back, and passes of `earlier` come before it. With `gathers` the outputs of the ranks are joined.
        """
        total, weights = self.weights(parts, copies=1 if gathers else self.num_runs)
        found, gradients, loss, count, returns_sums = Record(0.0), dict[str, torch.Tensor](), 0.0, 0.0, False

        def evaluate(part: Part, weight: float) -> Tally:
            rows = [part.micro_batch(1.0 if gathers else weight, self.mesh.world.device) for _ in range(self.num_runs)]
            with nothing_changed(self.part.module, functions=[self.loss.loss_fn]), not_compiled():
                for before in earlier:
                    pieces = [before.micro_batch(1.0, self.mesh.world.device) for _ in range(self.num_runs)]
                    self.tally(pieces, None, trains=False)
                seed_generators(seed)
                numbers, noise = python_numbers(), FixedNoise(part.numbers)
                with noise if self.draws else nullcontext():
                    tally = self.tally(rows, None if gathers else total, trains=has_graph, gathers=gathers)
                found.draws |= noise.draws or python_numbers() != numbers
                found.has_halves |= noise.has_halves
                if seen is not None:
                    seen()
            return tally

        for part, weight in zip(parts, weights, strict=True):
            has_graph = trains or self._needs_graph
            try:
                tally = evaluate(part, weight)
            except RuntimeError as error:  # a loss with torch.autograd.grad, on all ranks
                is_agreed = self.plan.pp == 1 or isinstance(error, _NeedsGraphError)
                if has_graph or not is_agreed or NO_GRAPH not in str(error):
                    raise
                has_graph = self._needs_graph = True
                tally = evaluate(part, weight)
            if trains:
                self._add_gradients(gradients)
            if has_graph:
                self.part.forget_gradients()
            loss, count = loss + float(tally.loss), count + float(tally.count)
            returns_sums = tally.returns_sums
            add_metrics(found.metrics, tally.metrics)
        if count < 0.0:
            raise UsageError(
                f"loss_fn returned {count:g} as its count, not one number from 0", hint="return (loss_sum, count)"
            )
        if not gathers:  # sums were divided by what was counted
            loss *= total / max(count, 1e-30) if returns_sums else self.mesh.size("dp")
        return replace(found, loss=loss, gradients=gradients)

    def weights(self, parts: Sequence[Part], *, copies: int = 1) -> tuple[float, list[float]]:
        """Return the targets of `copies` of `parts` on every rank of dp, and the share that each part has of them."""
        counts = [float(self.counter.count(one.inputs, one.targets)) for one in parts]
        total = math.fsum(counts) * copies * self.mesh.size("dp")
        return total, [own / total if total else 0.0 for own in counts]

    def tally(self, rows: list[MicroBatch], total: float | None, *, trains: bool, gathers: bool = False) -> Tally:
        """Run micro-batches; return what their losses come to. Gradients are left in place."""
        execution, failures = self.part.execution, list[Exception]()
        waits = self.plan.pp > 1 and self.plan.tp * self.plan.cp == 1 and not trains
        with self.loss.replaced(self._kept_from_raising(failures) if waits else None, total=total, gathers=gathers):
            if trains:
                self.part.forget_gradients()
                for reduction in self.part.reductions:
                    reduction.begin()
                execution.train(rows)
                for reduction in self.part.reductions:
                    reduction.complete()
            else:
                execution.evaluate(rows)
            tally = self.loss.tally
        if waits and anywhere(any(NO_GRAPH in str(one) for one in failures), self.mesh):
            raise _NeedsGraphError(NO_GRAPH)
        if waits and anywhere(bool(failures), self.mesh):
            raise failures[0] if failures else FailedElsewhereError
        return tally

    def _kept_from_raising(self, failures: list[Exception]) -> LossFunction:
        """Return the loss, which notes what it raises: other stages of a pipeline are to finish what they began."""
        loss_fn = self.loss.loss_fn

        def noted(outputs: Any, targets: Any) -> Any:
            try:
                returned = loss_fn(outputs, targets)
                read_loss(returned)
            except Exception as error:  # raised again behind the run, on every rank
                failures.append(self.loss.explained(error))
                return torch.zeros((), device=self.mesh.world.device)
            return returned

        return noted

    def _add_gradients(self, gradients: dict[str, torch.Tensor]) -> None:
        for name, held in self.part.parameters.items():
            if held.grad is not None:
                gradient = held.grad.to_local() if isinstance(held.grad, DTensor) else held.grad.to_dense()
                gradients[name] = gradients[name].add_(gradient) if name in gradients else gradient.clone()
