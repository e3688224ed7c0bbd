from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from paraplan.accuracy.calibration import calibrate_to_runs
from paraplan.accuracy.measured_runs import MeasuredRun, read_runs
from paraplan.cli.main import app

HEADER = (
    "id,source,gpu,num_gpus,layers,hidden,heads,vocab,seq_len,global_batch,precision,framework,quality,"
    "measured_step_time_s,measured_peak_mem_gib,memory_metric"
)
ROWS = """\
one,paper,A100-80GB,8,24,2048,16,50304,2048,64,bf16,Megatron-Core,A,1.0,20,max_allocated
two,blog,H100-80GB,8,24,2048,16,50304,2048,64,bf16,FSDP,C,0.5,,
three,blog,Abacus-1,8,24,2048,16,50304,2048,64,bf16,FSDP,A,0.5,,
four,blog,H100-80GB,8,,2048,16,50304,2048,64,bf16,FSDP,A,0.5,,
"""


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    path = tmp_path / "runs.csv"
    path.write_text(f"{HEADER}\n{ROWS}")
    return path


def test_every_row_is_predicted_or_skipped_with_a_reason(runs: Path) -> None:
    result = CliRunner().invoke(app, ["validate", str(runs), "--json"])
    answer = json.loads(result.stdout)
    assert result.exit_code == 0
    rows = {row["id"]: row for row in answer["rows"]}
    assert rows["one"]["skipped"] is None
    assert rows["one"]["predicted_step_time_s"] > 0
    assert rows["one"]["scored"]
    assert not rows["two"]["scored"]
    assert "Abacus-1" in rows["three"]["skipped"]
    assert rows["four"]["skipped"] == "layers not given"
    assert answer["summary"]["step_time"]["rows"] == 1
    assert answer["summary"]["memory"]["mape"] == pytest.approx(abs(rows["one"]["memory_error"]))


def test_the_text_shows_errors_by_source(runs: Path) -> None:
    result = CliRunner().invoke(app, ["validate", str(runs), "--all"])
    assert result.exit_code == 0
    for expected in ("Step time", "paper", "blog", "mean of the sources", "2 rows scored of 4, 2 skipped"):
        assert expected in result.stdout


def test_why_names_a_factor_for_each_source(runs: Path) -> None:
    result = CliRunner().invoke(app, ["validate", str(runs), "--why"])
    assert result.exit_code == 0
    assert "What one factor would explain: step time" in result.stdout
    answer = json.loads(CliRunner().invoke(app, ["validate", str(runs), "--why", "--json"]).stdout)
    assert [(one["source"], one["quantity"], one["runs"]) for one in answer["why"]] == [
        ("paper", "step time", 1),
        ("paper", "peak memory", 1),
    ]
    least = answer["why"][0]["effects"][0]
    assert least["error"] <= answer["why"][0]["error"]


def test_a_missing_table_is_one_clear_error(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["validate", str(tmp_path / "none.csv")])
    assert result.exit_code == 2
    assert "cannot read" in result.stderr


SWEEP_HEADER = f"{HEADER},tp,micro_batch"
SWEEP_ROWS = "".join(
    f"row{tp},paper,A100-80GB,8,24,2048,16,50304,2048,64,bf16,Megatron-LM,A,{seconds},,,{tp},1\n"
    for tp, seconds in ((1, 3.0), (2, 3.5), (4, 4.5), (8, 6.5))
)


@pytest.fixture(scope="module")
def calibration(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of what is fitted to the sweep."""
    found = read_runs(f"{SWEEP_HEADER}\n{SWEEP_ROWS}", source="sweep")
    path = tmp_path_factory.mktemp("fitted") / "calibration.json"
    path.write_text(calibrate_to_runs([row for row in found if isinstance(row, MeasuredRun)], source="sweep").to_json())
    return path


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    path = tmp_path / "sweep.csv"
    path.write_text(f"{SWEEP_HEADER}\n{SWEEP_ROWS}")
    return path


def test_a_sweep_has_a_rank_correlation_and_a_regret(sweep: Path) -> None:
    answer = json.loads(CliRunner().invoke(app, ["validate", str(sweep), "--json"]).stdout)
    step_time = answer["summary"]["step_time"]
    assert [found["rows"] for found in step_time["sweeps"]["sweeps"]] == [4]
    assert step_time["sweeps"]["rank_correlation"] == pytest.approx(1)
    assert step_time["sweeps"]["top1_regret"] == 0
    assert set(step_time["by_parallelism"]) == {"DDP", "tp, DDP", "tp"}
    assert answer["rows"][1]["plan"].startswith("dp4 x tp2")


def test_rows_that_are_not_scored_stand_apart_and_skipped_ones_have_their_share(runs: Path) -> None:
    summary = json.loads(CliRunner().invoke(app, ["validate", str(runs), "--json"]).stdout)["summary"]
    assert set(summary["step_time"]["by_source"]) == {"paper"}
    assert set(summary["others"]["step_time"]["by_source"]) == {"blog"}
    assert summary["skipped"]["rows"] == 2
    assert summary["skipped"]["share"] == pytest.approx(0.5)


MEMORY_ROWS = "".join(
    f"row{row},paper,A100-80GB,8,24,2048,16,50304,2048,64,bf16,Megatron-LM,A,3.0,20.0,{metric},1,1\n"
    for row, metric in enumerate(
        (
            "max_allocated of LAST rank",
            "max_reserved (max over ranks)",
            "nvml used (allocator-reserved)",
            "",
            "unknown",
            "allocated or reserved",
        )
    )
)


def test_peaks_are_compared_as_they_were_read(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    path.write_text(f"{HEADER},tp,micro_batch\n{MEMORY_ROWS}")
    answer = json.loads(CliRunner().invoke(app, ["validate", str(path), "--json"]).stdout)
    allocated, reserved, *on_device, either = [row["predicted_peak_memory_bytes"] for row in answer["rows"]]
    assert allocated < reserved < on_device[0]
    assert len(set(on_device)) == 1
    assert either == reserved
    groups = answer["summary"]["memory"]["by_reading"]
    assert {name: found["rows"] for name, found in groups.items()} == {
        "max_allocated": 1,
        "max_reserved": 1,
        "nvidia-smi": 1,
        "not stated": 2,
        "allocated or reserved": 1,
    }
    assert answer["summary"]["step_time"]["by_reading"] == {}
    assert "Peak memory by what was read" in CliRunner().invoke(app, ["validate", str(path)]).stdout


def test_nvidia_smi_shows_the_first_machine_where_nothing_else_is_said(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    row = "paper,A100-80GB,16,24,2048,16,50304,2048,256,fp16,Megatron-DeepSpeed,A,3.0,20.0,nvidia-smi,2,8,8,full,"
    rows = "".join(f"row{rank},{row}{rank}\n" for rank in ("", "all", "last"))
    path.write_text(f"{HEADER},pp,micro_batch,gpus_per_node,recompute,memory_rank\n{rows}")
    answer = json.loads(CliRunner().invoke(app, ["validate", str(path), "--json"]).stdout)
    first, of_all, last = [row["predicted_peak_memory_bytes"] for row in answer["rows"]]
    # The second stage has the logits of 8 x 2,048 tokens, on the second machine.
    assert last == of_all > first + 2e9


def test_the_text_names_the_worst_rows_and_every_grouping(sweep: Path) -> None:
    text = CliRunner().invoke(app, ["validate", str(sweep)]).stdout
    for expected in (
        "by GPU",
        "by framework",
        "by parallelism",
        "Worst rows, step time",
        "1 sweep of one model",
        "1 sweep of one batch",
    ):
        assert expected in text


@pytest.mark.with_all  # estimates take one, below
def test_a_calibration_changes_the_predictions(sweep: Path, calibration: Path) -> None:
    errors = []
    for options in ([], ["--calibration", str(calibration)]):
        answer = json.loads(CliRunner().invoke(app, ["validate", str(sweep), "--json", *options]).stdout)
        errors.append(answer["summary"]["step_time"]["mape"])
    assert errors[1] < errors[0]


def test_a_file_that_is_no_calibration_is_one_clear_error(sweep: Path) -> None:
    result = CliRunner().invoke(app, ["validate", str(sweep), "--calibration", str(sweep)])
    assert result.exit_code == 2
    assert "is not JSON" in result.stderr


@pytest.mark.parametrize("command", ["estimate", "recommend"])
def test_estimates_and_recommendations_take_a_calibration(command: str, calibration: Path) -> None:
    options = [command, "gpt2", "--profile", "dgx-a100", "--seq-len", "1024", "--global-batch", "64", "--json"]
    times = []
    for extra in ([], ["--calibration", str(calibration)]):
        result = CliRunner().invoke(app, [*options, *extra])
        assert result.exit_code == 0, result.output
        answer = json.loads(result.stdout)
        times.append((answer.get("estimate") or answer)["step"]["step_time_s"])
    assert times[0] != times[1]
