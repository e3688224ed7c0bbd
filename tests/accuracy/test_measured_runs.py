from __future__ import annotations

import pytest

from paraplan.accuracy.measured_runs import REQUIRED_COLUMNS, MeasuredRun, UnusableRow, read_runs
from paraplan.errors import PlanError

HEADER = "id,gpu,num_gpus,layers,hidden,heads,seq_len,global_batch,tp,sequence_parallel,measured_step_time_s,notes"


def table(*rows: str) -> list[MeasuredRun | UnusableRow]:
    return read_runs("\n".join([HEADER, *rows]), source="runs.csv")


def test_cells_are_read_with_their_types_and_blanks_are_unknown() -> None:
    (run,) = table('a,H100-80GB,8,32,4096,32,2048,64,2,1,1.5,"one, two"')
    assert isinstance(run, MeasuredRun)
    assert (run.num_gpus, run.tp, run.sequence_parallel, run.measured_step_time_s) == (8, 2, True, 1.5)
    assert run.pp is None
    assert run.notes == "one, two"


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("a,H100-80GB,8,32,4096,32,,64,,,,", "seq_len not given"),
        ("a,H100-80GB,8,32,4096,32,-2,64,,,,", "seq_len=-2 is negative"),
        ("a,H100-80GB,1e400,32,4096,32,2048,64,,,,", "num_gpus='1e400' is no whole number"),
        ("a,H100-80GB,8,,,,2048,16,,,,", "layers, hidden, heads not given"),
        ("a,H100-80GB,eight,32,4096,32,2048,64,,,,", "num_gpus='eight' is no whole number"),
        ("a,H100-80GB,8,32,4096,32,2048,64,1.5,,,", "tp='1.5' is no whole number"),
        ("a,H100-80GB,8,32,4096,32,2048,64,1,perhaps,,", "sequence_parallel='perhaps' is no yes or no"),
    ],
)
def test_a_row_that_describes_no_run_keeps_its_reason(row: str, reason: str) -> None:
    assert table(row) == [UnusableRow(id="a", reason=reason)]


def test_a_batch_that_is_not_what_its_parts_make_is_refused_and_not_guessed() -> None:
    header = "id,gpu,num_gpus,layers,hidden,heads,seq_len,dp,micro_batch,num_microbatches,global_batch"
    run = "A100-80GB,48,8,1024,16,1024,48,8"
    rows = f"a,{run},1,768\nb,{run},2,768\nc,{run},2,"
    refused, whole, implied = read_runs(f"{header}\n{rows}\n", source="runs.csv")
    said = "dp x micro_batch x num_microbatches = 384, and global_batch=768"
    assert refused == UnusableRow(id="a", reason=said)
    assert isinstance(whole, MeasuredRun)
    assert isinstance(implied, MeasuredRun)
    assert whole.global_batch == implied.global_batch == 768


def test_a_row_without_a_name_is_called_by_its_line() -> None:
    (row,) = table(",H100-80GB,8,32,4096,32,2048,64,,,,")
    assert row.id == "line 2"


WIDE = "\ufeffGPU,num_gpus, layers,hidden,heads,seq_len,global_batch,dp,tp,micro_batch,num_microbatches,"
WIDE += "measured_step_time_s,measured_tokens_per_s_per_gpu,precision,zero_stage,vpp,quality\r\n"


def test_cells_that_others_imply_are_filled_in_and_spellings_are_understood() -> None:
    rows = [
        'H100,8,32,4096,32,2048,"1,024",,,2,,,8192,BFloat16,ZeRO-3,n/a,A',
        "H100,,32,4096,32,2048,,4,2,2,3,1.5,,AMP,fsdp,0,A",
        "H100,8,32,4096,32,2048,,,2,2,,2.0,1024,,-,,A",
        "H100,8,32,4096,32,2048,,,2,2,,2.0,,fp8,1,,A",
    ]
    first, second, third, fourth = (
        run for run in read_runs(WIDE + "\r\n".join(rows), source="x") if isinstance(run, MeasuredRun)
    )
    assert (first.global_batch, first.measured_step_time_s) == (1024, 32)
    assert (first.id, first.precision, first.zero_stage, first.vpp) == ("line 2", "bf16", 3, None)
    assert (second.num_gpus, second.global_batch, second.zero_stage, second.precision) == (8, 24, 3, "")
    assert third.global_batch == 8
    assert (fourth.global_batch, fourth.measured_step_time_s, fourth.quality) == (8, None, "C"), "the batch is assumed"


@pytest.mark.parametrize("text", ["id,gpu\na,H100\n", "", "gpu;num_gpus\n", 'gpu,num_gpus,"' + "x" * 200_000 + '"\n'])
def test_a_table_without_the_needed_columns_is_refused(text: str) -> None:
    with pytest.raises(PlanError, match=r"runs.csv (has no column .*seq_len|is no table, line 1)"):
        read_runs(text, source="runs.csv")
    assert set(REQUIRED_COLUMNS) <= set(MeasuredRun.model_fields)
