"""A time that no plan goes below, cheap enough for every plan of a space: what is slower anyway need not be priced."""

from __future__ import annotations

import numpy as np

from paraplan.cost.blocks import BlockCosts, block_costs
from paraplan.cost.collectives import fastest_all_reduce_s
from paraplan.cost.table import RECOMPUTES, SCHEDULES, Floats, PlanTable
from paraplan.cost.workload import Workload

_ONE_CHUNK = tuple(SCHEDULES.index(name) for name in ("gpipe", "1f1b"))
_INTERLEAVED, _ZERO_BUBBLE = (SCHEDULES.index(name) for name in ("interleaved_1f1b", "zero_bubble"))
_FULL = RECOMPUTES.index("full")


def least_step_s(workload: Workload, table: PlanTable, costs: BlockCosts | None = None) -> Floats:
    """Return seconds of a step that each plan needs at least: compute and tensor parallelism, spread without loss.

    Under GPipe and 1F1B the slowest stage k waits for the stages before it, and they for it: a step takes at least
    `sum of t_j over j < k + m t_k`, whose mean over k is `(m + (p - 1) / 2)` times the mean stage. Interleaved they
    wait for one chunk of each stage alone, under zero bubble for the forward passes.
    `costs` are the plans' `block_costs`, where they are known.
    """
    costs = costs or block_costs(workload, table)
    key, num_blocks = costs.key, workload.model.num_blocks
    is_full = table.recompute == _FULL
    activation = costs.boundary_bytes[key] * np.where(table.sequence_parallel == 1, table.tp, 1)
    all_reduce_s = fastest_all_reduce_s(workload, table, activation)
    backward_sends = table.sequence_parallel if workload.habits.overlaps_tensor_backward else 2.0
    sends = num_blocks * all_reduce_s * (2.0 * (1 + is_full) + backward_sends)
    forward_s = costs.forward_s[key, -1]
    again = np.where(is_full, forward_s, costs.recompute_s[key, -1])
    blocks = forward_s + costs.backward_s[key, -1] + again + sends
    each = (blocks + costs.embedding_s[key] + costs.head_s[key]) / table.pp
    # Chunks are alike where blocks are, and are divided evenly.
    is_even = (table.split == 0) & (len(workload.model.runs) == 1)
    chunk = blocks / num_blocks * (num_blocks // (table.pp * table.virtual)) * is_even
    waited = np.select(
        [np.isin(table.schedule, _ONE_CHUNK), table.schedule == _INTERLEAVED, table.schedule == _ZERO_BUBBLE],
        [each, chunk, forward_s / table.pp * is_even],
        default=0.0,
    )
    return np.asarray(each * table.num_microbatches + waited * (table.pp - 1) / 2)
