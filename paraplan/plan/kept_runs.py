"""Runs of the user that were measured, beside what was predicted of them: the records, and the file that keeps them."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

from pydantic import Field, ValidationError

from paraplan.errors import ParaplanError
from paraplan.records import Record

SCHEMA_VERSION = 1
MOST_RUNS = 300
"""Runs that the file keeps: the newest."""
MOST_BYTES = 4_000_000
"""A file that is larger was not written here."""
MOST_RATIO = 10.0
"""Ratio of measured to predicted beyond which, either way, a run did something else."""
_LONGEST = 300

Ratio = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Size = Annotated[float, Field(allow_inf_nan=False, ge=-100, le=100)]
Text = Annotated[str, Field(max_length=_LONGEST)]


class KeptRunsError(ParaplanError):
    """The file of kept runs cannot be read or written."""


class PlainPrediction(Record):
    """Prediction of a plan before the user's own runs corrected it, and where the plan stands among others."""

    kind: Text
    """Key that two runs share where the error of one says something of the other: GPU, framework, calibration."""
    gpu: Text
    """The kind of GPU."""
    sizes: tuple[Size, ...] = Field(min_length=1, max_length=100)
    """The sizes by which plans are alike."""
    step_time_s: Ratio
    """Predicted seconds of a step."""
    peak_memory_bytes: Ratio
    """Predicted peak that the allocator has given out, of the fullest rank."""
    version: Text
    """The release of paraplan that predicted."""


class MeasuredRun(Record):
    """Measurements of a run of itself, as rank 0 tells the launcher, which keeps it in the folder of the run."""

    step_time_s: Ratio
    """Median of the steps without the first; of CPUs without the time in which other processes had them."""
    num_steps: int = Field(ge=0)
    """Steps without the first."""
    peak_memory_bytes: int | None = None
    """Bytes that torch has allocated at most on the GPU of rank 0."""
    device: Text
    """The GPU as its driver names it, or cpu."""
    tokens_of_steps: tuple[int, ...]
    """How many tokens the steps had, over all ranks: the two least of different numbers."""
    num_parameters: int | None = None
    """Parameters of the whole model."""
    parts: dict[str, float] | None = None
    """Parts of a step of rank 0 on its host, by the medians: waits in collectives, data, backward pass, optimizer."""


class KeptRun(Record):
    """One run: what was predicted of it and what was measured; None was not."""

    predicted: PlainPrediction
    step_time_s: Ratio | None = None
    """Seconds of a step: the median without the first."""
    peak_memory_bytes: Ratio | None = None
    """Bytes that torch's allocator has given out at most."""
    name: Text = ""
    """The model and the plan in words."""
    source: Text = ""
    """The folder of the run, or the table or log that it is from."""
    host: Text = ""
    """The machine that measured it, of CPUs, where any two differ."""
    day: Text = ""

    @property
    def is_plausible(self) -> bool:
        """Whether both figures are within ten times of what was predicted: what is not ran something else."""
        pairs = (
            (self.step_time_s, self.predicted.step_time_s),
            (self.peak_memory_bytes, self.predicted.peak_memory_bytes),
        )
        return all(measured is None or 1 / MOST_RATIO < measured / own < MOST_RATIO for measured, own in pairs)


class KeptRuns(Record):
    """The file."""

    schema_version: int = SCHEMA_VERSION
    runs: tuple[KeptRun, ...] = Field(default=(), max_length=MOST_RUNS)


def kept_runs_path() -> Path:
    """Return where runs are kept: $PARAPLAN_HISTORY, or a file in the user's folder of states."""
    named = os.environ.get("PARAPLAN_HISTORY")
    if named:
        return Path(named)
    folder = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(folder).expanduser() / "paraplan" / "runs.json"


def read_kept_runs(path: Path) -> tuple[KeptRun, ...]:
    """Return the runs of a file, none where there is no file. Raises `KeptRunsError` for one that is damaged."""
    try:
        with path.open("rb") as file:
            text = file.read(MOST_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError):
        return ()
    except OSError as error:
        raise KeptRunsError(f"cannot read {path}: {error.strerror}", hint=_hint(path)) from None
    if len(text) > MOST_BYTES:
        raise KeptRunsError(f"{path} has more than {MOST_BYTES:,} bytes, and is not of paraplan", hint=_hint(path))
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        raise KeptRunsError(f"{path} is not JSON", hint=_hint(path)) from None
    version = data.get("schema_version") if isinstance(data, dict) else None
    if version != SCHEMA_VERSION:
        raise KeptRunsError(
            f"{path} has schema_version {version!r}, and this paraplan reads {SCHEMA_VERSION}", hint=_hint(path)
        )
    try:
        return KeptRuns.model_validate(data).runs
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise KeptRunsError(f"{path} is damaged: {where}: {first['msg']}", hint=_hint(path)) from None


def keep_runs(path: Path, new: Iterable[KeptRun]) -> int:
    """Add runs to a file, each in place of one of the same source and name, and return how many it has then.

    The oldest go where they are more than `MOST_RUNS`. Raises `KeptRunsError` for a file that is damaged, which stays
    as it is, and where it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path):
            known = {(run.source, run.name): run for run in read_kept_runs(path)}
            for run in new:
                known.pop((run.source, run.name), None)
                known[run.source, run.name] = run
            runs = KeptRuns(runs=tuple(known.values())[-MOST_RUNS:])
            beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
            beside.write_text(runs.to_json(indent=None) + "\n", encoding="utf-8")
            beside.replace(path)
    except OSError as error:
        raise KeptRunsError(
            f"cannot write {path}: {error.strerror}", hint="PARAPLAN_HISTORY names another file"
        ) from None
    return len(runs.runs)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Have other processes that add runs wait."""
    with path.with_name(f".{path.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _hint(path: Path) -> str:
    return f"delete {path}: later runs make it anew; --no-history does without"


def shortened(text: str) -> str:
    """Return a text that a record takes."""
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."
