from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from waiting import wait_until

from paraplan.launch.faults.activity import Activity, read_activities
from paraplan.launch.faults.collectives import Call, RankCalls, Whereabouts
from paraplan.launch.faults.hang import HangVerdict, HangWatch, describe_elsewhere
from paraplan.launch.ranks.bootstrap import STACK_FILE
from paraplan.launch.ranks.live import LiveRank
from paraplan.launch.ranks.stacks import Frame, main_stack

STACK = """Thread 0x00007f01 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 320 in wait

Current thread 0x00007f02 (most recent call first):
  File "/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 2901 in all_reduce
  File "/home/me/train.py", line {line} in step
  File "/home/me/train.py", line 80 in <module>
"""


class FakeRanks:
    """Ranks that answer a request for stacks with what `stacks` holds, and a clock that moves when told."""

    def __init__(self, folder: Path, num_ranks: int = 2) -> None:
        self.stacks = {rank: STACK.format(line=41 + rank) for rank in range(num_ranks)}
        self.activities = dict.fromkeys(self.stacks, Activity(0.0, 7, 0.0, 0.0, 0, ()))
        self.load = dict.fromkeys(self.stacks, 0.0)
        self.calls: dict[int, RankCalls] = {}
        self.requests = 0
        self.questions = 0
        self.now = 100.0
        self.live = {rank: LiveRank(rank, rank, rank, folder / str(rank)) for rank in self.stacks}
        self.files = {rank: folder / str(rank) / STACK_FILE for rank in self.stacks}
        for file in self.files.values():
            file.parent.mkdir()
            file.touch()

    def answer(self, ranks: Sequence[LiveRank]) -> None:
        self.requests += 1
        for one in ranks:
            self.files[one.rank].write_text(self.stacks[one.rank])
            self.do(one.rank, waits=1)

    def do(self, rank: int, **more: int) -> None:
        """Add to what a rank has done."""
        done = self.activities[rank]
        self.activities[rank] = replace(done, **{name: getattr(done, name) + value for name, value in more.items()})

    def read(self, ranks: Sequence[LiveRank]) -> dict[int, Activity]:
        """Return what ranks have done; each has used its `load` of a core since the last time."""
        for rank in (one.rank for one in ranks):
            done = self.activities[rank]
            cpu_s = done.cpu_s + self.load[rank] * (self.now - done.time_s)
            self.activities[rank] = replace(done, time_s=self.now, cpu_s=cpu_s)
        return {one.rank: self.activities[one.rank] for one in ranks}

    def watch(self, timeout_s: float = 10.0) -> HangWatch:
        return HangWatch(
            timeout_s=timeout_s,
            request_stacks=self.answer,
            read=self.read,
            ask=lambda ranks: dict(self.calls),
            count_questions=lambda: self.questions,
            clock=lambda: self.now,
        )

    def run(self, watch: HangWatch, seconds: float, running: list[int]) -> HangVerdict | None:
        """Look every 0.1 s until there is a verdict or the time is over."""
        end = self.now + seconds
        while self.now < end:
            verdict = watch.check([self.live[rank] for rank in running])
            if verdict is not None:
                return verdict
            self.now += 0.1
        return None


def test_ranks_that_stand_still_hang_after_the_timeout_and_not_before(tmp_path: Path) -> None:
    ranks = FakeRanks(tmp_path)
    watch = ranks.watch(timeout_s=10.0)
    assert ranks.run(watch, 10.0, [0, 1]) is None
    assert ranks.requests == 0  # nobody is disturbed before
    verdict = ranks.run(watch, 10.0, [0, 1])
    assert verdict is not None
    assert verdict.still_s >= 10.0
    assert verdict.where.stacks[1][1] == Frame("/home/me/train.py", 42, "step")


def test_one_rank_that_computes_and_waits_for_something_new_is_progress_for_all(tmp_path: Path) -> None:
    ranks = FakeRanks(tmp_path)
    ranks.load[1] = 0.9
    watch = ranks.watch(timeout_s=2.0)
    for _ in range(40):
        ranks.do(1, waits=10)
        assert ranks.run(watch, 1.5, [0, 1]) is None
    assert ranks.run(watch, 10.0, [0, 1]) is not None


@pytest.mark.parametrize("load", [0.0, 0.02])
def test_a_rank_that_polls_hangs_wherever_it_stands_when_it_is_looked_at(tmp_path: Path, load: float) -> None:
    ranks = FakeRanks(tmp_path)
    ranks.load[1] = load
    watch, verdict = ranks.watch(timeout_s=10.0), None
    while verdict is None and ranks.now < 130.0:
        ranks.do(1, waits=5, moved_bytes=200)
        ranks.stacks[1] = STACK.format(line=int(ranks.now))
        verdict = ranks.run(watch, 1.0, [0, 1])
    assert verdict is not None
    assert 10.0 <= verdict.still_s < 20.0


def test_a_rank_that_spins_at_one_place_hangs(tmp_path: Path) -> None:
    ranks = FakeRanks(tmp_path)
    ranks.load[1] = 1.0
    assert ranks.run(ranks.watch(timeout_s=10.0), 20.0, [0, 1]) is not None


@pytest.mark.parametrize("done", [{"children_cpu_s": 2}, {"moved_bytes": 1 << 20}])
def test_children_that_work_and_data_that_is_read_are_progress(tmp_path: Path, done: dict[str, int]) -> None:
    ranks = FakeRanks(tmp_path)
    watch = ranks.watch(timeout_s=10.0)
    for _ in range(30):
        ranks.do(1, **done)
        assert ranks.run(watch, 2.0, [0, 1]) is None
    assert ranks.run(watch, 20.0, [0, 1]) is not None


def test_steps_and_lines_are_progress_however_rare(tmp_path: Path) -> None:
    ranks = FakeRanks(tmp_path)
    watch = ranks.watch(timeout_s=10.0)
    for step in range(10):
        ranks.activities[0] = replace(ranks.activities[0], shown=(step,))
        assert ranks.run(watch, 9.0, [0, 1]) is None
    assert ranks.run(watch, 20.0, [0, 1]) is not None


def test_collectives_are_progress_for_ranks_that_do_nothing_else(tmp_path: Path) -> None:
    ranks = FakeRanks(tmp_path)
    watch = ranks.watch(timeout_s=10.0)
    for number in range(30):
        ranks.calls = {1: RankCalls((Call("0", number, "all_reduce", is_done=True),), {})}
        assert ranks.run(watch, 4.0, [0, 1]) is None
    assert ranks.run(watch, 40.0, [0, 1]) is not None


def test_a_thread_that_computes_without_waiting_is_seen_by_its_stack(tmp_path: Path) -> None:
    ranks = FakeRanks(tmp_path)
    ranks.load[1] = 1.0
    watch = ranks.watch(timeout_s=2.0)
    for step in range(400):
        ranks.stacks[1] = STACK.format(line=step)
        assert ranks.run(watch, 0.3, [0, 1]) is None
    assert ranks.requests > 10
    assert ranks.run(watch, 10.0, [0, 1]) is not None


def test_a_rank_that_wakes_up_while_it_is_looked_at_does_not_hang(tmp_path: Path) -> None:
    ranks = FakeRanks(tmp_path)
    watch = ranks.watch(timeout_s=2.0)
    while ranks.requests < 2:
        assert ranks.run(watch, 0.1, [0, 1]) is None
    ranks.load[0] = 1.0
    ranks.do(0, waits=50)
    assert ranks.run(watch, 2.0, [0, 1]) is None


def test_to_be_asked_from_outside_neither_ends_a_job_nor_keeps_one_that_hangs(tmp_path: Path) -> None:
    ranks = FakeRanks(tmp_path)
    watch = ranks.watch(timeout_s=2.0)
    for _ in range(30):
        ranks.questions += 2
        ranks.answer([*ranks.live.values()])
        ranks.do(0, waits=50)
        assert ranks.run(watch, 0.3, [0, 1]) is None
    verdict = ranks.run(watch, 10.0, [0, 1])
    assert verdict is not None
    assert verdict.still_s > 9.0  # what was asked meanwhile counts for no movement


def test_a_rank_that_has_not_begun_is_not_asked_and_does_not_hang(tmp_path: Path) -> None:
    ranks = FakeRanks(tmp_path)
    ranks.files[1].unlink()
    assert ranks.run(ranks.watch(timeout_s=1.0), 20.0, [0, 1]) is None
    assert not ranks.files[1].exists()
    assert ranks.requests == 0


def test_a_rank_that_has_ended_is_not_waited_for(tmp_path: Path) -> None:
    ranks = FakeRanks(tmp_path)
    verdict = ranks.run(ranks.watch(timeout_s=1.0), 20.0, [1])
    assert verdict is not None
    assert set(verdict.where.stacks) == {1}


def test_what_a_process_and_its_children_do_is_counted_by_the_kernel(tmp_path: Path) -> None:
    code = "import os, time; data = b'x' * (1 << 20)\nfor _ in range(50): time.sleep(0.001)\n"
    code += "input(); end = time.process_time() + 0.3\nwhile time.process_time() < end: pass\n"
    code += "open('data', 'wb').write(data); os.system('true'); print(flush=True); input()"
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    rank = LiveRank(3, 0, process.pid, tmp_path)
    try:

        def look() -> dict[int, Activity]:
            return read_activities([rank, LiveRank(4, 1, 2**22 + 1)])

        wait_until(lambda: look()[3].waits >= 50)
        before = look()
        process.stdin.write(b"\n")
        process.stdin.flush()
        process.stdout.readline()
        (tmp_path / "stdout.log").write_text("a line")
        after = look()
    finally:
        process.kill()
        process.communicate()
    assert set(before) == {3}, "above the largest process id there is none"
    assert after[3].cpu_s - before[3].cpu_s >= 0.25
    assert after[3].moved_bytes - before[3].moved_bytes >= 1 << 20
    assert after[3].shown != before[3].shown
    assert read_activities([rank]) == {}


def test_the_report_says_who_stands_where_and_the_odd_one_last() -> None:
    waiting, odd = main_stack(STACK.format(line=41)), (Frame("/home/me/train.py", 17, "load"),)
    text = HangVerdict(30.2, Whereabouts({0: waiting, 1: odd, 2: waiting, 3: waiting})).render()
    assert "the job hangs: no rank has moved for 30 s" in text
    assert text.splitlines()[-2:] == [
        "  ranks 0, 2-3 in all_reduce (distributed_c10d.py:2901), called from step (train.py:41)",
        "  rank 1 in load (train.py:17)",
    ]
    assert "  /home/me/train.py:80 in <module>" in text


@pytest.mark.parametrize(
    "text", ["", "no stack at all", "Current thread 0x1 (most recent call first):\n  <no Python frame>"]
)
def test_a_rank_without_python_frames_has_an_empty_stack(text: str) -> None:
    assert main_stack(text) == ()
    assert "native code, or it does not answer" in HangVerdict(1.0, Whereabouts({0: ()})).render()


def test_ranks_that_never_came_are_named_with_their_hosts_on_every_node() -> None:
    call = {"name": "all_reduce", "number": 12, "of": [0, 1, 2, 3]}
    first = {"host": "gpu0", "ranks": [0, 1], "calls": [call | {"waiting": [0, 1]}], "places": ["ranks 0-1 in wait"]}
    second = {
        "host": "gpu1",
        "ranks": [2, 3],
        "calls": [call | {"waiting": [2]}],
        "places": ["rank 3 is stopped, by SIGSTOP or a debugger"],
        "a field of tomorrow": 1,
    }
    never = "never came to all_reduce number 12: rank 3 on gpu1"
    stopped = "on host gpu1: rank 3 is stopped, by SIGSTOP or a debugger"
    assert describe_elsewhere(first, [second]) == (never, stopped)
    assert describe_elsewhere(second, [first])[0] == never
    assert describe_elsewhere({}, [{}]) == ()


@pytest.mark.parametrize(("wanted_s", "works"), [(0, False), (5, True)])
def test_a_rank_that_waits_for_a_core_works_as_one_that_has_it(tmp_path: Path, wanted_s: int, works: bool) -> None:
    activities = []
    for seconds in (0, wanted_s):
        process = tmp_path / "7"
        (process / "task" / "7").mkdir(parents=True, exist_ok=True)
        (process / "stat").write_text(f"7 (python) R 1 7 7 {' '.join(['0'] * 40)}")
        (process / "schedstat").write_text(f"1000 {seconds * 10**9} 5\n")
        (process / "task" / "7" / "status").write_text("voluntary_ctxt_switches:\t3\n")
        activities.append(read_activities([LiveRank(0, 0, 7)], proc=tmp_path)[0])
    before, after = (replace(one, time_s=10.0 * number) for number, one in enumerate(activities))
    assert after.works_since(before) is works
    assert not after.has_progressed_since(before)
