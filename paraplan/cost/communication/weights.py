"""What passes do with weights beside computing with them: copies inside a GPU, and the host's work for shards."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from paraplan.cost.plan_table import Floats, Ints, PlanTable
from paraplan.cost.workload import Workload

AUTOCAST_BYTES = 6.0
"""What a cast between 16 bits and fp32 moves for each element: it reads one and writes the other."""


@dataclass(frozen=True, eq=False)
class WeightWork:
    """What each micro-batch does with weights and their gradients, one entry a plan.

    Bytes through a GPU's memory: `cast` by autocast in each pass, a recomputed one too, for each weight of a matmul;
    `forward` and `backward` for each parameter. Seconds of the host for each block: `forward_host_s` and
    `backward_host_s`.
    """

    cast: Floats
    forward: Floats
    backward: Floats
    forward_host_s: Floats
    backward_host_s: Floats

    def select(self, rows: Ints) -> WeightWork:
        """Return the work of some of the plans."""
        return WeightWork(*(getattr(self, each.name)[rows] for each in fields(self)))


def weight_work(workload: Workload, table: PlanTable) -> WeightWork:
    """Return what one micro-batch does with weights and their gradients under each plan.

    Weights are copied out of the buffer that they are gathered in, gradients into the one that is reduced. Autocast
    casts fp32 weights and their gradients. A gradient is added to those of earlier micro-batches, unless the product
    that makes it does so or ranks keep shards of gradients. What happens once a step is divided among its
    micro-batches. Copies on a stream of their own count in full: they take bandwidth from what runs beside them.
    """
    storage, profile = workload.framework.storage, workload.framework.data_parallel
    is_mixed = workload.is_mixed_precision
    kept_bytes = storage.gradient_bytes if is_mixed else 4.0
    once = 1.0 / table.num_microbatches
    is_whole, keeps_shards, is_zero_3 = table.zero_stage == 0, table.zero_stage >= 2, table.zero_stage == 3
    gathers = np.where(is_zero_3, 1.0, np.where(is_whole, 0.0, once) * profile.uses_fsdp)
    again = 1.0 * is_zero_3
    reductions = np.where(keeps_shards, 1.0, np.where(is_whole, 0.0, once))
    cast = np.where(is_whole, AUTOCAST_BYTES if storage.is_autocast and is_mixed else 0.0, 0.0)
    made_bytes = np.where(cast > 0, 4.0, float(workload.training.activation_bytes))
    adds = np.where(keeps_shards, 0.0, 0.0 if profile.fuses_accumulation else 1.0 - once)
    has_replicas = is_whole & (table.dp * table.cp > 1) & (table.devices == 1)
    reduced = reductions * profile.reduce_traffic[kept_bytes > 2] + once * profile.replica_traffic * has_replicas
    return WeightWork(
        cast=cast,
        forward=gathers * profile.gather_traffic,
        backward=again * profile.gather_traffic + reduced + adds * (made_bytes + 2.0 * kept_bytes),
        forward_host_s=gathers * profile.gather_host_s,
        backward_host_s=again * profile.gather_host_s + reductions * profile.reduce_host_s,
    )
