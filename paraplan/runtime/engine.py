"""The engine: one call for one optimizer step, the same under every plan."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from paraplan.errors import ModelError, UnsupportedPlanError
from paraplan.plan.files import PlanFile
from paraplan.plan.parallel import ParallelPlan
from paraplan.runtime.checkpoints.saving import CheckpointSource, CheckpointWriter, load_checkpoint
from paraplan.runtime.checkpoints.whole_tensors import whole_tensor
from paraplan.runtime.data_parallel import reads_shards
from paraplan.runtime.export import export_weights
from paraplan.runtime.mesh import Mesh
from paraplan.runtime.peers import Call, Peers
from paraplan.runtime.split.cut import Cut
from paraplan.runtime.split.pieces import Place
from paraplan.runtime.step.batches import (
    MicroBatch,
    TargetCount,
    batch_size,
    count_micro_batches,
    counted_targets,
    split_batch,
    to_device,
    weigh,
)
from paraplan.runtime.step.clipping import clip_gradients, global_norm
from paraplan.runtime.step.division import StepDivider, StepShape
from paraplan.runtime.step.execution import Execution
from paraplan.runtime.step.loss_scale import LossScale
from paraplan.runtime.step.loss_watch import LossWatch
from paraplan.runtime.step.memory_fault import is_out_of_memory, memory_error
from paraplan.runtime.step.reports import RunWatch, StepReport, count_tokens
from paraplan.runtime.timeouts import TimeoutWatch


@dataclass(frozen=True)
class RankPart:
    """What one rank holds of the model: the module, its parameters and buffers by their names in the whole model.

    `buffers` are those that belong to the model's state. `repeated` names the parameters that an earlier pipeline stage
    holds too, and counts in the norm of the gradient. `cuts` names those of which the ranks of a `tp` group hold parts.
    `is_replica` says that DDP averages the gradients, which needs every one of them.
    """

    module: nn.Module
    parameters: dict[str, nn.Parameter]
    buffers: dict[str, torch.Tensor]
    execution: Execution
    repeated: frozenset[str] = frozenset()
    cuts: Mapping[str, Cut] = field(default_factory=dict)
    is_replica: bool = False

    def optimized(self) -> list[nn.Parameter]:
        """Return the parameters that an optimizer is made for.

        A rank that trains none of them (a stage of frozen blocks) has one without elements too, since optimizers refuse
        an empty list, and scripts give them those that need a gradient.
        """
        held = list(self.parameters.values())
        if not any(parameter.requires_grad for parameter in held):
            held.append(nn.Parameter(torch.empty(0)))
        return held


@dataclass
class Equipment:
    """What an engine works with beside its part of the model and the optimizer.

    `count_targets` says over how many targets of a micro-batch its mean loss goes. `loss_scale` is given in fp16.
    `has_values` is False where tensors have none (a run without a GPU that counts bytes).
    """

    max_grad_norm: float | None = None
    scheduler: LRScheduler | None = None
    count_targets: TargetCount = counted_targets
    loss_scale: LossScale | None = None
    peers: Peers | None = None
    timeouts: TimeoutWatch | None = None
    watch: RunWatch | None = None
    file: PlanFile | None = None
    has_values: bool = True


class Engine:
    """A model under a plan, with its optimizer. Made by `Job.prepare`.

    `optimizer` is this rank's, over `parameters`; `scheduler` what sets its learning rate, None without one.
    `grad_norm` is the norm of the whole model's gradient at the last step before clipping, None where nothing needed
    it. Gradients stay readable until the next step. `num_steps` counts the steps done, those of a loaded checkpoint
    included: it is the position in the data, for `job.shard(skip=engine.num_steps)`.
    """

    def __init__(
        self,
        part: RankPart,
        optimizer: torch.optim.Optimizer,
        *,
        mesh: Mesh,
        plan: ParallelPlan,
        shape: StepShape,
        equipment: Equipment,
    ) -> None:
        self.optimizer = optimizer
        self.scheduler = equipment.scheduler
        self.grad_norm: torch.Tensor | None = None
        self._part = part
        self._mesh = mesh
        self._plan = plan
        self._divider = StepDivider(shape, mesh.grid)
        self._equipment = equipment
        self._peers = equipment.peers or Peers(mesh.world)
        self._has_stepped = False
        self._losses = LossWatch(mesh.world)
        self._writer = CheckpointWriter(is_main=mesh.world.rank == 0)

    @property
    def module(self) -> nn.Module:
        """This rank's part of the model, on its device: all of it, a sharded model, or a pipeline stage."""
        return self._part.module

    @property
    def num_steps(self) -> int:
        """Steps done, those of a loaded checkpoint included."""
        return self._peers.num_steps

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """This rank's parameters by their names in the whole model; DTensors where they are sharded.

        Under tensor parallelism some are this rank's parts; see `whole`.
        """
        return dict(self._part.parameters)

    @property
    def loss_scale(self) -> LossScale | None:
        """The scale of the loss in fp16, with the number of steps that were left out; None in other precisions."""
        return self._equipment.loss_scale

    @property
    def last_report(self) -> StepReport | None:
        """What was last measured, on rank 0 of a run that writes metrics or shows its progress; else None."""
        return None if self._equipment.watch is None else self._equipment.watch.last

    def whole(self, name: str, tensor: torch.Tensor | None = None) -> torch.Tensor:
        """Return the whole of parameter `name`, or of `tensor`, which lies over the ranks as that parameter does.

        Such a tensor is its gradient, or an average that an optimizer keeps of it. The ranks that share the parameter
        call it together.
        """
        held = self._part.parameters[name]
        tensor = held.detach() if tensor is None else tensor
        return whole_tensor(tensor, self._part.cuts.get(name), self._mesh)

    def step(self, inputs: Any, targets: Any) -> torch.Tensor:
        """Do one optimizer step on this rank's share of a global batch; return the mean loss of the whole batch.

        `inputs` and `targets` are tensors, or nests of tensors, with the batch first; a dict of inputs gives the model
        keyword arguments, a tuple positional ones. The mean is that over all targets of the global batch, also where
        some are masked or the batch is not full. The loss is a scalar tensor on the device; reading it waits for the
        step. Raises `UsageError` where the share has another size than the plan says or does not divide, or ranks make
        other calls; `DivergedError` where the loss is no number; `RankMemoryError` where the memory is too small;
        `CollectiveTimeoutError` where a rank did not come.
        """
        with self._explained("step"):
            return self._step(inputs, targets)

    def _step(self, inputs: Any, targets: Any) -> torch.Tensor:
        watch, scale = self._equipment.watch, self._equipment.loss_scale
        if watch is not None:
            watch.begin()
        self._losses.check(keep=1)
        micro_batches = self._divided("step", inputs, targets)
        self.optimizer.zero_grad(set_to_none=True)
        loss = self._guarded(lambda: self._part.execution.train(micro_batches))
        if scale is not None:
            loss = loss / scale.scale
        if self._part.is_replica and not self._has_stepped:
            self._check_every_gradient()
        mean = self._global_mean(loss)
        self._losses.add(step=self.num_steps + 1, mean=mean, own=loss, is_read=self._equipment.has_values)
        if self._prepare_gradients():
            self._guarded(self.optimizer.step)
            if self.scheduler is not None:
                self.scheduler.step()
        self._has_stepped = True
        self._peers.num_steps += 1
        if watch is not None:
            watch.end(
                step=self.num_steps,
                loss=mean,
                grad_norm=self.grad_norm,
                learning_rate=float(self.optimizer.param_groups[0]["lr"]),
                tokens=count_tokens(inputs) * self._mesh.size("dp"),
            )
        return mean

    def eval_step(self, inputs: Any, targets: Any) -> torch.Tensor:
        """Return the mean loss of a global batch, this rank's share of which is given, without training on it.

        Every rank calls it. Dropout is off.
        """
        self._losses.check()
        was_training = self._part.module.training
        with self._explained("eval_step"):
            micro_batches = self._divided("eval_step", inputs, targets)
            self._part.module.eval()
            try:
                return self._global_mean(self._guarded(lambda: self._part.execution.evaluate(micro_batches)))
            finally:
                self._part.module.train(was_training)

    def save(self, folder: str | Path, *, wait: bool = True) -> None:
        """Write the state of the training to `folder`, which any plan can load.

        That is parameters, buffers, optimizer, scheduler, loss scale, random numbers and `num_steps`. Every rank calls
        it, with a folder that all of them reach. A checkpoint that is there stays whole until the new one is. Without
        `wait` the state is copied to the host's memory and written while training goes on; the next `save`, `load` or
        `job.close` waits for it, and raises what went wrong. Raises `CheckpointError` where the folder or the disk does
        not take it, and `DivergedError` before anything is written where the last loss is no number.
        """
        self._losses.check()
        with self._explained("save"):
            self._meet("save")
            self._writer.write(Path(folder), self._source(), wait=wait)

    def load(self, folder: str | Path) -> None:
        """Go on from what `save` wrote to `folder`, under this plan or another one. Every rank calls it.

        Under the same plan dropout goes on with the random numbers of the checkpoint, under another one with new ones.
        Raises `CheckpointError` where `folder` holds no checkpoint of this model.
        """
        with self._explained("load"):
            self._meet("load")
            self._writer.finish()
            self._peers.num_steps = load_checkpoint(Path(folder), self._source())

    def export(self, path: str | Path) -> None:
        """Write the weights to the safetensors file `path`, in the model's own names. Every rank calls it.

        They pass through a checkpoint beside the file; rank 0 needs the memory of the whole model. See
        `paraplan.runtime.export.export_weights` for a checkpoint that is there.
        """
        passing = Path(f"{path}.passing")
        self.save(passing)
        if self._mesh.world.rank == 0:
            export_weights(passing, path)
            shutil.rmtree(passing)
        self._meet("save")

    def expect(self, num_steps: int) -> None:
        """Say how many steps there will be, those of a loaded checkpoint included: the bar shows its share of them."""
        if self._equipment.watch is not None:
            self._equipment.watch.total_steps = num_steps

    def finish(self) -> None:
        """Wait for what `save` still writes, and end the progress bar. `job.close` does it too."""
        self._writer.finish()
        if self._equipment.watch is not None:
            self._equipment.watch.finish()

    def _source(self) -> CheckpointSource:
        index = self._mesh.coordinate("tp")
        return CheckpointSource(
            parameters=self._part.parameters,
            buffers=self._part.buffers,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            loss_scale=self._equipment.loss_scale,
            places={name: Place(cut=cut, index=index) for name, cut in self._part.cuts.items()},
            plan=self._plan,
            num_steps=self.num_steps,
            mesh=self._mesh,
        )

    def _explained(self, call: Call) -> AbstractContextManager[None]:
        """Have a timeout in this context say what rank did not come to what."""
        if self._equipment.timeouts is None:
            return nullcontext()
        return self._equipment.timeouts.explained(lambda: f"engine.{call} after {self.num_steps} steps")

    def _meet(self, call: Call, size: int = 0) -> list[int]:
        return self._peers.meet(call, size) if self._equipment.has_values else [size] * self._mesh.world.size

    def _divided(self, call: Call, inputs: Any, targets: Any) -> list[MicroBatch]:
        """Return the micro-batches of a step, each with its weight in the mean over the global batch."""
        device, mesh = self._mesh.world.device, self._mesh
        sizes = self._meet(call, batch_size(inputs, targets))
        division = self._divider.divide(sizes, is_step=call == "step")
        pieces = split_batch(to_device(inputs, device), to_device(targets, device), division)
        counts = count_micro_batches(pieces, self._equipment.count_targets, device)
        total = counts.sum()
        if mesh.group("dp") is not None:
            dist.all_reduce(total, group=mesh.group("dp"))
        scale = self._equipment.loss_scale.scale if self._equipment.loss_scale and call == "step" else 1.0
        return weigh(pieces, counts * (scale * mesh.size("dp")) / total.clamp(min=torch.finfo(total.dtype).tiny))

    def _check_every_gradient(self) -> None:
        missing = [name for name, held in self._part.parameters.items() if held.requires_grad and held.grad is None]
        if missing:
            raise ModelError(
                f"{len(missing)} parameters take no part in the loss, {missing[0]} first, and DDP averages them all",
                hint="turn them off with requires_grad_(False), or use ZeRO, which leaves them alone",
            )

    def _prepare_gradients(self) -> bool:
        """Unscale and clip the gradients; return whether the step can be done, the same on every rank."""
        max_norm, scale = self._equipment.max_grad_norm, self._equipment.loss_scale
        if max_norm is None and scale is None:
            return True
        gradients = {name: held.grad for name, held in self._part.parameters.items() if held.grad is not None}
        if scale is not None:
            scale.unscale(gradients.values())
        counted = {name: gradient for name, gradient in gradients.items() if name not in self._part.repeated}
        self.grad_norm = global_norm(counted, self._mesh, split=self._part.cuts.keys())
        if scale is not None and self._equipment.has_values:
            # The norm of the whole model's gradient is finite where every part of it is, on every rank.
            overflowed = not bool(self.grad_norm.isfinite())
            scale.update(overflowed=overflowed)
            if overflowed:
                return False
        if max_norm is not None:
            clip_gradients(list(self._part.parameters.values()), norm=self.grad_norm, max_norm=max_norm)
        return True

    def _guarded(self, work: Callable[[], Any]) -> Any:
        """Return `work()`; a lack of memory is said in the parts of the plan's estimate, and what ZeRO cannot run."""
        try:
            return work()
        except RuntimeError as error:
            if self._plan.zero_stage and reads_shards(error):
                raise UnsupportedPlanError(
                    f"zero_stage={self._plan.zero_stage}: the model computes with a parameter outside of the forward "
                    "pass of the module that holds it, where ranks have shards of it",
                    hint="compute with it in the forward pass of that module, or use zero_stage=0",
                ) from error
            if not is_out_of_memory(error):
                raise
            device = self._mesh.world.device
            raise memory_error(
                error,
                parameters=self._part.parameters.values(),
                optimizer=self.optimizer,
                plan=self._plan,
                file=self._equipment.file,
                rank=self._mesh.world.rank,
                step=self.num_steps + 1,
                allocated_bytes=int(torch.cuda.max_memory_allocated(device)) if device.type == "cuda" else None,
            ) from error

    def _global_mean(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the mean over `dp` of the losses of the last stages; ranks of other stages bring 0.

        The ranks of a `tp` group bring the same loss each.
        """
        mean = loss / (self._mesh.size("dp") * self._mesh.size("tp"))
        if self._mesh.world.is_distributed:
            dist.all_reduce(mean)
        return mean
