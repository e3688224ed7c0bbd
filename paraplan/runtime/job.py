"""A job: this process among its ranks, with the plan that they run. What a training script talks to."""

from __future__ import annotations

import atexit
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from paraplan.arguments import checked
from paraplan.errors import PlanError
from paraplan.plan.files import PlanFile
from paraplan.plan.parallel import ParallelPlan
from paraplan.plan.training import TrainingPrecision
from paraplan.runtime.agreement import Agreement, RankSync
from paraplan.runtime.assembly import check_model, check_quantized, unfrozen_note, unfused_note, wrap_model
from paraplan.runtime.batch_norm import synchronize_batch_norms
from paraplan.runtime.checkpoints.adapter_files import adapters_of
from paraplan.runtime.checkpoints.weight_files import names_of_ties, read_weights
from paraplan.runtime.checks.batch_coupling import Coupling
from paraplan.runtime.checks.plan_check import Checking
from paraplan.runtime.checks.references import Reference, Verify, changes_the_model, reference_of
from paraplan.runtime.connections import Connections
from paraplan.runtime.data.batches import TargetCount, TargetCounter
from paraplan.runtime.data.packing import Packing, check_keeps_apart
from paraplan.runtime.data.sharding import ShardedBatches, SizedDataset, is_stream, shard_dataset
from paraplan.runtime.data.streams import BatchSettings, DataPasses, SameStream, StreamBatches
from paraplan.runtime.engine import Engine
from paraplan.runtime.mesh import Mesh
from paraplan.runtime.optimizers.offload import keep_on_host
from paraplan.runtime.optimizers.same_options import WholeOptions, check_same_options, whole_options
from paraplan.runtime.optimizers.several import (
    OptimizerFactory,
    SchedulerFactory,
    as_one_optimizer,
    as_one_scheduler,
    check_parameters,
    optimizers_in,
)
from paraplan.runtime.optimizers.whole_tensors import WholeTensorSteps, check_optimizer, check_scheduler
from paraplan.runtime.options import EngineOptions, TrainingOptions
from paraplan.runtime.precision import LossScale, ReduceType, check_reduce_type
from paraplan.runtime.rank_part import ParallelContext, RankPart, step_loss
from paraplan.runtime.recompute.policy import RecomputePolicy, check_operators
from paraplan.runtime.recovery.status import RankStatus
from paraplan.runtime.step.global_batch import check_gathers
from paraplan.runtime.step.loss import LossFunction
from paraplan.runtime.step.reports import RunWatch, SpeedBaseline, peak_flops_per_s
from paraplan.runtime.structure.blocks import compile_blocks
from paraplan.runtime.structure.float8 import convert_products
from paraplan.runtime.structure.parameter_hooks import check_hooks, check_written_tables
from paraplan.runtime.structure.weights import count_parameters, share_weights
from paraplan.runtime.timeouts import explained_timeouts
from paraplan.runtime.world import World, leave_group

_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True)
class Job:
    """One rank of a training job. `file` is what the plan came from, None for a plan made on the spot.

    `metrics` is the file that rank 0 writes a line to for every `metrics_every` steps; `shows_progress` says that it
    draws a bar.
    """

    file: PlanFile | None
    precision: TrainingPrecision
    mesh: Mesh
    metrics: Path | None = None
    measured: Path | None = None
    metrics_every: int = 1
    shows_progress: bool = False
    connections: Connections = field(default_factory=Connections, repr=False)
    _sync: list[RankSync] = field(default_factory=list, repr=False)
    _engines: list[Engine] = field(default_factory=list, repr=False)
    _streams: Iterator[int] = field(default_factory=count, repr=False)
    _packings: list[Packing] = field(default_factory=list, repr=False)
    _passes: DataPasses = field(default_factory=DataPasses, repr=False)

    def __enter__(self) -> Self:
        """Return the job; leaving the context closes it."""
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Close the job; with an error leave at once, without waiting for other ranks or for a checkpoint."""
        if error is None or (isinstance(error, SystemExit) and not error.code):
            self.close()
        else:
            self._abandon()

    @property
    def plan(self) -> ParallelPlan:
        """The plan that all ranks run."""
        return self.mesh.plan

    @property
    def world(self) -> World:
        """This rank among the others."""
        return self.mesh.world

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        return self.mesh.world.device

    @property
    def dp(self) -> int:
        """The degree of data parallelism: into how many shares a global batch is cut."""
        return self.mesh.size("dp")

    @property
    def dp_rank(self) -> int:
        """Which of the `dp` shares this rank takes, from 0; ranks that hold one copy of the model take the same."""
        return self.mesh.coordinate("dp")

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, the one that prints and writes."""
        return self.mesh.world.rank == 0

    @checked
    def prepare(
        self,
        model: nn.Module,
        *,
        loss_fn: LossFunction,
        optimizer: OptimizerFactory,
        scheduler: SchedulerFactory | None = None,
        max_grad_norm: float | None = None,
        count_targets: TargetCount | None = None,
        compile_backend: str | None = None,
        example_inputs: Any = None,
        weights: str | Path | None = None,
        batch_coupling: Coupling = "warn",
        verify: Verify = "auto",
        verify_every: int | None = None,
        find_unused: bool = False,
        split: Mapping[str, str] | None = None,
        recompute: RecomputePolicy | None = None,
        reduce_dtype: ReduceType = "fp32",
    ) -> Engine:
        """Put `model` under the plan and return the engine that trains it. Takes the model over: use the engine's.

        What each argument means is said in `TrainingOptions`. Every rank starts from the weights of rank 0. Ranks of a
        `dp` group draw different random numbers afterwards (dropout).

        Raises `PlanError` for a model that the plan was not made for, `UnsupportedPlanError` for a plan that the
        runtime cannot execute on it, and `ModelError` for a model without values, or another one on another rank.
        """
        if self._packings:
            check_keeps_apart(model)
        options = TrainingOptions(
            loss_fn=loss_fn,
            optimizer=optimizer,
            scheduler=scheduler,
            max_grad_norm=max_grad_norm,
            count_targets=count_targets,
            compile_backend=compile_backend,
            example_inputs=example_inputs,
            weights=weights,
            batch_coupling=batch_coupling,
            verify=verify,
            verify_every=verify_every,
            find_unused=find_unused,
            split=split,
            recompute=recompute,
            reduce_dtype=reduce_dtype,
        )
        return self.prepare_with(model, options)

    def prepare_with(self, model: nn.Module, options: TrainingOptions) -> Engine:
        """Return the engine that trains `model` by `options`; see `prepare`."""
        watch, adapters = self._watch(count_parameters(model)), adapters_of(model)
        with self._agreement.on("job.prepare"), explained_timeouts(lambda: "job.prepare"):
            part, reference, whole = self._wrap(model, options)
            if place := self.mesh.place_of_draws:
                torch.manual_seed(torch.initial_seed() + place)
            made, schedule = self._optimizer(options, part, whole)
            self._tell(unfused_note(optimizers_in(made), self.file, self.device))
            for one in optimizers_in(made):
                if check_optimizer(one, self.plan) != "numbers":
                    WholeTensorSteps(part.parameters, part.shardings, self.mesh).attach(one)
                if self.plan.offload == "optimizer":
                    keep_on_host(one)
        sync = RankSync(self.world)
        engine = Engine(
            part,
            made,
            self.mesh,
            EngineOptions(
                max_grad_norm=options.max_grad_norm,
                scheduler=schedule,
                loss_scale=LossScale() if self.precision == "fp16" else None,
                checking=Checking(
                    precision=self.precision,
                    counter=TargetCounter.of(options.count_targets, options.loss_fn, part.module),
                    coupling=options.batch_coupling,
                    reference=reference,
                    agreement=self._agreement,
                    is_off=options.verify == "off",
                    every=options.verify_every,
                ),
                sync=sync,
                watch=watch,
                file=self.file,
                adapters=adapters,
                status=self._status(),
            ),
        )
        self._sync.append(sync)
        atexit.register(sync.leave)  # runs before the group is left
        self._engines.append(engine)
        return engine

    def _optimizer(
        self, options: TrainingOptions, part: RankPart, whole: WholeOptions | None = None
    ) -> tuple[torch.optim.Optimizer, LRScheduler | None]:
        given = options.optimizer(held := part.optimized())
        made = as_one_optimizer(given)
        check_parameters(made, held, self.plan)
        if whole is not None:
            check_same_options(made, part.parameters, whole, self.plan)
        scheduler = options.scheduler
        return made, None if scheduler is None else as_one_scheduler(scheduler(given), check_scheduler)

    def _status(self) -> RankStatus:
        for engine in self._engines:
            engine.leave_status()
        return RankStatus() if self._engines else RankStatus.of(os.environ)

    @cached_property
    def _agreement(self) -> Agreement:
        return Agreement(self.world, self.connections)

    def _tell(self, note: str | None) -> None:
        if note is not None and self.is_main:
            _LOGGER.warning(note)

    def _wrap(
        self, model: nn.Module, options: TrainingOptions
    ) -> tuple[RankPart, Reference | None, WholeOptions | None]:
        """Return this rank's part of `model`, with the weights of rank 0 or of a file, and what to verify it by."""
        plan, reads = self.plan, options.weights is not None
        stack = check_model(model, plan=plan, file=self.file, precision=self.precision, reads_weights=reads)
        convert_products(model, stack, None if self.file is None else self.file.training, self.device)
        check_quantized(model, plan, self.device)
        self._tell(unfrozen_note(model, self.file))
        check_hooks(model, plan)
        check_written_tables(model, plan)
        check_reduce_type(options.reduce_dtype, self.precision)
        if options.batch_coupling == "gather":
            check_gathers(plan)
        share_weights(model, self.world)
        names = names_of_ties(model)
        whole = whole_options(options.optimizer, model) if changes_the_model(plan) else None
        reference = reference_of(model, self.mesh, options.verify, recomputes=options.recompute is not None)
        if options.batch_coupling == "gather":
            synchronize_batch_norms(model, self.mesh)
        backend = options.compile_backend or ("inductor" if is_compiled(self.file) else None)
        check_operators(options.recompute, compiled=backend is not None)
        if backend is not None:
            compile_blocks(model, stack, backend, plan=plan)
        parallel = self._parallel(options, backend)
        part = wrap_model(model, stack, parallel, example_inputs=options.example_inputs, given=options.split)
        if options.weights is not None:
            read_weights(Path(options.weights), part, self.mesh, names=names)
        return part, reference, whole

    def _parallel(self, options: TrainingOptions, backend: str | None) -> ParallelContext:
        """Return the plan with what `options` say beside it; `backend` is what torch.compile compiles blocks by."""
        return ParallelContext(
            self.mesh,
            self.precision,
            step_loss(options.loss_fn, self.mesh),
            find_unused=options.find_unused,
            recompute=options.recompute,
            compile_backend=backend,
            reduce_dtype=options.reduce_dtype,
            training=None if self.file is None else self.file.training,
        )

    @checked
    def shard(
        self,
        dataset: SizedDataset | Iterable[Any],
        *,
        batch_size: int | None = None,
        seed: int = 0,
        epochs: int = 1,
        shuffle: bool | None = None,
        skip: int = 0,
        drop_last: bool = True,
        num_workers: int = 0,
        collate: Callable[[list[Any]], Any] | None = None,
        pack: Packing | None = None,
    ) -> ShardedBatches | StreamBatches:
        """Return the batches of this rank: an iterable of (inputs, targets), one pair for each step.

        `dataset` is a map-style data set of (inputs, targets). `batch_size` is the global batch in samples: by default
        the plan's, one for each rank of a plan made on the spot. The order depends on `seed` and the epoch alone. The
        last samples of an epoch that fill no global batch are left out, without `drop_last` they make a short one. Each
        loop over the same `dataset` is the next epoch, or the next `epochs`. `skip` leaves out the first steps of all
        of them: the engine's `num_steps`, to go on where a checkpoint was written.
        A data set without numbered samples (`IterableDataset`, generator) is read from start to end by every rank,
        which takes its share: give all ranks the same samples. It is not shuffled; `set_epoch` is called, and skipped
        steps are read: `state_dict` and `load_state_dict` go on without where the stream has its own. With `pack` the
        samples are documents, all of which every rank reads, and batches are of rows.
        Raises `UsageError` for a batch that does not divide or is never full, `PlanError` for one not the plan's.
        """
        if pack is not None:
            self._packings.append(pack)
            for engine in self._engines:
                check_keeps_apart(engine.module)
        planned = self.plan.global_batch_size
        if self.file is not None and batch_size not in (None, planned):
            raise PlanError(
                f"batch_size={batch_size}, but the plan is for a global batch of {planned} (dp={self.plan.dp} x "
                f"micro_batch_size={self.plan.micro_batch_size} x num_microbatches={self.plan.num_microbatches})",
                hint="leave batch_size out, or make a plan with paraplan recommend --global-batch",
            )
        batches = shard_dataset(
            dataset,
            BatchSettings(
                batch_size=planned if batch_size is None else batch_size,
                dp=self.dp,
                dp_rank=self.dp_rank,
                device=self.device,
                seed=seed,
                epochs=epochs,
                shuffle=shuffle,
                skip=skip,
                drop_last=drop_last,
                num_workers=num_workers,
                collate=collate,
                check=self._same_stream() if is_stream(dataset) or pack is not None else None,
            ),
            pack=pack,
            passes=self._passes,
        )
        batches.reading = lambda: self._agreement.explained(lambda: "job.shard")
        return batches

    def _same_stream(self) -> Callable[[list[Any]], None]:
        return SameStream(self.world, next(self._streams))

    def close(self) -> None:
        """Wait for checkpoints that are being written, say how the run compares with its prediction, and leave.

        Safe to call twice. Without it the process leaves its group at exit.
        """
        for engine in self._engines:
            engine.finish()
        for sync in self._sync:
            sync.leave()
        self._engines.clear()
        self._sync.clear()
        leave_group()

    def _abandon(self) -> None:
        """Leave after an error. Other ranks are not told that this one is done: it is not."""
        for sync in self._sync:
            atexit.unregister(sync.leave)
        self._engines.clear()
        self._sync.clear()
        self.connections.close()
        leave_group()

    def _watch(self, num_parameters: int) -> RunWatch:
        """Return what follows the steps of an engine; only that of rank 0 writes."""
        return RunWatch(
            device=self.device,
            baseline=SpeedBaseline(
                num_ranks=self.world.size,
                peak_flops_per_s=peak_flops_per_s(self.device, self.precision),
                num_parameters=num_parameters,
                estimate=None if self.file is None or not self.is_main else self.file.estimate,
            ),
            metrics=self.metrics if self.is_main else None,
            measured=self.measured if self.is_main and not self._engines else None,
            metrics_every=self.metrics_every,
            terminal=sys.stderr if self.is_main and self.shows_progress else None,
        )


def is_compiled(file: PlanFile | None) -> bool:
    """Whether the plan was made for blocks under torch.compile."""
    return file is not None and file.training is not None and file.training.compiled
