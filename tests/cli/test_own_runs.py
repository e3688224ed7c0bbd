from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from paraplan.cli.main import app
from paraplan.plan.files import PlanFile
from paraplan.plan.kept_runs import KeptRun, keep_runs

WORDS = ("gpt2", "--profile", "dgx-h100", "--seq-len", "1024")


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "runs.json"
    monkeypatch.setenv("PARAPLAN_HISTORY", str(path))
    monkeypatch.setenv("PARAPLAN_CONFIG", str(tmp_path / "config.json"))
    return path


def said(*words: str) -> str:
    answer = CliRunner().invoke(app, list(words))
    assert answer.exit_code == 0, answer.stderr
    return " ".join((answer.stdout + answer.stderr).split())


def recommended(folder: Path) -> PlanFile:
    path = folder / "plan.json"
    said("recommend", *WORDS, "--global-batch", "64", "-o", str(path))
    return PlanFile.from_json(path.read_text(), source="plan")


def measure(path: Path, file: PlanFile, ratio: float, count: int = 3) -> None:
    assert file.estimate is not None
    plain = file.estimate.plain
    assert plain is not None
    keep_runs(
        path,
        [
            KeptRun(predicted=plain, step_time_s=ratio * plain.step_time_s, source=str(number))
            for number in range(count)
        ],
    )


def test_estimate_and_recommend_are_corrected_and_say_so(tmp_path: Path, kept: Path) -> None:
    before = recommended(tmp_path)
    measure(kept, before, 1.12)
    answer = said("recommend", *WORDS, "--global-batch", "64")
    assert "corrected by 3 runs here: x1.1" in answer
    assert "; range from those" in answer
    found = json.loads(said("estimate", *WORDS, "--plan", str(tmp_path / "plan.json"), "--json"))
    assert found["history"]["runs"] == 3
    assert before.estimate is not None
    assert found["step"]["step_time_s"] == pytest.approx(1.12 * (before.estimate.step_time_s or 0), rel=0.03)
    again = recommended(tmp_path)
    assert again.estimate is not None
    assert again.estimate.step_time_s != before.estimate.step_time_s
    assert again.plan == before.plan
    assert again.estimate.plain is not None
    assert before.estimate.plain is not None
    assert again.estimate.plain.step_time_s == pytest.approx(before.estimate.plain.step_time_s)


def test_no_history_and_config_leave_runs_alone(tmp_path: Path, kept: Path) -> None:
    measure(kept, recommended(tmp_path), 1.5)
    estimate = ("estimate", *WORDS, "--dp", "8")
    assert "corrected by" in said(*estimate)
    assert "corrected by" not in said(*estimate, "--no-history")
    said("config", "history=off")
    answer = said(*estimate)
    assert "corrected by" not in answer
    assert "note: --no-history, as paraplan config keeps it" in answer
    assert "corrected by" not in said("estimate", *WORDS, "--plan", str(tmp_path / "plan.json"))
    said("config", "history=on")
    assert "corrected by" in said(*estimate)
    wrong = CliRunner().invoke(app, ["config", "history=maybe"])
    assert wrong.exit_code == 2
    assert "neither on nor off" in wrong.stderr


def test_a_damaged_file_corrects_nothing_and_is_named(kept: Path) -> None:
    kept.write_text('{"schema_version": 1, "runs": 3}')
    answer = said("estimate", *WORDS, "--dp", "8")
    assert "nothing is corrected by your own runs" in answer
    assert "runs.json is damaged: runs: " in answer
    assert "corrected by 1" not in answer


def test_another_machine_is_not_corrected(tmp_path: Path, kept: Path) -> None:
    measure(kept, recommended(tmp_path), 1.5)
    assert "corrected by" not in said("estimate", "gpt2", "--profile", "dgx-a100", "--dp", "8")
    assert "corrected by" not in said("estimate", *WORDS, "--dp", "8", "--framework", "torchtitan")


MEGATRON = "\n".join(
    f" iteration {step:8d}/     100 | consumed samples: {step:12d} | elapsed time per iteration (ms): {ms} | learning "
    "rate: 1.0E-04 | global batch size:     8 | lm loss: 9.0 |"
    for step, ms in ((10, 900.0), (20, 31.0), (30, 30.0), (40, 29.0))
)


def test_a_trainers_log_and_seconds_are_kept_and_correct_the_next_estimate(tmp_path: Path, kept: Path) -> None:
    log = tmp_path / "train.log"
    log.write_text(MEGATRON)
    estimate = ("estimate", *WORDS, "--dp", "8", "--framework", "megatron-core")
    assert "measured 30.0 ms a step (Megatron-LM, median of 3)" in said(*estimate, "--measured", str(log))
    assert "corrected by 1 run here" in said(*estimate)
    assert "(as given)" in said(*estimate, "--measured", "0.03")
    assert "corrected by 2 runs here" in said(*estimate)
    assert json.loads(kept.read_text())["runs"][0]["source"] == str(log)


@pytest.mark.parametrize(
    ("measured", "words"),
    [
        ("none.log", "neither seconds nor a file"),
        ("-1", "not a number of seconds above 0"),
        ("nan", "not a number of seconds above 0"),
        ("1000", "more than ten times apart"),
    ],
)
def test_what_measured_nothing_is_refused_and_nothing_kept(kept: Path, measured: str, words: str) -> None:
    answer = CliRunner().invoke(app, ["estimate", *WORDS, "--dp", "8", "--measured", measured])
    assert answer.exit_code == 2
    assert words in " ".join(answer.stderr.split())
    assert not kept.exists()


TABLE = """\
id,source,gpu,num_gpus,layers,hidden,heads,seq_len,framework,dp,micro_batch,global_batch,measured_step_time_s
a,mine,H100-80GB,8,12,768,12,1024,fsdp,8,8,64,0.08
b,mine,H100-80GB,8,12,768,12,1024,fsdp,8,4,32,0.05
c,mine,H100-80GB,8,12,768,12,1024,fsdp,8,4,32,
"""


def test_rows_of_a_table_are_kept_with_keep_alone(tmp_path: Path, kept: Path) -> None:
    table = tmp_path / "runs.csv"
    table.write_text(TABLE)
    said("validate", str(table))
    assert not kept.exists()
    assert "2 of 3 rows are kept for later estimates, 2 runs in all" in said("validate", str(table), "--keep")
    said("validate", str(table), "--keep")
    assert len(json.loads(kept.read_text())["runs"]) == 2
    answer = said("estimate", *WORDS, "--dp", "8", "--framework", "fsdp")
    assert "corrected by 2 runs here" in answer
    table.write_text(TABLE.replace("0.08", "").replace("0.05", ""))
    refused = CliRunner().invoke(app, ["validate", str(table), "--keep"])
    assert refused.exit_code == 2
    assert "none of 3 rows can be kept" in " ".join(refused.stderr.split())
