"""Rows of tables of measured runs as runs of the user's own."""

from __future__ import annotations

from paraplan.accuracy.run_prediction import RunPrediction
from paraplan.plan.kept_runs import KeptRun, shortened


def run_of_table(row: RunPrediction) -> KeptRun | None:
    """Return a row of a table of measured runs as a run to keep; None for one that says nothing of a prediction.

    Peaks count where torch's allocator reported them.
    """
    plain = row.plain
    is_allocated = row.memory_reading in ("max_allocated", "max_reserved") and row.memory_error is not None
    if plain is None or row.fits is False or (row.step_time_error is None and not is_allocated):
        return None
    run = KeptRun(
        predicted=plain,
        step_time_s=None if row.step_time_error is None else plain.step_time_s / (1 + row.step_time_error),
        peak_memory_bytes=plain.peak_memory_bytes / (1 + (row.memory_error or 0.0)) if is_allocated else None,
        name=shortened(row.id),
        source=shortened(row.source),
    )
    return run if run.is_plausible else None
