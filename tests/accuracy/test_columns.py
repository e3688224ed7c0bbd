"""What rows say of schedules and offload is priced, ranges stand beside predictions, and unknown columns are told."""

from __future__ import annotations

from pathlib import Path

import pytest
from small_run import run
from typer.testing import CliRunner

from paraplan.accuracy.machines import DescribedMachines, described_cluster
from paraplan.accuracy.measured_runs import MeasuredRun, read_runs, unread_columns
from paraplan.accuracy.prediction import predict_run
from paraplan.accuracy.ranges import load_accuracy
from paraplan.accuracy.run_prediction import RunPrediction
from paraplan.accuracy.run_workload import BundledData, plan_of_run, workload_of_run
from paraplan.cli.main import app

DATA = BundledData()
TABLE = "id,gpu,num_gpus,layers,hidden,heads,seq_len,global_batch,pp,schedule\na,A100,8,8,64,4,128,8,8,{}\n"


def predicted(one: MeasuredRun) -> RunPrediction:
    workload = workload_of_run(one, DATA)
    return predict_run(one, workload, plan_of_run(one, workload.framework))


@pytest.mark.parametrize(
    ("word", "schedule"),
    [("", "1f1b"), ("gpipe", "gpipe"), ("ZB", "zero_bubble"), ("zero_bubble", "zero_bubble")],
)
def test_a_schedule_that_a_row_states_is_that_of_its_plan(word: str, schedule: str) -> None:
    (row,) = read_runs(TABLE.format(word), source="x")
    assert isinstance(row, MeasuredRun)
    assert plan_of_run(row, workload_of_run(row, DATA).framework).pipeline_schedule == schedule


@pytest.mark.parametrize(
    ("words", "offload"),
    [
        ("none", "none"),
        ("activations to CPU", "none"),
        ("DeepSpeed ZeRO CPU offload", "optimizer"),
        ("optimizer to CPU", "optimizer"),
        ("parameters, optimizer to CPU", "parameters"),
    ],
)
def test_what_a_row_leaves_on_the_host_is_off_the_gpu(words: str, offload: str) -> None:
    one = run(zero_stage=3, offload=words, framework="DeepSpeed ZeRO-3")
    assert plan_of_run(one, workload_of_run(one, DATA).framework).offload == offload
    plain, moved = (predicted(each).predicted_peak_memory_bytes or 0 for each in (one.replace(offload=""), one))
    assert (moved < plain) == (offload != "none")


def test_a_row_has_the_range_and_the_risk_that_an_estimate_tells() -> None:
    found = predicted(run())
    assert found.predicted_step_time_s is not None
    assert found.evidence is not None
    ends = (found.predicted_step_time_low_s, found.predicted_step_time_high_s)
    told = load_accuracy().step_time[found.evidence].range
    assert ends == pytest.approx([end * found.predicted_step_time_s for end in told])
    assert found.out_of_memory_risk is not None


def test_columns_from_which_nothing_is_read_are_told_with_what_may_be_meant(tmp_path: Path) -> None:
    text = TABLE.format("").replace("schedule", "measured_step_time") + "b,A100,8,8,64,4,128,8,8,1.5\n"
    assert unread_columns(text) == {"measured_step_time": "measured_step_time_s"}
    assert unread_columns(TABLE) == {}
    path = tmp_path / "runs.csv"
    path.write_text(text)
    shown = CliRunner().invoke(app, ["validate", str(path)])
    assert "measured_step_time (did you mean measured_step_time_s?)" in " ".join(shown.stderr.split())


def test_gpus_of_amd_have_the_network_that_their_machines_have() -> None:
    for gpu in ("MI300X", "MI325X", "MI355X"):
        cluster = described_cluster(DescribedMachines(gpu=gpu, num_gpus=16, gpus_per_node=8))
        assert cluster.network is not None
        assert cluster.network.nic_bandwidth_bytes_per_s == 50e9
