from __future__ import annotations

import pytest

from paraplan.errors import PlanError
from paraplan.plan.runs import REQUIRED_COLUMNS, MeasuredRun, UnusableRow, read_runs

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
        ("a,H100-80GB,8,32,4096,32,2048,,,,,", "global_batch not given"),
        ("a,H100-80GB,8,,,,2048,16,,,,", "layers, hidden, heads not given"),
        ("a,H100-80GB,eight,32,4096,32,2048,64,,,,", "num_gpus='eight' is no number"),
        ("a,H100-80GB,8,32,4096,32,2048,64,1.5,,,", "tp='1.5' is no number"),
        ("a,H100-80GB,8,32,4096,32,2048,64,1,perhaps,,", "sequence_parallel='perhaps' is no number"),
    ],
)
def test_a_row_that_describes_no_run_keeps_its_reason(row: str, reason: str) -> None:
    assert table(row) == [UnusableRow(id="a", reason=reason)]


def test_a_row_without_a_name_is_called_by_its_line() -> None:
    (row,) = table(",H100-80GB,8,32,4096,32,2048,64,,,,")
    assert row.id == "line 2"


def test_a_table_without_the_needed_columns_is_refused() -> None:
    with pytest.raises(PlanError, match=r"runs.csv has no column .*global_batch"):
        read_runs("id,gpu\na,H100\n", source="runs.csv")
    assert set(REQUIRED_COLUMNS) <= set(MeasuredRun.model_fields)
