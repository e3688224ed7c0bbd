"""Calibrations: constants of the cost model fitted to measured runs."""

from __future__ import annotations

from pathlib import Path

from paraplan.accuracy.calibration import Calibration, calibrate_to_runs, read_calibration
from paraplan.accuracy.measured_runs import MeasuredRun, UnusableRow, read_runs
from paraplan.accuracy.run_workload import BundledData
from paraplan.errors import PlanError
from paraplan.model.named import known_configs


def load_calibration(path: str | Path) -> Calibration:
    """Return the calibration that `paraplan calibrate --runs` wrote; `.applied_to(workload)` uses it.

    Raises `PlanError` for a file that cannot be read or holds none.
    """
    try:
        text = Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise PlanError(f"cannot read {path}: {reason}", hint="write one with paraplan calibrate --runs -o") from None
    return read_calibration(text, source=str(path))


def fit_to_runs(text: str, *, source: str, title: str) -> Calibration:
    """Return the constants fitted to a CSV table of measured runs; `source` names it in errors, `title` in the result.

    Raises `PlanError` for a text that is no table of runs, and for too few of them.
    """
    rows = read_runs(text, source=source)
    measured = [row for row in rows if isinstance(row, MeasuredRun)]
    unusable = tuple(f"{row.id}: {row.reason}" for row in rows if isinstance(row, UnusableRow))
    fitted = calibrate_to_runs(measured, BundledData(configs=known_configs()), source=title)
    return fitted.replace(skipped=unusable + fitted.skipped)
