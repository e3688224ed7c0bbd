"""Jobs whose ranks wait for one that never comes: what is said of those that wait, and where the other one is."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from launching import Launch, WriteScript, names_in

from paraplan.launch.ranks.stacks import stack_by_py_spy

pytestmark = pytest.mark.ranks

WAITING = """
    import sys, time
    from datetime import timedelta
    import torch, torch.distributed as dist

    def load_data():
        time.sleep(600)

    dist.init_process_group("gloo")
    dist.barrier()
    pair = dist.new_group([0, 1])
    dist.barrier()
    if sys.argv[1:]:
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=int(sys.argv[1])))
    if dist.get_rank() == 2:
        load_data()
    dist.all_reduce(torch.ones(3), group=pair)
    dist.all_reduce(torch.ones(3))
"""


def test_a_collective_that_timed_out_is_told_with_the_rank_that_never_came_and_where_it_was(
    scratch: Path, script: WriteScript, launch: Launch
) -> None:
    done = launch("--nproc-per-node", 3, script(WAITING), 5)
    assert done.returncode == 1
    report = done.stderr[done.stderr.index("paraplan: a collective") :].splitlines()
    told = r"paraplan: a collective timed out: ranks 0-1 waited 5 s in all_reduce number \d+ of ranks 0-2; "
    assert re.match(told + "rank 2 never came to it$", report[0])
    assert report[1] == "  rank 2 was in load_data (train.py:7)"
    assert any(line.endswith('train.py", line 18, in <module>') for line in report)
    assert len(report) <= 10
    assert names_in(scratch) == []


def test_a_hang_is_told_with_the_collective_in_which_ranks_wait(
    scratch: Path, script: WriteScript, launch: Launch
) -> None:
    done = launch("--nproc-per-node", 3, "--hang-timeout", 3, script(WAITING))
    assert done.returncode == 124, done.stderr
    waiting, *places = done.stderr.splitlines()[-3:]
    told = (
        r"  waiting: ranks 0-1 in all_reduce number (\d+) of ranks 0-2; "
        r"rank 2 has not come to it, its last in the group was number (\d+)"
    )
    found = re.match(told, waiting)
    assert found is not None, done.stderr
    assert int(found[1]) == int(found[2]) + 1
    assert places[0].endswith("called from <module> (train.py:18)")
    assert places[1] == "  rank 2 in load_data (train.py:7)"
    assert names_in(scratch) == []


def test_a_process_that_is_stopped_is_read_from_outside() -> None:
    if shutil.which("py-spy") is None:
        pytest.skip("py-spy is not installed")
    program = "import os, signal\ndef wait():\n    os.kill(os.getpid(), signal.SIGSTOP)\nwait()"
    with subprocess.Popen([sys.executable, "-c", program]) as process:
        try:
            _, status = os.waitpid(process.pid, os.WUNTRACED)
            assert os.WSTOPSIG(status) == signal.SIGSTOP
            stack = stack_by_py_spy(process.pid)
        finally:
            process.kill()
    if not stack:
        pytest.skip("this container does not let processes be read")
    assert [frame.name for frame in stack] == ["wait", "<module>"]
