"""How a model is trained beside the plan: the one list of what `job.prepare` takes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paraplan.runtime.recompute_policy import RecomputePolicy
from paraplan.runtime.several_optimizers import OptimizerFactory, SchedulerFactory
from paraplan.runtime.step.batches import TargetCount
from paraplan.runtime.step.forward_state import BatchStatistics
from paraplan.runtime.step.loss import LossFunction
from paraplan.runtime.step.references import Verify


@dataclass(frozen=True)
class TrainingOptions:
    """What a training is made of beside the model and the plan. Only `loss_fn` and `optimizer` have no default."""

    loss_fn: LossFunction
    """`loss_fn(outputs, targets)` returns a mean or a sum over its micro-batch, or `(loss_sum, count)`.

    A dict of metrics may stand behind each; they are averaged as the loss is.
    """
    optimizer: OptimizerFactory
    """Called with a list of this rank's parameters; returns their optimizer, or a list of several."""
    scheduler: SchedulerFactory | None = None
    """Called with what `optimizer` returned; what it returns is stepped after every step."""
    max_grad_norm: float | None = None
    """The largest norm of the whole model's gradient; a longer one is clipped."""
    count_targets: TargetCount | None = None
    """Over how many targets the mean of a micro-batch goes, where the code of `loss_fn` does not show it."""
    compile_backend: str | None = None
    """Has torch.compile compile each of the repeated blocks ("inductor", also for a plan made with --compile)."""
    example_inputs: Any = None
    """A small batch to find the model's structure by, for models whose inputs are not token ids."""
    weights: str | Path | None = None
    """A safetensors file, or a folder of them, from which every rank reads its own part.

    The model may then be built in `runtime.without_weights()`, for one that no rank can hold whole.
    """
    batch_statistics: BatchStatistics = "global"
    """What buffers see that the forward pass writes (batch norm): the global batch, or each micro-batch ("local").

    "global" refuses a plan under which that cannot be had.
    """
    verify: Verify = "auto"
    """Whether the first step is checked beside the model itself, on two sequences: loss, gradients and buffers.

    "auto" does so where the plan changes the model and a copy of it is small beside the free memory, "full" always.
    """
    gather_outputs: bool = False
    """Whether `loss_fn` gets outputs and targets of the global batch, whose sequences it compares (contrastive)."""
    find_unused: bool = False
    """Whether some parameters take no part in some steps, under ZeRO or a pipeline; DDP needs no word of it."""
    recompute: RecomputePolicy | None = None
    """Which blocks are run again in the backward pass, and what they keep; it refines the plan's `recompute`."""
