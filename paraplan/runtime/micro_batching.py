"""From the batch of a call to weighed micro-batches, and the check that comes before the first of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from paraplan.errors import UsageError
from paraplan.runtime.agreement import Call, RankSync
from paraplan.runtime.checks.plan_check import Checking, PlanCheck
from paraplan.runtime.checks.trial_runs import TrialRuns
from paraplan.runtime.checks.trials import global_sequences
from paraplan.runtime.data.batches import (
    MicroBatch,
    StepDivider,
    StepShape,
    batch_size,
    split_batch,
    to_device,
    weigh,
    with_rows_repeated,
)
from paraplan.runtime.mesh import Mesh
from paraplan.runtime.rank_part import RankPart
from paraplan.runtime.timeouts import explained_timeouts


class MicroBatching:
    """Cuts the batches of one engine into micro-batches, each with its weight in the loss of the global batch."""

    def __init__(self, part: RankPart, shape: StepShape, checking: Checking, sync: RankSync, mesh: Mesh) -> None:
        self.divider = StepDivider(shape, mesh.grid)
        self._mesh = mesh
        self._sync = sync
        self._checking = replace(checking, reference=None)  # which the check itself lets go
        self._loss = part.execution.loss
        self._num_copies = mesh.size("dp") * mesh.size("cp")
        self._gathers = checking.coupling == "gather" and mesh.size("dp") > 1

        def whole(name: str, tensor: torch.Tensor) -> torch.Tensor:
            return part.shardings.whole(name, tensor, mesh)

        runs = TrialRuns(part, mesh, precision=checking.precision, counter=checking.counter)
        self._check = PlanCheck(runs, checking, whole)

    def meet(self, call: Call, size: int = 0) -> list[int]:
        """Return the sequences that every rank brings to `call`; all ranks make it together."""
        return self._sync.meet(call, size) if self._checking.has_values else [size] * self._mesh.world.size

    def divide(
        self, call: Call, inputs: Any, targets: Any, *, guarded: Callable[[Callable[[], None]], None]
    ) -> list[MicroBatch]:
        """Return the micro-batches of `call` with their weights, and have the loss divide sums by all targets.

        `guarded` runs the check of a batch, and puts its errors in words.
        """
        device, checking = self._mesh.world.device, self._checking
        inputs = with_rows_repeated(inputs, targets)
        sizes = self.meet(call, batch_size(inputs, targets))
        division = self.divider.divide(sizes, is_step=call == "step")
        inputs, targets = to_device(inputs, device), to_device(targets, device)
        pieces = split_batch(inputs, targets, division)
        if self._gathers and division.count > 1:
            raise UsageError(
                f"batch_coupling='gather', and the ranks have {sizes} sequences: their outputs cannot be joined",
                hint="give each rank as many, in one micro-batch; job.shard does",
            )
        if self._check.is_due(call):
            with ExitStack() as stack:
                stack.enter_context(_uncounted_memory(device))
                if checking.agreement is not None:
                    words = "the check before the first" if not self._sync.num_steps else "the check of a"
                    stack.enter_context(checking.agreement.on(f"{words} {call}", parts=True))
                stack.enter_context(explained_timeouts(lambda: f"the check of engine.{call}"))
                guarded(lambda: self._check.run(call, pieces))
        self._loss.gathers, self._loss.total = self._gathers, None
        if self._gathers or division.count * self._num_copies == 1:
            return weigh(pieces, [1.0 / self._mesh.size("dp")] * len(pieces))
        self._loss.total, weights = self._weights(pieces, sizes)
        return weigh(pieces, weights)

    def _weights(
        self, pieces: list[MicroBatch], sizes: list[int]
    ) -> tuple[torch.Tensor | float, torch.Tensor | list[float]]:
        """Return the targets of the global batch, and the share of them that each of `pieces` has."""
        counter = self._checking.counter
        if not self._checking.has_values or not counter.reads_values(pieces[0].inputs, pieces[0].targets):
            whole = float(global_sequences(sizes, self._mesh))
            return whole, [one.num_sequences / whole for one in pieces]
        counts = counter.counts(pieces, self._mesh.world.device)
        total = counts.sum()
        if self._mesh.group("dp") is not None:
            dist.all_reduce(total, group=self._mesh.group("dp"))
        return total, counts / total.clamp(min=torch.finfo(total.dtype).tiny)

    def end_step(self) -> None:
        """Keep what the forward passes of a step have written the same on all replicas; see `PlanCheck.after_step`."""
        self._check.after_step()


@contextmanager
def _uncounted_memory(device: torch.device) -> Iterator[None]:
    """Let the peak of the training's memory begin behind this context."""
    yield
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
