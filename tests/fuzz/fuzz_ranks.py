"""Rank groups for random models: processes forked from one that has torch imported, which try one case after another.

A group is made anew after anything but a right answer or a refusal, and such a case is tried once more in a group of
its own: a verdict is never that of what ran before.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import signal
import socket
import tempfile
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from fuzz_plans import Case

_IMPORTED_ONCE: tuple[str, ...] = (
    "paraplan.runtime.job_start",
    "paraplan.runtime.pipeline.assembly",
    "paraplan.runtime.split.tensor_parallel",
)
_IMPORTED_ONCE += ("torch._dynamo", "torch.distributed.pipelining", "torch.distributed.checkpoint")
_GRACE_S = 8.0  # for the other ranks to answer, once one has raised
_CASES_OF_A_GROUP = 12

_Reply = tuple[str, str, str, frozenset[str], int]
"""What a rank sends: status, message, detail, the parameters that it does not hold, and where the first gap came."""

FAILURES = ("wrong", "bare", "hung")


@dataclass(frozen=True)
class Verdict:
    """What came of a case: right, refused, wrong, bare (an exception that is no ParaplanError) or hung."""

    case: Case
    status: str
    message: str = ""
    detail: str = ""
    seconds: float = 0.0

    @property
    def is_failure(self) -> bool:
        """Whether the promise does not hold."""
        return self.status in FAILURES


@dataclass
class _Group:
    """The ranks of one world size, with the cases that they have yet to try."""

    processes: list[BaseProcess]
    connections: list[Connection]
    cases: deque[Case]
    folder: Path
    answers: dict[int, _Reply] = field(default_factory=dict)
    num_done: int = 0
    began_s: float = 0.0
    deadline_s: float = 0.0

    def begin(self, limit_s: float) -> None:
        """Hand the next case to all ranks."""
        self.answers.clear()
        self.began_s = time.monotonic()
        self.deadline_s = self.began_s + limit_s
        message = (self.cases[0], str(_free_port()), limit_s)
        for connection in self.connections:
            with contextlib.suppress(OSError):  # one that has died is seen to have
                connection.send(message)

    def stop(self) -> None:
        """End all ranks, whatever they do."""
        for process in self.processes:
            if process.is_alive():
                process.kill()
        for process in self.processes:
            process.join()
        for connection in self.connections:
            connection.close()

    def stacks(self) -> str:
        """Return where the ranks are that have not answered."""
        missing = [rank for rank in range(len(self.processes)) if rank not in self.answers]
        for rank in missing:
            pid = self.processes[rank].pid
            if pid is not None and self.processes[rank].is_alive():
                os.kill(pid, signal.SIGUSR1)
        time.sleep(0.3)
        texts = []
        for rank in missing:
            path = self.folder / f"{self.processes[rank].pid}.stack"
            texts.append(f"rank {rank}:\n{path.read_text() if path.exists() else ''}")
        return "\n".join(texts)


class Fuzzer:
    """Tries cases on groups of ranks, `jobs` groups at a time. Use it in a `with` statement: it ends all processes."""

    def __init__(self, *, jobs: int = 2, limit_s: float = 60.0) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([*_IMPORTED_ONCE])
        self._jobs, self._limit_s = jobs, limit_s
        self._groups: list[_Group] = []
        self._folder = tempfile.TemporaryDirectory(prefix="paraplan_fuzz_")

    def __enter__(self) -> Fuzzer:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """End all ranks and remove what they wrote."""
        for group in self._groups:
            group.stop()
        self._folder.cleanup()

    def new_forms(self) -> bool:
        """Whether losses may return a sum with a count."""
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_new_forms_main, args=(theirs,), daemon=True)
        process.start()
        theirs.close()
        try:
            return bool(ours.recv())
        except EOFError:
            return False
        finally:
            process.join()

    def verdicts(self, cases: Sequence[Case]) -> Iterator[Verdict]:
        """Try `cases`, and yield a verdict on each as it comes."""
        waiting = deque(_chunks(cases))
        suspects: set[Case] = set()
        while waiting or self._groups:
            while waiting and len(self._groups) < self._jobs:
                self._groups.append(self._started(waiting.popleft()))
            for group in self._look():
                verdict = _verdict(group)
                is_fresh = not group.num_done
                group.num_done += 1
                case = group.cases.popleft()
                if verdict.is_failure:
                    group.stop()
                    self._groups.remove(group)
                    if group.cases:
                        waiting.append(group.cases)
                    if not is_fresh and case not in suspects:
                        suspects.add(case)
                        waiting.appendleft(deque([case]))
                        continue
                elif group.cases:
                    group.begin(self._limit_s)
                else:
                    group.stop()
                    self._groups.remove(group)
                yield verdict

    def _look(self) -> list[_Group]:
        """Wait for answers; return the groups whose case has all of them, or has run out of time."""
        owners = {connection: group for group in self._groups for connection in group.connections}
        pending = [
            connection
            for group in self._groups
            for rank, connection in enumerate(group.connections)
            if rank not in group.answers
        ]
        left_s = min(group.deadline_s for group in self._groups) - time.monotonic()
        ready = wait(pending, timeout=max(0.0, left_s)) if pending else []
        for connection in ready:
            assert isinstance(connection, Connection)
            group = owners[connection]
            rank = group.connections.index(connection)
            try:
                group.answers[rank] = connection.recv()
            except (EOFError, OSError):
                code = group.processes[rank].exitcode
                group.answers[rank] = ("bare", f"the process ended, exit code {code}", "", frozenset(), 0)
            if group.answers[rank][0] != "right":
                group.deadline_s = min(group.deadline_s, time.monotonic() + _GRACE_S)
        now = time.monotonic()
        return [
            group
            for group in list(self._groups)
            if len(group.answers) == len(group.processes) or now >= group.deadline_s
        ]

    def _started(self, cases: deque[Case]) -> _Group:
        size = cases[0].plan.world_size
        folder = Path(self._folder.name)
        processes: list[BaseProcess] = []
        connections = []
        for rank in range(size):
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=_rank_main, args=(theirs, rank, size, str(folder)), daemon=True)
            process.start()
            theirs.close()
            processes.append(process)
            connections.append(ours)
        group = _Group(processes, connections, cases, folder)
        group.begin(self._limit_s)
        return group


def shrunk(fuzzer: Fuzzer, failure: Verdict, simpler: Callable[[Case], Iterator[Case]]) -> Verdict:
    """Return the verdict on a case that fails as `failure` does and has as little in it as can be."""
    best = failure
    while True:
        found = (one for one in fuzzer.verdicts(list(simpler(best.case))) if one.status == failure.status)
        smaller = next(iter(sorted(found, key=lambda one: len(repr(one.case)))), None)
        if smaller is None:
            return best
        best = smaller


def _chunks(cases: Sequence[Case]) -> Iterator[deque[Case]]:
    """Yield the cases in groups of one world size, in the order of the first of each."""
    by_size: dict[int, deque[Case]] = {}
    for case in cases:
        chunk = by_size.setdefault(case.plan.world_size, deque())
        chunk.append(case)
        if len(chunk) == _CASES_OF_A_GROUP:
            yield by_size.pop(case.plan.world_size)
    yield from by_size.values()


def _verdict(group: _Group) -> Verdict:
    case, answers = group.cases[0], group.answers
    seconds = time.monotonic() - group.began_s
    by_status = {
        status: [rank for rank in sorted(answers) if answers[rank][0] == status] for status in (*FAILURES, "refused")
    }
    size = len(group.processes)

    def verdict(status: str, message: str, detail: str) -> Verdict:
        return Verdict(case, status, message, detail, seconds)

    raised = sorted(by_status["bare"], key=lambda rank: _is_echo(answers[rank][1]))
    if raised and not _is_echo(answers[raised[0]][1]):
        return verdict("bare", answers[raised[0]][1], f"rank {raised[0]}\n{answers[raised[0]][2]}")
    refused = by_status["refused"]
    if refused and len(refused) < size:
        others = f"ranks {refused} alone refused"
        return verdict("hung", f"{others}: {answers[refused[0]][1]}", group.stacks())
    if len(answers) < size:
        return verdict("hung", f"{size - len(answers)} of {size} ranks do not answer", group.stacks())
    if by_status["hung"] or raised:
        first = (by_status["hung"] or raised)[0]
        return verdict("hung", answers[first][1], answers[first][2])
    if refused:
        return verdict("refused", answers[0][1], answers[0][2])
    if by_status["wrong"]:
        first = min(by_status["wrong"], key=lambda rank: answers[rank][4])
        return verdict("wrong", answers[first][1], answers[first][2])
    missing = frozenset.intersection(*(answer[3] for answer in answers.values()))
    if missing:
        return verdict("wrong", f"no rank holds {sorted(missing)}", "")
    return verdict("right", "", "")


def _is_echo(message: str) -> bool:
    """Whether an error says no more than that another rank has failed."""
    return "onnection" in message and ("closed" in message or "reset" in message or "refused" in message)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _rank_main(connection: Connection, rank: int, size: int, folder: str) -> None:
    """Try the cases that come over `connection`, until it is closed."""
    import torch
    from fuzz_training import try_case

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process ends all
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "RANK": str(rank), "LOCAL_RANK": str(rank)})
    os.environ.update({"WORLD_SIZE": str(size)} if size > 1 else {})
    with (Path(folder) / f"{os.getpid()}.stack").open("w") as stacks, Path(os.devnull).open("w") as nowhere:
        faulthandler.register(signal.SIGUSR1, file=stacks)
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
        with contextlib.suppress(EOFError, OSError):
            while True:
                case, port, limit_s = connection.recv()
                os.environ["MASTER_PORT"] = port
                faulthandler.dump_traceback_later(3 * limit_s, file=stacks, exit=True)  # nobody is there to end it
                answer, end = try_case(case, Path(folder))
                connection.send((answer.status, answer.message, answer.detail, answer.missing, answer.order))
                # The next case comes when all have answered: none leaves while another still needs it.
                if not connection.poll(3 * limit_s):
                    return
                end()
                faulthandler.cancel_dump_traceback_later()


def _new_forms_main(connection: Connection) -> None:
    from fuzz_training import accepts_new_forms

    connection.send(accepts_new_forms())
