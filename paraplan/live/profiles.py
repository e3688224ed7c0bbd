"""torch.profiler in ranks of a live run for so many seconds; py-spy for those that cannot, where it is installed."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paraplan.launch.ranks.stacks import find_py_spy
from paraplan.launch.stragglers.steps import LONGEST_S
from paraplan.live.runs import Run, RunEndedError, RunError, ask_run, question
from paraplan.units import ranks_in_words

_POLL_S = 0.5
_EXPORT_S = 120.0
"""How long a rank may take behind its last step to write the trace: 10 s for a million events."""

_SAMPLING_S = 30.0
"""How long py-spy may take longer than it samples."""


@dataclass
class Profiles:
    """The traces of a profile by rank, those that py-spy made, and why others have none; `hosts` by rank.

    `silent` are hosts that have not answered.
    """

    traces: dict[int, str] = field(default_factory=dict)
    sampled: dict[int, str] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)
    hosts: dict[int, str] = field(default_factory=dict)
    silent: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return it as values of JSON."""
        return {
            "traces": {str(rank): path for rank, path in sorted(self.traces.items())},
            "sampled_by_py_spy": {str(rank): path for rank, path in sorted(self.sampled.items())},
            "failed": {str(rank): reason for rank, reason in sorted(self.failed.items())},
            "hosts": {str(rank): host for rank, host in sorted(self.hosts.items())},
            "silent_hosts": list(self.silent),
        }


def profile_run(
    run: Run,
    *,
    ranks: Collection[int] | None,
    seconds: float,
    wait_s: float,
    on_begin: Callable[[str], None] = lambda text: None,
) -> Profiles:
    """Have `ranks` (None: all) profile themselves, from their next step on, and wait for their traces.

    A rank whose next step does not end within `wait_s` has no profile. Raises `RunError` for ranks that there are not.
    """
    if not 0 < seconds <= LONGEST_S:
        raise RunError(f"--seconds {seconds:g} is outside 0 to {LONGEST_S:g}")
    wanted = sorted(ranks) if ranks is not None else None
    _refuse_ranks(run, [rank for rank in wanted or () if run.world_size and rank >= run.world_size])
    number = time.time_ns() // 1_000_000  # in names of files: milliseconds tell two profiles apart
    asked = ask_run(run, question("profile", number=number, seconds=seconds, wait_s=wait_s, ranks=wanted))
    made, pids = Profiles(silent=asked.silent), {}
    waiting: dict[int, str] = {}
    for node in asked.nodes:
        for rank, pid in node["pids"].items():
            made.hosts[int(rank)], pids[int(rank)] = str(node["host"]), int(pid)
        made.failed |= {int(rank): str(reason) for rank, reason in node["refused"].items()}
        waiting |= {int(rank): str(path) for rank, path in node["traces"].items()}
    _check_ranks(run, wanted, made)
    if waiting:
        on_begin(f"{ranks_in_words(list(waiting))} from the next step on, for {seconds:g} s")
    _await_traces(run, made, waiting, number=number, deadline=time.monotonic() + wait_s, seconds=seconds)
    local = {rank: pid for rank, pid in pids.items() if rank in made.failed and made.hosts[rank] == run.host}
    _sample(run, made, local, number=number, seconds=seconds)
    return made


def _check_ranks(run: Run, wanted: list[int] | None, made: Profiles) -> None:
    if not made.hosts and not made.silent and wanted is None:
        raise RunError(f"the run {run.id} has no ranks now: they are being started", hint="ask again in a moment")
    missing = [rank for rank in wanted or () if rank not in made.hosts]
    if not made.silent:
        _refuse_ranks(run, missing)
    made.failed |= dict.fromkeys(missing, "its node has not answered")


def _refuse_ranks(run: Run, missing: list[int]) -> None:
    if missing:
        last = f"it has ranks 0 to {run.world_size - 1}" if run.world_size else "its ranks are being started"
        raise RunError(f"the run {run.id} has no {ranks_in_words(missing)}", hint=last)


def _await_traces(
    run: Run, made: Profiles, waiting: dict[int, str], *, number: int, deadline: float, seconds: float
) -> None:
    """Wait until each rank of `waiting` has written its trace, or has said why it has not."""
    began: set[int] = set()
    last = deadline + seconds + _EXPORT_S
    while waiting and time.monotonic() < last:
        time.sleep(_POLL_S)
        try:
            nodes = ask_run(run, question("profiled", number=number, ranks=sorted(waiting))).nodes
        except RunEndedError:
            break
        for rank, (state, text) in _states(nodes).items():
            if rank not in waiting:
                continue
            if state == "began":
                began.add(rank)
            elif state == "done":
                made.traces[rank] = waiting.pop(rank)
            elif state or (time.monotonic() > deadline and rank not in began):
                made.failed[rank] = text if state not in ("", "late") else "its step has not ended in time (--wait)"
                del waiting[rank]
    for rank, path in waiting.items():
        if Path(path).exists():
            made.traces[rank] = path
        else:
            made.failed[rank] = f"its trace was not written yet; it will be {path}" if rank in began else "it has ended"


def _states(nodes: Any) -> Mapping[int, tuple[str, str]]:
    return {int(rank): (str(state), str(text)) for node in nodes for rank, (state, text) in node["profiles"].items()}


def _sample(run: Run, made: Profiles, pids: Mapping[int, int], *, number: int, seconds: float) -> None:
    """Have py-spy sample ranks of this machine, where it is installed and allowed to."""
    py_spy = find_py_spy()
    if py_spy is None or run.folder is None:
        return
    paths = {rank: run.folder / f"py-spy-rank{rank}-{number}.json" for rank in pids}
    options = ["record", "--format", "chrometrace", "--nonblocking", "--duration", str(max(1, round(seconds)))]
    programs = {
        rank: subprocess.Popen(
            [py_spy, *options, "--output", str(path), "--pid", str(pids[rank])],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for rank, path in paths.items()
    }
    deadline = time.monotonic() + seconds + _SAMPLING_S
    for rank, program in programs.items():
        try:
            program.wait(timeout=max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            program.kill()
            program.wait()
        if program.returncode == 0 and paths[rank].exists():
            made.sampled[rank] = str(paths[rank])
            del made.failed[rank]
