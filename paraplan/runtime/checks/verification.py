"""A plan checked in numbers: loss, every gradient and every buffer of some sequences, as one process has them.

The model as it was before it was cut, split and sharded runs beside what was made of it on the same sequences, by the
same loss; see `paraplan.runtime.checks.references`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from paraplan.errors import UnsupportedPlanError
from paraplan.plan.parallel import ParallelPlan
from paraplan.plan.training import TrainingPrecision
from paraplan.runtime.batch_norm import batch_norms
from paraplan.runtime.checks.attributes import LARGEST_STATE, Attributes
from paraplan.runtime.checks.batch_parts import copied, num_sequences_of
from paraplan.runtime.checks.forward_state import WeightSums, weight_sums, written_weights
from paraplan.runtime.checks.gaps import Gaps
from paraplan.runtime.checks.references import Reference, RunningReference, Whole
from paraplan.runtime.checks.trials import (
    Piece,
    gathered_numbers,
    modes,
    not_compiled,
    nothing_changed,
)
from paraplan.runtime.data.batches import MicroBatch, TargetCounter, is_of_batch
from paraplan.runtime.mesh import Mesh
from paraplan.runtime.precision import compute_context
from paraplan.runtime.rank_part import RankPart
from paraplan.runtime.seeds import seed_generators
from paraplan.runtime.step.loss import StepLoss
from paraplan.runtime.torch_private import pytree


@dataclass(frozen=True)
class Tolerance:
    """How far a plan may be from one process: of the loss, and of a gradient relative to its own size."""

    loss: float
    gradient: float


# Sums in another order: 1e-6 in fp32. In 16 bits products are rounded by 2**-8, many of which meet in a gradient.
_TOLERANCES: dict[TrainingPrecision, Tolerance] = {"fp32": Tolerance(loss=2e-5, gradient=2e-4)}
_HALF = Tolerance(loss=2e-2, gradient=0.3)


class Verification:
    """Checks of a rank's part against `reference`, the model. Every rank calls them together with the others.

    `differs` says that both ran, and not alike.
    """

    def __init__(
        self,
        reference: Reference,
        part: RankPart,
        *,
        plan: ParallelPlan,
        mesh: Mesh,
        precision: TrainingPrecision,
        whole: Whole,
        counter: TargetCounter,
    ) -> None:
        self._reference = RunningReference(reference, part, mesh, whole)
        self._part = part
        self._plan = plan
        self._mesh = mesh
        self._precision = precision
        self._whole = whole
        self._counter = counter
        self.differs = False

    def check(self, parts: Sequence[Piece], *, trains: bool, may_differ: bool = False) -> float | None:
        """Return how long it took, in seconds, after both were run on some of each of `parts`.

        They run in training, without `trains` in evaluation. Where that is random too, ranks may draw other numbers:
        `may_differ` says that nothing follows from a difference. None where the model itself gives no number for them,
        or does not run on them. Raises `UnsupportedPlanError` on every rank where they differ. Gradients and buffers
        are left as they were.
        """
        started_s = time.perf_counter()
        module, model, loss = self._part.module, self._reference.model, self._part.execution.loss
        rows = [_few(parts[index % len(parts)]) for index in range(self._plan.pp if self._plan.pp > 1 else 2)]
        mode = modes(module, model, training=None if trains else False, batch_norm_training=False)
        attributes = Attributes(model, largest=LARGEST_STATE)
        watches = bool(self._plan.zero_stage) and not self._reference.is_streamed
        before: WeightSums = {}
        nothing_written = partial(nothing_changed, module, functions=[loss.loss_fn])  # both begin as things are
        with mode, not_compiled(), nothing_written():
            micro_batches, total = self._micro_batches(rows)
            with loss.replaced(total=total), nothing_written():
                loss.start()
                seed_generators(0)
                has_run = self._reference.run(
                    lambda model: self._terms(model, micro_batches, loss),
                    begin=lambda: before.update(weight_sums(model) if watches else {}),
                )
                expected_loss = float(loss.tally.loss) * self._mesh.size("dp")
            if not has_run or not math.isfinite(expected_loss):
                attributes.put_back()
                self._reference.release()
                return None
            self._refuse_written(before, weight_sums(model) if before else {})
            buffers = {name: held.detach().clone() for name, held in model.named_buffers()}
            found_loss = self._train_part(rows, loss)
            errors = self._errors(expected_loss, found_loss, buffers)
        self._part.forget_gradients()
        attributes.put_back()
        self._reference.release()
        if errors is None or not self._is_near(errors, raises=not may_differ):
            return None
        return time.perf_counter() - started_s

    def _refuse_written(self, before: Mapping[str, object], after: Mapping[str, object]) -> None:
        """Raise where the whole model has written its weights: under ZeRO it writes copies, which are let go."""
        for name, sums in before.items():
            if after[name] != sums:
                raise written_weights(name)

    def _terms(self, model: nn.Module, micro_batches: Sequence[MicroBatch], loss: StepLoss) -> Iterator[torch.Tensor]:
        for one in micro_batches:
            with compute_context(self._precision, self._mesh.world.device), torch.enable_grad():
                term = loss.run(model, one.inputs, one)
            yield term

    def _train_part(self, rows: Sequence[Piece], loss: StepLoss) -> float:
        self._part.forget_gradients()
        micro_batches, total = self._micro_batches(rows)
        with loss.replaced(total=total):
            seed_generators(0)
            self._part.execution.train(micro_batches)
            own = float(loss.tally.loss)
        return sum(row[0] for row in gathered_numbers([own], self._mesh)) / (
            self._mesh.size("tp") * self._mesh.size("cp")
        )

    def _micro_batches(self, rows: Sequence[Piece]) -> tuple[list[MicroBatch], float]:
        """Return `rows` as micro-batches of a batch that all ranks of `dp` bring each, and the targets of all of it.

        Both sides run them by the same weights: a backward pass may clip what it is given.
        """
        counts = [float(self._counter.count(*row)) for row in rows]
        total = math.fsum(counts) * self._mesh.size("dp")
        return [
            MicroBatch(*copied(row), num_sequences=num_sequences_of(row), weight=count / total if total else 0.0)
            for row, count in zip(rows, counts, strict=True)
        ], total

    def _gradients(self) -> dict[str, torch.Tensor]:
        return {name: held.grad for name, held in self._part.parameters.items() if held.grad is not None}

    def _errors(
        self, expected_loss: float, found_loss: float, buffers: Mapping[str, torch.Tensor]
    ) -> dict[str, float] | None:
        """Return how far the loss, each gradient and each buffer of this rank are off, by how much they may be.

        None where the gradients of the reference could not be had.
        """
        tolerance, gaps = _TOLERANCES.get(self._precision, _HALF), Gaps()

        def compare(name: str, of_a_copy: torch.Tensor | None) -> None:
            expected = None if of_a_copy is None else of_a_copy * self._mesh.size("dp")
            held = self._part.parameters.get(name)
            if held is None or not held.requires_grad:
                gaps.measure(expected)
                return
            gradient = torch.zeros_like(held) if held.grad is None else held.grad
            gaps.add(name, self._whole(name, gradient.detach()), expected)

        if not self._reference.compare(compare):
            return None
        errors = {"the loss": abs(found_loss - expected_loss) / max(abs(expected_loss), 1e-3) / tolerance.loss}
        for name, gap in gaps.relative().items():
            errors[f"the gradient of {name}"] = gap / tolerance.gradient
        return errors | self._buffer_errors(buffers, tolerance)

    def _buffer_errors(self, expected: Mapping[str, torch.Tensor], tolerance: Tolerance) -> dict[str, float]:
        normalized = tuple(f"{name}." for name in batch_norms(self._reference.model))
        errors = {}
        for name, found in self._part.buffers.items():
            reference = expected.get(name)
            if reference is None or name.startswith(normalized) or not found.numel():
                continue
            if found.shape != reference.shape:
                errors[f"buffer {name}"] = math.inf
                continue
            errors[f"buffer {name}"] = _off(found.to(reference.device), reference) / tolerance.gradient
        return errors

    def _is_near(self, errors: dict[str, float], *, raises: bool) -> bool:
        """Whether no rank has more than rounding among its errors; with `raises` it says what it has."""
        worst = max(errors, key=lambda name: math.inf if math.isnan(errors[name]) else errors[name])
        bound = math.inf if math.isnan(errors[worst]) else errors[worst]
        rows = gathered_numbers([bound], self._mesh)
        ranks = [rank for rank, (error,) in enumerate(rows) if error > 1.0]
        if not (ranks and raises):
            return not ranks
        where = worst if bound > 1.0 else f"what rank {ranks[0]} holds"
        tolerance = _TOLERANCES.get(self._precision, _HALF)
        size = bound * (tolerance.loss if worst == "the loss" else tolerance.gradient)
        off = f" is {size:.1e} off" if bound > 1.0 else " differs"
        self.differs = True
        raise UnsupportedPlanError(
            f"this model does not train under '{self._plan.describe()}' as it does in one process: {where}{off}",
            hint="use another plan (DDP runs any model), or name the model in a report to paraplan",
        )


def _off(found: torch.Tensor, reference: torch.Tensor) -> float:
    """Return the largest difference as a share of the largest finite value; bounds that are infinite in both agree."""
    values = reference.double()
    scale = max(float(values.abs().masked_fill(~values.isfinite(), 0.0).max()), 1e-3)
    return float((found.double() - values).abs().masked_fill(found == reference, 0.0).max()) / scale


def _few(part: Piece) -> Piece:
    """Return the first two sequences of a part, which show what is split as well as all of them do."""
    inputs, targets = pytree.tree_map(lambda leaf: leaf[:2] if is_of_batch(leaf) else leaf, part)
    return inputs, targets
