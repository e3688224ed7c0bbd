"""The life of a rank that measures: it meets the others through a file, takes one request, and reports on a pipe.

It takes its request as a line of JSON on standard input and ends when that is closed, so that ranks never outlive the
process that started them.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]  # torch re-exports it from C++ unmarked

from paraplan.errors import UsageError
from paraplan.hardware.measurement.kernels import KernelRequest
from paraplan.hardware.measurement.links import MeasureRequest
from paraplan.records import Record

_START_TIMEOUT_S = 120.0


_Request = TypeVar("_Request", MeasureRequest, KernelRequest)
_Event = TypeVar("_Event", bound=Record)


def run_rank(kind: type[_Request], measure: Callable[[_Request, Callable[[_Event], None]], None]) -> None:
    """Run one rank: `RANK SIZE STORE_FILE REPORT_FD` as arguments, the request as the first line of standard input.

    A UsageError is written to standard error, with exit status 2.
    """
    rank, size, store_path, report_fd = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    request = kind.model_validate_json(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()

    def report(event: _Event) -> None:
        # One write each: shorter than PIPE_BUF, so that lines of several ranks never mix.
        os.write(report_fd, (event.model_dump_json() + "\n").encode())

    # Ranks outside a group wait for it, as long as everything may take.
    timeout_s = _START_TIMEOUT_S + request.max_seconds
    try:
        join(device=request.device, rank=rank, size=size, store_path=store_path, timeout_s=timeout_s)
    except UsageError as problem:
        sys.stderr.write(f"{problem}\n")
        sys.exit(2)
    try:
        measure(request, report)
    finally:
        with contextlib.suppress(RuntimeError):  # a rank that failed leaves the others' connections broken
            dist.destroy_process_group()


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


def _end_with_parent() -> None:
    """End this process when its standard input closes: the process that started it has ended."""
    sys.stdin.read()
    os._exit(1)
