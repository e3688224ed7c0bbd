"""The spawner with real processes: what it starts, it ends, and what those leave behind too."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from launching import is_alive, wait_until_dead
from waiting import PATIENCE_S, wait_until

from paraplan.launch.ranks.spawning import (
    RankCommand,
    RankExit,
    SpawnerHandle,
    SpawnerLostError,
    StartError,
    open_spawner,
)

SLEEP = "import time; time.sleep(600)"
STUBBORN = (
    "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); os.write(1, b'up\\n'); time.sleep(600)"
)
WITH_CHILD = (
    "import subprocess, sys; child = subprocess.Popen(['sleep', '600'], start_new_session={daemon}); "
    "print(child.pid, flush=True)"
)


@pytest.fixture
def spawner() -> Iterator[SpawnerHandle]:
    handle = open_spawner()
    yield handle
    handle.close()


def start(spawner: SpawnerHandle, *programs: str, folder: Path | None = None, **environment: str) -> dict[int, int]:
    ranks = [
        RankCommand(
            local_rank=rank,
            command=[sys.executable, "-c", program],
            environment={"RANK": str(rank)},
            stdout=str(folder / f"{rank}.out") if folder else "",
        )
        for rank, program in enumerate(programs)
    ]
    return spawner.start(ranks, environment=dict(os.environ) | environment, fork=False, num_threads=None)


def wait_for_exits(spawner: SpawnerHandle, number: int) -> dict[int, RankExit]:
    ends: dict[int, RankExit] = {}

    def have_come() -> bool:
        ends.update({end.local_rank: end for end in spawner.exits(timeout_s=0.2)})
        return len(ends) >= number

    wait_until(have_come, told=lambda: ends)
    return ends


def wait_for_line(path: Path) -> str:
    wait_until(lambda: path.exists() and path.read_text().endswith("\n"))
    return path.read_text().strip()


def test_exits_come_with_their_codes_and_the_order_in_which_they_happened(
    spawner: SpawnerHandle, tmp_path: Path
) -> None:
    before_ns = time.time_ns()
    fifo = str(tmp_path / "fifo")
    os.mkfifo(fifo)
    killed = f"import os; os.write(os.open({fifo!r}, os.O_WRONLY), b'%d' % os.getpid()); os.kill(os.getpid(), 9)"
    after = (
        f"import os, time; path = '/proc/' + open({fifo!r}).read()\n"
        "while os.path.exists(path): time.sleep(0.01)\n"  # until the spawner has taken note of its end
        "raise SystemExit(7)"
    )
    start(spawner, killed, after, "")
    ends = wait_for_exits(spawner, 3)
    assert {rank: end.code for rank, end in ends.items()} == {0: -9, 1: 7, 2: 0}
    assert before_ns < ends[0].time_ns < ends[1].time_ns < time.time_ns()
    assert 1 << 20 < ends[1].max_rss_bytes < 1 << 32


def test_each_rank_gets_its_environment_and_its_log_file(spawner: SpawnerHandle, tmp_path: Path) -> None:
    program = "import os; print(os.environ['RANK'], os.environ['SHARED'], os.getsid(0) == os.getpid())"
    start(spawner, program, program, folder=tmp_path, SHARED="yes")
    wait_for_exits(spawner, 2)
    assert [(tmp_path / f"{rank}.out").read_text() for rank in (0, 1)] == ["0 yes True\n", "1 yes True\n"]


def test_a_signal_reaches_all_ranks_that_still_run(spawner: SpawnerHandle) -> None:
    start(spawner, "", SLEEP, SLEEP)
    assert wait_for_exits(spawner, 1)[0].code == 0
    spawner.signal(signal.SIGTERM)
    assert {end.code for end in wait_for_exits(spawner, 2).values()} == {-signal.SIGTERM}


SIGNALLED_AT_ONCE = """
import signal, time
from paraplan.launch.ranks.spawner import RankStart
from paraplan.launch.ranks.spawning import RankCommand, fork_spawner
handle = fork_spawner()
if isinstance(handle, RankStart):
    time.sleep(600)
ranks = [RankCommand(local_rank=rank, command=[], environment={}) for rank in range(4)]
for _ in range(20):
    handle.start(ranks, environment={}, fork=True, num_threads=None)
    handle.signal(signal.SIGTERM)
    codes = []
    while len(codes) < 4:
        codes += [end.code for end in handle.exits(timeout_s=1.0)]
    assert codes == [-signal.SIGTERM] * 4
handle.close()
"""


def test_a_signal_reaches_forked_ranks_that_have_only_just_begun() -> None:
    subprocess.run([sys.executable, "-c", SIGNALLED_AT_ONCE], check=True, timeout=PATIENCE_S)


def test_ranks_start_with_the_default_answers_to_signals(spawner: SpawnerHandle, tmp_path: Path) -> None:
    program = "import signal as s; print([s.getsignal(n) for n in (s.SIGTERM, s.SIGHUP, s.SIGCHLD)] == [0, 0, 0])"
    start(spawner, program, folder=tmp_path)
    wait_for_exits(spawner, 1)
    assert (tmp_path / "0.out").read_text() == "True\n"


def test_a_program_that_cannot_be_started_leaves_no_rank_running(spawner: SpawnerHandle) -> None:
    good = RankCommand(local_rank=0, command=["sleep", "600"], environment={})
    bad = RankCommand(local_rank=1, command=["/no/such/program"], environment={})
    with pytest.raises(StartError, match="local rank 1 cannot be started"):
        spawner.start([good, bad], environment=os.environ, fork=False, num_threads=None)
    start(spawner, "")
    assert set(wait_for_exits(spawner, 1)) == {0}


@pytest.mark.parametrize("daemon", [False, True])
def test_what_a_rank_leaves_behind_is_ended_after_it(spawner: SpawnerHandle, tmp_path: Path, daemon: bool) -> None:
    start(spawner, WITH_CHILD.format(daemon=daemon), folder=tmp_path)
    child = int(wait_for_line(tmp_path / "0.out"))
    wait_for_exits(spawner, 1)
    assert is_alive(child)
    assert spawner.clear(grace_s=1.0) == 1
    wait_until_dead(child)


@pytest.mark.parametrize("daemon", [False, True])
def test_what_stays_after_a_rank_that_succeeded_is_left_alone_and_named(
    spawner: SpawnerHandle, tmp_path: Path, daemon: bool
) -> None:
    start(spawner, WITH_CHILD.format(daemon=daemon), folder=tmp_path)
    child = int(wait_for_line(tmp_path / "0.out"))
    wait_for_exits(spawner, 1)
    assert spawner.find_left() == {child: "sleep 600"}
    assert is_alive(child)
    os.kill(child, signal.SIGKILL)
    wait_until_dead(child)  # on a busy machine not at once
    assert spawner.find_left() == {}


def test_ranks_and_their_children_die_with_a_killed_launcher_and_the_log_folder_goes(tmp_path: Path) -> None:
    launcher = f"""
import os, sys, time
from paraplan.launch.ranks.spawning import RankCommand, open_spawner
spawner = open_spawner()
os.mkdir({str(tmp_path / "logs")!r})
spawner.own({str(tmp_path / "logs")!r})
ranks = [RankCommand(local_rank=0, command=[sys.executable, "-c", {STUBBORN!r}], environment={{}}),
         RankCommand(local_rank=1, command=["sh", "-c", "sleep 600 & wait"], environment={{}})]
pids = spawner.start(ranks, environment=os.environ, fork=False, num_threads=None).values()
os.write(1, (" ".join(map(str, pids)) + "\\n").encode())  # in one piece, beside what the rank writes
time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", launcher], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = {process.stdout.readline(), process.stdout.readline()}  # launcher and rank write to the same pipe
        lines.remove("up\n")
        pids = [int(word) for word in lines.pop().split()]
        assert all(map(is_alive, pids))
        process.kill()
        wait_until_dead(*pids)
        assert process.stdout.read() == ""  # the child of the second rank held it open
    assert not (tmp_path / "logs").exists()


def test_ranks_die_with_a_killed_spawner_and_the_launcher_is_told() -> None:
    handle = open_spawner()
    pids = start(handle, SLEEP, STUBBORN)
    os.kill(handle._pid, signal.SIGKILL)
    with pytest.raises(SpawnerLostError):
        wait_for_exits(handle, 2)
    wait_until_dead(*pids.values())
    handle.close()


def test_closing_kills_ranks_that_still_run() -> None:
    handle = open_spawner()
    pids = start(handle, STUBBORN)
    handle.close()
    wait_until_dead(*pids.values())
