"""A job whose tensors have no values: what `runtime.init` returns under `paraplan launch --fake`.

The script is the user's own, and so are its data; from `prepare` on the model, the optimizer and each step are run
without values, by the runtime's own engine. The second step ends the script.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paraplan.errors import UsageError
from paraplan.plan.fake import FakeRankReport
from paraplan.runtime.assembly import check_model
from paraplan.runtime.checks.plan_check import Checking
from paraplan.runtime.data.batches import StepDivider, StepShape, batch_size
from paraplan.runtime.engine import Engine
from paraplan.runtime.fake.gpu import FakeGpu
from paraplan.runtime.fake.rank import FakeRank, FakeRunEnd, write_report
from paraplan.runtime.fake.run import (
    NUM_STEPS,
    check_keeps_on_gpu,
    wrap_without_values,
)
from paraplan.runtime.fake.share import KeptOfLeft, StepShare, forward_passes_of_left, starts_uncounted
from paraplan.runtime.fake.storage_tracking import storage_of
from paraplan.runtime.job import Job
from paraplan.runtime.optimizers.offload import keep_on_host
from paraplan.runtime.optimizers.several import optimizers_in
from paraplan.runtime.options import EngineOptions, TrainingOptions
from paraplan.runtime.precision import LossScale
from paraplan.runtime.structure.weights import count_parameters
from paraplan.runtime.torch_private import pytree


@dataclass(frozen=True)
class FakeJob(Job):
    """A job that runs `NUM_STEPS` steps without values, writes its report, and ends the script.

    `gpu` is given for a plan that offloads, and tells what lies on the host.
    """

    gpu: FakeGpu | None = None

    def prepare_with(self, model: nn.Module, options: TrainingOptions) -> Engine:
        """Put `model` under the plan without values; see `Job.prepare`. Nothing is compiled, read or verified."""
        check_keeps_on_gpu(None if self.file is None else self.file.training)
        left_out = [] if options.compile_backend is None else [f"compiling with {options.compile_backend}"]
        left_out += [] if options.weights is None else [f"the weights in {options.weights}"]
        num_parameters = count_parameters(model)
        parallel = self._parallel(options, None)
        stack = check_model(model, plan=self.plan, file=self.file, precision=self.precision, reads_weights=True)
        if not all(parameter.is_meta for parameter in model.parameters()):
            model.to(device="meta")
        rank = FakeRank(self.mesh, self.gpu)
        rank.patches.enter_context(starts_uncounted(rank.collectives))
        part = wrap_without_values(rank, model, stack, parallel, example_inputs=options.example_inputs)
        with rank.running():
            made, schedule = self._optimizer(options, part)
            engine = FakeEngine(
                part,
                made,
                self.mesh,
                EngineOptions(
                    file=self.file,
                    max_grad_norm=options.max_grad_norm,
                    scheduler=schedule,
                    loss_scale=LossScale() if self.precision == "fp16" else None,
                    checking=Checking(has_values=False),
                ),
            )
            for one in optimizers_in(made) if self.plan.offload == "optimizer" else ():
                rank.keeps_on_host(keep_on_host(one))
            rank.follow(part, made)
        engine.attend(rank, self, num_parameters=num_parameters, left_out=tuple(left_out))
        return engine

    def _same_stream(self) -> Callable[[list[Any]], None]:
        """Compare nothing: there is no other rank."""
        return lambda _: None


class FakeEngine(Engine):
    """An engine without values. Losses are 0, nothing is saved, loaded or evaluated."""

    def attend(self, rank: FakeRank, job: FakeJob, *, num_parameters: int, left_out: tuple[str, ...]) -> None:
        """Say where to run, and what the report is to hold."""
        self._rank, self._job = rank, job
        self._num_parameters, self._left_out = num_parameters, left_out

    def step(self, inputs: Any, targets: Any) -> torch.Tensor:
        """Do a step without values; the last of `NUM_STEPS` writes the report and ends the script."""
        self._share = batch_size(inputs, targets)
        before = self._rank.collectives.copy() if self.num_steps else None
        self._rank.collectives.forget()
        share = self._shorten()
        schedule = self._mesh.plan.pipeline_schedule
        counts_left = schedule == "gpipe" and share.left
        with self._rank.running(), forward_passes_of_left(self._rank.tracker, share) if counts_left else nullcontext():
            left = share.left if self.num_steps else 0
            kept = KeptOfLeft.of(self._part.execution, left, in_halves=schedule == "zero_bubble")
            self._rank.tracker.mark({storage_of(one): "workspace" for one in kept.gradients})
            super().step(*pytree.tree_map(self._without_values, (inputs, targets)))
            del kept
        self._rank.collectives.go_on(before, share.left_rounds)
        if self.num_steps >= NUM_STEPS:
            self._write_report()
            raise FakeRunEnd(0)
        return torch.zeros(())

    def _shorten(self) -> StepShare:
        """Leave micro-batches out that are like others; return which. The batch is checked whole."""
        plan, mesh = self._mesh.plan, self._mesh
        shape = StepShape.of_plan(plan, is_fixed=self._job.file is not None)
        StepDivider(shape, mesh.grid).divide([self._share] * mesh.world.size, is_step=True)
        share = StepShare.of_step(plan, self.num_steps)
        self._size = self._share
        if shape.share != self._share or not share.left:
            return StepShare(count=plan.num_microbatches, left=0)
        self._size = share.count * plan.micro_batch_size
        self._batches.divider = StepDivider(replace(shape, num_microbatches=share.count), mesh.grid)
        return share

    def _without_values(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        whole = torch.empty(leaf.shape, dtype=leaf.dtype)
        return whole[: self._size] if leaf.ndim > 0 and leaf.shape[0] == self._share else whole

    def eval_step(self, inputs: Any, targets: Any) -> torch.Tensor:
        """Return 0: what is not trained on needs less memory."""
        return torch.zeros(())

    def predict(self, inputs: Any) -> Any:
        """Raise `UsageError`: there is nothing to return."""
        raise _no_values("predict")

    def generate(self, inputs: Any, *arguments: Any, **options: Any) -> Any:
        """Raise `UsageError`: there is nothing to return."""
        raise _no_values("generate")

    def save(self, folder: str | Path, *, wait: bool = True) -> None:
        """Write nothing."""

    def load(self, folder: str | Path) -> None:
        """Read nothing."""

    def export(self, path: str | Path) -> None:
        """Write nothing."""

    def _write_report(self) -> None:
        job, rank, world = self._job, self._rank, self._mesh.world
        peak = rank.peak()
        write_report(
            FakeRankReport(
                rank=world.rank,
                world_size=world.size,
                pipeline_stage=self._mesh.coordinate("pp"),
                plan=job.plan if job.file is not None else job.plan.replace(micro_batch_size=self._share),
                precision=job.precision,
                num_parameters=self._num_parameters,
                **peak.parts().model_dump(),
                phase=peak.phase,
                host=rank.host,
                collectives=rank.collectives.counted(),
                left_out=self._left_out,
            )
        )


def _no_values(call: str) -> UsageError:
    return UsageError(f"engine.{call} has no values to return in a run without GPUs", hint="leave it out of this run")
