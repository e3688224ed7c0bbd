"""The runs of this user on this machine: those whose launchers answer, and what the folders of others say."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paraplan.errors import UsageError, near_names
from paraplan.launch.live.channel import VERSION, ask, launchers
from paraplan.launch.spec import RUNS_FOLDER

_SILENT = "does not answer"
_LOCAL_S = 3.0
"""How long a launcher gets to answer of itself: it does so at once, unless it is stopped."""

_EVERYWHERE_S = 30.0
"""How long for an answer of all nodes: longer than a launcher waits for the others."""


class RunError(UsageError):
    """A run that there is not, that has ended, or that does not answer."""


@dataclass(frozen=True)
class RankStatus:
    """How one rank is. `step` is None where none is known, `since_step_s` how long ago it ended."""

    rank: int
    host: str
    pid: int
    state: str
    step: int | None
    since_step_s: float | None


@dataclass(frozen=True)
class Run:
    """A run of this user. `name` is the socket of its launcher on this machine, "" for one that has ended.

    `ranks` are those whose nodes have answered, `silent` the hosts of the others. `exit_status` is known at the end.
    """

    id: str
    name: str
    pid: int | None
    host: str
    state: str
    folder: Path | None = None
    script: str = ""
    plan: str | None = None
    elapsed_s: float | None = None
    attempt: int = 0
    num_nodes: int | None = None
    world_size: int | None = None
    ranks: tuple[RankStatus, ...] = ()
    silent: tuple[str, ...] = ()
    exit_status: int | None = None

    @property
    def step(self) -> int | None:
        """The last step that all known ranks have done, None where it is not known of one."""
        steps = [rank.step for rank in self.ranks if rank.step is not None]
        return min(steps) if steps and len(steps) == len(self.ranks) else None

    @property
    def since_step_s(self) -> float | None:
        """How long ago the last step of any rank ended."""
        return min((rank.since_step_s for rank in self.ranks if rank.since_step_s is not None), default=None)


@dataclass(frozen=True)
class Answers:
    """The answers of the nodes of a run, each with its `host`, and the hosts that have not answered."""

    nodes: Sequence[Mapping[str, Any]]
    silent: tuple[str, ...]


def question(what: str, **values: Any) -> dict[str, Any]:
    """Return a question to the launcher of a run."""
    return {"version": VERSION, "ask": what} | values


def ask_run(run: Run, asked: dict[str, Any]) -> Answers:
    """Return what the nodes of a run answer. Raises `RunError` where its launcher has ended, or does not answer."""
    timeout_s = _LOCAL_S if asked.get("is_local") else _EVERYWHERE_S
    try:
        answer = ask(run.name, asked, timeout_s=timeout_s)
    except TimeoutError:
        raise RunError(
            f"the launcher of {run.id} (process {run.pid}) has not answered for {timeout_s:g} s",
            hint="it may be stopped: kill -CONT wakes it",
        ) from None
    if answer is None:
        raise RunEndedError(f"the run {run.id} has ended")
    nodes = [node for node in answer.get("nodes", ()) if isinstance(node, dict)]
    errors = [f"host {node.get('host')}: {node['error']}" for node in nodes if "error" in node]
    if errors:
        raise RunError(errors[0], hint="use the paraplan that has started the run")
    return Answers(nodes, tuple(map(str, answer.get("silent", ()))))


class RunEndedError(RunError):
    """A run that has ended while it was asked."""


def live_runs() -> list[Run]:
    """Return the runs of this user whose launchers are on this machine, as their own nodes know them.

    A launcher that does not answer has the state `does not answer`.
    """
    found = []
    for name in launchers():
        pid = int(name.split("-")[2])
        try:
            answer = ask(name, question("status", is_local=True), timeout_s=_LOCAL_S)
        except TimeoutError:
            found.append(_silent_run(name, pid))
            continue
        if answer is not None:
            found += [_run(name, node) for node in answer.get("nodes", ())[:1]]
    return found


def _silent_run(name: str, pid: int) -> Run:
    return Run(f"process-{pid}", name, pid, socket.gethostname(), _SILENT)


def _run(name: str, node: Mapping[str, Any]) -> Run:
    if "error" in node:
        return _silent_run(name, int(name.split("-")[2]))
    return Run(
        id=str(node["run"]),
        name=name,
        pid=int(node["pid"]),
        host=str(node["host"]),
        state=str(node["state"]),
        folder=Path(node["folder"]) if node["folder"] else None,
        script=str(node["script"]),
        plan=node["plan"],
        elapsed_s=float(node["elapsed_s"]),
        attempt=int(node["attempt"]),
        num_nodes=int(node["num_nodes"]),
        world_size=int(node["world_size"]) or None,
        ranks=tuple(_rank(int(rank), str(node["host"]), values) for rank, values in node["ranks"].items()),
    )


def _rank(rank: int, host: str, values: Mapping[str, Any]) -> RankStatus:
    return RankStatus(rank, host, values["pid"], values["state"], values["step"], values["since_step_s"])


def ended_runs(folder: Path) -> list[Run]:
    """Return the runs in `folder`, oldest first, that no launcher on this machine answers for."""
    try:
        names = sorted(path.name for path in folder.iterdir() if path.is_dir())
    except OSError:
        return []
    live = {run.folder for run in live_runs()}
    paths = [folder.absolute() / name for name in names]
    found = (_ended_run(path) for path in paths if path not in live)
    return [run for run in found if run is not None]


def _ended_run(folder: Path) -> Run | None:
    """Return the run of a folder; None where it holds none. Raises PermissionError for another user's."""
    try:
        values = json.loads((folder / "run.json").read_text(encoding="utf-8"))
        host, status = str(values["host"]), values.get("exit_status")
        words = str(values["command"]).split()
    except PermissionError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    is_here = host == socket.gethostname()
    state = "gone" if is_here else f"on {host}"
    if status is not None:
        state = "done" if status == 0 else f"status {status}"
    script = next((word for word in words[2:] if word.endswith(".py")), "")
    took = {"elapsed_s": values.get("elapsed_s"), "attempt": int(values.get("attempts") or 0)}
    return Run(folder.name, "", None, host, state, folder, script, exit_status=status, **took)


def find_run(wanted: str | None) -> Run:
    """Return the live run that a user names by its id, folder or process, or the only one. Raises `RunError`."""
    if not hasattr(socket, "SO_PEERCRED"):
        raise RunError("runs can be asked on Linux alone")
    runs = live_runs()
    if wanted is None:
        if len(runs) == 1:
            return _answering(runs[0])
        if not runs:
            raise RunError(f"nothing runs: there is no launcher of yours on {socket.gethostname()}", hint=_HINT)
        names = ", ".join(run.id for run in runs[:5])
        raise RunError(f"{len(runs)} runs are here: {names}", hint="name one of them")
    path = os.path.realpath(wanted)
    found = [run for run in runs if run.id == wanted or str(run.pid) == wanted]
    found = found or [run for run in runs if run.folder is not None and os.path.realpath(run.folder) == path]
    if len(found) > 1:
        pids = ", ".join(str(run.pid) for run in found)
        raise RunError(f"{len(found)} runs are called {wanted}", hint=f"name one by its process: {pids}")
    if found:
        return _answering(found[0])
    raise _unknown_run(wanted, runs)


def _answering(run: Run) -> Run:
    if run.state == _SILENT:
        raise RunError(
            f"the launcher of process {run.pid} does not answer",
            hint="a signal or a debugger has stopped it, or it is of another version: kill -CONT wakes it",
        )
    return run


_HINT = "ask on a machine of the run, in its network namespace; paraplan ps --all lists those that have ended"


def _unknown_run(wanted: str, runs: Sequence[Run]) -> RunError:
    """Return why a run is not to be found: it has ended, is elsewhere or another user's, or there is no such run."""
    for folder in (Path(wanted), Path(RUNS_FOLDER) / wanted):
        try:
            ended = _ended_run(folder.absolute())
        except PermissionError:
            return RunError(f"the run {wanted} is another user's: its folder cannot be read", hint="ask as that user")
        if ended is None:
            continue
        where = f"its logs are in {folder}"
        if ended.exit_status is not None:
            after = f" after {ended.elapsed_s:.1f} s" if ended.elapsed_s is not None else ""
            return RunEndedError(f"the run {ended.id} has ended with status {ended.exit_status}{after}", hint=where)
        if ended.host != socket.gethostname():
            return RunError(f"the run {ended.id} is on host {ended.host}", hint="ask there")
        return RunEndedError(f"the launcher of {ended.id} is gone, without a word; it has ended", hint=where)
    names = [run.id for run in runs] + [run.id for run in ended_runs(Path(RUNS_FOLDER))]
    return RunError(f"there is no run {wanted}", hint=near_names(wanted, names) if names else _HINT)


def whole_run(run: Run) -> Run:
    """Return a run as all its nodes know it. Raises `RunError` where it has ended."""
    answers = ask_run(run, question("status"))
    ranks = [_rank(int(rank), node["host"], values) for node in answers.nodes for rank, values in node["ranks"].items()]
    return replace(run, ranks=tuple(sorted(ranks, key=lambda rank: rank.rank)), silent=answers.silent)
