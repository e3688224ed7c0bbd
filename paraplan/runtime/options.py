"""Options of `prepare` beside the model, and of an engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from paraplan.errors import UsageError
from paraplan.plan.files import PlanFile
from paraplan.runtime.agreement import RankSync
from paraplan.runtime.checkpoints.adapter_files import Adapter
from paraplan.runtime.checks.batch_coupling import Coupling
from paraplan.runtime.checks.plan_check import Checking
from paraplan.runtime.checks.references import Verify
from paraplan.runtime.data.batches import TargetCount
from paraplan.runtime.optimizers.several import OptimizerFactory, SchedulerFactory
from paraplan.runtime.precision import LossScale, ReduceType
from paraplan.runtime.recompute.policy import RecomputePolicy
from paraplan.runtime.recovery.status import RankStatus
from paraplan.runtime.step.loss import LossFunction
from paraplan.runtime.step.reports import RunWatch


@dataclass(frozen=True)
class TrainingOptions:
    """The parts of a training beside the model and the plan. Only `loss_fn` and `optimizer` have no default."""

    loss_fn: LossFunction
    """`loss_fn(outputs, targets)` returns the mean over the targets of its micro-batch, or `(loss_sum, count)`.

    A dict of metrics may stand behind each: means, averaged as the loss is, `(sum, count)`, or `(value, "sum")`,
    `"max"` or `"min"`.
    """
    optimizer: OptimizerFactory
    """Called with a list of this rank's parameters; returns their optimizer, or a list of several.

    `parameters.named()` has their names in the whole model, to make groups of them."""
    scheduler: SchedulerFactory | None = None
    """Called with what `optimizer` returned; what it returns is stepped after every step."""
    max_grad_norm: float | None = None
    """The largest norm of the whole model's gradient; a longer one is clipped."""
    count_targets: TargetCount | None = None
    """`count_targets(targets)` says over how many targets the mean of a micro-batch goes.

    By default that is how many whole numbers among `targets` (or the inputs' `labels`) are not -100, or what `loss_fn`
    has as its `ignore_index`; without whole numbers it is the sequences.
    """
    compile_backend: str | None = None
    """Has torch.compile compile each of the repeated blocks ("inductor", also for a plan made with --compile)."""
    example_inputs: Any = None
    """A small batch to find the model's structure by, for models whose inputs are not token ids."""
    weights: str | Path | None = None
    """A safetensors file, or a folder of them, from which every rank reads its own part.

    The model may then be built in `runtime.without_weights()`, for one that no rank can hold whole.
    """
    batch_coupling: Coupling = "warn"
    """The treatment of samples of a batch that are compared (batch norm, contrastive losses, the balance of experts).

    "warn" computes them by parts of the batch, as DistributedDataParallel does, and says so with the losses of both
    ways; "refuse" ends the training there. "gather" gives batch norms the statistics, and `loss_fn` the outputs and
    targets, of the global batch.
    """
    verify: Verify = "auto"
    """Whether steps are checked: that the plan trains as the model itself does, and how the batch is coupled.

    The first is loss, gradients and buffers beside one process; "auto" does so where the plan changes the model and its
    weights, or those of one block at a time, fit beside it, "full" always. "off" checks nothing.
    """
    verify_every: int | None = None
    """After how many steps that is done again: by default in steps 2, 10, 100, 1,000 and so on, with 0 never."""
    find_unused: bool = False
    """Whether some parameters take no part in some steps, under ZeRO or a pipeline; DDP needs no word of it."""
    split: Mapping[str, str] | None = None
    """How layers are split over `tp`: a style by patterns of their names, in which `*` stands for one part of a name.

    `{"layers.*.qkv": "packed(3)", "layers.*.out": "rowwise"}`: colwise, rowwise, packed, experts, vocabulary, whole,
    and `divide(num_heads)` of modules that write sizes down. Without it the model's own plan says so, or one is tried.
    """
    recompute: RecomputePolicy | None = None
    """Which blocks are run again in the backward pass, and what they keep; it refines the plan's `recompute`."""
    reduce_dtype: ReduceType = "fp32"
    """In which type gradients are summed over replicas: "bf16" sends half as much, and rounds each rank's share."""

    def __post_init__(self) -> None:
        """Raise `UsageError` for a class in place of a loss, a norm of 0 or less, and a number of steps below 0."""
        if isinstance(self.loss_fn, type):
            name = self.loss_fn.__name__
            raise UsageError(f"loss_fn is the class {name}", hint=f"give one of it: {name}()")
        if self.max_grad_norm is not None and not self.max_grad_norm > 0:
            raise UsageError(f"max_grad_norm={self.max_grad_norm}", hint="give a norm above 0: 1.0 is usual")
        if self.verify_every is not None and self.verify_every < 0:
            raise UsageError(f"verify_every={self.verify_every}", hint="give a number of steps, or 0 for never")


@dataclass
class EngineOptions:
    """The parts of an engine beside its part of the model and the optimizer. `loss_scale` is given in fp16."""

    max_grad_norm: float | None = None
    scheduler: LRScheduler | None = None
    loss_scale: LossScale | None = None
    sync: RankSync | None = None
    watch: RunWatch | None = None
    file: PlanFile | None = None
    checking: Checking = field(default_factory=Checking)
    adapters: tuple[Adapter, ...] = ()
    status: RankStatus = field(default_factory=RankStatus)
