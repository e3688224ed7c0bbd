"""One rank without values: the modes that it runs under, what they count, and its report."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from paraplan.plan.fake import FAKE_VARIABLE, FakeRankReport
from paraplan.plan.memory_record import MemoryParts
from paraplan.runtime.fake.collective_count import CollectiveCount
from paraplan.runtime.fake.gpu import FakeGpu, Place, PlacedTracker
from paraplan.runtime.fake.gpu_operators import GpuKernels, GpuOperators
from paraplan.runtime.fake.storage_tracking import Peak, StorageTracker, StorageUse, uses_of
from paraplan.runtime.fake.torch_private import FakeTensorMode
from paraplan.runtime.fake.world import SmallNumbers, modules_that_stay, transformers_as_if_with_values
from paraplan.runtime.mesh import Mesh
from paraplan.runtime.optimizers.offload import HostSteps
from paraplan.runtime.rank_part import RankPart


class FakeRunEnd(SystemExit):
    """The end of a script whose steps have been run; nothing failed."""


class FakeRank:
    """The modes under which a rank runs without values, and what they count: with `gpu`, what is on the host apart."""

    def __init__(self, mesh: Mesh, gpu: FakeGpu | None = None) -> None:
        self._mesh = mesh
        self.patches = ExitStack()  # until the process ends
        self.collectives = CollectiveCount(mesh)
        self._host_steps: list[HostSteps] = []
        self._parameters: list[nn.Parameter] = []
        self._buffers: list[torch.Tensor] = []
        self._optimizers: list[torch.optim.Optimizer] = []
        self._mode = FakeTensorMode(allow_non_fake_inputs=True) if gpu is None else gpu.mode
        self._sees_for_itself = gpu is None
        self.tracker = StorageTracker(self._uses) if gpu is None else gpu.tracker.anew(self._uses)
        for patch in (modules_that_stay(), transformers_as_if_with_values(), self.tracker.following_resizes()):
            self.patches.enter_context(patch)

    @contextmanager
    def on_host(self) -> Iterator[None]:
        """Make tensors without values that are not counted in this context."""
        with self._mode, SmallNumbers():
            yield

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run without values in this context."""
        with ExitStack() as stack:
            stack.enter_context(self.on_host())
            stack.enter_context(GpuKernels())  # type: ignore[no-untyped-call]  # torch leaves its base untyped
            stack.enter_context(GpuOperators())
            if self._sees_for_itself:
                stack.enter_context(self.tracker)
            stack.enter_context(self.collectives)
            yield

    def follow(self, part: RankPart, optimizer: torch.optim.Optimizer) -> None:
        """Count from now on; what was made of the whole model is in the host's memory.

        Steps of `optimizer` take the form that torch chooses for tensors on a GPU.
        """
        self._parameters, self._buffers = list(part.parameters.values()), list(part.module.buffers())
        self._optimizers, tracker = [optimizer], self.tracker
        place_of = tracker.place_of if isinstance(tracker, PlacedTracker) else None

        def begin_update(*_: object) -> None:
            choose_as_on_gpu(optimizer, place_of=place_of)
            tracker.enter("optimizer")

        optimizer.register_step_pre_hook(begin_update)
        optimizer.register_step_post_hook(lambda *_: tracker.enter("forward"))
        for tensor in [*self._parameters, *self._buffers]:
            tracker.watch(tensor)
        tracker.mark(self._uses())
        gc.collect()  # what the cutting of the model left in cycles
        tracker.enter("forward")
        tracker.forget_peak()

    def keeps_on_host(self, steps: HostSteps) -> None:
        """Say that an optimizer's parameters have copies on the host."""
        self._host_steps.append(steps)

    def peak(self) -> Peak:
        """Return what was live when most bytes were."""
        self.tracker.settle()
        return self.tracker.peak

    @property
    def host(self) -> MemoryParts | None:
        """The most bytes on the host, None where they are not told apart."""
        return self.tracker.host.peak.parts() if isinstance(self.tracker, PlacedTracker) else None

    def _uses(self) -> dict[int, StorageUse]:
        on_host = [copy for steps in self._host_steps for copy in steps.copies]
        return uses_of([*self._parameters, *on_host], self._buffers, self._optimizers)


def write_report(report: FakeRankReport) -> None:
    """Write `report` to the file that PARAPLAN_FAKE names."""
    path = Path(os.environ[FAKE_VARIABLE])
    beside = path.with_suffix(".part")
    beside.write_text(report.to_json(), encoding="utf-8")
    beside.rename(path)


def choose_as_on_gpu(
    optimizer: torch.optim.Optimizer, *, place_of: Callable[[torch.Tensor], Place] | None = None
) -> None:
    """Choose the form of the optimizer that torch takes by default: foreach for plain parameters on a GPU.

    All are there where `place_of` does not say otherwise.
    """
    for group in optimizer.param_groups:
        is_open = "foreach" in group and group["foreach"] is None and not group.get("fused")
        on_gpu = place_of is None or all(place_of(parameter) == "device" for parameter in group["params"])
        if is_open and not any(isinstance(parameter, DTensor) for parameter in group["params"]):
            group["foreach"] = on_gpu
