from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from paraplan.cli.main import app
from paraplan.plan.files import ClusterReference, PlanFile
from paraplan.plan.parallel import ParallelPlan


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    file = PlanFile(
        plan=ParallelPlan(dp=8, zero_stage=3),
        cluster=ClusterReference(name="dgx-h100", num_nodes=1, gpus_per_node=8),
    )
    path.write_text(file.to_json())
    return path


@pytest.fixture
def pipeline(tmp_path: Path) -> Path:
    path = tmp_path / "pipeline.json"
    path.write_text(PlanFile(plan=ParallelPlan(dp=4, pp=2, pipeline_schedule="1f1b", num_microbatches=4)).to_json())
    return path


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["export", *arguments])
    return result.exit_code, result.stdout, result.stderr


def test_the_configuration_goes_to_stdout_and_remarks_to_stderr(plan: Path) -> None:
    status, stdout, stderr = run(str(plan), "--to", "accelerate")
    assert status == 0
    assert yaml.safe_load(stdout)["distributed_type"] == "FSDP"
    assert "left to you: in the script: DataLoader(batch_size=1)" in stderr


def test_a_file_is_written_whole_or_not_at_all(plan: Path, tmp_path: Path) -> None:
    status, stdout, _ = run(str(plan), "--to", "deepspeed", "-o", str(tmp_path / "ds.json"))
    assert (status, stdout) == (0, f"deepspeed configuration written to {tmp_path / 'ds.json'}.\n")
    assert json.loads((tmp_path / "ds.json").read_text())["zero_optimization"] == {"stage": 3}
    status, stdout, stderr = run(str(plan), "--to", "deepspeed", "-o", str(tmp_path / "no" / "ds.json"))
    assert (status, stdout) == (2, "")
    assert "cannot write" in stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ds.json", "plan.json"]


def test_a_plan_that_cannot_be_expressed_writes_nothing(pipeline: Path, tmp_path: Path) -> None:
    path = tmp_path / "accelerate.yaml"
    status, stdout, stderr = run(str(pipeline), "--to", "accelerate", "-o", str(path))
    assert (status, stdout) == (2, "")
    assert "pp=2: accelerate's configuration has no pipeline" in stderr
    assert "recommend --framework" in stderr
    assert not path.exists()


def test_partial_leaves_out_no_more_than_the_order_of_ranks(pipeline: Path, plan: Path, tmp_path: Path) -> None:
    status, stdout, stderr = run(str(pipeline), "--to", "accelerate", "--partial")
    assert (status, stdout) == (2, "")
    assert "without pp=2 accelerate would run another plan" in stderr
    assert "paraplan recommend --framework fsdp" in stderr
    content = json.loads(plan.read_text())
    content["plan"] |= {"dp": 4, "tp": 2, "zero_stage": 3, "rank_order": ["pp", "tp", "cp", "dp"]}
    content["plan"] |= {"num_microbatches": 16, "micro_batch_size": 1, "sequence_parallel": False}
    other = tmp_path / "other.json"
    other.write_text(json.dumps(content))
    assert run(str(other), "--to", "accelerate")[0] == 2
    status, stdout, stderr = run(str(other), "--to", "accelerate", "--partial", "--json")
    answer = json.loads(stdout)
    assert (status, set(answer)) == (0, {"target", "text", "gaps", "notes"})
    assert [gap["part"] for gap in answer["gaps"]] == ["rank_order=tp dp"]
    assert "# NOT EXPRESSED: rank_order=tp dp" in answer["text"]
    assert "not expressed: rank_order=tp dp" in stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--to", "accelerat"], "did you mean accelerate?"),
        (["--to", "pytorchjob"], "--image"),
        ([], "--to"),
    ],
)
def test_bad_input_is_one_clear_message(arguments: list[str], message: str, plan: Path) -> None:
    status, stdout, stderr = run(str(plan), *arguments)
    assert (status, stdout) == (2, "")
    assert message in stderr
    assert "Traceback" not in stderr


def test_a_plan_that_is_not_there_is_named(tmp_path: Path) -> None:
    status, _, stderr = run(str(tmp_path / "none.json"), "--to", "slurm")
    assert status == 2
    assert "none.json" in stderr
