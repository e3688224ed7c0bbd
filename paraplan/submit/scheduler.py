"""Requests to a scheduler, the table of those that are known, and how their clients are called."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Literal, Protocol

from paraplan.errors import ParaplanError, UsageError, near_names
from paraplan.interop.exported import Exported, Subject
from paraplan.submit.handle import Handle
from paraplan.units import one_line

ENTRY_POINTS = "paraplan.schedulers"
"""The group of entry points under which other packages offer schedulers: a name, and an instance of `Scheduler`."""
_BUNDLED = {"slurm": "slurm", "k8s": "kubernetes", "sky": "skypilot", "ray": "ray"}
"""Modules of this package by the word for them; each holds its `SCHEDULER`."""
_PATIENCE_S = 120.0
_MOST_LETTERS = 400

FilesWay = Literal["shared", "uploaded", "image"]
StateName = Literal["queued", "running", "done", "failed", "canceled", "unknown"]


class SchedulerError(ParaplanError):
    """A scheduler that is not here, does not answer, or refuses: its words, and what to do."""

    exit_status = 1

    def __init__(self, message: str, *, hint: str, is_refusal: bool = False) -> None:
        super().__init__(message, hint=hint)
        self.is_refusal = is_refusal
        """Whether it has answered: nothing was done then."""


@dataclass(frozen=True)
class JobState:
    """How a job is: `words` are the scheduler's own, `exit_status` is known of some that have ended."""

    name: StateName
    words: str
    exit_status: int | None = None

    @property
    def has_ended(self) -> bool:
        """Whether nothing more comes of it."""
        return self.name in ("done", "failed", "canceled")


class Scheduler(Protocol):
    """One kind of scheduler, through its own client. Options are those of the client that the user named."""

    title: str
    """Name of the scheduler in messages."""
    client: str
    """The program that has to be in PATH."""
    files: FilesWay
    """How files reach the nodes: they see them where they are, the client uploads them, or an image holds them."""

    exclude_option: str | None = None
    """The client's option that leaves out hosts by their names; None where it has none."""

    def export(self, subject: Subject, options: Mapping[str, str]) -> Exported:
        """Return the document of the job."""

    def cluster(self, options: Mapping[str, str]) -> str:
        """Return the name of the cluster that the client talks to. Raises `SchedulerError` where it cannot say."""

    def submission(self, job: Handle) -> Sequence[str]:
        """Return the words of the client's command that submits the document of `job`."""

    def job_id(self, job: Handle, output: str) -> str:
        """Return the scheduler's name of the job from what the client printed: the name that was asked for."""
        return job.name

    def state(self, job: Handle) -> JobState:
        """Return how a job is."""

    def logs(self, job: Handle, *, follow: bool) -> Iterator[str]:
        """Yield the lines of a job's log; with `follow` until it has ended."""

    def cancel(self, job: Handle) -> None:
        """End a job by its id, or by its name where it has none yet; a job that is not there is no error then."""


def scheduler_names() -> list[str]:
    """Return the words for all known schedulers."""
    return [*_BUNDLED, *(point.name for point in entry_points(group=ENTRY_POINTS) if point.name not in _BUNDLED)]


def find_scheduler(name: str) -> Scheduler:
    """Return the scheduler of this name. Raises `UsageError` where there is none."""
    if name in _BUNDLED:
        found: Scheduler = import_module(f"paraplan.submit.{_BUNDLED[name]}").SCHEDULER
        return found
    for point in entry_points(group=ENTRY_POINTS, name=name):
        loaded: Scheduler = point.load()
        return loaded
    raise UsageError(f"there is no scheduler {name!r}", hint=near_names(name, scheduler_names()))


def require_client(scheduler: Scheduler) -> None:
    """Raise `SchedulerError` where the scheduler's client is not on this machine."""
    if shutil.which(scheduler.client) is None:
        raise SchedulerError(
            f"{scheduler.client}, the client of {scheduler.title}, is not in PATH here",
            hint="submit from a machine that has it (a login node), or add --dry-run to see what would be submitted",
        )


def call(words: Sequence[str], *, folder: Path | None = None, hint: str) -> str:
    """Return what a client prints. Raises `SchedulerError` with its own words where it fails or does not answer."""
    try:
        ended = subprocess.run(
            [*words],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_PATIENCE_S,
            check=False,
        )
    except FileNotFoundError:
        raise SchedulerError(
            f"{words[0]} is not in PATH here", hint="run this where it is, as at a login node"
        ) from None
    except (OSError, subprocess.TimeoutExpired) as error:
        said = f"no answer in {_PATIENCE_S:.0f} s" if isinstance(error, subprocess.TimeoutExpired) else str(error)
        raise SchedulerError(f"{words[0]}: {one_line(said)}", hint=hint) from None
    if ended.returncode:
        said = ended.stderr.strip() or ended.stdout.strip()
        if "Traceback (most" in said:  # its last line has the reason
            said = said.rpartition("\n")[2]
        said = one_line(said[-_MOST_LETTERS:])
        said = said or f"status {ended.returncode}, and no word"
        raise SchedulerError(f"{words[0]} says: {said}", hint=hint, is_refusal=ended.returncode > 0)
    return ended.stdout


def lines_of(words: Sequence[str]) -> Iterator[str]:
    """Yield the lines that a client prints while it runs. Raises `SchedulerError` where it fails."""
    with subprocess.Popen(
        [*words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        assert process.stdout is not None
        last = ""
        try:
            for line in process.stdout:
                last = line.rstrip("\n")
                yield last
        finally:
            if process.poll() is None and process.stdout.readable():
                process.terminate()
    if process.returncode > 0:
        raise SchedulerError(
            f"{words[0]} ended with status {process.returncode}: {one_line(last)}", hint="see its words"
        )


def option_words(options: Mapping[str, str]) -> list[str]:
    """Return options as a client takes them: `--name=value`, and `--name` for an empty value."""
    return [f"--{name}={value}" if value else f"--{name}" for name, value in options.items()]
