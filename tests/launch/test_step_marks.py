"""Which steps a rank notes, and that the launcher reads them as they were noted."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from paraplan.launch.ranks.step_marks import CAPACITY, MARKS_FILE, StepMarks
from paraplan.launch.stragglers.steps import StepReader


def train(marks: StepMarks, *, steps: int, step_s: float) -> None:
    for _ in range(steps):
        began = marks.backward_begins()
        if marks.is_noting:
            marks.backward_ends(began)
        if step_s:
            time.sleep(step_s)
        marks.optimizer_ends(marks.optimizer_begins())


@pytest.mark.parametrize("step_s", [0.0, 0.0005])
def test_of_short_steps_every_so_many_th_is_noted_the_same_on_all_ranks(tmp_path: Path, step_s: float) -> None:
    marks = StepMarks(str(tmp_path / MARKS_FILE))
    reader = StepReader(tmp_path)
    train(marks, steps=33, step_s=step_s)
    assert [step.step for step in reader.read()] == list(range(1, 33)), "the first ones tell how long steps are"
    train(marks, steps=400, step_s=step_s)
    later = [step.step for step in reader.read()]
    assert 0 < len(later) < 60
    assert all(number // 2 % 8 == 0 for number in later[1:]), later
    assert {number % 2 for number in later} == {0, 1}, "where one ends, the next begins"
    assert [step.step for step in StepReader(tmp_path).read()][32:] == later


def test_of_a_step_that_is_noted_the_time_is_its_own(tmp_path: Path) -> None:
    marks = StepMarks(str(tmp_path / MARKS_FILE))
    began_s = time.perf_counter()
    train(marks, steps=200, step_s=0.003)
    usual_s = (time.perf_counter() - began_s) / 200
    noted = StepReader(tmp_path).read()
    assert noted[-1].step - noted[-3].step > 2, "others were left out between"
    assert 0.003 <= sorted(step.period_s for step in noted)[len(noted) // 2] < 3 * usual_s


def test_all_steps_are_noted_where_they_are_long(tmp_path: Path) -> None:
    marks = StepMarks(str(tmp_path / MARKS_FILE))
    train(marks, steps=41, step_s=0.04)
    assert [step.step for step in StepReader(tmp_path).read()] == list(range(1, 41))


def test_what_the_ring_has_lost_is_left_out(tmp_path: Path) -> None:
    marks = StepMarks(str(tmp_path / MARKS_FILE))
    train(marks, steps=64 * (CAPACITY + 100), step_s=0.0)
    read = [step.step for step in StepReader(tmp_path).read()]
    assert read == [number for number in range(read[0], read[-1] + 1) if number // 2 % 64 == 0]
    assert len(read) == CAPACITY - 1
