"""Ranks that measure links and kernels of this machine: started, watched, ended with the process that asked."""

from __future__ import annotations

import contextlib
import datetime as dt
import importlib.metadata
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from paraplan.errors import ParaplanError, UsageError
from paraplan.hardware.cluster import Cluster
from paraplan.hardware.link_speed import load_link_speeds
from paraplan.hardware.measurement.kernels import KernelEvent, KernelRequest
from paraplan.hardware.measurement.links import (
    CPU_MESSAGE_BYTES,
    GPU_MESSAGE_BYTES,
    LinkReport,
    MeasureRequest,
    RankEnd,
    RankEvent,
    groups_to_measure,
    report_links,
)
from paraplan.hardware.topology import NodeTopology
from paraplan.launch.planning import search_path
from paraplan.launch.ranks.spawning import unwound_by_sigterm

_START_ALLOWANCE_S = 180.0  # importing torch on slow disks, and one message that takes longer than the time for all
_GRACE_S = 2.0
_ALSO_FAILED_S = 0.3  # for ranks that fail together, each with its own reason
_END = b'"ended_rank"'
_LOG = "start.log"

EventT = TypeVar("EventT", RankEvent, KernelEvent)


class MeasurementError(ParaplanError):
    """Ranks that measured links failed, or did not end in time."""

    exit_status = 1


def measure_machine(
    node: NodeTopology,
    *,
    cluster: Cluster | None,
    on_gpus: bool,
    max_seconds: float,
    environment: Mapping[str, str],
    watch: Callable[[MeasureRequest], Callable[[RankEvent], None]] = lambda request: lambda event: None,
) -> LinkReport:
    """Return what the links between the GPUs of `node` reach, one rank for each GPU in their order.

    `environment` must show exactly these GPUs to CUDA. Without `on_gpus` the ranks are CPU processes. `cluster` says
    what is expected (None: unknown). `watch` is told the request and returns what gets each report.
    Raises `MeasurementError`, and `UsageError` where torch is missing or there is no pair to measure.
    """
    try:
        torch_version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        raise UsageError("measuring links needs torch", hint="pip install torch, as suits these GPUs") from None
    groups = groups_to_measure(node, members="GPUs" if on_gpus else "processes")
    if not groups:
        raise UsageError("there is one GPU, and no link to measure", hint="--ranks 2 measures CPU processes")
    rank_of = {gpu.index: rank for rank, gpu in enumerate(node.gpus)}
    request = MeasureRequest(
        device="cuda" if on_gpus else "cpu",
        groups=tuple(tuple(sorted(rank_of[gpu] for gpu in group.gpus)) for group in groups),
        message_bytes=GPU_MESSAGE_BYTES if on_gpus else CPU_MESSAGE_BYTES,
        max_seconds=max_seconds,
    )
    events = measure_links(request, num_ranks=len(node.gpus), environment=environment, on_event=watch(request))
    backend = "nccl" if on_gpus else "gloo"
    return report_links(
        events,
        groups=groups,
        cluster=cluster,
        table=load_link_speeds(),
        backend=backend,
        source=f"measured on this machine with {backend}, torch {torch_version}, {dt.date.today()}",
    )


def measure_links(
    request: MeasureRequest,
    *,
    num_ranks: int,
    environment: Mapping[str, str],
    on_event: Callable[[RankEvent], None] = lambda event: None,
) -> list[RankEvent]:
    """Return what `num_ranks` ranks on this machine report on `request`; `on_event` gets each report at once.

    `environment` is that of the ranks. They have ended when this returns or raises, also by Ctrl-C or SIGTERM; when
    this process is killed they end by themselves. Raises `MeasurementError` with the last words of a failed rank.
    """
    return _run_ranks("paraplan.measure.links", request, RankEvent, num_ranks, environment, on_event)


def measure_kernels(
    request: KernelRequest,
    *,
    num_ranks: int,
    environment: Mapping[str, str],
    on_event: Callable[[KernelEvent], None] = lambda event: None,
) -> list[KernelEvent]:
    """Return what ranks report last of each kernel, which all of them time at once; else as `measure_links`."""
    events = _run_ranks("paraplan.measure.kernels", request, KernelEvent, num_ranks, environment, on_event)
    return list({event.case: event for event in events}.values())


def _run_ranks(
    module: str,
    request: MeasureRequest | KernelRequest,
    event_type: type[EventT],
    num_ranks: int,
    environment: Mapping[str, str],
    on_event: Callable[[EventT], None],
) -> list[EventT]:
    with tempfile.TemporaryDirectory(prefix="paraplan_") as name, unwound_by_sigterm():
        folder = Path(name)
        read_fd, write_fd = os.pipe()
        try:
            try:
                process = _start(module, num_ranks, folder, write_fd, request, environment)
            finally:
                os.close(write_fd)
            try:
                return _collect(process, num_ranks, read_fd, folder, request, event_type, on_event)
            finally:
                _stop(process)
        finally:
            os.close(read_fd)


def _start(
    module: str,
    num_ranks: int,
    folder: Path,
    write_fd: int,
    request: MeasureRequest | KernelRequest,
    environment: Mapping[str, str],
) -> subprocess.Popen[bytes]:
    """Start the process that the ranks are forked off."""
    own = search_path(environment) | {"OMP_NUM_THREADS": "1"} | _on_loopback(environment)
    with (folder / _LOG).open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", module, str(num_ranks), str(folder), str(write_fd)],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            env=dict(environment) | own,
            pass_fds=[write_fd],
            start_new_session=True,  # a Ctrl-C of the terminal is this process's to act on
        )
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it has ended already; its exit status will tell
        process.stdin.write(request.to_json(indent=None).encode() + b"\n")
        process.stdin.flush()  # and stays open: that it closes is how ranks learn that this process has ended
    return process


def _on_loopback(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that keep the sockets of gloo and NCCL on the loopback interface."""
    interface = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    variables = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    return {name: interface for name in variables if interface is not None and name not in environment}


def _collect(
    process: subprocess.Popen[bytes],
    num_ranks: int,
    read_fd: int,
    folder: Path,
    request: MeasureRequest | KernelRequest,
    event_type: type[EventT],
    on_event: Callable[[EventT], None],
) -> list[EventT]:
    events: list[EventT] = []
    failed: dict[int, int] = {}
    give_up_s = time.monotonic() + request.max_seconds + _START_ALLOWANCE_S
    until_s = give_up_s
    received, is_open = b"", True
    while (is_open or process.poll() is None) and time.monotonic() < until_s:
        ready, _, _ = select.select([read_fd] if is_open else [], [], [], 0.1)
        if ready:
            data = os.read(read_fd, 1 << 16)
            is_open = bool(data)
            *lines, received = (received + data).split(b"\n")
            for line in lines:
                if _END in line:
                    end = RankEnd.model_validate_json(line)
                    if end.exit_status:
                        failed[end.ended_rank] = end.exit_status
                        until_s = min(until_s, time.monotonic() + _ALSO_FAILED_S)
                else:
                    events.append(event_type.model_validate_json(line))
                    on_event(events[-1])
        if process.poll():  # killed: its ranks would go on without it
            until_s = min(until_s, time.monotonic() + _ALSO_FAILED_S)
    if failed:
        raise _failure(failed, folder)
    if process.poll():
        raise _error("the process that starts ranks", process.returncode, _last_words(folder / _LOG))
    if time.monotonic() >= give_up_s:
        raise MeasurementError(
            f"{num_ranks} ranks have not taken {request.num_timings} timings within "
            f"{request.max_seconds + _START_ALLOWANCE_S:.0f} s",
            hint="NCCL_DEBUG=INFO and fewer GPUs (--gpus) show which link hangs",
        )
    return events


def _failure(failed: Mapping[int, int], folder: Path) -> MeasurementError:
    """Return the error that names the rank whose fault it was: not one that only lost its connection to another."""
    words = {number: _last_words(folder / f"{number}.log") for number in sorted(failed)}
    lost = ("connection closed by peer", "connection reset", "socket closed", "remote process has exited")
    cause = next((number for number in words if not any(word in words[number].lower() for word in lost)), min(failed))
    return _error(f"rank {cause} that measured", failed[cause], words[cause])


def _error(who: str, status: int, words: str) -> MeasurementError:
    ended = f"was ended by signal {-status}" if status < 0 else f"failed with status {status}"
    return MeasurementError(
        f"{who} {ended}: {words or 'it said nothing'}",
        hint="paraplan topo without --measure shows what is known of the machine",
    )


def _last_words(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:500] if lines else ""


def _stop(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.close()
    try:
        process.wait(timeout=_GRACE_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # its ranks, too, are of its group
        process.wait()
