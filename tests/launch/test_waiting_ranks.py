"""Jobs whose ranks wait in a collective: who waits is told, and who is missing, and where that one is."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from launching import NEVER_S, ForkedLaunch, WriteScript, names_in

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


def test_a_collective_that_timed_out_is_told_with_the_rank_that_never_entered_it_and_where_it_was(
    scratch: Path, script: WriteScript, launch_forked: ForkedLaunch
) -> None:
    done = launch_forked("--nproc-per-node", 3, script(WAITING), 5)
    assert done.returncode == 1
    report = done.stderr[done.stderr.index("paraplan: a collective") :].splitlines()
    told = r"paraplan: a collective timed out: ranks 0-1 waited 5 s in all_reduce number \d+ of ranks 0-2; "
    assert re.match(told + "rank 2 never entered it$", report[0])
    assert "  rank 2 was in load_data (train.py:7)" in report  # beside ranks that are slow to end
    assert any(line.endswith('train.py", line 18, in <module>') for line in report)
    assert len(report) <= 10
    assert names_in(scratch) == []


FAULTS = """
    import os, signal, sys
    from datetime import timedelta
    import torch, torch.distributed as dist

    fault = sys.argv[1]
    dist.init_process_group("gloo")
    dist.barrier()
    if fault != "skip":  # there the end of a process is waited for, which a busy machine puts off
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=3), dist.group.WORLD)
    if dist.get_rank() == 1:
        if fault == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if fault == "order":
            dist.broadcast(torch.ones(3), 1)
    if not (fault == "skip" and dist.get_rank() == 1):
        dist.all_reduce(torch.ones(3))
    dist.all_reduce(torch.ones(3))
"""


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (
            "stop",
            r"a collective timed out: rank 0 waited 3 s in all_reduce number (\d+) of ranks 0-1; "
            r"rank 1 never entered it\n  rank 1 was stopped, by SIGSTOP or a debugger\n",
        ),
        (
            "order",
            # the first to give up closes the connection of the other, whose own timeout may then never come
            r"a collective timed out: rank (0 waited 3 s in all_reduce|1 waited 3 s in broadcast) number (\d+) of "
            r"ranks 0-1; rank ([01] waited 3 s in \w+ number \2 of ranks 0-1|1 called broadcast instead|"
            r"0 called all_reduce instead)\n",
        ),
        (
            "skip",
            r"rank 0 failed: RuntimeError: .*Connection (?:closed|reset) by peer.*\n"
            r"  rank 1 had ended with exit code 0, and rank 0 went on with all_reduce number (\d+) of ranks 0-1\n",
        ),
    ],
)
def test_a_rank_that_is_stopped_or_calls_another_collective_or_one_less_is_told(
    scratch: Path, script: WriteScript, launch_forked: ForkedLaunch, fault: str, told: str
) -> None:
    done = launch_forked("--nproc-per-node", 2, "--no-logs", "--shutdown-timeout", NEVER_S, script(FAULTS), fault)
    assert done.returncode == 1
    assert re.search(f"^paraplan: {told}", done.stderr, re.MULTILINE), done.stderr
    assert names_in(scratch) == []


def test_a_hang_is_told_with_the_collective_in_which_ranks_wait(
    scratch: Path, script: WriteScript, launch_forked: ForkedLaunch
) -> None:
    done = launch_forked("--nproc-per-node", 3, "--hang-timeout", 3, script(WAITING))
    assert done.returncode == 124, done.stderr
    waiting, *places = done.stderr.splitlines()[-3:]
    told = (
        r"  waiting: ranks 0-1 in all_reduce number (\d+) of ranks 0-2; "
        r"rank 2 never entered it, its last call in this group was number (\d+)"
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
