"""The life of ranks that measure: forked off one interpreter, they meet through a file and report on a pipe.

The request is a line of JSON on standard input. All of them end when that is closed, so that ranks never outlive the
process that started them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Collection
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]  # torch re-exports it from C++ unmarked

from paraplan.errors import UsageError
from paraplan.hardware.measurement.kernels import KernelRequest
from paraplan.hardware.measurement.links import MeasureRequest, RankEnd
from paraplan.records import Record

_START_TIMEOUT_S = 120.0


_Request = TypeVar("_Request", MeasureRequest, KernelRequest)
_Event = TypeVar("_Event", bound=Record)


def run_ranks(kind: type[_Request], measure: Callable[[_Request, Callable[[_Event], None]], None]) -> None:
    """Run ranks: `SIZE FOLDER REPORT_FD` as arguments, the request as the first line of standard input.

    Each writes what it says to `RANK.log` in the folder, with its UsageError (exit status 2) or traceback (1), and its
    end is reported.
    """
    size, folder, report_fd = int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    request = kind.model_validate_json(sys.stdin.readline())

    def report(event: Record) -> None:
        # One write each: shorter than PIPE_BUF, so that lines of several ranks never mix.
        os.write(report_fd, (event.model_dump_json() + "\n").encode())

    ranks: dict[int, int] = {}
    for rank in range(size):
        pid = os.fork()
        if pid == 0:
            _end_with(folder / f"{rank}.log", partial(_run, request, rank, size, folder, measure, report))
        ranks[pid] = rank
    threading.Thread(target=_end_with_parent, args=(ranks,), daemon=True).start()
    while ranks:
        pid, status = os.wait()
        report(RankEnd(ended_rank=ranks.pop(pid), exit_status=os.waitstatus_to_exitcode(status)))


def _end_with(log: Path, run: Callable[[], int]) -> NoReturn:
    """End this process with the status that `run` returns, its words in a log."""
    with log.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    threading.Thread(target=_end_with_parent, args=((),), daemon=True).start()
    status = 1
    try:
        status = run()
    except BaseException:  # told to the process that waits, as an interpreter's own end would
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _run(
    request: _Request,
    rank: int,
    size: int,
    folder: Path,
    measure: Callable[[_Request, Callable[[_Event], None]], None],
    report: Callable[[Record], None],
) -> int:
    # Ranks outside a group wait for it, as long as everything may take.
    timeout_s = _START_TIMEOUT_S + request.max_seconds
    try:
        join(device=request.device, rank=rank, size=size, store_path=str(folder / "store"), timeout_s=timeout_s)
    except UsageError as problem:
        sys.stderr.write(f"{problem}\n")
        return 2
    try:
        measure(request, report)
    finally:
        with contextlib.suppress(RuntimeError):  # a rank that failed leaves the others' connections broken
            dist.destroy_process_group()
    return 0


def join(*, device: str, rank: int, size: int, store_path: str, timeout_s: float = _START_TIMEOUT_S) -> None:
    """Set up the default process group of ranks on this machine: gloo, and NCCL for tensors on GPUs.

    They meet through a file, and wait `timeout_s` for each other at most. Raises UsageError where torch sees too few
    GPUs.
    """
    if device == "cuda":
        seen = torch.cuda.device_count()
        if seen <= rank:
            built = "" if torch.version.cuda else ": it is built without CUDA"
            raise UsageError(
                f"torch sees {seen} of the {size} GPUs{built}",
                hint="install a build of torch for these GPUs, or measure CPU processes with --ranks 2",
            )
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo",
        store=FileStore(store_path, size),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=timeout_s),
    )


def _end_with_parent(ranks: Collection[int]) -> None:
    """End this process, and the ranks that it has forked, when standard input closes: who has started it has ended."""
    sys.stdin.read()
    for pid in list(ranks):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    os._exit(1)
