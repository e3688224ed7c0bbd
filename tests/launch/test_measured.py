from __future__ import annotations

import json
from pathlib import Path

import pytest

from paraplan.launch.measured import FEWEST_STEPS, MEASURED_FILE, note_measured
from paraplan.plan.files import ModelReference, PlanFile, PlannedEstimate
from paraplan.plan.kept_runs import MeasuredRun, PlainPrediction, read_kept_runs
from paraplan.plan.parallel import ParallelPlan
from paraplan.plan.training import TrainingSpec

PLAN = PlanFile(
    plan=ParallelPlan(dp=2),
    model=ModelReference(name="small", num_parameters=1000),
    training=TrainingSpec(global_batch_size=2, seq_length=64, precision="fp32"),
    estimate=PlannedEstimate(
        step_time_s=1.5,
        plain=PlainPrediction(
            kind="cpu, paraplan", gpu="cpu", sizes=(1.0,), step_time_s=1.0, peak_memory_bytes=100, version="1"
        ),
    ),
)
MEASURED = MeasuredRun(
    step_time_s=1.2, num_steps=FEWEST_STEPS, device="cpu", tokens_of_steps=(128,), num_parameters=1000
)


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "state" / "runs.json"
    monkeypatch.setenv("PARAPLAN_HISTORY", str(path))
    return path


def noted(folder: Path, measured: MeasuredRun = MEASURED, file: PlanFile = PLAN, *, ended: bool = True) -> str:
    (folder / MEASURED_FILE).write_text(measured.to_json())
    found = note_measured(folder, file, has_ended_well=ended)
    assert found.record is not None
    return found.sentence or ""


def test_what_ran_as_planned_is_kept_beside_what_was_predicted_without_earlier_runs(tmp_path: Path, kept: Path) -> None:
    assert noted(tmp_path).startswith("kept for later estimates")
    (run,) = read_kept_runs(kept)
    assert run.predicted.step_time_s == 1.0
    assert run.step_time_s == 1.2
    assert run.name == "plan for small: dp2, DDP, micro-batch 1 x 1"
    assert run.source == str(tmp_path)
    assert not (tmp_path / MEASURED_FILE).exists()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"device": "NVIDIA H200"}, "it ran on h200-sxm-141gb, and the plan was made for cpu"),
        ({"device": "a GPU of nobody"}, "it ran on a GPU of nobody, and"),
        ({"num_steps": 4}, "4 steps were timed after the first, and 5 are the least"),
        ({"tokens_of_steps": (256,)}, "its steps had 256 tokens, and the plan was made for 128"),
        ({"tokens_of_steps": (64, 128)}, "its steps had 64 and 128 tokens"),
        ({"tokens_of_steps": ()}, "its steps had"),
        ({"num_parameters": 2000}, "its model has 2,000 parameters, and the plan was made for 1,000"),
        ({"step_time_s": 20.0}, "a step took 20 times what was predicted"),
    ],
)
def test_what_ran_otherwise_is_not_kept_and_one_line_says_why(
    tmp_path: Path, kept: Path, changes: dict[str, object], words: str
) -> None:
    assert words in noted(tmp_path, MEASURED.replace(**changes))
    assert not kept.exists()


def test_tokens_that_labels_took_and_inputs_that_are_no_tokens_are_as_planned(tmp_path: Path, kept: Path) -> None:
    assert noted(tmp_path, MEASURED.replace(tokens_of_steps=(126,))).startswith("kept")
    assert noted(tmp_path, MEASURED.replace(tokens_of_steps=(2,))).startswith("kept")


def test_nothing_is_kept_of_a_failed_run_nor_without_a_prediction(tmp_path: Path, kept: Path) -> None:
    assert noted(tmp_path, ended=False) == ""
    assert noted(tmp_path, file=PLAN.replace(estimate=None)) == ""
    assert not kept.exists()
    assert note_measured(tmp_path / "none", PLAN, has_ended_well=True).record is None


def test_a_damaged_file_keeps_nothing_and_is_named(tmp_path: Path, kept: Path) -> None:
    kept.parent.mkdir()
    kept.write_text("{")
    assert "is not JSON" in noted(tmp_path)
    assert kept.read_text() == "{"
    (tmp_path / MEASURED_FILE).write_text(json.dumps({"step_time_s": "none"}))
    found = note_measured(tmp_path, PLAN, has_ended_well=True)
    assert found.record is None
    assert "cannot be read" in (found.sentence or "")
