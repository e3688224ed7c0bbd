"""A job whose tensors have no values: what `runtime.init` returns under `paraplan launch --fake`.

The script is the user's own, and so are its data; from `prepare` on the model, the optimizer and each step are run
without values, by the runtime's own engine. The second step ends the script.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from paraplan.plan.fake import FAKE_VARIABLE, FakeRankReport
from paraplan.runtime.assembly import OptimizerFactory, assemble_part, check_model
from paraplan.runtime.batches import TargetCount, batch_size, counted_targets
from paraplan.runtime.collective_count import CollectiveCount
from paraplan.runtime.engine import Engine, Equipment, RankPart
from paraplan.runtime.execution import LossFunction
from paraplan.runtime.fake_run import NUM_STEPS, attention_again_on_gpu, keep_operators, materialise, storage_of
from paraplan.runtime.fake_split import splits_without_values
from paraplan.runtime.fake_world import Valueless
from paraplan.runtime.gpu_operators import GpuOperators, GroupedProducts
from paraplan.runtime.job import Job, SchedulerFactory
from paraplan.runtime.loss_scale import LossScale
from paraplan.runtime.mesh import Mesh
from paraplan.runtime.setting import Setting
from paraplan.runtime.step_division import StepShape
from paraplan.runtime.storage_tracking import StorageTracker, StorageUse
from paraplan.runtime.weights import count_parameters


class FakeRunEnd(SystemExit):
    """The end of a script whose steps have been run; nothing failed."""


class FakeJob(Job):
    """A job that runs `NUM_STEPS` steps without values, writes its report, and ends the script."""

    def prepare(
        self,
        model: nn.Module,
        *,
        loss_fn: LossFunction,
        optimizer: OptimizerFactory,
        scheduler: SchedulerFactory | None = None,
        max_grad_norm: float | None = None,
        count_targets: TargetCount = counted_targets,
        compile_backend: str | None = None,
        example_inputs: Any = None,
        weights: str | Path | None = None,
    ) -> Engine:
        """Put `model` under the plan without values; see `Job.prepare`. Nothing is compiled, no weights are read."""
        left_out = [] if compile_backend is None else [f"compiling with {compile_backend}"]
        left_out += [] if weights is None else [f"the weights in {weights}"]
        num_parameters = count_parameters(model)
        setting = Setting(plan=self.plan, mesh=self.mesh, precision=self.precision, loss_fn=loss_fn)
        stack = check_model(model, plan=self.plan, file=self.file, precision=self.precision, reads_weights=True)
        if not all(parameter.is_meta for parameter in model.parameters()):
            model.to(device="meta")
        rank = _FakeRank(self.mesh)
        rank.patches.enter_context(
            splits_without_values(model, self.mesh, sequence_parallel=self.plan.sequence_parallel)
        )
        with rank.on_host():  # where the script keeps the whole model
            materialise(model, self.device)
        with rank.running():
            for block in [] if stack is None else stack.modules(model):
                keep_operators(block)
            part = assemble_part(model, stack, setting, example_inputs=example_inputs)
            made = optimizer(list(part.parameters.values()))
            _choose_as_on_gpu(made)
            engine = FakeEngine(
                part,
                made,
                mesh=self.mesh,
                plan=self.plan,
                shape=StepShape.of_plan(self.plan, is_fixed=self.file is not None),
                equipment=Equipment(
                    max_grad_norm=max_grad_norm,
                    scheduler=None if scheduler is None else scheduler(made),
                    count_targets=count_targets,
                    loss_scale=LossScale() if self.precision == "fp16" else None,
                    has_values=False,
                ),
            )
            rank.follow(part, made)
        engine.attend(rank, self, num_parameters=num_parameters, left_out=tuple(left_out))
        return engine


class FakeEngine(Engine):
    """An engine without values. Losses are 0, nothing is saved, loaded or evaluated."""

    def attend(self, rank: _FakeRank, job: FakeJob, *, num_parameters: int, left_out: tuple[str, ...]) -> None:
        """Say where to run, and what the report is to hold."""
        self._rank, self._job = rank, job
        self._num_parameters, self._left_out = num_parameters, left_out

    def step(self, inputs: Any, targets: Any) -> torch.Tensor:
        """Do a step without values; the last of `NUM_STEPS` writes the report and ends the script."""
        self._rank.collectives.forget()
        self._share = batch_size(inputs, targets)
        with self._rank.running():
            super().step(*pytree.tree_map(_without_values, (inputs, targets)))
        if self.num_steps >= NUM_STEPS:
            self._write_report()
            raise FakeRunEnd(0)
        return torch.zeros(())

    def eval_step(self, inputs: Any, targets: Any) -> torch.Tensor:
        """Return 0: what is not trained on needs less memory."""
        return torch.zeros(())

    def save(self, folder: str | Path, *, wait: bool = True) -> None:
        """Write nothing."""

    def load(self, folder: str | Path) -> None:
        """Read nothing."""

    def export(self, path: str | Path) -> None:
        """Write nothing."""

    def _write_report(self) -> None:
        peak, job = self._rank.peak(), self._job
        report = FakeRankReport(
            rank=job.world.rank,
            world_size=job.world.size,
            pipeline_stage=job.mesh.coordinate("pp"),
            plan=job.plan if job.file is not None else job.plan.replace(micro_batch_size=self._share),
            precision=job.precision,
            num_parameters=self._num_parameters,
            parameter_bytes=peak.bytes_by_use["parameter"],
            gradient_bytes=peak.bytes_by_use["gradient"],
            optimizer_state_bytes=peak.bytes_by_use["optimizer_state"],
            activation_bytes=peak.bytes_by_use["activation"],
            workspace_bytes=peak.bytes_by_use["workspace"],
            total_bytes=peak.total_bytes,
            phase=peak.phase,
            collectives=self._rank.collectives.counted(),
            left_out=self._left_out,
        )
        path = Path(os.environ[FAKE_VARIABLE])
        beside = path.with_suffix(".part")
        beside.write_text(report.to_json(), encoding="utf-8")
        beside.rename(path)


class _FakeRank:
    """The modes under which a rank runs without values, and what they count."""

    def __init__(self, mesh: Mesh) -> None:
        self.patches = ExitStack()  # until the process ends
        self.collectives = CollectiveCount(mesh)
        self._valueless = Valueless()
        self._tracker = StorageTracker(self._uses)
        self._part: RankPart | None = None
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

    def follow(self, part: RankPart, optimizer: torch.optim.Optimizer) -> None:
        """Count from now on; what was made of the whole model is in the host's memory."""
        self._part, self._optimizer = part, optimizer
        tracker = self._tracker
        for tensor in [*part.parameters.values(), *part.module.buffers()]:
            tracker.watch(tensor)
        tracker.mark(self._uses())
        gc.collect()  # what the cutting of the model left in cycles
        tracker.enter("forward")
        tracker.forget_peak()
        optimizer.register_step_pre_hook(lambda *_: tracker.enter("optimizer"))
        optimizer.register_step_post_hook(lambda *_: tracker.enter("forward"))

    def peak(self) -> Any:
        """Return what was live when most was."""
        self._tracker.settle()
        return self._tracker.peak

    def _uses(self) -> dict[int, StorageUse]:
        uses: dict[int, StorageUse] = {}
        if self._part is None or self._optimizer is None:
            return uses
        for parameter in self._part.parameters.values():
            uses[storage_of(parameter)] = "parameter"
            if parameter.grad is not None:
                uses[storage_of(parameter.grad)] = "gradient"
        for buffer in self._part.module.buffers():
            uses[storage_of(buffer)] = "parameter"
        for state in self._optimizer.state.values():
            for value in state.values():
                if isinstance(value, torch.Tensor):
                    uses[storage_of(value)] = "optimizer_state"
        return uses


def _choose_as_on_gpu(optimizer: torch.optim.Optimizer) -> None:
    """Choose the form of the optimizer that torch takes by default for parameters on a GPU: foreach for plain ones."""
    for group in optimizer.param_groups:
        is_open = "foreach" in group and group["foreach"] is None and not group.get("fused")
        if is_open and not any(isinstance(parameter, DTensor) for parameter in group["params"]):
            group["foreach"] = True


def _without_values(leaf: Any) -> Any:
    return torch.empty(leaf.shape, dtype=leaf.dtype) if isinstance(leaf, torch.Tensor) else leaf
