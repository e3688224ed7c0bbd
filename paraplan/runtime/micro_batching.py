"""From the batch of a call to weighed micro-batches, and the checks that come before the first of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from paraplan.errors import UsageError
from paraplan.plan.parallel import ParallelPlan
from paraplan.plan.training import TrainingPrecision
from paraplan.runtime.agreement import Agreement, Call, RankSync
from paraplan.runtime.checkpoints.saving import Reader
from paraplan.runtime.checks.first_step import FirstStep
from paraplan.runtime.checks.forward_state import BatchStatistics
from paraplan.runtime.checks.gradient_rule import GradientRule
from paraplan.runtime.checks.loss_rule import LossProbe
from paraplan.runtime.checks.references import Reference
from paraplan.runtime.checks.trials import global_sequences
from paraplan.runtime.checks.verification import Verification
from paraplan.runtime.data.batches import (
    Division,
    MicroBatch,
    StepDivider,
    StepShape,
    TargetCount,
    batch_size,
    count_micro_batches,
    counted_targets,
    split_batch,
    to_device,
    weigh,
    with_rows_repeated,
)
from paraplan.runtime.mesh import Mesh
from paraplan.runtime.precision import half_type
from paraplan.runtime.rank_part import RankPart
from paraplan.runtime.shards.group import whole_tensor
from paraplan.runtime.step.loss import LossRule


@dataclass(frozen=True)
class Checking:
    """How the first batch is checked: `reference` is the model itself, None where the plan is not checked by it.

    `agreement` brings all ranks out of a check together. `has_values` is False where tensors have none. `gathers`: the
    loss is one of the global batch, not of its parts.
    """

    precision: TrainingPrecision = "fp32"
    count_targets: TargetCount | None = None
    batch_statistics: BatchStatistics = "global"
    reference: Reference | None = None
    agreement: Agreement | None = None
    has_values: bool = True
    gathers: bool = False


class MicroBatching:
    """Cuts the batches of one engine into micro-batches, each with its weight in the loss of the global batch."""

    def __init__(
        self,
        part: RankPart,
        shape: StepShape,
        checking: Checking,
        sync: RankSync,
        *,
        plan: ParallelPlan,
        mesh: Mesh,
    ) -> None:
        self.divider = StepDivider(shape, mesh.grid)
        self._mesh = mesh
        self._sync = sync
        self._checking = replace(checking, reference=None)  # which the check itself lets go
        self._first_step = _first_step(part, plan, mesh, checking)

    def meet(self, call: Call, size: int = 0) -> list[int]:
        """Return the sequences that every rank brings to `call`; all ranks make it together."""
        return self._sync.meet(call, size) if self._checking.has_values else [size] * self._mesh.world.size

    def divide(
        self, call: Call, inputs: Any, targets: Any, *, guarded: Callable[[Callable[[], LossRule]], LossRule]
    ) -> tuple[list[MicroBatch], LossRule]:
        """Return the micro-batches of `call`, and by what rule their losses make up that of the global batch.

        `guarded` runs the check of the first batch, and puts its errors in words.
        """
        device = self._mesh.world.device
        inputs = with_rows_repeated(inputs, targets)
        sizes = self.meet(call, batch_size(inputs, targets))
        division = self.divider.divide(sizes, is_step=call == "step")
        inputs, targets = to_device(inputs, device), to_device(targets, device)
        if self._checking.gathers and division.count > 1:
            raise UsageError(
                f"gather_outputs, and the ranks have {sizes} sequences: their outputs cannot be joined",
                hint="give each rank as many, in one micro-batch; job.shard does",
            )
        rule = self._rule(call, division, (inputs, targets), sizes, guarded)
        pieces = split_batch(inputs, targets, division)
        if rule.kind == "counted":
            return pieces, rule
        if rule.kind == "targets":
            counts = count_micro_batches(pieces, self._checking.count_targets or counted_targets, device)
            total = counts.sum()
            if self._mesh.group("dp") is not None:
                dist.all_reduce(total, group=self._mesh.group("dp"))
            return weigh(pieces, counts / total.clamp(min=torch.finfo(total.dtype).tiny)), rule
        if rule.kind == "gathered":
            return weigh(pieces, [1.0 / self._mesh.size("dp")]), rule
        whole = global_sequences(sizes, self._mesh) if rule.kind == "sequences" else 1
        each = [piece.num_sequences if rule.kind == "sequences" else float(piece.num_sequences > 0) for piece in pieces]
        return weigh(pieces, [count / whole for count in each]), rule

    def share_state(self) -> None:
        """Keep what the forward pass of a divided batch has written the same on all replicas.

        Raises `UnsupportedPlanError` where the first step's has written trained weights.
        """
        self._first_step.check_weights()
        self._first_step.share_state()

    def reload(self, reader: Reader) -> None:
        """Take note that the state that `reader` has was loaded."""
        self._first_step.reload(reader)

    def _rule(
        self,
        call: Call,
        division: Division,
        batch: tuple[Any, Any],
        sizes: list[int],
        guarded: Callable[[Callable[[], LossRule]], LossRule],
    ) -> LossRule:
        is_divided = division.count > 1 or self._mesh.size("dp") > 1
        if not self._checking.has_values:
            return LossRule(kind="sequences" if is_divided else "whole")
        first_step, trains = self._first_step, call == "step"
        with ExitStack() as stack:
            if first_step.is_due(is_divided=is_divided, trains=trains):
                stack.enter_context(_uncounted_memory(self._mesh.world.device))
                if self._checking.agreement is not None:
                    stack.enter_context(self._checking.agreement.on(f"the check before the first {call}"))
            return guarded(
                lambda: first_step.check(*batch, sizes, is_divided=is_divided, trains=trains),
            )


@contextmanager
def _uncounted_memory(device: torch.device) -> Iterator[None]:
    """Let the peak of the training's memory begin behind this context."""
    yield
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def _first_step(
    part: RankPart,
    plan: ParallelPlan,
    mesh: Mesh,
    checking: Checking,
) -> FirstStep:
    def whole(name: str, tensor: torch.Tensor) -> torch.Tensor:
        return whole_tensor(tensor, part.shardings.get(name), mesh)

    dtype = half_type(checking.precision) or torch.float32
    counts = checking.count_targets
    probe = LossProbe(part.execution, part.module, mesh=mesh, plan=plan, count_targets=counts, dtype=dtype)
    verification = None
    if checking.reference is not None:
        verification = Verification(
            checking.reference, part, plan=plan, mesh=mesh, precision=checking.precision, whole=whole
        )
    return FirstStep(
        part,
        probe,
        plan=plan,
        mesh=mesh,
        statistics=checking.batch_statistics,
        verification=verification,
        gathers=checking.gathers,
        has_values=checking.has_values,
        gradients=GradientRule(part, mesh=mesh, plan=plan, count_targets=counts, dtype=dtype),
    )
