"""What an engine works with."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch.optim.lr_scheduler import LRScheduler

from paraplan.plan.files import PlanFile
from paraplan.runtime.peers import Peers
from paraplan.runtime.step.loss_scale import LossScale
from paraplan.runtime.step.micro_batching import Checking
from paraplan.runtime.step.reports import RunWatch
from paraplan.runtime.timeouts import TimeoutWatch


@dataclass
class Equipment:
    """What an engine works with beside its part of the model and the optimizer. `loss_scale` is given in fp16."""

    max_grad_norm: float | None = None
    scheduler: LRScheduler | None = None
    loss_scale: LossScale | None = None
    peers: Peers | None = None
    timeouts: TimeoutWatch | None = None
    watch: RunWatch | None = None
    file: PlanFile | None = None
    checking: Checking = field(default_factory=Checking)
