from __future__ import annotations

import json
from pathlib import Path

import pytest

from paraplan.plan.kept_runs import (
    MOST_BYTES,
    MOST_RUNS,
    KeptRun,
    KeptRunsError,
    PlainPrediction,
    keep_runs,
    kept_runs_path,
    read_kept_runs,
)


def run(number: int, *, step_time_s: float = 2.0) -> KeptRun:
    predicted = PlainPrediction(
        kind="gpu, framework", gpu="gpu", sizes=(1.0,), step_time_s=1.0, peak_memory_bytes=1.0, version="1"
    )
    return KeptRun(predicted=predicted, step_time_s=step_time_s, source=f"run {number}")


def test_runs_are_kept_and_a_run_that_is_kept_again_takes_its_own_place(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "runs.json"
    assert read_kept_runs(path) == ()
    assert keep_runs(path, [run(1), run(2)]) == 2
    assert keep_runs(path, [run(1, step_time_s=3.0)]) == 2
    assert read_kept_runs(path) == (run(2), run(1, step_time_s=3.0))


def test_the_oldest_go_where_there_are_many(tmp_path: Path) -> None:
    path = tmp_path / "runs.json"
    keep_runs(path, [run(number) for number in range(MOST_RUNS)])
    assert keep_runs(path, [run(-1), run(-2)]) == MOST_RUNS
    found = read_kept_runs(path)
    assert (found[0], found[-1]) == (run(2), run(-2))
    assert path.stat().st_size < MOST_BYTES


DAMAGED = [
    "",
    "{",
    "[" * 50_000,
    "[]",
    "{}",
    '{"schema_version": 2, "runs": []}',
    '{"schema_version": 1, "runs": [{}]}',
    '{"schema_version": 1, "more": 1}',
    "\xff\x00",
]


@pytest.mark.parametrize("text", DAMAGED, ids=range(len(DAMAGED)))
def test_a_damaged_file_is_one_sentence_and_stays_as_it_is(tmp_path: Path, text: str) -> None:
    path = tmp_path / "runs.json"
    path.write_text(text, encoding="latin-1")
    before = path.read_bytes()
    for act in (lambda: read_kept_runs(path), lambda: keep_runs(path, [run(1)])):
        with pytest.raises(KeptRunsError, match=r"runs\.json") as caught:
            act()
        assert "\n" not in caught.value.message
        assert "delete" in caught.value.hint
    assert path.read_bytes() == before


@pytest.mark.parametrize(("field", "value"), [("step_time_s", -1), ("step_time_s", 0), ("step_time_s", "Infinity")])
def test_a_time_that_is_none_is_damage(tmp_path: Path, field: str, value: object) -> None:
    path = tmp_path / "runs.json"
    keep_runs(path, [run(1)])
    data = json.loads(path.read_text())
    data["runs"][0][field] = value
    path.write_text(json.dumps(data))
    with pytest.raises(KeptRunsError, match=rf"damaged: runs\.0\.{field}"):
        read_kept_runs(path)


def test_a_file_that_is_too_large_and_a_folder_are_named(tmp_path: Path) -> None:
    path = tmp_path / "runs.json"
    path.write_text(" " * (MOST_BYTES + 1))
    with pytest.raises(KeptRunsError, match="4,000,000 bytes"):
        read_kept_runs(path)
    with pytest.raises(KeptRunsError, match="cannot read"):
        read_kept_runs(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(KeptRunsError, match="cannot write"):
        keep_runs(tmp_path / "file" / "runs.json", [run(1)])


def test_the_file_is_in_the_folder_of_states(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PARAPLAN_HISTORY", str(tmp_path / "h.json"))
    assert kept_runs_path() == tmp_path / "h.json"
    monkeypatch.delenv("PARAPLAN_HISTORY")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert kept_runs_path() == tmp_path / "paraplan" / "runs.json"
