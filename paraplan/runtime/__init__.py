"""The runtime: one rank of a training job under a plan.

    job = runtime.init()
    engine = job.prepare(model, loss_fn=loss_fn, optimizer=lambda params: torch.optim.AdamW(params, lr=3e-4))
    for inputs, targets in job.shard(dataset):
        loss = engine.step(inputs, targets)

The same script runs in one process, under torchrun, and under `paraplan launch` with any plan that
`paraplan.plan.support` admits; the plan does not change the training.
"""

from paraplan.runtime.data.packing import Packing
from paraplan.runtime.data_parallel.sharded_table import ShardedEmbedding
from paraplan.runtime.engine import Engine
from paraplan.runtime.job import Job
from paraplan.runtime.job_start import init
from paraplan.runtime.options import TrainingOptions
from paraplan.runtime.recompute.policy import RecomputePolicy
from paraplan.runtime.structure.meta import without_weights

__all__ = [
    "Engine",
    "Job",
    "Packing",
    "RecomputePolicy",
    "ShardedEmbedding",
    "TrainingOptions",
    "init",
    "without_weights",
]
