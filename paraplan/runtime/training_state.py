"""The state of a training on one rank: what it is, and how it is saved, loaded, averaged and exported."""

from __future__ import annotations

import os
import shutil
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from paraplan.arguments import checked
from paraplan.errors import UsageError
from paraplan.runtime.agreement import Call, RankSync
from paraplan.runtime.checkpoints.adapter_files import check_adapters, write_adapters
from paraplan.runtime.checkpoints.boxes import CheckpointError
from paraplan.runtime.checkpoints.entries import MODEL, CheckpointSource
from paraplan.runtime.checkpoints.loading import (
    FolderReader,
    count_steps,
    find_whole,
    load_checkpoint,
    load_from,
)
from paraplan.runtime.checkpoints.saving import CheckpointWriter
from paraplan.runtime.checkpoints.weight_files import export_weights
from paraplan.runtime.data.batches import StepShape
from paraplan.runtime.data_parallel.block_order import BlockOrders
from paraplan.runtime.data_parallel.reached_shards import ReachedShards
from paraplan.runtime.hands import Hands
from paraplan.runtime.mesh import Mesh
from paraplan.runtime.micro_batching import MicroBatching
from paraplan.runtime.optimizers.averages import ParameterAverage
from paraplan.runtime.options import EngineOptions
from paraplan.runtime.precision import LossScale
from paraplan.runtime.rank_part import RankPart
from paraplan.runtime.recovery.keeper import MemoryKeeper
from paraplan.runtime.recovery.memory_reader import OtherGaveUpError
from paraplan.runtime.recovery.stopping import outlive_signals, stop_here
from paraplan.runtime.step.faults import FaultContext, LossWatch, explained_failures
from paraplan.runtime.structure.weights import free_gathered, is_quantized, local_shard, own_part
from paraplan.runtime.timeouts import explained_timeouts


class TrainingState:
    """A model under a plan, with its optimizer, and how far its training is."""

    def __init__(
        self, part: RankPart, optimizer: torch.optim.Optimizer, mesh: Mesh, engine_options: EngineOptions
    ) -> None:
        self.optimizer = optimizer
        self.scheduler = engine_options.scheduler
        self._part = part
        self._mesh = mesh
        self._options = engine_options
        self._sync = engine_options.sync or RankSync(mesh.world)
        if part.orders:
            reached = [one for one in part.reductions if isinstance(one, ReachedShards)]
            self._sync.orders = BlockOrders([*part.orders, *reached], mesh)
        self._losses = LossWatch(mesh.world)
        shape = StepShape.of_plan(mesh.plan, is_fixed=engine_options.file is not None)
        self._batches = MicroBatching(part, shape, engine_options.checking, self._sync, mesh)
        has_values = engine_options.checking.has_values
        self._hands = Hands(part, optimizer, mesh, has_values=has_values)
        has_writes = weakref.WeakMethod(self._hands.has_writes)  # what ends the job holds the sync until the end
        self._sync.has_writes = lambda: (call := has_writes()) is not None and call()
        self._average: ParameterAverage | None = None
        self._status = engine_options.status
        self._folder: Path | None = None
        self._keeper: MemoryKeeper | None = None
        self._writer = CheckpointWriter(is_main=mesh.world.rank == 0, note_whole=engine_options.status.note_whole)

    @property
    def module(self) -> nn.Module:
        """This rank's part of the model, on its device: all of it, a sharded model, or a pipeline stage."""
        return self._part.module

    @property
    def num_steps(self) -> int:
        """Steps done, those of a loaded checkpoint included."""
        return self._sync.num_steps

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """This rank's parameters by their names in the whole model; DTensors where they are sharded.

        Under tensor parallelism some are this rank's parts; see `whole`.
        """
        return dict(self._part.parameters)

    @property
    def loss_scale(self) -> LossScale | None:
        """The scale of the loss in fp16, with the number of steps that were left out; None in other precisions."""
        return self._options.loss_scale

    def whole(self, name: str, tensor: torch.Tensor | None = None) -> torch.Tensor:
        """Return the whole of parameter `name`, or of `tensor`, which lies over the ranks as that parameter does.

        Such a tensor is its gradient, or an average that an optimizer keeps of it. The ranks that share the parameter
        call it together.
        """
        held = self._part.parameters[name]
        tensor = (held if tensor is None else tensor).detach()
        return self._part.shardings.whole(name, tensor, self._mesh)

    @torch.no_grad()
    def set_whole(self, name: str, values: torch.Tensor, tensor: torch.Tensor | None = None) -> None:
        """Put `values`, a whole tensor, into parameter `name`, or into `tensor`, which lies as that parameter does.

        Nothing travels: every rank that holds a part of it calls this with the same values, and takes its part. Raises
        `UsageError` for values of another shape.
        """
        held = self._part.parameters[name].detach() if tensor is None else tensor
        shape = self._part.shardings.whole_shape(name, held.shape, self._mesh)
        if values.shape != shape:
            raise UsageError(
                f"engine.set_whole: {tuple(values.shape)} is not the shape of {name}, {shape}",
                hint="give all of it, as engine.whole returns it",
            )
        with self._hands.writing_whole(name):
            local_shard(held).copy_(own_part(self._part.shardings.part(name, values, self._mesh), held))

    @checked
    def save(self, folder: str | Path, *, wait: bool = True) -> None:
        """Write the state of the training to `folder`, which any plan can load.

        That is parameters, buffers, optimizer, scheduler, loss scale, random numbers and `num_steps`. Every rank calls
        it, with a folder that all of them reach. A checkpoint that is there stays whole until the new one is. Without
        `wait` the state is copied to the host's memory and written while training goes on; the next `save`, `load` or
        `job.close` waits for it, and raises what went wrong. Raises `CheckpointError` where the folder or the disk does
        not take it, `UsageError` for quantized weights, and `DivergedError` before anything is written where the last
        loss is not a number.
        """
        self._refuse_averages("save")
        name = self._quantized_name()
        if name is not None:
            raise UsageError(
                f"engine.save cannot write {name}, which is quantized ({type(self._part.parameters[name]).__name__})",
                hint="write what trains: engine.export_adapters for peft, else engine.whole(name) of each",
            )
        self._save(folder, wait=wait)

    def _save(self, folder: str | Path, *, wait: bool, only: Callable[[str], bool] | None = None) -> None:
        self._losses.check()
        with self._explained("save"):
            self._batches.meet("save")
            self._writer.write(Path(folder), self._source(), wait=wait, only=only)

    @checked
    def load(self, folder: str | Path) -> None:
        """Go on from what `save` wrote to `folder`, under this plan or another one. Every rank calls it.

        Under the same plan dropout goes on with the random numbers of the checkpoint, under another one with new ones.
        Raises `CheckpointError` where `folder` holds no checkpoint of this model.
        """
        self._refuse_averages("load")
        with self._explained("load"):
            self._batches.meet("load")
            free_gathered(self._part.module)
            self._writer.finish()
            self._sync.num_steps = load_checkpoint(Path(folder), self._source())

    @checked
    def resume(self, folder: str | Path) -> bool:
        """Go on from the newest state of this training, if there is one; return whether there was. Every rank calls it.

        That is the copy that the launcher holds in memory (`--memory-checkpoint`), or the checkpoint in `folder`, where
        `save` writes it, if that is newer. From then on a job that is to end (SIGTERM to its launcher, SIGUSR1, a
        notice) saves there at the end of a step, and ends with status 75. A training with quantized weights, which
        cannot be saved, is not kept in memory either, and ends as by the signal alone; rank 0 says so.
        Raises what `load` raises, and `CheckpointError` where some ranks see a checkpoint and others do not.
        """
        self._folder = Path(folder)
        keeper = MemoryKeeper.of(os.environ, self._mesh.world, self._status)
        quantized = self._quantized_name()
        is_kept = keeper is not None and quantized is None
        self._keeper = keeper if all(self._batches.meet("load", int(is_kept))) else None
        self._sync.wants_stop = self._status.is_to_stop
        found = [bool(seen) for seen in self._batches.meet("load", int(find_whole(self._folder) is not None))]
        if len(set(found)) > 1:
            raise CheckpointError(
                f"rank {found.index(True)} sees a checkpoint in {folder}, and rank {found.index(False)} does not",
                hint="name a folder that all nodes reach",
            )
        has_copy = self._keeper is not None and self._resume_from_memory(self._keeper, has_checkpoint=found[0])
        if found[0] and not has_copy:
            self.load(folder)
        if quantized is None:
            outlive_signals(self._status)
            self._status.set("can_stop", 1)
        elif self._mesh.world.rank == 0:
            sys.stderr.write(
                f"paraplan: {quantized} is quantized, and cannot be saved: there are no copies in memory, and a signal "
                "ends the job without a checkpoint\n"
            )
        return found[0] or has_copy

    def _resume_from_memory(self, keeper: MemoryKeeper, *, has_checkpoint: bool) -> bool:
        """Go on from the copy in memory, if one is whole, the newest, and readable here; return whether it was."""
        copy = keeper.newest(lambda: any(self._batches.meet("load", 0)))
        if copy is None or (has_checkpoint and self._steps_on_disk() > copy[0]):
            return False
        self._refuse_averages("load")
        with self._explained("load"):
            free_gathered(self._part.module)
            lacks = num_steps = 0
            try:
                num_steps = load_from(copy[1], self._source())
            except OtherGaveUpError:
                return False
            except CheckpointError as error:  # a node is gone with its part: the checkpoint is what is left
                sys.stderr.write(f"paraplan: {error.message}\n")
                lacks = 1
            if any(self._batches.meet("load", lacks)):
                return False
            self._sync.num_steps = num_steps
        if self._mesh.world.rank == 0:
            sys.stderr.write(f"paraplan: going on after {self.num_steps} steps from the copy in memory\n")
        return True

    def _steps_on_disk(self) -> int:
        """Return the steps of the checkpoint that `resume` names, as all ranks see them; 0 for one that is damaged."""
        assert self._folder is not None
        try:
            steps = count_steps(FolderReader(self._folder))
        except CheckpointError:
            steps = 0
        return min(self._batches.meet("load", steps))

    def leave_status(self) -> None:
        """Tell the launcher nothing from now on, and do not stop for it: another engine is made."""
        self._status.leave()

    def _end_step(self) -> None:
        """Save and end the process where all ranks have agreed to; take note of a state that is to be copied."""
        if self._keeper is not None:
            self._keeper.note(self._source())
        if self._sync.has_agreed_to_stop and self._folder is not None:
            stop_here(self.save, self._folder, self._status, num_steps=self.num_steps)

    @checked
    def export(self, path: str | Path) -> None:
        """Write the weights to the safetensors file `path`, in the model's own names. Every rank calls it.

        They pass through a folder beside the file, without the optimizer's state; rank 0 needs the memory of the whole
        model. See `paraplan.runtime.export.export_weights` for a checkpoint that is there.
        """
        self._export(Path(path), lambda name: name.startswith(MODEL), lambda passing: export_weights(passing, path))

    @checked
    def export_adapters(self, folder: str | Path) -> None:
        """Write the adapters of a peft model alone to `folder`, as peft's `save_pretrained` does. Every rank calls it.

        `peft.PeftModel.from_pretrained(base, folder)` reads them. Raises `UsageError` for a model without any.
        """
        adapters = self._options.adapters
        check_adapters(adapters)
        names = {f"{MODEL}{name}" for adapter in adapters for name in adapter.names.values()}
        self._export(Path(folder), names.__contains__, lambda passing: write_adapters(Path(folder), passing, adapters))

    def _export(self, path: Path, only: Callable[[str], bool], write: Callable[[Path], Any]) -> None:
        passing = path.with_name(f"{path.name}.passing")
        self._save(passing, wait=True, only=only)
        if self._mesh.world.rank == 0:
            write(passing)
            shutil.rmtree(passing)
        self._batches.meet("save")

    def average(self, decay: float) -> None:
        """Keep the exponential moving average of the parameters from now on, updated behind every step.

        It takes as much memory as the parameters, and is in checkpoints: call it before `load`. Raises `UsageError` for
        a decay that is not in [0, 1), and where an average is kept.
        """
        if self._average is not None:
            raise UsageError("engine.average was called before", hint="call it once, before the first step")
        self._average = ParameterAverage(self._part.parameters, decay)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Have the averages in the place of the parameters in this context, for eval_step, predict and export.

        Every rank enters it. Raises `UsageError` where `average` was not called.
        """
        if self._average is None:
            raise UsageError("there is no average of the parameters", hint="call engine.average(decay) before training")
        with self._average.in_place(self._part.module):
            yield
        self._hands.note_weights()

    def _refuse_averages(self, call: str) -> None:
        if self._average is not None and self._average.is_in_place:
            raise UsageError(f"engine.{call} inside of engine.averaged", hint="leave the context first")

    def _quantized_name(self) -> str | None:
        """Return the name of a quantized weight, None where there is none."""
        for name, parameter in self._part.parameters.items():
            if is_quantized(parameter.to_local() if isinstance(parameter, DTensor) else parameter):
                return name
        return None

    def _source(self) -> CheckpointSource:
        return CheckpointSource(
            parameters=self._part.parameters,
            buffers=self._part.buffers,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            loss_scale=self._options.loss_scale,
            places=self._part.shardings.places(self._mesh),
            num_steps=self.num_steps,
            mesh=self._mesh,
            average=self._average,
        )

    def _explained(self, call: Call) -> AbstractContextManager[Any]:
        """Have a timeout or a lost connection in this context say what the other rank did."""
        self._hands.begin_call()
        stack = ExitStack()
        stack.callback(self._hands.end_call)
        stack.enter_context(self._status.timed(call, self._sync))

        def name() -> str:
            return f"engine.{call} after {self.num_steps} steps"

        if self._options.checking.agreement is not None:
            stack.enter_context(self._options.checking.agreement.explained(name))
        stack.enter_context(explained_timeouts(name))
        return stack

    def _guarded(self, work: Callable[[], Any]) -> Any:
        mesh, parameters = self._mesh, [*self._part.parameters.values()]
        context = FaultContext(
            parameters, self.optimizer, mesh.plan, self._options.file, mesh.world, step=self.num_steps + 1
        )
        return explained_failures(work, context)
