"""The largest micro-batches that may fit: beyond them no plan has to be priced."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from paraplan.cost.estimate import peak_memory
from paraplan.cost.plan_table import Ints, PlanTable
from paraplan.cost.workload import Workload

MARGIN = 1.25
"""A size is left out where the smallest plans need so many times the memory: others might need a little less."""


def largest_fitting(workload: Workload, plans: Sequence[PlanTable], sizes: Sequence[Ints]) -> list[int]:
    """Return for each table of plans the largest of its `sizes` of a micro-batch that some plan of the table may fit.

    The tables hold the plans that need least memory, of one sequence a micro-batch; sizes ascend. The smallest size is
    returned where none fits.
    """
    table = PlanTable.concatenate(plans)
    owner = np.repeat(np.arange(len(plans)), [len(each) for each in plans])
    share = table.micro_batch_size * table.num_microbatches
    low, high = np.zeros(len(plans), dtype=np.int64), np.array([len(each) for each in sizes])
    while (open_ones := high - low > 1).any():
        middle = (low + high) // 2
        rows = np.flatnonzero(open_ones[owner])
        size = np.array([each[place] for each, place in zip(sizes, np.minimum(middle, high - 1), strict=True)])
        micro = size[owner[rows]]
        tried = replace(table.select(rows), micro_batch_size=micro, num_microbatches=share[rows] // micro)
        least = np.full(len(plans), np.inf)
        np.minimum.at(least, owner[rows], peak_memory(workload, tried))
        may_fit = least <= MARGIN * workload.usable_memory_bytes
        low, high = np.where(open_ones & may_fit, middle, low), np.where(open_ones & ~may_fit, middle, high)
    return [int(each[place]) for each, place in zip(sizes, low, strict=True)]
