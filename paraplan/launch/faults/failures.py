"""How ranks failed, and which of them failed first: torchrun's error files read, ordered by cause and nanoseconds."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import IntEnum
from pathlib import Path
from signal import SIGABRT, SIGPIPE
from typing import TypeVar

from paraplan.launch.faults.gpu_errors import OUT_OF_MEMORY, OWN_NCCL_ERROR, telling_lines
from paraplan.launch.ranks.bootstrap import FAULT_FILE
from paraplan.launch.ranks.spawning import RankExit
from paraplan.launch.torch_private.texts import COMMUNICATION_ERRORS

_TAIL_LINES = 4
_MANY_LINES = 1000
_TAIL_BYTES = 1 << 16


class Cause(IntEnum):
    """How likely a failure is the first one, most likely first."""

    OWN_ERROR = 0
    ABORT = 1  # SIGABRT: a bug of its own, or what NCCL's watchdog does to a rank whose peer is gone
    COMMUNICATION = 2
    STOPPED = 3  # ended by the launcher


@dataclass(frozen=True)
class ErrorRecord:
    """A rank's own record of its failure. Times count from the epoch; `exit_code` is None where only @record wrote.

    `step` is that of the engine of paraplan.runtime, counted from 1; None where the error was outside of one.
    """

    message: str
    traceback: str
    time_ns: int
    exit_code: int | None = None
    exception_type: str | None = None
    user_message: str | None = None
    user_hint: str | None = None
    exit_message: str | None = None
    step: int | None = None

    @property
    def is_out_of_gpu_memory(self) -> bool:
        """Whether a GPU was out of memory."""
        return self.exception_type == "OutOfMemoryError" or OUT_OF_MEMORY.search(self.message) is not None


@dataclass(frozen=True)
class RankFailure:
    """One rank that failed: its exit, and its own record of the error where it wrote one.

    `error_file` is the path of the record, `fault` the Python stack of a crash, `log_tail` the last lines of its log
    for a rank that left no record.
    """

    rank: int
    pid: int
    exit: RankExit
    cause: Cause
    error_file: str
    record: ErrorRecord | None = None
    fault: str | None = None
    log_tail: tuple[str, ...] = ()

    @property
    def time_ns(self) -> int:
        """When it failed: when the error was raised if the rank said so, else when it ended."""
        return self.record.time_ns if self.record else self.exit.time_ns

    @property
    def exit_status(self) -> int:
        """The rank's status as a shell gives it: its exit code, 128+n for signal n.

        For a rank that was stopped after it had recorded an error: the status that this error would have led to.
        """
        if self.record and self.record.exit_code and self.exit.code <= 0:
            return self.record.exit_code
        if self.record and self.exit.code <= 0:
            return 1
        return self.exit.code if self.exit.code > 0 else 128 - self.exit.code


@dataclass(frozen=True)
class NodeFailure:
    """How the ranks of one node failed: the first of them, in words, with the rank's exit status.

    `what` is one line, `evidence` the last lines of its traceback, `places` say where ranks stood that others waited
    for. `time_ns` counts from the epoch on the node's own clock.
    """

    host: str
    rank: int
    cause: Cause
    time_ns: int
    exit_status: int
    what: str
    evidence: tuple[str, ...] = ()
    places: tuple[str, ...] = ()


FailureT = TypeVar("FailureT", RankFailure, NodeFailure)


def read_error_record(path: str) -> ErrorRecord | None:
    """Return what is in a torchrun error file; None where there is none or it holds something else."""
    try:
        message = json.loads(Path(path).read_text(encoding="utf-8", errors="replace"))["message"]
        if isinstance(message, str):
            return ErrorRecord(message=message, traceback="", time_ns=0)
        extra = message["extraInfo"]
        seconds = int(extra["timestamp"])
        return ErrorRecord(
            message=str(message["message"]),
            traceback=str(extra.get("py_callstack", "")),
            time_ns=int(extra.get("timestamp_ns", seconds * 10**9)),
            exit_code=int(extra["exit_code"]) if "exit_code" in extra else None,
            exception_type=extra.get("exception_type"),
            user_message=extra.get("user_message"),
            user_hint=extra.get("user_hint") or None,
            exit_message=extra.get("exit_message"),
            step=int(extra["step"]) if "step" in extra else None,
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def read_failure(*, rank: int, pid: int, exit: RankExit, error_file: str, was_stopped: bool) -> RankFailure:  # noqa: A002
    """Return how a rank failed. `was_stopped` says that it still ran when the launcher began to stop the ranks."""
    record = read_error_record(error_file) if error_file else None
    cause = _cause(exit, record, was_stopped=was_stopped)
    failure = RankFailure(rank, pid, exit, cause, error_file, record)
    if not error_file:
        return failure
    folder, fault, tail = Path(error_file).parent, "", tuple[str, ...]()
    if exit.code < 0:
        with suppress(OSError):
            fault = (folder / FAULT_FILE).read_text(encoding="utf-8", errors="replace").strip()
    if record is None:  # the last lines that it wrote, to stderr if it wrote there
        tail = telling_lines(last_lines(folder / "stderr.log", _MANY_LINES), _TAIL_LINES)
        tail = tail or last_lines(folder / "stdout.log", _TAIL_LINES)
    return replace(failure, fault=fault or None, log_tail=tail)


def first_failure(failures: Iterable[FailureT]) -> FailureT:
    """Return the failure that the others follow from: of the most likely cause, the earliest."""
    return min(failures, key=lambda failure: (failure.cause, failure.time_ns, failure.rank))


def _cause(exit: RankExit, record: ErrorRecord | None, *, was_stopped: bool) -> Cause:  # noqa: A002
    if record is not None:
        is_own = OWN_NCCL_ERROR.search(record.message) or not COMMUNICATION_ERRORS.search(record.message)
        return Cause.OWN_ERROR if is_own else Cause.COMMUNICATION
    if was_stopped:
        return Cause.STOPPED
    if exit.code == -SIGABRT:
        return Cause.ABORT
    return Cause.COMMUNICATION if exit.code == -SIGPIPE else Cause.OWN_ERROR


def last_lines(path: Path, number: int) -> tuple[str, ...]:
    """Return the last lines of a log that are not empty, without carriage returns; none where there is no file."""
    try:
        with path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return ()
    lines = [line.rpartition("\r")[2].rstrip() for line in text.rstrip("\r\n").split("\n")]
    return tuple([line for line in lines if line][-number:])
