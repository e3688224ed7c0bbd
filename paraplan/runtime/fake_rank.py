"""One rank without values: the modes that it runs under, what they count, and its report."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from paraplan.plan.fake import FAKE_VARIABLE, FakeRankReport
from paraplan.plan.parallel import ParallelPlan
from paraplan.plan.training import TrainingPrecision
from paraplan.runtime.collective_count import CollectiveCount
from paraplan.runtime.fake_run import attention_again_on_gpu, storage_of
from paraplan.runtime.fake_world import Valueless
from paraplan.runtime.gpu_operators import GpuOperators, GroupedProducts
from paraplan.runtime.mesh import Mesh
from paraplan.runtime.storage_tracking import StorageTracker, StorageUse


class FakeRunEnd(SystemExit):
    """The end of a script whose steps have been run; nothing failed."""


class FakeRank:
    """The modes under which a rank runs without values, and what they count."""

    def __init__(self, mesh: Mesh, tracker: type[StorageTracker] = StorageTracker) -> None:
        self._mesh = mesh
        self.patches = ExitStack()  # until the process ends
        self.collectives = CollectiveCount(mesh)
        self._valueless = Valueless()
        self._tracker = tracker(self._uses)
        self._parameters: list[nn.Parameter] = []
        self._buffers: list[torch.Tensor] = []
        self._optimizer: torch.optim.Optimizer | None = None
        self.patches.enter_context(self._valueless.patches())
        self.patches.enter_context(self._tracker.following_resizes())
        self.patches.enter_context(attention_again_on_gpu())

    @contextmanager
    def on_host(self) -> Iterator[None]:
        """Make tensors without values that are not counted in this context."""
        with self._valueless.modes():
            yield

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run without values in this context."""
        with ExitStack() as stack:
            stack.enter_context(self._valueless.modes())
            stack.enter_context(GroupedProducts())  # type: ignore[no-untyped-call]  # torch leaves its base untyped
            stack.enter_context(GpuOperators())
            stack.enter_context(self._tracker)
            stack.enter_context(self.collectives)
            yield

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Count in this context, in which new tensors have values where nothing else says otherwise."""
        with GroupedProducts(), GpuOperators(), self._tracker, self.collectives:  # type: ignore[no-untyped-call]
            yield

    def follow(self, parameters: Iterable[nn.Parameter], buffers: Iterable[torch.Tensor]) -> None:
        """Count from now on; what was made of the whole model is in the host's memory."""
        self._parameters, self._buffers = list(parameters), list(buffers)
        tracker = self._tracker
        for tensor in [*self._parameters, *self._buffers]:
            tracker.watch(tensor)
        tracker.mark(self._uses())
        gc.collect()  # what the cutting of the model left in cycles
        tracker.enter("forward")
        tracker.forget_peak()

    def know(self, tensors: Iterable[torch.Tensor], use: StorageUse) -> None:
        """Say what tensors that were made just now are for."""
        self._tracker.mark({storage_of(tensor): use for tensor in tensors})

    def begin_update(self, optimizer: torch.optim.Optimizer) -> None:
        """Take note that the step of `optimizer` begins. It takes the form that torch chooses for tensors on a GPU."""
        self._optimizer = optimizer
        choose_as_on_gpu(optimizer)
        self._tracker.enter("optimizer")

    def end_update(self) -> None:
        """Take note that the optimizer's step is done."""
        self._tracker.enter("forward")

    def write_report(
        self, *, plan: ParallelPlan, precision: TrainingPrecision, num_parameters: int, left_out: tuple[str, ...]
    ) -> None:
        """Write what was counted to the file that PARAPLAN_FAKE names."""
        self._tracker.settle()
        peak, world = self._tracker.peak, self._mesh.world
        report = FakeRankReport(
            rank=world.rank,
            world_size=world.size,
            pipeline_stage=self._mesh.coordinate("pp"),
            plan=plan,
            precision=precision,
            num_parameters=num_parameters,
            parameter_bytes=peak.bytes_by_use["parameter"],
            gradient_bytes=peak.bytes_by_use["gradient"],
            optimizer_state_bytes=peak.bytes_by_use["optimizer_state"],
            activation_bytes=peak.bytes_by_use["activation"],
            workspace_bytes=peak.bytes_by_use["workspace"],
            total_bytes=peak.total_bytes,
            phase=peak.phase,
            collectives=self.collectives.counted(),
            left_out=left_out,
        )
        path = Path(os.environ[FAKE_VARIABLE])
        beside = path.with_suffix(".part")
        beside.write_text(report.to_json(), encoding="utf-8")
        beside.rename(path)

    def _uses(self) -> dict[int, StorageUse]:
        uses: dict[int, StorageUse] = {}
        for parameter in self._parameters:
            uses[storage_of(parameter)] = "parameter"
            if parameter.grad is not None:
                uses[storage_of(parameter.grad)] = "gradient"
        for buffer in self._buffers:
            uses[storage_of(buffer)] = "parameter"
        for state in {} if self._optimizer is None else self._optimizer.state.values():
            for value in state.values():
                if isinstance(value, torch.Tensor):
                    uses[storage_of(value)] = "optimizer_state"
        return uses


def choose_as_on_gpu(optimizer: torch.optim.Optimizer) -> None:
    """Choose the form of the optimizer that torch takes by default for parameters on a GPU: foreach for plain ones."""
    for group in optimizer.param_groups:
        is_open = "foreach" in group and group["foreach"] is None and not group.get("fused")
        if is_open and not any(isinstance(parameter, DTensor) for parameter in group["params"]):
            group["foreach"] = True
