"""A time that no plan goes below, cheap enough for every plan of a space: what is slower anyway need not be priced."""

from __future__ import annotations

import numpy as np

from paraplan.cost.blocks import block_costs
from paraplan.cost.table import RECOMPUTES, SCHEDULES, Floats, PlanTable
from paraplan.cost.workload import Workload

_ONE_CHUNK = tuple(SCHEDULES.index(name) for name in ("gpipe", "1f1b"))
_FULL = RECOMPUTES.index("full")


def least_step_s(workload: Workload, table: PlanTable) -> Floats:
    """Return seconds of a step that each plan needs at least: its compute, spread over its stages without loss.

    Under GPipe and 1F1B the slowest stage k waits for the stages before it, and they for it: a step takes at least
    `sum of t_j over j < k + m t_k`, whose mean over k is `(m + (p - 1) / 2)` times the mean stage.
    """
    costs = block_costs(workload, table)
    key = costs.key
    again = np.where(table.recompute == _FULL, costs.forward_s[key, -1], costs.recompute_s[key, -1])
    blocks = costs.forward_s[key, -1] + costs.backward_s[key, -1] + again
    each = (blocks + costs.embedding_s[key] + costs.head_s[key]) / table.pp
    waits = np.where(np.isin(table.schedule, _ONE_CHUNK), (table.pp - 1) / 2, 0.0)
    return np.asarray(each * (table.num_microbatches + waits))
