"""Real ranks for tests: processes forked from one that has torch imported, joined over gloo on the loopback interface.

multiprocessing's fork server is that one process: it imports torch once, runs nothing, and ends with the tests. Ranks
whose work went well wait for more: what torch finds out once (types of kernels, placements of shards) they know.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import io
import logging
import multiprocessing
import os
import pickle
import random
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from free_ports import free_port

_MOST_PATIENCE_S = 1000.0
_SLACK_S = 60.0  # for a rank to show its stacks and end, once its own time is over
_GRACE_S = 10.0  # for the other ranks to answer, once one has failed
_READY, _ALL_ANSWERED = b"ready", b"all answered"
# What ranks of nearly every test would import, each for itself: the compiler comes with FSDP and pipelines.
_IMPORTED_ONCE = (
    "paraplan.runtime.job_start",
    "paraplan.runtime.pipeline.assembly",
    "paraplan.runtime.split.tensor_parallel",
)
_IMPORTED_ONCE += ("torch._dynamo", "torch.distributed.pipelining", "torch.distributed.checkpoint", "pytest")
_IMPORTED_ONCE += ("transformers.models.auto.modeling_auto", "transformers.modeling_utils")
_IMPORTED_ONCE += ("paraplan.runtime.fake.script", "paraplan.launch.command", "torch.distributed.tensor.debug")
_IMPORTED_ONCE += ("transformers.models.llama.modeling_llama", "peft", "hypothesis")
_IMPORTED_ONCE += ("paraplan.launch.job", "paraplan.launch.fake.ranks", "paraplan.launch.fake.report")
# Ranks that compile would import these, for a second each; none of them starts a thread.
_IMPORTED_ONCE += ("torch._dynamo.backends.common", "torch._inductor.cudagraph_trees")
_IMPORTED_ONCE += ("torch.distributed.tensor.experimental", "transformers.trainer")


_stores_of_the_past: list[Any] = []  # kept: a thread of torch's may still hold one, and cannot end it


class RanksFailedError(AssertionError):
    """Ranks raised, ended or did not answer; the text shows each of them."""


@dataclass(frozen=True)
class _Job:
    """What one rank is to do, in which environment; `path` is the test's own, for modules that hold functions."""

    work: Callable[..., Any]
    arguments: tuple[Any, ...]
    environment: dict[str, str]
    path: list[str]
    stacks: str
    timeout_s: float


class _Worker:
    """A process that runs the work of one rank after that of another."""

    def __init__(self, context: multiprocessing.context.ForkServerContext) -> None:
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_rank_main, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()

    def is_ready(self) -> bool:
        """Whether it waits for more work, once it has left its group; it ends where its work has left something."""
        try:
            return self.connection.poll(_GRACE_S) and self.connection.recv_bytes() == _READY
        except (EOFError, ConnectionError):
            return False

    def end(self) -> None:
        self.connection.close()
        self.process.join(0.5)
        if self.process.is_alive():
            self.process.kill()
        self.process.join()


class RankHarness:
    """Runs functions on ranks. The functions and their arguments must pickle: module-level ones."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([*_IMPORTED_ONCE])
        self._idle: dict[int, list[_Worker]] = {}

    def run(
        self,
        work: Callable[..., Any],
        *arguments: Any,
        size: int,
        timeout_s: float = 150.0,
        environment: dict[str, str] | None = None,
        is_fresh: bool = False,
    ) -> list[Any]:
        """Return what `work(*arguments)` returns on each of `size` ranks, in order.

        With `is_fresh` no other work has run in their processes, and they have ended by then. `timeout_s` is that of a
        quiet machine (`_patience_s`).
        """
        timeout_s = _patience_s(timeout_s)
        with tempfile.TemporaryDirectory() as folder:
            variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(size)}
            workers = [_Worker(self._context) if is_fresh else self._taken(rank) for rank in range(size)]
            is_well = False
            try:
                for rank, worker in enumerate(workers):
                    own = variables | {"RANK": str(rank), "LOCAL_RANK": str(rank)} | (environment or {})
                    stacks = str(Path(folder) / f"{rank}.txt")
                    worker.connection.send_bytes(pickle.dumps(_Job(work, arguments, own, sys.path, stacks, timeout_s)))
                connections = [worker.connection for worker in workers]
                answers = _collect(connections, deadline_s=time.monotonic() + timeout_s + _SLACK_S)
                is_well = all(answer is not None and answer[0] == "returned" for answer in answers)
            finally:
                self._release(workers, may_go_on=is_well and not is_fresh)
            return _results(answers, Path(folder), [worker.process.exitcode for worker in workers])

    def run_alone(
        self, work: Callable[..., Any], *arguments: Any, timeout_s: float = 150.0, is_fresh: bool = False
    ) -> Any:
        """Return what `work(*arguments)` returns in one process that no launcher started."""
        return self.run(_without_launcher, work, arguments, size=1, timeout_s=timeout_s, is_fresh=is_fresh)[0]

    def process(self, work: Callable[..., Any], *arguments: Any) -> multiprocessing.process.BaseProcess:
        """Return a process that is still to be started: `work(*arguments)`, forked with torch imported."""
        return self._context.Process(target=work, args=arguments, daemon=True)

    def pipe(self) -> tuple[Connection, Connection]:
        """Return the reading and the writing end of a pipe; a process that is started can be given either."""
        return self._context.Pipe(duplex=False)

    def _release(self, workers: list[_Worker], *, may_go_on: bool) -> None:
        for worker in workers:
            if may_go_on:
                with contextlib.suppress(OSError):  # it has answered: what becomes of it then fails no test
                    worker.connection.send_bytes(_ALL_ANSWERED)
            else:
                worker.connection.close()
        for rank, worker in enumerate(workers):
            if may_go_on:
                self._idle.setdefault(rank, []).append(worker)
            else:
                worker.end()

    def _taken(self, rank: int) -> _Worker:
        """Return a process that has been this rank, or none yet."""
        idle = self._idle.get(rank, [])
        while idle:
            worker = idle.pop()
            if worker.is_ready():
                return worker
            worker.end()
        return _Worker(self._context)


def _patience_s(seconds: float) -> float:
    """Return `seconds` of a quiet machine as many times as programs of the last minute shared one of its cores."""
    shared_by = os.getloadavg()[0] / (os.cpu_count() or 1)
    return max(seconds, min(seconds * shared_by, _MOST_PATIENCE_S))


def _without_launcher(work: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    return work(*arguments)


def _rank_main(connection: Connection) -> None:
    import torch

    torch.set_num_threads(1)
    gc.set_threshold(100_000, 20, 20)
    gc.freeze()  # a collection would touch, and so copy, every page that the fork shares
    with contextlib.suppress(EOFError, ConnectionError):
        while _run_one(pickle.loads(connection.recv_bytes()), connection):  # noqa: S301 (the test wrote it)
            connection.send_bytes(_READY)


def _run_one(job: _Job, connection: Connection) -> bool:
    """Run the work of one rank and answer; return whether the process is then as it was before."""
    import torch.distributed as dist

    with _all_put_back(), Path(job.stacks).open("w") as stack_file:
        sys.path[:] = job.path
        os.environ.update(job.environment)
        faulthandler.dump_traceback_later(job.timeout_s, file=stack_file, exit=True)
        try:
            answer = ("returned", job.work(*job.arguments))
        except BaseException as error:
            answer = ("raised", (type(error), str(error), traceback.format_exc()))
        connection.send_bytes(_pickled(answer))
        if answer[0] == "returned":
            _wait_for_the_others(connection)
        if dist.is_initialized():
            dist.destroy_process_group()
        _forget_groups()
        faulthandler.cancel_dump_traceback_later()
    return answer[0] == "returned" and threading.active_count() == 1 and not multiprocessing.active_children()


def _pickled(answer: Any) -> bytes:
    """Return an answer pickled with its tensors as arrays: torch writes an archive for each of them."""
    import torch

    class Pickler(pickle.Pickler):
        def reducer_override(self, value: Any) -> Any:
            is_plain = type(value) is torch.Tensor and value.layout is torch.strided and not value.requires_grad
            if (
                is_plain
                and value.device.type == "cpu"
                and value.dtype in (torch.float32, torch.float64, torch.int64, torch.bool)
            ):
                return torch.from_numpy, (value.numpy(),)
            return NotImplemented

    stream = io.BytesIO()
    Pickler(stream).dump(answer)
    return stream.getvalue()


def _forget_groups() -> None:
    """Clear what holds the groups of the last job: placements of shards, and stores, whose ports others get again."""
    from torch.distributed.tensor import _redistribute, debug

    from paraplan.runtime import world

    _stores_of_the_past.extend(world._Stores.held.values())
    world._Stores.held.clear()
    world._Stores.num_jobs.clear()
    debug._clear_sharding_prop_cache()
    _redistribute._gen_transform_infos.cache_clear()


@contextlib.contextmanager
def _all_put_back() -> Iterator[None]:
    """Put back at the end of this context what work may set for its process."""
    import numpy as np
    import torch

    environment, path, folder = dict(os.environ), [*sys.path], Path.cwd()
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    dtype = torch.get_default_dtype()
    known = [
        logging.root,
        *(one for one in logging.root.manager.loggerDict.values() if isinstance(one, logging.Logger)),
    ]
    loggers = {one: (one.level, one.propagate, one.disabled, [*one.handlers]) for one in known}
    with warnings.catch_warnings():
        yield
    for one, (level, propagate, is_disabled, handlers) in loggers.items():
        if one.level != level:
            one.setLevel(level)  # which goes over all loggers
        one.propagate, one.disabled, one.handlers[:] = propagate, is_disabled, handlers
    logging.disable(logging.NOTSET)
    torch.set_default_dtype(dtype)
    torch.set_num_threads(1)
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:] = path


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
            except (EOFError, ConnectionResetError):
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
