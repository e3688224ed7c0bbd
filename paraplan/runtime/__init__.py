"""The runtime: one rank of a training job under a plan.

    job = runtime.init()
    engine = job.prepare(model, loss_fn=loss_fn, optimizer=lambda params: torch.optim.AdamW(params, lr=3e-4))
    for inputs, targets in job.shard(dataset):
        loss = engine.step(inputs, targets)

The same script runs in one process, under torchrun, and under `paraplan launch` with any plan that
`paraplan.plan.support` admits; the plan does not change the training.

Each name is imported when it is first used: ranks that measure links need nothing of it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paraplan.runtime.data.packed_rows import pack_rows as pack_rows
    from paraplan.runtime.data.packing import Packing as Packing
    from paraplan.runtime.engine import Engine as Engine
    from paraplan.runtime.job import Job as Job
    from paraplan.runtime.job_start import init as init
    from paraplan.runtime.options import TrainingOptions as TrainingOptions
    from paraplan.runtime.recompute.policy import RecomputePolicy as RecomputePolicy
    from paraplan.runtime.structure.meta import without_weights as without_weights

_HOME_OF = {
    "Engine": "engine",
    "Job": "job",
    "Packing": "data.packing",
    "RecomputePolicy": "recompute.policy",
    "TrainingOptions": "options",
    "init": "job_start",
    "pack_rows": "data.packed_rows",
    "without_weights": "structure.meta",
}

__all__ = [
    "Engine",
    "Job",
    "Packing",
    "RecomputePolicy",
    "TrainingOptions",
    "init",
    "pack_rows",
    "without_weights",
]


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'paraplan.runtime' has no attribute {name!r}")
    value = getattr(import_module(f"paraplan.runtime.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
