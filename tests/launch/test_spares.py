"""Processes that stand by with what a script imports, in which its ranks start again."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest
from launching import ForkedLaunch, StartForked, WriteScript, names_in, read_until, wait_until_dead
from recovery_script import descendants
from waiting import PATIENCE_S, wait_until

pytestmark = pytest.mark.ranks

TRAIN = """
    import os, signal, sys, time
    import fractions  # which torch does not import
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank, size, attempt = dist.get_rank(), dist.get_world_size(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    seen = sorted(set(os.environ) - {"PARAPLAN_STATUS_PAGE"}), sys.argv, os.getcwd(), blocked, torch.get_num_threads()
    print(f"attempt {attempt} of rank {rank} in {os.getpid()} sees {seen}\\n", end="", flush=True)
    print(f"drew {torch.rand(1).item()}\\n", end="", flush=True)
    for step in range(6):
        dist.all_reduce(torch.ones(10))
        if attempt == 0 and step == 3 and rank == size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
    print(f"rank {rank} is done\\n", end="", flush=True)
    dist.destroy_process_group()
"""


@pytest.mark.parametrize(("method", "size"), [("spawn", 2), pytest.param("exec", 1, marks=pytest.mark.with_all)])
def test_ranks_that_start_again_begin_in_spare_processes_and_see_what_they_saw(
    method: str, size: int, launch_forked: ForkedLaunch, script: WriteScript
) -> None:
    words = ("--spare-ranks", size, "--max-restarts", 1, "--no-logs", "--nproc-per-node", size)
    ended = launch_forked(*words, "--start-method", method, script(TRAIN), "--lr", "0.1")
    assert ended.returncode == 0, ended.stderr
    assert "killed by SIGKILL" in ended.stderr
    assert ("ranks 0-1 begin in spare processes" if size > 1 else "rank 0 begins in a spare process") in ended.stderr
    assert ended.stdout.count("is done") == size
    found = re.findall(r"attempt (\d) of rank (\d) in (\d+) sees (.*)", ended.stdout)
    assert len({pid for *_, pid, _ in found}) == 2 * size
    for rank in "01"[:size]:
        first, again = (seen for number in "01" for a, r, _, seen in found if (a, r) == (number, rank))
        assert first == again
    if method == "spawn":  # where torch seeds each rank by the system
        assert len(set(re.findall("drew (.*)", ended.stdout))) == 4


def test_fewer_spares_than_ranks_are_taken_and_the_others_begin_anew(
    launch_forked: ForkedLaunch, script: WriteScript
) -> None:
    words = ("--spare-ranks", 1, "--max-restarts", 1, "--no-logs", "--nproc-per-node", 2)
    ended = launch_forked(*words, script(TRAIN))
    assert ended.returncode == 0, ended.stderr
    assert "rank 0 begins in a spare process" in ended.stderr


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_nothing_is_left_of_spares(
    number: signal.Signals, start_forked: StartForked, script: WriteScript, scratch: Path
) -> None:
    path = script(TRAIN.replace("range(6)", "range(10**9)").replace("attempt == 0 and", "False and"))
    process = start_forked("--max-restarts", 1, "--no-logs", "--spare-ranks", 2, "--nproc-per-node", 2, path)
    assert process.stdout is not None
    read_until(process.stdout, lambda text: text.count("drew") == 2 and text.endswith("\n"))
    wait_until(lambda: len([*descendants(process.pid)]) >= 5)  # spawner, two ranks, two spares
    family = [process.pid, *descendants(process.pid)]
    process.send_signal(number)
    process.communicate(timeout=PATIENCE_S)
    assert process.wait() == (130 if number == signal.SIGINT else -9)
    wait_until_dead(*family)
    assert names_in(scratch) == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--spare-ranks", 2], "--spare-ranks 2 without --max-restarts: ranks never start again"),
        (["--spare-ranks", -1, "--max-restarts", 1], "--spare-ranks -1 is below the least, 0"),
        (["--spare-ranks", 1, "--max-restarts", 1, "--no-python"], "--spare-ranks 1 and --no-python: "),
    ],
)
def test_options_that_cannot_be_held_are_refused(
    words: list[object], said: str, launch_forked: ForkedLaunch, script: WriteScript
) -> None:
    path = script("pass")
    path.chmod(0o755)
    ended = launch_forked(*words, path)
    assert (ended.returncode, said in ended.stderr) == (2, True), ended.stderr
