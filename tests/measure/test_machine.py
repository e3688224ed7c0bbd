"""Ranks that measure links: what is said when one fails, and that none of them outlives the one who asked."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import PATIENCE_S, wait_until

from paraplan.errors import UsageError
from paraplan.hardware.measurement.links import MeasureRequest
from paraplan.hardware.topology import Gpu, NodeTopology
from paraplan.measure.machine import MeasurementError, measure_links, measure_machine

pytestmark = pytest.mark.ranks


def test_a_rank_that_fails_is_quoted_and_no_rank_is_left() -> None:
    request = MeasureRequest(device="cpu", groups=((0, 7),), message_bytes=(1024,), max_seconds=5)
    with pytest.raises(MeasurementError, match=r"rank [01] .*failed with status 1: .*") as caught:
        measure_links(request, num_ranks=2, environment=os.environ)
    assert "it said nothing" not in str(caught.value)
    assert children_of(os.getpid()) == set()


def test_one_gpu_has_no_link_to_measure() -> None:
    node = NodeTopology(source="test", gpus=(Gpu(index=0),))
    with pytest.raises(UsageError, match="no link to measure"):
        measure_machine(node, cluster=None, on_gpus=True, max_seconds=1, environment={})


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads the children of a process in /proc")
@pytest.mark.parametrize(
    "number",
    # An interrupt goes the way of SIGTERM: both are exceptions where the ranks are waited for.
    [pytest.param(signal.SIGINT, marks=pytest.mark.with_all), signal.SIGTERM, signal.SIGKILL],
    ids=lambda number: number.name,
)
def test_ranks_end_with_the_process_that_asked_for_them(number: signal.Signals, tmp_path: Path) -> None:
    asking = subprocess.Popen(
        [sys.executable, "-m", "paraplan", "topo", "--measure", "--ranks", "2", "--seconds", "300"],
        env=os.environ | {"TMPDIR": str(tmp_path)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        ranks = wait_for_children(asking.pid, count=3)  # what forks the ranks is one
        asking.send_signal(number)
        _, said = asking.communicate(timeout=PATIENCE_S)
        assert asking.returncode != 0
        assert "Traceback" not in said
        wait_until(lambda: not any(map(is_running, ranks)))
    finally:
        asking.kill()
        asking.communicate()
    if number is not signal.SIGKILL:
        assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads the children of a process in /proc")
def test_ranks_end_with_the_process_that_has_forked_them() -> None:
    command = [sys.executable, "-m", "paraplan", "topo", "--measure", "--ranks", "2", "--seconds", "300"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as asking:
        try:
            ranks = wait_for_children(asking.pid, count=3)
            os.kill(next(pid for pid in ranks if int(stat_fields(pid)[1]) == asking.pid), signal.SIGKILL)
            _, said = asking.communicate(timeout=PATIENCE_S)
        finally:
            asking.kill()
    assert asking.returncode == 1
    assert "the process that starts ranks was ended by signal 9" in said
    wait_until(lambda: not any(map(is_running, ranks)))


def wait_for_children(pid: int, *, count: int) -> set[int]:
    return wait_until(lambda: len(found := children_of(pid)) >= count and found, told=lambda: "no ranks were started")


def children_of(pid: int) -> set[int]:
    """Return what a process has started that measures links, and what that has."""
    found = set()
    for thread in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, read(thread).split()):
            found |= children_of(child)
            if "paraplan.measure.links" in read(Path(f"/proc/{child}/cmdline")):
                found.add(child)
    return found


def is_running(pid: int) -> bool:
    fields = stat_fields(pid)
    return bool(fields) and fields[0] not in ("Z", "X")


def stat_fields(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the state on; none for a process that is gone."""
    return read(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()


def read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
