"""Predictions of measured runs, and how far they are off."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from pydantic import ValidationError

from paraplan.accuracy.calibration import Calibration
from paraplan.accuracy.measured_runs import MeasuredRun, UnusableRow, read_runs, unread_columns
from paraplan.accuracy.prediction import is_standard, predict_run
from paraplan.accuracy.run_prediction import RunPrediction
from paraplan.accuracy.run_workload import BundledData, plan_of_run, workload_of_run
from paraplan.accuracy.scoring import FitScore, Score, SweepScore, score, score_fits, score_sweeps
from paraplan.accuracy.why import SourceFactors, source_factors
from paraplan.errors import ParaplanError
from paraplan.model.named import known_configs
from paraplan.progress import doing, say, stoppable

Row = tuple[MeasuredRun | UnusableRow, RunPrediction]


@dataclass(frozen=True)
class Scores:
    """Errors of some rows, and how well the plans of a sweep are ranked."""

    rows: tuple[Row, ...]
    """The rows that are scored together."""

    @cached_property
    def step_time(self) -> Score:
        """Errors of step times, by group."""
        return score([prediction for _, prediction in self.rows], "step_time_error")

    @cached_property
    def memory(self) -> Score:
        """Errors of peaks, by group."""
        return score([prediction for _, prediction in self.rows], "memory_error")

    @cached_property
    def sweeps(self) -> dict[str, SweepScore]:
        """How well the best plan of a sweep is found: of all its batches, and at each global batch."""
        pairs = [(entry, prediction) for entry, prediction in self.rows if isinstance(entry, MeasuredRun)]
        return {"sweeps": score_sweeps(pairs), "batch_sweeps": score_sweeps(pairs, at_one_batch=True)}

    def to_dict(self) -> dict[str, Any]:
        """Return the scores as `paraplan validate --json` prints them."""
        sweeps = {name: found.model_dump() for name, found in self.sweeps.items()}
        return {"step_time": _figures(self.step_time) | sweeps, "memory": _figures(self.memory)}


@dataclass(frozen=True)
class Validation:
    """Measured runs beside their predictions."""

    rows: tuple[Row, ...]
    """Each run, or why it cannot be read, with its prediction."""
    everything: bool = False
    """Whether rows of low quality or with unusual features are scored too."""
    calibration: Calibration | None = None
    """Calibration of the predictions, beside the sourced constants."""
    unread: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """By table its columns from which nothing is read, each with the one that may be meant, or nothing."""

    @cached_property
    def scored(self) -> Scores:
        """The rows that are a fair test."""
        return Scores(tuple(row for row in self.rows if self._is_scored(row)))

    @cached_property
    def others(self) -> Scores:
        """The rows that were predicted and are not a fair test."""
        return Scores(tuple(row for row in self.rows if not self._is_scored(row) and row[1].skipped is None))

    @property
    def skipped(self) -> tuple[RunPrediction, ...]:
        """The rows that cannot be predicted, each with its reason."""
        return tuple(prediction for _, prediction in self.rows if prediction.skipped is not None)

    @property
    def fits(self) -> FitScore:
        """How often it was predicted rightly whether a run fits."""
        return score_fits(self.rows)

    def factors(self) -> list[SourceFactors]:
        """Return which one factor would explain most of the errors of each source that is scored.

        Ctrl-C on a terminal ends it with the sources so far.
        """
        runs = [entry for entry, _ in self.scored.rows if isinstance(entry, MeasuredRun)]
        with doing("scaling one factor after the other"), stoppable():
            return source_factors(runs, BundledData(configs=known_configs()), calibration=self.calibration)

    def to_dict(self) -> dict[str, Any]:
        """Return what `paraplan validate --json` prints."""
        skipped = self.skipped
        return {
            "rows": [
                prediction.model_dump() | {"scored": self._is_scored((run, prediction))}
                for run, prediction in self.rows
            ],
            "summary": self.scored.to_dict()
            | {
                "others": self.others.to_dict(),
                "fits": self.fits.model_dump(),
                "skipped": {
                    "rows": len(skipped),
                    "share": len(skipped) / max(1, len(self.rows)),
                    "reasons": dict(Counter(prediction.skipped for prediction in skipped).most_common()),
                },
            },
        }

    def _is_scored(self, row: Row) -> bool:
        entry, prediction = row
        is_fair = isinstance(entry, MeasuredRun) and (self.everything or is_standard(entry))
        return is_fair and prediction.skipped is None


def validate(
    tables: Mapping[str, str], *, calibration: Calibration | None = None, everything: bool = False
) -> Validation:
    """Return the predictions of measured runs: the texts of CSV tables by the names that errors give them.

    Raises `PlanError` for a text that is no table of runs.
    """
    entries = [entry for source, text in tables.items() for entry in read_runs(text, source=source)]
    data = BundledData(configs=known_configs())
    rows = []
    with doing("predicting measured runs"):
        for number, entry in enumerate(entries):
            if number % 50 == 0:
                say(f"predicting measured runs, {number} of {len(entries)}")
            rows.append((entry, _predict(entry, data, calibration)))
    unread = {source: found for source, text in tables.items() if (found := unread_columns(text))}
    return Validation(tuple(rows), everything=everything, calibration=calibration, unread=unread)


def _predict(entry: MeasuredRun | UnusableRow, data: BundledData, fitted: Calibration | None) -> RunPrediction:
    if isinstance(entry, UnusableRow):
        return RunPrediction(id=entry.id, source="", gpu="", framework="", skipped=entry.reason)
    try:
        entry = data.completed(entry)
        workload = workload_of_run(entry, data)
        if fitted is not None:
            workload = fitted.applied_to(workload)
        is_known = data.frameworks.find(entry.framework) is not None
        plan = plan_of_run(entry, workload.framework)
        return predict_run(entry, workload, plan, is_known_framework=is_known)
    except ParaplanError as error:
        reason = error.message
    except ValidationError as error:
        reason = error.errors()[0]["msg"].removeprefix("Value error, ")
    return RunPrediction(id=entry.id, source=entry.source, gpu=entry.gpu, framework=entry.framework, skipped=reason)


def _figures(figures: Score) -> dict[str, Any]:
    return figures.all_rows.model_dump() | figures.model_dump(exclude={"all_rows"})
