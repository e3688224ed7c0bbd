"""Real ranks for tests: processes forked from one that has torch imported, joined over gloo on the loopback interface.

multiprocessing's fork server is that one process: it imports torch once, runs nothing, and ends with the tests.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from free_ports import free_port

_SLACK_S = 60.0  # for a rank to show its stacks and end, once its own time is over
_GRACE_S = 10.0  # for the other ranks to answer, once one has failed
# What ranks of nearly every test would import, each for itself: the compiler comes with FSDP and pipelines.
_IMPORTED_ONCE = ("paraplan.runtime", "paraplan.runtime.pipeline.assembly", "paraplan.runtime.split.rules")
_IMPORTED_ONCE += ("torch._dynamo", "torch.distributed.pipelining", "torch.distributed.checkpoint", "pytest")
_IMPORTED_ONCE += ("transformers.models.auto.modeling_auto", "transformers.modeling_utils")
_IMPORTED_ONCE += ("paraplan.runtime.fake.script",)


class RanksFailedError(AssertionError):
    """Ranks raised, ended or did not answer; the text shows each of them."""


class RankHarness:
    """Runs functions on ranks. The functions and their arguments must pickle: module-level ones."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([*_IMPORTED_ONCE])

    def run(
        self,
        work: Callable[..., Any],
        *arguments: Any,
        size: int,
        timeout_s: float = 150.0,
        environment: dict[str, str] | None = None,
    ) -> list[Any]:
        """Return what `work(*arguments)` returns on each of `size` ranks, in order. All ranks have ended by then."""
        with tempfile.TemporaryDirectory() as folder:
            variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(size)}
            connections, processes = [], []
            for rank in range(size):
                ours, theirs = self._context.Pipe()
                own = variables | {"RANK": str(rank), "LOCAL_RANK": str(rank)} | (environment or {})
                stacks = str(Path(folder) / f"{rank}.txt")
                process = self._context.Process(
                    target=_rank_main, args=(theirs, own, stacks, timeout_s, work, arguments), daemon=True
                )
                process.start()
                theirs.close()
                connections.append(ours)
                processes.append(process)
            try:
                answers = _collect(connections, deadline_s=time.monotonic() + timeout_s + _SLACK_S)
            finally:
                for connection in connections:
                    connection.close()
                for process in processes:
                    process.join(0.5)
                    if process.is_alive():
                        process.kill()
                    process.join()
            return _results(answers, Path(folder), [process.exitcode for process in processes])

    def run_alone(self, work: Callable[..., Any], *arguments: Any, timeout_s: float = 150.0) -> Any:
        """Return what `work(*arguments)` returns in one process that no launcher started."""
        return self.run(_without_launcher, work, arguments, size=1, timeout_s=timeout_s)[0]


def _without_launcher(work: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    return work(*arguments)


def _rank_main(
    connection: Connection,
    environment: dict[str, str],
    stacks: str,
    timeout_s: float,
    work: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    import torch
    import torch.distributed as dist

    os.environ.update(environment)
    torch.set_num_threads(1)
    with Path(stacks).open("w") as stack_file:
        faulthandler.dump_traceback_later(timeout_s, file=stack_file, exit=True)
        try:
            answer = ("returned", work(*arguments))
        except BaseException as error:
            answer = ("raised", (type(error), str(error), traceback.format_exc()))
        connection.send_bytes(pickle.dumps(answer))
        if answer[0] == "returned":
            _wait_for_the_others(connection)
        if dist.is_initialized():
            dist.destroy_process_group()
        faulthandler.cancel_dump_traceback_later()


def _wait_for_the_others(connection: Connection) -> None:
    """Return once the test has all answers: a rank that leaves while a peer still connects to it fails that peer."""
    with contextlib.suppress(EOFError, ConnectionResetError):
        connection.recv_bytes()


def _collect(connections: list[Connection], *, deadline_s: float) -> list[tuple[str, Any] | None]:
    """Return the answer of each rank, None where none came; after a first failure the others get a short while."""
    answers: list[tuple[str, Any] | None] = [None] * len(connections)
    waiting = dict(enumerate(connections))
    while waiting and (left_s := deadline_s - time.monotonic()) > 0:
        for ready in wait(list(waiting.values()), timeout=left_s):
            rank = next(rank for rank, connection in waiting.items() if connection is ready)
            del waiting[rank]
            try:
                answers[rank] = pickle.loads(ready.recv_bytes())  # noqa: S301 (our own ranks wrote it)
            except EOFError:
                answers[rank] = None
            if answers[rank] is None or answers[rank][0] == "raised":
                deadline_s = min(deadline_s, time.monotonic() + _GRACE_S)
    return answers


def _results(answers: list[tuple[str, Any] | None], folder: Path, exit_codes: list[int | None]) -> list[Any]:
    failures = []
    for rank, answer in enumerate(answers):
        if answer is None:
            stack = (folder / f"{rank}.txt").read_text()
            failures.append(f"rank {rank} did not answer, exit code {exit_codes[rank]}\n{stack}")
        elif answer[0] == "raised":
            failures.append(f"rank {rank} raised\n{answer[1][2]}")
    if failures:
        raise RanksFailedError("\n".join(failures))
    return [answer[1] for answer in answers if answer is not None]
