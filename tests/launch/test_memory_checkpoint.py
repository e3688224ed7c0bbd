"""Copies of the training's state in memory of the launcher: ranks that are lost go on from there."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest
import torch
from case_selection import with_all
from launching import ForkedLaunch, StartForked, WriteScript, wait_until_dead
from recovery_script import SCRIPT, descendants, losses, read_until_line
from waiting import PATIENCE_S

from paraplan.runtime.checkpoints.boxes import Box, CheckpointError, owner_of_each
from paraplan.runtime.checkpoints.entries import State
from paraplan.runtime.recovery.memory_copies import Copied, Copier, CopyName, Slot, newest_whole
from paraplan.runtime.recovery.memory_reader import MemoryReader
from paraplan.shared_memory import CopySlots


def train(
    launch: ForkedLaunch, path: Path, folder: Path, *words: str, ranks: int, every: int | None = None
) -> tuple[str, str]:
    memory = [] if every is None else ["--memory-checkpoint", every, "--max-restarts", 2]
    ended = launch(*memory, "--nproc-per-node", ranks, path, f"folder={folder}", "steps=11", *words)
    assert ended.returncode == 0, ended.stderr
    assert not folder.exists()  # the disk was left alone
    return ended.stdout, ended.stderr


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("plan", "size"),
    [("zero3", 2), *(pytest.param(*one, marks=pytest.mark.with_all) for one in (("dp", 2), ("zero3", 4)))],
)
def test_lost_ranks_cost_few_steps_and_losses_go_on_digit_by_digit(
    plan: str, size: int, launch_forked: ForkedLaunch, script: WriteScript, tmp_path: Path
) -> None:
    path = script(SCRIPT)
    words = (f"plans={plan}", f"faults={size - 1}@7,0@10")
    stdout, stderr = train(launch_forked, path, tmp_path / "none", *words, ranks=size, every=4)
    # step 4 is copied during step 5, 8 during 9: a copy is never older than the last two that were due
    assert re.findall(r"begins after (\d+) steps", stdout) == ["0", "4", "8"]
    assert stderr.count("from the copy in memory") == 2
    assert "5 steps undone by failures" in stderr  # 3 and 2
    whole, _ = train(launch_forked, path, tmp_path / "none", f"plans={plan}", ranks=size)
    assert losses(stdout) == losses(whole)


@pytest.mark.with_all  # a lost node has another plan in test_several_nodes
@pytest.mark.ranks
def test_another_plan_goes_on_from_memory(launch_forked: ForkedLaunch, script: WriteScript, tmp_path: Path) -> None:
    path = script(SCRIPT)
    words = ("plans=zero3,pp2,dp", "faults=1@5,0@9", "dropout=0")
    ranks = (with_all([4]) or [2])[0]  # replicas beside stages have the copies that stages have
    stdout, stderr = train(launch_forked, path, tmp_path / "none", *words, ranks=ranks, every=1)
    assert re.findall(r"begins after (\d+) steps", stdout) == ["0", "4", "8"], stderr
    whole, _ = train(launch_forked, path, tmp_path / "none", "dropout=0", ranks=1)
    expected = losses(whole)
    assert losses(stdout) == pytest.approx(expected, abs=1e-6)


@pytest.mark.ranks
def test_a_checkpoint_that_is_newer_than_the_copy_is_taken(
    launch_forked: ForkedLaunch, script: WriteScript, tmp_path: Path
) -> None:
    words = (script(SCRIPT), f"folder={tmp_path / 'c'}", "steps=9", "save=3", "faults=0@7,0@8")
    options = ("--no-logs", "--max-restarts", 2, "--memory-checkpoint", 4)
    ended = launch_forked(*options, *words)
    # 4 is copied and 6 saved before the first fault; the copy of 8 is not whole yet at the second
    assert re.findall(r"begins after (\d+) steps", ended.stdout) == ["0", "6", "6"], ended.stderr


@pytest.mark.ranks
def test_what_an_optimizer_begins_to_keep_later_is_in_the_copies(
    launch_forked: ForkedLaunch, script: WriteScript, tmp_path: Path
) -> None:
    text = SCRIPT.replace("torch.optim.AdamW(parameters, lr=1e-2, fused=True)", "torch.optim.SGD(parameters, lr=1e-2)")
    later = "engine.optimizer.param_groups[0]['momentum'] = 0.9 * (engine.num_steps > 2)"
    path = script(text.replace("loss = engine", f"{later}; loss = engine"))
    words = ("--no-logs", "--max-restarts", 1, path, f"folder={tmp_path / 'none'}", "steps=9")
    broken = launch_forked("--memory-checkpoint", 1, *words, "faults=0@6")
    assert "going on after 5 steps from the copy in memory" in broken.stderr
    assert losses(broken.stdout) == losses(launch_forked(*words).stdout)


@pytest.mark.ranks
def test_nothing_of_the_memory_is_left_when_the_launcher_is_killed(
    start_forked: StartForked, script: WriteScript, tmp_path: Path
) -> None:
    options = ("--memory-checkpoint", 1, "--nproc-per-node", 2)
    process = start_forked(*options, script(SCRIPT), f"folder={tmp_path / 'c'}", "steps=600", "pause=0.05")
    read_until_line(process, "step 5 ")
    slots = [path for path in Path(f"/proc/{process.pid}/fd").iterdir() if "paraplan-copy" in str(path.readlink())]
    family = [process.pid, *descendants(process.pid)]
    assert len(family) >= 4  # launcher, spawner, ranks
    assert len(slots) == 4
    assert sum(path.stat().st_size for path in slots) > 0
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=PATIENCE_S)
    wait_until_dead(*family)  # a file without a name goes with the last process that holds it


def test_a_launch_says_how_much_memory_it_may_take(launch_forked: ForkedLaunch, script: WriteScript) -> None:
    ended = launch_forked("--memory-checkpoint", 10, script("pass"))
    assert ended.returncode == 0
    assert re.search(r"kept in memory every 10 steps: at most [\d.]+ \wiB on this node", ended.stderr)
    ended = launch_forked("--memory-checkpoint", 0, script("pass"))
    assert (ended.returncode, "--memory-checkpoint 0 is below the least, 1" in ended.stderr) == (2, True)


def test_a_copy_that_is_being_written_does_not_count() -> None:
    made = CopySlots.make(every=1, num_ranks=1, most_bytes=1 << 20)
    slot = Slot(made.paths[0][0])
    box = Box.of("a", (0, 0), (2, 3), torch.arange(6.0).view(2, 3))
    assert slot.read() is None
    slot.write(Copied(CopyName(4, 1, 1), 0, State([box], {"progress": 4})))
    assert slot.read() is None
    slot.commit()
    found = Slot(made.paths[0][0]).read()  # as another process does
    assert found is not None
    assert (found.name, found.writer) == (CopyName(4, 1, 1), 0)
    assert torch.equal(found.state.boxes[0].values, box.values)
    assert found.state.values == {"progress": 4}
    slot.write(Copied(CopyName(5, 1, 1), 0, State([box], {"progress": 4})))
    assert slot.read() is None


def test_a_state_of_a_loss_that_is_no_number_does_not_count() -> None:
    made = CopySlots.make(every=1, num_ranks=1, most_bytes=1 << 20)
    slots = [Slot(path) for path in made.paths[0]]
    copier = Copier(slots)
    for step, is_good in ((1, True), (2, False)):
        copier.begin(Copied(CopyName(step, 1, 1), 0, State([Box.of("a", (0,), (1,), torch.ones(1))], {})))
        assert copier.finish(is_good=is_good) is is_good
    assert [None if found is None else found.name.num_steps for found in (slot.read() for slot in slots)] == [1, None]


def test_boxes_of_one_split_fill_those_of_another() -> None:
    whole = torch.arange(24.0).view(4, 6)
    rows = [Box.of("w", (first, 0), (4, 6), whole[first : first + 2].clone()) for first in (0, 2)]
    name = CopyName(1, 1, 2)
    reader = MemoryReader([Copied(name, writer, State([row], {})) for writer, row in enumerate(rows)])
    target = torch.zeros(4, 6)
    reader.read([Box.of("w", (0, 0), (4, 6), target)])
    assert torch.equal(target, whole)
    twice = MemoryReader([Copied(name, 0, State(rows[:1], {}))] * 2)  # the same, which is not all
    with pytest.raises(CheckpointError, match="lacks some of w"):
        twice.read([Box.of("w", (0, 0), (4, 6), target)])


def test_every_box_is_written_once() -> None:
    boxes = [Box.of(name, (0,), (4,), torch.ones(4)) for name in "abcd"]
    owners = owner_of_each([{box.place.key: box.place.num_bytes for box in boxes} | {7: 0} for _ in range(2)])
    assert owners.pop(7) == 0  # a value, of which rank 0 knows more
    assert owners.keys() == {box.place.key for box in boxes}
    assert sorted(owners.values()) == [0, 0, 1, 1]


def test_the_newest_step_that_every_rank_has_written_is_taken() -> None:
    ten, fifteen = CopyName(10, 1, 2), CopyName(15, 1, 2)
    assert newest_whole([{ten: [0, 1], fifteen: [0]}]) == ten
    assert newest_whole([{ten: [0], fifteen: [0]}, {fifteen: [1]}]) == fifteen  # of two nodes
    assert newest_whole([{ten: [0]}]) is None


def test_steps_that_two_attempts_have_written_are_not_mixed() -> None:
    before, since = CopyName(10, 1, 4), CopyName(10, 2, 2)
    assert newest_whole([{before: [2, 3], since: [0]}]) is None  # of the one that came back, and of a rank since
    assert newest_whole([{before: [0, 1, 2, 3], since: [0, 1]}]) == since
