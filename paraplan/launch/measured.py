"""Measurements of the ranks of a plan: noted in the folder of the run, and kept for later estimates."""

from __future__ import annotations

import json
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paraplan.errors import ParaplanError

if TYPE_CHECKING:  # pydantic: a tenth of a second for launches without a plan
    from paraplan.plan.files import PlanFile
    from paraplan.plan.kept_runs import MeasuredRun, PlainPrediction

MEASURED_VARIABLE = "PARAPLAN_MEASURED"
"""The file into which rank 0 writes what it measured."""
MEASURED_FILE = "measured.json"
FEWEST_STEPS = 5
"""Steps after the first from which on a median says something."""
LIKE_PLANNED = 0.05
"""Tokens of a step and parameters may differ by so much from those that were planned for: labels are shifted by one
token, adapters are counted or not."""


@dataclass(frozen=True)
class Noted:
    """Notes to be written about a run, and to be said."""

    record: dict[str, Any] | None = None
    """For run.json; None where nothing was measured."""
    sentence: str | None = None


def note_measured(
    folder: Path, file: PlanFile, *, has_ended_well: bool, parts: dict[str, float] | None = None
) -> Noted:
    """Take what rank 0 left in the folder of a run, and keep it for later estimates where it ran what was planned.

    `parts` are seconds of the parts of its usual step.
    """
    path = folder / MEASURED_FILE
    if not path.exists():
        return Noted()
    from paraplan.plan.kept_runs import MeasuredRun

    try:
        measured = MeasuredRun.model_validate_json(path.read_bytes())
        path.unlink()
    except (OSError, ValueError) as error:
        return Noted(None, f"what was measured cannot be read: {str(error).splitlines()[0]}")
    measured = measured.replace(parts=parts)
    plain = file.estimate.plain if file.estimate is not None else None
    sentence = None
    if has_ended_well and plain is not None:
        why = _why_not_kept(measured, file, plain)
        sentence = f"not kept for later estimates: {why}" if why is not None else _keep(measured, file, plain, folder)
    return Noted(json.loads(measured.to_json()), sentence)


def _why_not_kept(measured: MeasuredRun, file: PlanFile, plain: PlainPrediction) -> str | None:
    """Return why a run says nothing of the prediction of its plan, None where it does."""
    from paraplan.hardware.catalogue.profile_files import profile_name
    from paraplan.plan.kept_runs import KeptRun

    device = profile_name(measured.device)
    if device != plain.gpu:
        return f"it ran on {device}, and the plan was made for {plain.gpu}"
    if measured.num_steps < FEWEST_STEPS:
        return f"{measured.num_steps} steps were timed after the first, and {FEWEST_STEPS} are the least"
    training, model = file.training, file.model
    if training is not None:
        planned = training.global_batch_size * training.seq_length
        tokens = measured.tokens_of_steps
        if len(tokens) != 1 or not (_is_like(tokens[0], planned) or tokens[0] == training.global_batch_size):
            said = " and ".join(f"{each:,}" for each in tokens)
            return f"its steps had {said} tokens, and the plan was made for {planned:,}"
    known = None if model is None else model.num_parameters
    if known and measured.num_parameters and not _is_like(measured.num_parameters, known):
        return f"its model has {measured.num_parameters:,} parameters, and the plan was made for {known:,}"
    ratio = measured.step_time_s / plain.step_time_s
    if not KeptRun(predicted=plain, step_time_s=measured.step_time_s).is_plausible:
        return f"a step took {ratio:.3g} times what was predicted, which is no error of a prediction"
    return None


def _is_like(value: float, planned: float) -> bool:
    return abs(value / planned - 1) <= LIKE_PLANNED


def _keep(measured: MeasuredRun, file: PlanFile, plain: PlainPrediction, folder: Path) -> str:
    """Keep a run; return what to say of it."""
    from paraplan.plan.kept_runs import KeptRun, keep_runs, kept_runs_path, shortened

    # rank 0 has one stage of a pipeline, and the fullest was predicted
    peak = measured.peak_memory_bytes if file.plan.pp == 1 else None
    where = {"name": str(file), "source": str(folder), "host": socket.gethostname(), "day": time.strftime("%Y-%m-%d")}
    texts = {name: shortened(text) for name, text in where.items()}
    run = KeptRun(predicted=plain, step_time_s=measured.step_time_s, peak_memory_bytes=peak, **texts)
    try:
        keep_runs(kept_runs_path(), [run])
    except ParaplanError as error:
        return f"not kept for later estimates: {error.message} ({error.hint})"
    return "kept for later estimates on such machines, which it corrects; paraplan config history=off leaves them alone"
