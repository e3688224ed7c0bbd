from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

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


def test_a_missing_table_is_one_clear_error(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["validate", str(tmp_path / "none.csv")])
    assert result.exit_code == 2
    assert "cannot read" in result.stderr
