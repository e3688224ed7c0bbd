"""The time of the slowest of many, which the others wait for."""

from __future__ import annotations

from statistics import NormalDist

import numpy as np

from paraplan.cost.constants import CostConstants
from paraplan.cost.plan_table import Floats, Ints, PlanTable


def slowest_gpu_share(constants: CostConstants, table: PlanTable) -> Floats:
    """Return how much longer kernels take on the slowest GPU of each plan than on a usual one."""
    gpus = table.dp * table.tp * table.pp * table.cp * table.devices
    return np.asarray(1.0 + constants.gpu_deviation * largest_of(gpus))


def largest_of(counts: Ints | Floats) -> Floats:
    """Return the mean of the largest of so many normal numbers of deviation 1 (Blom 1958: 0 of one, 1.43 of eight)."""
    normal = NormalDist()
    known = {count: normal.inv_cdf((count - 0.375) / (count + 0.25)) for count in set(counts.tolist())}
    return np.array([known[count] for count in counts.tolist()])
