"""Where a job's time went, as `paraplan launch` says it at the end and in run.json."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from launching import ForkedLaunch, WriteScript
from recovery_script import SCRIPT, losses

from paraplan.api.goodput import read_measured_costs
from paraplan.launch.goodput import JobClock
from paraplan.plan.files import PlanFile
from paraplan.plan.parallel import ParallelPlan
from paraplan.shared_memory import StatusPage

PARTS = (
    "useful_s done_again_s checkpoints_s evaluation_s loads_s restarts_s waiting_s start_s".split()  # noqa: SIM905
)


@pytest.mark.ranks
def test_the_end_of_a_job_says_where_its_time_went(
    launch_forked: ForkedLaunch, script: WriteScript, tmp_path: Path
) -> None:
    path, folder = script(SCRIPT), tmp_path / "checkpoint"
    options = ("--nproc-per-node", 2, "--max-restarts", 1)
    ended = launch_forked(*options, path, "steps=20", "save=8", f"folder={folder}", "faults=1@13", "pause=0.02")
    assert ended.returncode == 0, ended.stderr
    assert "20 steps that count took" in ended.stderr
    assert "5 steps undone by failures" in ended.stderr
    assert "with a failure every" in ended.stderr
    (run,) = (tmp_path / "paraplan-runs").glob("2*")
    goodput = json.loads((run / "run.json").read_text())["goodput"]
    assert sum(goodput[part] for part in PARTS) == pytest.approx(goodput["wall_s"])
    assert all(goodput[part] >= 0 for part in PARTS)
    assert goodput["useful_s"] >= 20 * 0.02
    assert (goodput["num_steps"], goodput["steps_done_again"], goodput["num_restarts"]) == (20, 5, 1)
    measured = read_measured_costs(run)
    assert None not in dict(measured).values()
    assert measured.restart_s == goodput["costs"]["restart_s"] < goodput["wall_s"]
    assert sorted(losses(ended.stdout)) == list(range(1, 21))


@pytest.mark.ranks
def test_what_rank_0_measured_of_a_plan_stays_with_the_parts_of_its_usual_step(
    launch_forked: ForkedLaunch, script: WriteScript, tmp_path: Path
) -> None:
    plan = tmp_path / "plan.json"
    plan.write_text(PlanFile(plan=ParallelPlan(dp=2, micro_batch_size=8)).to_json())
    ended = launch_forked(
        "--plan", plan, script(SCRIPT), "steps=8", "save=8", f"folder={tmp_path / 'checkpoint'}", "pause=0.02"
    )
    assert ended.returncode == 0, ended.stderr
    (run,) = (tmp_path / "paraplan-runs").glob("2*")
    measured = json.loads((run / "run.json").read_text())["measured"]
    assert measured["num_steps"] == 7
    assert set(measured["parts"]) == {"wait_s", "loader_s", "backward_s", "optimizer_s"}
    assert 0 < measured["parts"]["backward_s"] < measured["step_time_s"]
    assert not list(run.rglob("steps.ring"))


@pytest.mark.ranks
def test_a_script_without_the_engine_has_no_goodput(launch_forked: ForkedLaunch, script: WriteScript) -> None:
    ended = launch_forked("--nproc-per-node", 2, script("print('done')"))
    assert ended.returncode == 0
    assert "goodput" not in ended.stderr


def attempt(clock: JobClock, page: StatusPage, first: int, last: int, *, saved: int, began: float) -> None:
    clock.begin_attempt(page)
    moments = {"first_began": began, "last_ended": began + last - first}
    for name, value in {**moments, "first_step": first, "last_step": last, "saved_step": saved}.items():
        page.set(0, name, value)  # type: ignore[arg-type]
    clock.end_attempt(page)


def test_steps_before_an_older_checkpoint_are_done_again() -> None:
    page = StatusPage.make(1)
    clock = JobClock()
    now = clock.began
    attempt(clock, page, 0, 30, saved=20, began=now - 100)
    attempt(clock, page, 20, 40, saved=0, began=now - 60)
    attempt(clock, page, 10, 50, saved=50, began=now - 40)  # that of step 20 could not be read
    clock.began = now - 101
    found = clock.measure(page, is_done=True)
    assert found is not None
    assert (found.num_steps, found.steps_done_again, found.num_restarts) == (50, 40, 2)
    assert (found.useful_s, found.done_again_s) == (pytest.approx(50), pytest.approx(40))


def test_steps_after_the_last_checkpoint_of_a_job_that_failed_do_not_count() -> None:
    page = StatusPage.make(1)
    clock = JobClock()
    attempt(clock, page, 0, 30, saved=20, began=clock.began - 40)
    clock.began -= 41
    found = clock.measure(page, is_done=False)
    assert found is not None
    assert (found.num_steps, found.steps_done_again) == (20, 10)
