"""The user's own runs: those that were kept, and what they say of predictions."""

from __future__ import annotations

import datetime as dt
import socket
from pathlib import Path

from paraplan.accuracy.history import History as History
from paraplan.accuracy.history import HistoryEffect as HistoryEffect
from paraplan.accuracy.history import effect_of_history as effect_of_history
from paraplan.accuracy.kept_rows import run_of_table
from paraplan.accuracy.trainer_logs import read_trainer_log
from paraplan.api.estimates import Estimate
from paraplan.api.validation import Validation
from paraplan.cost.plain_prediction import plain_prediction
from paraplan.errors import PlanError, UsageError
from paraplan.plan.kept_runs import KeptRun, keep_runs, kept_runs_path, read_kept_runs, shortened
from paraplan.plan.kept_runs import KeptRunsError as KeptRunsError
from paraplan.units import format_bytes, format_seconds


def has_history() -> bool:
    """Return whether any run of the user was kept."""
    return kept_runs_path().exists()


def load_history(path: str | Path | None = None) -> History:
    """Return the runs that `paraplan launch` and `paraplan validate --keep` kept; `.applied_to(workload)` uses them.

    `path` is the file, by default the user's own ($PARAPLAN_HISTORY, or `~/.local/state/paraplan/runs.json`): none are
    there without it. Raises `ParaplanError` for a file that is damaged.
    """
    found = kept_runs_path() if path is None else Path(path)
    return History(read_kept_runs(found), host=socket.gethostname())


def keep_table(found: Validation) -> str:
    """Keep the rows of measured runs that say something of predictions; return what to say of it.

    Raises `UsageError` for predictions with a calibration, and for tables without such a row, and `ParaplanError` for
    a file of kept runs that is damaged.
    """
    if found.calibration is not None:
        raise UsageError(
            "runs are kept beside predictions without a calibration", hint="leave out --calibration, or --keep"
        )
    runs = [run for _, row in found.rows if (run := run_of_table(row)) is not None]
    if not runs:
        raise UsageError(
            f"none of {len(found.rows)} rows can be kept: they need a step time, or a peak that torch's allocator "
            "reported, within ten times of what is predicted",
            hint="paraplan explain validate has the columns",
        )
    total = keep_runs(kept_runs_path(), runs)
    count = f"{len(runs)} of {len(found.rows)} rows {'are' if len(runs) != 1 else 'is'} kept for later estimates"
    return f"{count}, {total} runs in all: {kept_runs_path()}"


def keep_measured(estimate: Estimate, measured: str) -> str:
    """Keep what a run of a plan measured, seconds of a step or the path of a trainer's log; return what to say of it.

    Raises `UsageError` for what is neither, `PlanError` for a log of something else, and `ParaplanError` for a file of
    kept runs that is damaged.
    """
    plain = plain_prediction(estimate.workload, estimate.result)
    if plain is None:
        raise UsageError("runs are kept beside predictions without a calibration", hint="leave out --calibration")
    step_s, peak, whose = _measured(estimate, measured)
    run = KeptRun(
        predicted=plain,
        step_time_s=step_s,
        peak_memory_bytes=peak if estimate.plan.pp == 1 else None,
        name=shortened(f"{estimate.workload.model.name}: {estimate.plan.describe()}"),
        source=shortened(measured),
        host=socket.gethostname(),
        day=str(dt.date.today()),
    )
    words = f"measured {format_seconds(step_s)} a step ({whose}), {format_seconds(plain.step_time_s)} predicted without"
    if not run.is_plausible:
        raise PlanError(
            f"{words}: more than ten times apart is no error of a prediction",
            hint="give what was measured of this very plan",
        )
    keep_runs(kept_runs_path(), [run])
    memory = "" if run.peak_memory_bytes is None else f", peak {format_bytes(run.peak_memory_bytes)}"
    return f"{words}{memory}; kept for later estimates"


def _measured(estimate: Estimate, measured: str) -> tuple[float, int | None, str]:
    """Return seconds of a step, the peak where it is known, and whose figures they are."""
    try:
        seconds = float(measured)
    except ValueError:
        pass
    else:
        if not 0 < seconds < 1e6:
            raise UsageError(f"--measured {measured} is not a number of seconds above 0", hint="--measured 4.2")
        return seconds, None, "as given"
    path = Path(measured)
    try:
        with path.open("rb") as file:
            text = file.read(_MOST_LOG_BYTES + 1)
    except OSError as error:
        raise UsageError(
            f"--measured {measured} is neither seconds nor a file: {error.strerror}", hint="--measured 4.2"
        ) from None
    if len(text) > _MOST_LOG_BYTES:
        raise UsageError(f"{measured} has more than {_MOST_LOG_BYTES:,} bytes", hint="give its last part")
    log = read_trainer_log(text.decode(errors="replace"), source=measured)
    training, plan = estimate.workload.training, estimate.plan
    step_s = log.step_s(
        global_batch_size=training.global_batch_size, seq_length=training.seq_length, num_gpus=plan.world_size
    )
    count = (
        "mean of a training" if log.num_times == 1 and log.trainer == "transformers" else (f"median of {log.num_times}")
    )
    return step_s, log.peak_memory_bytes, f"{log.trainer}, {count}"


_MOST_LOG_BYTES = 100_000_000
