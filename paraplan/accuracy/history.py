"""`History`: the user's own runs, which correct predictions of plans that are alike."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from paraplan import __version__
from paraplan.accuracy.shared_errors import load_shared_errors
from paraplan.cost.correction import NUM_SIZES, WORKLOAD_SIZES, RunCorrection, SharedErrors, learned
from paraplan.cost.plan_table import PlanTable
from paraplan.cost.workload import Workload
from paraplan.plan.kept_runs import KeptRun, shortened
from paraplan.plan.parallel import ParallelPlan
from paraplan.records import Record

MOST_USED = 64
"""Runs that correct a workload: the nearest."""
CPU = "cpu"
WORTH_SAYING = 0.01
"""The least change of a prediction, or of the width of its range, that is said."""


class HistoryEffect(Record):
    """The effect of the user's own runs on the prediction of one plan."""

    runs: int
    """Runs on this kind of GPU with this framework."""
    step_time_factor: float
    """The step time as it would be without them is multiplied by this."""
    memory_factor: float
    """The peak is multiplied by this."""
    step_time_width: float
    """How wide the range of the step time is on a logarithmic scale, as a share of the range without them."""
    memory_width: float
    """How wide the range of the peak is."""

    @property
    def is_worth_saying(self) -> bool:
        """Whether a figure is clearly another one."""
        logs = [abs(math.log(factor)) for factor in (self.step_time_factor, self.memory_factor)]
        return max(*logs, abs(1 - self.step_time_width), abs(1 - self.memory_width)) >= WORTH_SAYING


@dataclass(frozen=True)
class History:
    """Runs of the user with what was predicted of them."""

    runs: tuple[KeptRun, ...]
    """All of them, of whatever machine and framework."""
    host: str = ""
    """The machine that asks: CPUs differ from one to the next."""
    version: str = __version__
    """The release that predicts."""

    def applied_to(self, workload: Workload) -> Workload:
        """Return `workload` with predictions corrected by the runs of its kind; as it is without any."""
        used = self.used_for(workload)
        times = [run for run in used if run.step_time_s is not None]
        peaks = [run for run in used if run.peak_memory_bytes is not None]
        shared, kind = load_shared_errors(), workload.run_kind
        return replace(
            workload,
            correction=_correction(shared.step_time, kind, times, [_log_time(run) for run in times]),
            memory_correction=_correction(shared.memory, kind, peaks, [_log_peak(run) for run in peaks]),
            num_corrected_by=len(used),
        )

    def used_for(self, workload: Workload) -> list[KeptRun]:
        """Return the runs that correct a workload, the nearest to its model and training first."""
        of_kind = [run for run in self._of_kind(workload) if self._why_unused(run) is None]
        own = workload.run_sizes(PlanTable.of_plans([ParallelPlan()]))[0, WORKLOAD_SIZES]

        def distance(run: KeptRun) -> tuple[float, str]:
            sizes = np.array(run.predicted.sizes)[WORKLOAD_SIZES]
            return float(np.abs(sizes - own).sum()), run.to_json(indent=None)

        return sorted(of_kind, key=distance)[:MOST_USED]

    def left_out(self, workload: Workload) -> tuple[str, ...]:
        """Return a sentence for each reason for which runs of a workload's kind do not count."""
        reasons = Counter(reason for run in self._of_kind(workload) if (reason := self._why_unused(run)) is not None)
        return tuple(
            f"{count} kept run{'s' if count != 1 else ''} on this kind of machine {'are' if count != 1 else 'is'} left "
            f"out: {reason}"
            for reason, count in sorted(reasons.items())
        )

    def _of_kind(self, workload: Workload) -> list[KeptRun]:
        kind = shortened(workload.run_kind)
        return [run for run in self.runs if run.predicted.kind == kind]

    def _why_unused(self, run: KeptRun) -> str | None:
        predicted = run.predicted
        if predicted.version != self.version or len(predicted.sizes) != NUM_SIZES:
            return f"paraplan {predicted.version} predicted them, and this is {self.version}; later runs count again"
        if predicted.gpu == CPU and run.host != self.host:
            return f"they ran on the CPUs of {run.host or 'another machine'}, and this is {self.host}"
        return None


def history_in_words(effect: HistoryEffect | None) -> str | None:
    """Return by what the user's own runs have corrected a prediction; None where they say nothing of it."""
    if effect is None or not effect.is_worth_saying:
        return None
    runs = "1 run" if effect.runs == 1 else f"{effect.runs} runs"
    memory = "" if abs(effect.memory_factor - 1) < WORTH_SAYING else f", memory x{effect.memory_factor:.2f}"
    return f"corrected by {runs} here: x{effect.step_time_factor:.2f}{memory}"


def effect_of_history(workload: Workload, plan: ParallelPlan) -> HistoryEffect | None:
    """Return what the user's own runs have done to the prediction of a plan; None without any."""
    if not workload.num_corrected_by:
        return None
    table = PlanTable.of_plans([plan])
    return HistoryEffect(
        runs=workload.num_corrected_by,
        step_time_factor=float(workload.time_factors(table)[0]),
        memory_factor=float(workload.memory_factors(table)[0]),
        step_time_width=_width(workload.correction, workload, table),
        memory_width=_width(workload.memory_correction, workload, table),
    )


def _width(correction: RunCorrection | None, workload: Workload, table: PlanTable) -> float:
    return 1.0 if correction is None else float(correction.widths(workload.run_sizes(table), workload.run_kind)[0])


def _correction(
    shared: SharedErrors, kind: str, runs: Sequence[KeptRun], logs: Sequence[float]
) -> RunCorrection | None:
    if not runs:
        return None
    return learned(shared, kind, np.array([run.predicted.sizes for run in runs]), np.array(logs))


def _log_time(run: KeptRun) -> float:
    assert run.step_time_s is not None
    return math.log(run.step_time_s / run.predicted.step_time_s)


def _log_peak(run: KeptRun) -> float:
    assert run.peak_memory_bytes is not None
    return math.log(run.peak_memory_bytes / run.predicted.peak_memory_bytes)
