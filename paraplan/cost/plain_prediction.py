"""The prediction of a plan without the user's own runs, which these are compared with once they were measured."""

from __future__ import annotations

import numpy as np

from paraplan import __version__
from paraplan.cost.estimate import PlanEstimate
from paraplan.cost.plan_table import PlanTable
from paraplan.cost.workload import Workload
from paraplan.plan.kept_runs import PlainPrediction, shortened


def plain_prediction(workload: Workload, estimate: PlanEstimate) -> PlainPrediction | None:
    """Return the prediction of an estimate without what the user's own runs have corrected of it.

    None for a workload with a calibration to runs, which takes their place, and for a plan without a step time.
    """
    is_calibrated = workload.correction is not None and not workload.num_corrected_by
    if is_calibrated or not 0 < estimate.step.step_time_s < float("inf"):
        return None
    table = PlanTable.of_plans([estimate.plan])
    time, memory = (float(factors(table)[0]) for factors in (workload.time_factors, workload.memory_factors))
    return PlainPrediction(
        kind=shortened(workload.run_kind),
        gpu=workload.cluster.gpu.name,
        sizes=tuple(np.round(workload.run_sizes(table)[0], 6).tolist()),
        step_time_s=estimate.step.step_time_s / time,
        peak_memory_bytes=estimate.peak_memory_bytes / memory,
        version=__version__,
    )
