"""The engine: one call for one optimizer step, the same under every plan."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paraplan.errors import UsageError
from paraplan.plan.parallel import ParallelPlan
from paraplan.runtime.agreement import Call, RankSync
from paraplan.runtime.checkpoints.adapter_files import check_adapters, write_adapters
from paraplan.runtime.checkpoints.chunks import locations
from paraplan.runtime.checkpoints.entries import MODEL
from paraplan.runtime.checkpoints.saving import CheckpointSource, CheckpointWriter, load_checkpoint
from paraplan.runtime.checkpoints.weight_files import export_weights
from paraplan.runtime.data.batches import StepShape
from paraplan.runtime.data_parallel.wrapping import complete_reductions
from paraplan.runtime.mesh import Mesh
from paraplan.runtime.micro_batching import MicroBatching
from paraplan.runtime.optimizers.averages import ParameterAverage, free_gathered
from paraplan.runtime.options import EngineOptions
from paraplan.runtime.precision import LossScale
from paraplan.runtime.predictions import Predictor
from paraplan.runtime.rank_part import RankPart
from paraplan.runtime.shards.group import whole_tensor
from paraplan.runtime.step.execution import evaluation_mode
from paraplan.runtime.step.faults import LossWatch, explained_failures
from paraplan.runtime.step.freezing import Freezing
from paraplan.runtime.step.gradients import GradientClipping, scale_gradients
from paraplan.runtime.step.reports import StepCallback, StepReport, count_tokens
from paraplan.runtime.step.totals import StepTotals, TotalsOverRanks
from paraplan.runtime.timeouts import explained_timeouts


class Engine:
    """A model under a plan, with its optimizer. Made by `Job.prepare`.

    `optimizer` is this rank's, over `parameters`; `scheduler` what sets its learning rate, None without one.
    `grad_norm` is the norm of the whole model's gradient at the last step before clipping, None where nothing needed
    it. Gradients stay readable until the next step. `metrics` are what `loss_fn` returned beside the loss in the last
    call, over the global batch. `num_steps` counts the steps done, those of a loaded checkpoint
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
        engine_options: EngineOptions,
    ) -> None:
        self.optimizer = optimizer
        self.scheduler = engine_options.scheduler
        self.grad_norm: torch.Tensor | None = None
        self._part = part
        self._mesh = mesh
        self._plan = plan
        self._options = engine_options
        self._sync = engine_options.sync or RankSync(mesh.world)
        self._has_stepped = False
        self.metrics: dict[str, torch.Tensor] = {}
        self._losses = LossWatch(mesh.world)
        self._freezing = Freezing(part.parameters, is_parallel=mesh.world.size > 1)
        self._totals = TotalsOverRanks(mesh)
        self._batches = MicroBatching(part, shape, engine_options.checking, self._sync, plan=plan, mesh=mesh)
        self._predictor = Predictor(part, plan, mesh, self._batches)
        engine_options.checking = replace(engine_options.checking, reference=None)
        self._loss: torch.Tensor | None = None
        self._tokens: int | None = None
        self._average: ParameterAverage | None = None
        self._writer = CheckpointWriter(is_main=mesh.world.rank == 0)

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

    @property
    def last_report(self) -> StepReport | None:
        """What was last measured: on rank 0 of a run that writes metrics or shows its progress, and for callbacks."""
        return None if self._options.watch is None else self._options.watch.last

    def whole(self, name: str, tensor: torch.Tensor | None = None) -> torch.Tensor:
        """Return the whole of parameter `name`, or of `tensor`, which lies over the ranks as that parameter does.

        Such a tensor is its gradient, or an average that an optimizer keeps of it. The ranks that share the parameter
        call it together.
        """
        held = self._part.parameters[name]
        tensor = held.detach() if tensor is None else tensor
        return whole_tensor(tensor, self._part.shardings.get(name), self._mesh)

    def step(self, inputs: Any, targets: Any) -> torch.Tensor:
        """Do one optimizer step on this rank's share of a global batch; return the loss of the whole batch.

        `inputs` and `targets` are tensors, or nests of tensors, with the batch first; a dict of inputs gives the model
        keyword arguments, a tuple positional ones. The loss is that of one process with the whole batch, also where
        some targets are masked or the batch is not full. It is a scalar tensor on the device; reading it waits for the
        step. Raises `UsageError` where the share has another size than the plan says or does not divide, or ranks make
        other calls; `UnsupportedPlanError` before the first step where the loss of a batch cannot be made of those of
        its parts; `DivergedError` where the loss is not a number; `RankMemoryError` where the memory is too small;
        `CollectiveTimeoutError` where a rank did not come.
        """
        with self._explained("step"):
            with self._freezing.as_prepared():
                totals = self._backward(inputs, targets)
            self._update(totals.factor)
            return totals.loss

    def backward(self, inputs: Any, targets: Any) -> torch.Tensor:
        """Do the first half of `step`: leave the gradients of the global batch in place, and return its loss.

        Gradients of an earlier batch are dropped. `update` does the other half.
        """
        with self._explained("step"), self._freezing.as_prepared():
            totals = self._backward(inputs, targets)
            if totals.factor is not None:
                scale_gradients(self._gradients().values(), totals.factor)
            return totals.loss

    def update(self) -> None:
        """Do the second half of `step`: clip the gradients that `backward` left, step optimizer and scheduler."""
        if self._tokens is None:
            raise UsageError("engine.update without engine.backward before it", hint="call engine.backward first")
        with self._explained("step"):
            self._update(None)

    def _backward(self, inputs: Any, targets: Any) -> StepTotals:
        self._refuse_averages("step")
        watch, scale = self._options.watch, self._options.loss_scale
        has_values = self._options.checking.has_values
        if watch is not None:
            watch.begin()
        self._losses.check(keep=1)
        loss = self._part.execution.loss
        micro_batches, rule = self._batches.divide("step", inputs, targets, guarded=self._guarded)
        self._forget_gradients()
        loss.rule, loss.gradient_factor = rule, 1.0 if scale is None else scale.scale
        for reduction in self._part.reductions:
            reduction.begin()
        self._guarded(lambda: self._part.execution.train(micro_batches))
        self._batches.share_state()
        if has_values:
            complete_reductions(self._part.reductions, self.num_steps, self._lacking_of_all)
        totals = self._totals.sum("step", loss.tally, rule, has_values=has_values)
        for reduction in self._part.reductions:
            reduction.drop_unused(self.num_steps)
        self._freezing.drop_gradients()
        self.metrics = totals.metrics
        own = loss.tally.loss
        self._losses.add(step=self.num_steps + 1, mean=totals.loss, own=own, is_read=self._options.checking.has_values)
        self._loss, self._tokens = totals.loss, count_tokens(inputs) * self._mesh.size("dp")
        return totals

    def _lacking_of_all(self, lacking: int) -> list[int]:
        has_stages_in_ddp = self._plan.pp > 1 and self._mesh.replica_group is not None and not self._plan.zero_stage
        return self._batches.meet("step", lacking) if has_stages_in_ddp else [lacking]

    def _update(self, factor: torch.Tensor | None) -> None:
        watch = self._options.watch
        gradients = GradientClipping(
            self._mesh,
            max_norm=self._options.max_grad_norm,
            scale=self._options.loss_scale,
            repeated=self._part.repeated,
            split=self._part.shardings.keys(),
            has_values=self._options.checking.has_values,
        )
        self.grad_norm, is_finite = gradients.finish(self._gradients(), factor)
        if is_finite:
            self._guarded(self.optimizer.step)
            if self.scheduler is not None:
                self.scheduler.step()
        self._has_stepped = True
        self._sync.num_steps += 1
        if self._average is not None:
            self._average.update()
        if watch is not None and self._loss is not None and self._tokens is not None:
            watch.end(
                step=self.num_steps,
                loss=self._loss,
                grad_norm=self.grad_norm,
                learning_rate=float(self.optimizer.param_groups[0]["lr"]),
                tokens=self._tokens,
                metrics=self.metrics,
            )
        self._loss = self._tokens = None

    def eval_step(self, inputs: Any, targets: Any) -> torch.Tensor:
        """Return the loss of a global batch, this rank's share of which is given, without training on it.

        Every rank calls it. Dropout is off. What `loss_fn` returned beside the loss is in `metrics`.
        """
        self._losses.check()
        with self._explained("eval_step"), self._freezing.as_prepared():
            micro_batches, rule = self._batches.divide("eval_step", inputs, targets, guarded=self._guarded)
            loss = self._part.execution.loss
            loss.rule = rule
            with evaluation_mode(self._part.module):
                self._guarded(lambda: self._part.execution.evaluate(micro_batches))
            totals = self._totals.sum("eval_step", loss.tally, rule, has_values=self._options.checking.has_values)
            self.metrics = totals.metrics
            return totals.loss

    def predict(self, inputs: Any) -> Any:
        """Return what the model returns for this rank's share of a batch of any size, as one process, without a graph.

        Every rank calls it. Dropout is off. Tensors are whole on every rank: logits, tokens, and all stages have them.
        Caches and other objects are left out (None). Raises `UsageError` where the outputs of micro-batches cannot be
        joined along their first dimension.
        """
        with self._explained("predict"), self._freezing.as_prepared():
            return self._guarded(lambda: self._predictor.predict(inputs))

    def generate(self, inputs: Any, *arguments: Any, **options: Any) -> Any:
        """Return what the model's own `generate` returns for these arguments and this rank's share, as one process.

        Every rank calls it. Each token is a run of the whole sequence, without a cache. Sampling draws the same on all
        ranks that hold one copy of the model. Raises `UsageError` for a model without `generate`.
        """
        with self._explained("predict"), self._freezing.as_prepared():
            return self._guarded(lambda: self._predictor.generate(inputs, (arguments, options)))

    def save(self, folder: str | Path, *, wait: bool = True) -> None:
        """Write the state of the training to `folder`, which any plan can load.

        That is parameters, buffers, optimizer, scheduler, loss scale, random numbers and `num_steps`. Every rank calls
        it, with a folder that all of them reach. A checkpoint that is there stays whole until the new one is. Without
        `wait` the state is copied to the host's memory and written while training goes on; the next `save`, `load` or
        `job.close` waits for it, and raises what went wrong. Raises `CheckpointError` where the folder or the disk does
        not take it, and `DivergedError` before anything is written where the last loss is not a number.
        """
        self._refuse_averages("save")
        self._save(folder, wait=wait)

    def _save(self, folder: str | Path, *, wait: bool, only: Callable[[str], bool] | None = None) -> None:
        self._losses.check()
        with self._explained("save"):
            self._batches.meet("save")
            self._writer.write(Path(folder), self._source(), wait=wait, only=only)

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
            self._batches.reload(Path(folder))

    def export(self, path: str | Path) -> None:
        """Write the weights to the safetensors file `path`, in the model's own names. Every rank calls it.

        They pass through a folder beside the file, without the optimizer's state; rank 0 needs the memory of the whole
        model. See `paraplan.runtime.export.export_weights` for a checkpoint that is there.
        """
        self._export(Path(path), lambda name: name.startswith(MODEL), lambda passing: export_weights(passing, path))

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

    def _refuse_averages(self, call: str) -> None:
        if self._average is not None and self._average.is_in_place:
            raise UsageError(f"engine.{call} inside of engine.averaged", hint="leave the context first")

    def expect(self, num_steps: int) -> None:
        """Say how many steps there will be, those of a loaded checkpoint included: the bar shows its share of them."""
        if self._options.watch is not None:
            self._options.watch.total_steps = num_steps

    def on_step(self, callback: StepCallback, *, every: int = 1, all_ranks: bool = False) -> None:
        """Call `callback(report)` on rank 0, or on `all_ranks`, behind every step whose number `every` divides.

        The report waits for the step on the device; so `every` says how often a GPU is waited for.
        """
        if every < 1:
            raise UsageError(f"on_step(every={every})", hint="give a whole number of steps, from 1")
        watch = self._options.watch
        if watch is not None and (all_ranks or self._mesh.world.rank == 0):
            watch.callbacks.append((every, callback))

    def finish(self) -> None:
        """Wait for what `save` still writes, and end the progress bar. `job.close` does it too."""
        self._writer.finish()
        if self._options.watch is not None:
            self._options.watch.finish()

    def _source(self) -> CheckpointSource:
        return CheckpointSource(
            parameters=self._part.parameters,
            buffers=self._part.buffers,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            loss_scale=self._options.loss_scale,
            places=locations(self._part.shardings, self._mesh.coordinate("tp")),
            plan=self._plan,
            num_steps=self.num_steps,
            mesh=self._mesh,
            average=self._average,
        )

    def _explained(self, call: Call) -> AbstractContextManager[Any]:
        """Have a timeout or a lost connection in this context say what the other rank did."""
        stack = ExitStack()

        def name() -> str:
            return f"engine.{call} after {self.num_steps} steps"

        if self._options.checking.agreement is not None:
            stack.enter_context(self._options.checking.agreement.explained(name))
        stack.enter_context(explained_timeouts(name))
        return stack

    def _forget_gradients(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        for parameter in self._part.parameters.values():  # of which the optimizer may have some
            parameter.grad = None

    def _gradients(self) -> dict[str, torch.Tensor]:
        return {name: held.grad for name, held in self._part.parameters.items() if held.grad is not None}

    def _guarded(self, work: Callable[[], Any]) -> Any:
        return explained_failures(
            work,
            parameters=self._part.parameters.values(),
            optimizer=self.optimizer,
            plan=self._plan,
            file=self._options.file,
            world=self._mesh.world,
            step=self.num_steps + 1,
        )
