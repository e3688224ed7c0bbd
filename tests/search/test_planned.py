from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

import paraplan
from paraplan.cli.main import app
from paraplan.plan.files import PlanFile


def test_a_plan_file_keeps_the_parts_of_its_prediction_and_a_smaller_plan(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    words = ["recommend", "llama-3-8b", "--profile", "dgx-h100", "--global-batch", "64", "--seq-len", "8192"]
    result = CliRunner().invoke(app, [*words, "-o", str(path), "--json"])
    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout)
    estimate = PlanFile.from_json(path.read_text(), source="plan").estimate
    assert estimate is not None
    assert estimate.memory is not None
    assert sum(estimate.memory.model_dump().values()) == estimate.peak_memory_bytes
    per_gpu = answer["estimate"]["step"]["model_flops_per_s_per_gpu"]
    assert estimate.model_flops_per_step is not None
    assert abs(estimate.model_flops_per_step / (8 * per_gpu * estimate.step_time_s) - 1) < 1e-9
    smaller = [
        candidate
        for candidate in answer["candidates"]
        if candidate["peak_memory_bytes"] <= 0.8 * estimate.peak_memory_bytes
    ]
    assert (estimate.smaller_plan is None) == (not smaller)


def test_a_roomier_plan_is_the_fastest_of_all_that_were_priced() -> None:
    training = paraplan.TrainingSpec(global_batch_size=64, seq_length=1792, precision="fp16")
    job = paraplan.Workload.of(paraplan.load_model("llama-3-8b"), training, paraplan.load_cluster("dgx-1-v100"))
    answer = paraplan.recommend(job, objective="fastest")
    best, roomier = answer.result.best, answer.result.roomier
    assert best.peak_memory_bytes > 0.95 * best.usable_memory_bytes
    assert roomier is not None
    assert roomier.peak_memory_bytes <= 0.9 * best.usable_memory_bytes
    assert roomier.plan.offload == "none"
    assert roomier.step.step_time_s < 1.2 * best.step.step_time_s
