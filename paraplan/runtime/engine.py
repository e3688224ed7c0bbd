"""The engine: one call for one optimizer step, the same under every plan."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import torch

from paraplan.arguments import checked
from paraplan.errors import UsageError
from paraplan.runtime.data_parallel.wrapping import complete_reductions
from paraplan.runtime.experts.layers import forget_load, load_metrics
from paraplan.runtime.hands import Freezing
from paraplan.runtime.mesh import Mesh
from paraplan.runtime.options import EngineOptions
from paraplan.runtime.predictions import Predictor
from paraplan.runtime.rank_part import RankPart
from paraplan.runtime.recovery.keeper import is_finite
from paraplan.runtime.step.gradients import GradientClipping, scale_gradients
from paraplan.runtime.step.reports import StepCallback, count_tokens
from paraplan.runtime.step.totals import StepTotals, TotalsOverRanks
from paraplan.runtime.structure.snapshots import modes
from paraplan.runtime.training_state import TrainingState

_LOGGER = logging.getLogger(__name__)


class Engine(TrainingState):
    """A model under a plan, with its optimizer. Made by `Job.prepare`.

    `optimizer` is this rank's, over `parameters`; `scheduler` what sets its learning rate, None without one.
    `grad_norm` is the norm of the whole model's gradient at the last step before clipping, None where nothing needed
    it. Gradients stay readable until the next step. `metrics` are what `loss_fn` returned beside the loss in the last
    call, over the global batch, and under `ep` the load of experts (`expert_load`, `expert_imbalance`). `num_steps`
    counts the steps done, those of a loaded checkpoint included: it is the position in the data, for
    `job.shard(skip=engine.num_steps)`.
    """

    def __init__(
        self, part: RankPart, optimizer: torch.optim.Optimizer, mesh: Mesh, engine_options: EngineOptions
    ) -> None:
        super().__init__(part, optimizer, mesh, engine_options)
        self.grad_norm: torch.Tensor | None = None
        self.metrics: dict[str, torch.Tensor] = {}
        self._freezing = Freezing(part.parameters, is_parallel=mesh.world.size > 1)
        self._totals = TotalsOverRanks(mesh)
        self._predictor = Predictor(part, mesh, self._batches)
        engine_options.checking = replace(engine_options.checking, reference=None)
        self._loss: torch.Tensor | None = None
        self._tokens: int | None = None
        self._last_loss: torch.Tensor | None = None

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
        self._end_step()
        return totals.loss

    def backward(self, inputs: Any, targets: Any) -> torch.Tensor:
        """Do the first half of `step`: leave the gradients of the global batch in place, and return its loss.

        Gradients of an earlier batch are dropped. `update` does the other half.
        """
        with self._explained("step"), self._freezing.as_prepared():
            totals = self._backward(inputs, targets)
            if totals.factor is not None:
                scale_gradients(self._gradients().values(), totals.factor)
            self._hands.note_gradients()
            return totals.loss

    def update(self) -> None:
        """Do the second half of `step`: clip the gradients that `backward` left, step optimizer and scheduler."""
        if self._tokens is None:
            raise UsageError("engine.update without engine.backward before it", hint="call engine.backward first")
        with self._explained("step"):
            self._hands.check_gradients()
            self._update(None)
        self._end_step()

    def _backward(self, inputs: Any, targets: Any) -> StepTotals:
        self._refuse_averages("step")
        watch, scale = self._options.watch, self._options.loss_scale
        has_values = self._options.checking.has_values
        if watch is not None:
            watch.begin()
        self._losses.check(keep=1)
        loss = self._part.execution.loss
        micro_batches = self._batches.divide("step", inputs, targets, guarded=self._guarded)
        if self._sync.saw_writes:
            self._hands.check_weights()
        if self._keeper is not None:
            self._keeper.begin()
        loss.gradient_factor = 1.0 if scale is None else scale.scale
        self.optimizer.zero_grad(set_to_none=True)
        self._part.forget_gradients()  # of which the optimizer may have some
        for reduction in self._part.reductions:
            reduction.begin()
        forget_load(self._part.loads)
        self._guarded(lambda: self._part.execution.train(micro_batches))
        self._batches.end_step()
        if has_values:
            complete_reductions(self._part.reductions, self._lacking_of_all)
        if self._keeper is not None:
            self._keeper.finish(self.num_steps, is_good=is_finite(self._last_loss))
        totals = self._totals.sum("step", loss, has_values=has_values)
        for reduction in self._part.reductions:
            reduction.drop_unused()
        self._freezing.drop_gradients()
        self.metrics = totals.metrics
        if self._part.loads and has_values:
            self.metrics |= load_metrics(self._part.loads, self._mesh)
        own = loss.tally.loss
        self._losses.add(totals, step=self._sync.num_steps + 1, own=own, is_read=has_values)
        self._last_loss = totals.loss.detach()
        self._loss, self._tokens = totals.loss, count_tokens(inputs) * self._mesh.size("dp")
        return totals

    def _lacking_of_all(self, lacking: int) -> list[int]:
        plan = self._mesh.plan
        has_stages_in_ddp = plan.pp > 1 and self._mesh.replica_group is not None and not plan.zero_stage
        return self._batches.meet("step", lacking) if has_stages_in_ddp else [lacking]

    def _update(self, factor: torch.Tensor | None) -> None:
        watch = self._options.watch
        gradients = GradientClipping(
            self._mesh,
            max_norm=self._options.max_grad_norm,
            scale=self._options.loss_scale,
            repeated=self._part.repeated,
            shardings=self._part.shardings,
            has_values=self._options.checking.has_values,
        )
        self.grad_norm, is_finite = gradients.finish(self._gradients(), factor)
        if is_finite:
            with self._hands.updating():
                self._guarded(self.optimizer.step)
            if self.scheduler is not None:
                self.scheduler.step()
        self._sync.num_steps += 1
        self._hands.end_step(self._sync.num_steps)
        if self._average is not None:
            self._average.update()
        if watch is not None and self._loss is not None and self._tokens is not None:
            with self._hands.given():
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
            micro_batches = self._batches.divide("eval_step", inputs, targets, guarded=self._guarded)
            loss = self._part.execution.loss
            with modes(self._part.module, training=False):
                self._guarded(lambda: self._part.execution.evaluate(micro_batches))
            totals = self._totals.sum("eval_step", loss, has_values=self._options.checking.has_values)
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

    @checked
    def expect(self, num_steps: int) -> None:
        """Say how many steps there will be, those of a loaded checkpoint included: the bar shows its share of them."""
        if self._options.watch is not None:
            self._options.watch.total_steps = num_steps

    @checked
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
        self._hands.finish()
        if self._options.watch is not None:
            self._options.watch.finish()

    def _gradients(self) -> dict[str, torch.Tensor]:
        return {name: held.grad for name, held in self._part.parameters.items() if held.grad is not None}
