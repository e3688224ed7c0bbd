"""The engine: one call for one optimizer step, the same under every plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from paraplan.errors import ModelError, UsageError
from paraplan.runtime.batches import MicroBatch, batch_size, split_batch, to_device
from paraplan.runtime.checkpoint import load_checkpoint, save_checkpoint
from paraplan.runtime.clipping import clip_gradients, global_norm
from paraplan.runtime.execution import Execution
from paraplan.runtime.mesh import Mesh
from paraplan.runtime.tensor_cut import Cut
from paraplan.runtime.tensor_pieces import Place
from paraplan.runtime.whole_tensors import whole_tensor


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


@dataclass(frozen=True)
class StepShape:
    """The batch of one step on one rank: `num_microbatches` of `micro_batch_size` sequences, None for any one size."""

    num_microbatches: int
    micro_batch_size: int | None

    @property
    def share(self) -> int | None:
        """Sequences of one step on one rank, None where any number will do."""
        return None if self.micro_batch_size is None else self.micro_batch_size * self.num_microbatches


class Engine:
    """A model under a plan, with its optimizer. Made by `Job.prepare`.

    `optimizer` is this rank's, over `parameters`: give it to a learning-rate scheduler. `grad_norm` is the norm of the
    whole model's gradient at the last step before clipping, None without `max_grad_norm`. Gradients stay readable
    until the next step. `num_steps` counts the steps done, those of a loaded checkpoint included.
    """

    def __init__(
        self,
        part: RankPart,
        optimizer: torch.optim.Optimizer,
        *,
        mesh: Mesh,
        shape: StepShape,
        max_grad_norm: float | None,
    ) -> None:
        self.optimizer = optimizer
        self.grad_norm: torch.Tensor | None = None
        self.num_steps = 0
        self._part = part
        self._mesh = mesh
        self._shape = shape
        self._share = shape.share
        self._has_stepped = False
        self._max_grad_norm = max_grad_norm

    @property
    def module(self) -> nn.Module:
        """This rank's part of the model, on its device: all of it, a sharded model, or a pipeline stage."""
        return self._part.module

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """This rank's parameters by their names in the whole model; DTensors where they are sharded.

        Under tensor parallelism some are this rank's parts; see `whole`.
        """
        return dict(self._part.parameters)

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
        keyword arguments, a tuple positional ones. Micro-batches are of one size, so that the mean over all of them and
        over all ranks is the mean over the global batch. The loss is a scalar tensor on the device; reading it waits
        for the step. Raises `UsageError` where the share has another size than the plan says or does not divide.
        """
        micro_batches = self._split(inputs, targets)
        self._check_share(batch_size(inputs, targets))
        self.optimizer.zero_grad(set_to_none=True)
        loss = self._part.execution.train(micro_batches)
        if self._part.is_replica and not self._has_stepped:
            self._check_every_gradient()
        if self._max_grad_norm is not None:
            self._clip(self._max_grad_norm)
        self.optimizer.step()
        self._has_stepped = True
        self.num_steps += 1
        return self._global_mean(loss)

    def eval_step(self, inputs: Any, targets: Any) -> torch.Tensor:
        """Return the mean loss of a global batch, this rank's share of which is given, without training on it.

        Every rank calls it, with shares of one size that divide into the plan's micro-batches. Dropout is off.
        """
        micro_batches = self._split(inputs, targets)
        was_training = self._part.module.training
        self._part.module.eval()
        try:
            return self._global_mean(self._part.execution.evaluate(micro_batches))
        finally:
            self._part.module.train(was_training)

    def save(self, folder: str | Path) -> None:
        """Write parameters, buffers, the optimizer's state and `num_steps` to `folder`, which any plan can load.

        Every rank calls it, with a folder that all of them reach. A checkpoint that is there stays whole until the new
        one is.
        """
        save_checkpoint(
            Path(folder),
            parameters=self._part.parameters,
            buffers=self._part.buffers,
            optimizer=self.optimizer,
            num_steps=self.num_steps,
            places=self._places,
            is_main=self._mesh.world.rank == 0,
        )

    def load(self, folder: str | Path) -> None:
        """Go on from what `save` wrote to `folder`, under this plan or another one. Every rank calls it.

        Raises `CheckpointError` where `folder` holds no checkpoint of this model.
        """
        self.num_steps = load_checkpoint(
            Path(folder),
            parameters=self._part.parameters,
            buffers=self._part.buffers,
            optimizer=self.optimizer,
            places=self._places,
        )

    @property
    def _places(self) -> dict[str, Place]:
        """Where the parts of split parameters lie in the whole ones."""
        index = self._mesh.coordinate("tp")
        return {name: Place(cut=cut, index=index) for name, cut in self._part.cuts.items()}

    def _split(self, inputs: Any, targets: Any) -> list[MicroBatch]:
        device = self._mesh.world.device
        return split_batch(to_device(inputs, device), to_device(targets, device), count=self._shape.num_microbatches)

    def _check_share(self, size: int) -> None:
        if self._share is None:
            self._share = self._agreed_share(size)
        if size == self._share:
            return
        if self._shape.micro_batch_size is None:
            raise UsageError(
                f"this step has {size} sequences on a rank and the first one had {self._share}",
                hint="leave out the last, short batch; job.shard does",
            )
        raise UsageError(
            f"this step has {size} sequences on a rank, but the plan takes micro_batch_size="
            f"{self._shape.micro_batch_size} x num_microbatches={self._shape.num_microbatches} = {self._share}",
            hint="take the batches from job.shard, or make a plan for this batch",
        )

    def _agreed_share(self, size: int) -> int:
        """Return `size` if every rank has it; raise `UsageError` on every rank otherwise."""
        if self._mesh.world.is_distributed:
            mine = torch.tensor([size], device=self._mesh.world.device)
            gathered = [torch.empty_like(mine) for _ in range(self._mesh.world.size)]
            dist.all_gather(gathered, mine)
            sizes = [int(other) for other in gathered]
            if len(set(sizes)) > 1:
                raise UsageError(
                    f"the ranks have {sizes} sequences for one step, so their mean is not the batch's mean",
                    hint="give every rank the same number; job.shard does",
                )
        return size

    def _check_every_gradient(self) -> None:
        missing = [name for name, held in self._part.parameters.items() if held.requires_grad and held.grad is None]
        if missing:
            raise ModelError(
                f"{len(missing)} parameters take no part in the loss, {missing[0]} first, and DDP averages them all",
                hint="turn them off with requires_grad_(False), or use ZeRO, which leaves them alone",
            )

    def _clip(self, max_norm: float) -> None:
        gradients = {name: held.grad for name, held in self._part.parameters.items() if held.grad is not None}
        counted = {name: gradient for name, gradient in gradients.items() if name not in self._part.repeated}
        self.grad_norm = global_norm(counted, self._mesh, split=self._part.cuts.keys())
        clip_gradients(list(self._part.parameters.values()), norm=self.grad_norm, max_norm=max_norm)

    def _global_mean(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the mean over `dp` of the losses of the last stages; ranks of other stages bring 0.

        The ranks of a `tp` group bring the same loss each.
        """
        if self._mesh.world.is_distributed:
            dist.all_reduce(loss)
        return loss / (self._mesh.size("dp") * self._mesh.size("tp"))
