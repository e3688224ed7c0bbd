from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from paraplan.launch.faults.failures import Cause, RankFailure, first_failure, read_error_record, read_failure
from paraplan.launch.ranks.spawning import RankExit


def write_record(path: Path, message: str, *, seconds: int = 100, **extra: str) -> str:
    record = {"message": {"message": message, "extraInfo": {"py_callstack": "", "timestamp": str(seconds)} | extra}}
    path.write_text(json.dumps(record))
    return str(path)


def failure(
    rank: int, *, code: int = 1, time_ns: int = 0, error_file: str = "", was_stopped: bool = False
) -> RankFailure:
    end = RankExit(local_rank=rank, code=code, time_ns=time_ns, max_rss_bytes=0)
    return read_failure(rank=rank, pid=1000 + rank, exit=end, error_file=error_file, was_stopped=was_stopped)


@pytest.mark.parametrize(
    "message",
    [
        "RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:14476.",
        "RuntimeError: [gloo/transport/tcp/buffer.cc] Timed out waiting 1800000ms for recv operation to complete",
        "DistBackendError: NCCL communicator was aborted on rank 3.",
        "torch.distributed.DistBackendError: [1] is setting up NCCL communicator",
        "DistNetworkError: The client socket has failed to connect to any network address of (localhost, 29500)",
        "ConnectionResetError: [Errno 104] Connection reset by peer",
    ],
)
def test_what_a_rank_says_when_its_peer_is_gone_counts_as_secondary(tmp_path: Path, message: str) -> None:
    error_file = write_record(tmp_path / "error.json", message)
    assert failure(0, error_file=error_file).cause is Cause.COMMUNICATION


def test_an_earlier_communication_error_does_not_hide_the_error_that_caused_it(tmp_path: Path) -> None:
    peer = write_record(tmp_path / "0.json", "RuntimeError: Connection closed by peer", timestamp_ns="1000")
    bug = write_record(tmp_path / "2.json", "ValueError: boom", timestamp_ns="2000")
    failures = [failure(0, error_file=peer), failure(2, error_file=bug)]
    assert first_failure(failures).rank == 2


def test_of_two_errors_in_the_same_second_the_earlier_nanosecond_is_the_first(tmp_path: Path) -> None:
    late = write_record(tmp_path / "0.json", "ValueError: late", timestamp_ns="100000000900")
    early = write_record(tmp_path / "1.json", "ValueError: early", timestamp_ns="100000000100")
    assert first_failure([failure(0, error_file=late), failure(1, error_file=early)]).rank == 1


def test_the_time_of_an_error_counts_not_the_time_the_process_took_to_end(tmp_path: Path) -> None:
    slow_to_end = write_record(tmp_path / "2.json", "ValueError: boom", timestamp_ns="1000")
    failures = [failure(1, code=3, time_ns=2000), failure(2, code=-15, time_ns=9000, error_file=slow_to_end)]
    assert first_failure(failures).rank == 2


def test_a_rank_that_the_launcher_stopped_is_never_first() -> None:
    stopped = failure(0, code=-signal.SIGTERM, time_ns=1, was_stopped=True)
    assert first_failure([stopped, failure(1, code=1, time_ns=2)]).rank == 1


def test_a_connection_error_is_first_when_there_is_nothing_else(tmp_path: Path) -> None:
    error_file = write_record(tmp_path / "0.json", "RuntimeError: Connection closed by peer")
    stopped = failure(1, code=-signal.SIGTERM, was_stopped=True)
    assert first_failure([stopped, failure(0, error_file=error_file)]).rank == 0


@pytest.mark.parametrize(("code", "status"), [(7, 7), (-9, 137), (-11, 139)])
def test_the_status_of_a_rank_is_its_code_or_128_and_the_signal(code: int, status: int) -> None:
    assert failure(0, code=code).exit_status == status


def test_a_rank_stopped_after_its_error_has_the_status_of_the_error(tmp_path: Path) -> None:
    error_file = write_record(tmp_path / "error.json", "PlanError: no", exit_code="2")
    assert failure(0, code=-signal.SIGTERM, error_file=error_file, was_stopped=True).exit_status == 2


def test_a_record_of_plain_torchrun_is_read(tmp_path: Path) -> None:
    record = read_error_record(write_record(tmp_path / "error.json", "ValueError: boom", seconds=1_700_000_000))
    assert record is not None
    assert (record.message, record.time_ns, record.exit_code) == ("ValueError: boom", 1_700_000_000 * 10**9, None)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"message": {}}', '{"message": {"extraInfo": {"timestamp": "x"}}}'])
def test_an_error_file_that_holds_something_else_is_no_record(tmp_path: Path, text: str) -> None:
    path = tmp_path / "error.json"
    path.write_text(text)
    assert read_error_record(str(path)) is None
