"""What torch's flight recorder tells of ranks that wait for each other, and that reading a dump runs no code."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path

import pytest

from paraplan.launch.faults.collectives import DUMP_PREFIX, Call, RankCalls, find_stuck_calls, read_calls
from paraplan.launch.ranks.bootstrap import CALLS_FILE

GROUPS = {"0": (0, 1, 2, 3), "1": (0, 1)}


def made(*calls: tuple[str, int, str, bool]) -> RankCalls:
    return RankCalls(tuple(Call(*call) for call in calls), GROUPS)


BARRIER = ("0", 1, "barrier", True)
REDUCE = ("0", 2, "all_reduce", False)


def test_a_rank_that_waits_elsewhere_has_not_come() -> None:
    by_rank = {rank: made(BARRIER, REDUCE) for rank in (0, 1, 2)} | {3: made(BARRIER)}
    (stuck,) = find_stuck_calls(by_rank)
    assert stuck.describe().split("; ") == [
        "ranks 0-2 in all_reduce number 2 of ranks 0-3",
        "rank 3 never entered it, its last call in this group was number 1",
    ]


def test_another_collective_in_the_place_of_the_others_is_named() -> None:
    by_rank = {rank: made(BARRIER, REDUCE) for rank in (0, 1, 2)} | {3: made(BARRIER, ("0", 2, "broadcast", False))}
    (stuck,) = find_stuck_calls(by_rank)
    assert stuck.describe().endswith("; rank 3 calls broadcast instead")


def test_two_groups_that_wait_for_each_other_are_both_told_the_larger_first() -> None:
    by_rank = {0: made(BARRIER, ("1", 1, "all_gather", False)), 1: made(BARRIER, REDUCE), 2: made(BARRIER, REDUCE)}
    first, second = find_stuck_calls(by_rank)
    assert first.describe().startswith("ranks 1-2 in all_reduce number 2 of ranks 0-3")
    assert second.describe() == "rank 0 in all_gather number 1 of ranks 0-1; rank 1 never entered it"


def test_a_rank_that_failed_in_a_call_waited_in_its_last_one() -> None:
    over = ("0", 2, "all_reduce", True)  # gloo takes a call that has failed for one that is over
    assert find_stuck_calls({0: made(BARRIER, over)}) == []
    (stuck,) = find_stuck_calls({0: made(BARRIER, over)}, failed=[0])
    assert stuck.call.number == 2


def entry(number: int, state: str, *, backend: str = "nccl", retired: bool = False) -> dict[str, object]:
    """Return an entry with the fields that getCollectiveTrace gives it (FlightRecorderDetail.hpp of torch 2.13)."""
    return {
        "frames": [{"name": "all_reduce", "filename": "distributed_c10d.py", "line": 3252}],
        "record_id": number,
        "pg_id": 0,
        "process_group": ("0", "default_pg"),
        "thread_name": "pt_main_thread",
        "thread_id": "139878",
        "collective_seq_id": number,
        "p2p_seq_id": 0,
        "op_id": number,
        "profiling_name": f"{backend}:all_reduce",
        "time_created_ns": 1_700_000_000_000_000_000,
        "input_sizes": [[3]],
        "input_dtypes": ["Float"],
        "output_sizes": [[3]],
        "output_dtypes": ["Float"],
        "state": state,
        "time_discovered_started_ns": None,
        "time_discovered_completed_ns": None,
        "retired": retired,
        "timeout_ms": 600000,
        "is_p2p": False,
    }


def test_a_dump_of_nccls_watchdog_is_read(tmp_path: Path) -> None:
    entries = [entry(1, "completed", retired=True), entry(2, "started", retired=True)]
    dump = {
        "version": "2.10",
        "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}},
        "comm_lib_version": "2.28.9",
        "pg_status": {"0": {"last_enqueued_collective": 2, "last_started_collective": 2}},
        "entries": entries,
        "nccl_comm_state": {"0x7f": {"rank": "1", "nRanks": "2"}},
    }
    (tmp_path / f"{DUMP_PREFIX}1").write_bytes(pickle.dumps(dump, protocol=2))
    calls = read_calls(tmp_path)
    assert calls is not None
    assert calls.groups == {"0": (0, 1)}
    waiting = calls.waits_in(has_failed=False)
    assert waiting is not None
    assert (waiting.name, waiting.number) == ("all_reduce", 2)


class Harmful:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, ("made by the dump",)


@pytest.mark.parametrize("data", [pickle.dumps(Harmful()), pickle.dumps([1]), b"", b"\x80"])
def test_a_dump_with_anything_else_in_it_is_not_read_and_runs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: bytes
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / f"{DUMP_PREFIX}0").write_bytes(data)
    assert read_calls(tmp_path) is None
    assert not (tmp_path / "made by the dump").exists()


def test_what_a_rank_wrote_itself_is_read_and_gloos_calls_are_over_when_they_are_retired(tmp_path: Path) -> None:
    entries = [entry(1, "scheduled", backend="gloo", retired=True), entry(2, "scheduled", backend="gloo")]
    (tmp_path / CALLS_FILE).write_text(json.dumps({"entries": entries, "groups": {"0": [0, 1]}}))
    calls = read_calls(tmp_path)
    assert calls is not None
    assert [call.is_done for call in calls.calls] == [True, False]
    assert read_calls(tmp_path / "none") is None
