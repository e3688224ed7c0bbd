from __future__ import annotations

import signal
from dataclasses import replace

import pytest

from paraplan.launch.faults.collectives import Call, RankCalls, Whereabouts
from paraplan.launch.faults.failures import Cause, ErrorRecord, NodeFailure, RankFailure
from paraplan.launch.faults.report import (
    MAX_REPORT_LINES,
    ReportContext,
    as_node_failure,
    describe_exit,
    fit_to_width,
    render_failure_elsewhere,
    render_failures,
)
from paraplan.launch.ranks import bootstrap
from paraplan.launch.ranks.limits import MemoryKillScope
from paraplan.launch.ranks.spawning import RankExit
from paraplan.launch.ranks.stacks import Frame
from paraplan.launch.torch_private import step_hooks
from paraplan.units import ranks_in_words

CONTEXT = ReportContext(hostname="node7", elapsed_s=12.34, coordinates={"pp": 1, "dp": 0})


def failed(rank: int, *, code: int = 1, cause: Cause = Cause.OWN_ERROR, **changes: object) -> RankFailure:
    values: dict[str, object] = {
        "rank": rank,
        "pid": 4000 + rank,
        "exit": RankExit(local_rank=rank, code=code, time_ns=rank, max_rss_bytes=0),
        "cause": cause,
        "error_file": "",
    }
    return RankFailure(**(values | changes))  # type: ignore[arg-type]


def deep_error(frames: int) -> ErrorRecord:
    calls = "".join(f'  File "model.py", line {line}, in forward\n    x = self.layer(x)\n' for line in range(frames))
    traceback = f"Traceback (most recent call last):\n{calls}ValueError: shapes differ\n"
    return ErrorRecord(message="ValueError: shapes differ", traceback=traceback, time_ns=5)


@pytest.mark.parametrize("frames", [1, 3, 60])
def test_a_report_has_at_most_ten_lines_and_ends_with_the_error(frames: int) -> None:
    others = [failed(rank, cause=Cause.COMMUNICATION) for rank in range(1, 512)]
    lines = render_failures([failed(0, record=deep_error(frames)), *others], CONTEXT).splitlines()
    assert len(lines) <= MAX_REPORT_LINES == 10
    assert lines[0] == "paraplan: rank 0 failed first: ValueError: shapes differ"
    assert lines[-1].strip() == "ValueError: shapes differ"
    assert f"line {frames - 1}, in forward" in lines[-3]


def test_a_report_says_where_on_the_axes_of_the_plan_the_rank_stood() -> None:
    record = ErrorRecord(**(vars(deep_error(1)) | {"step": 7}))
    text = render_failures([failed(3, record=record)], CONTEXT)
    assert "host node7, local rank 3, pid 4003, exit code 1, pp 1 dp 0, step 7, 12.3 s after start" in text


def test_a_report_of_many_ranks_says_why_the_others_ended() -> None:
    first = failed(2, record=deep_error(1))
    others = [failed(rank, cause=Cause.COMMUNICATION) for rank in (0, 1, 3)] + [failed(5, cause=Cause.STOPPED)]
    text = render_failures([first, *others], CONTEXT)
    assert "ranks 0-1, 3 because a connection was lost; rank 5 because the launcher stopped it" in text
    others = [failed(rank, cause=Cause.STOPPED) for rank in (0, 1)]
    assert "then ended: ranks 0-1 because the launcher stopped them\n" in render_failures([first, *others], CONTEXT)


def test_ranks_that_were_killed_together_are_named_together_and_none_is_blamed() -> None:
    killed = [failed(rank, code=-signal.SIGKILL) for rank in (1, 2)]
    lost = failed(0, cause=Cause.COMMUNICATION)
    lines = render_failures([lost, *killed], CONTEXT).splitlines()
    assert lines[0] == "paraplan: ranks 1-2 failed first: each killed by SIGKILL (from outside, or by itself)"
    assert "  then ended: rank 0 because a connection was lost" in lines
    crashed = failed(3, code=-signal.SIGSEGV)
    lines = render_failures([lost, *killed, crashed], CONTEXT).splitlines()
    assert "  then ended: rank 0 because a connection was lost; rank 3 killed by SIGSEGV" in lines
    text = render_failures(killed, replace(CONTEXT, memory_kill="cgroup"))
    assert text.startswith("paraplan: ranks 1-2 failed first: each killed, out of host memory: the memory limit")
    assert "then ended" not in text


def test_a_node_whose_ranks_only_lost_connections_points_to_the_other_nodes() -> None:
    lost = [failed(rank, cause=Cause.COMMUNICATION, record=deep_error(9)) for rank in (2, 3)]
    lines = render_failures(lost, ReportContext(hostname="node7", num_nodes=2)).splitlines()
    assert lines[0].startswith("paraplan: rank 2 lost a connection: ")
    assert "see the launcher of another node" in lines[1]
    assert MAX_REPORT_LINES - 1 <= len(lines) <= MAX_REPORT_LINES  # a frame is shown whole or not at all
    assert "another node" not in render_failures(lost, CONTEXT)


def test_an_error_of_the_user_is_shown_with_its_hint_and_without_traceback() -> None:
    record = ErrorRecord(
        message="PlanError: x",
        traceback="Traceback (most recent call last):\n  File ...",
        time_ns=5,
        exit_code=2,
        user_message="the plan is for 4 ranks, not 2",
        user_hint="make another plan",
    )
    text = render_failures([failed(0, code=2, record=record)], CONTEXT)
    assert text.splitlines()[:2] == [
        "paraplan: rank 0 failed: the plan is for 4 ranks, not 2",
        "  hint: make another plan",
    ]
    assert "Traceback" not in text
    assert "File" not in text


def test_a_script_that_ended_itself_is_reported_with_its_words() -> None:
    record = ErrorRecord(message="SystemExit: no data", traceback="", time_ns=5, exit_code=1, exit_message="no data")
    record = ErrorRecord(**(vars(record) | {"exception_type": "SystemExit"}))
    text = render_failures([failed(0, record=record)], CONTEXT)
    assert text.startswith("paraplan: rank 0 failed: the script ended itself with exit code 1: no data\n")


def test_a_crash_is_reported_with_the_lines_of_python_it_happened_in() -> None:
    fault = (
        "Fatal Python error: Segmentation fault\n\nCurrent thread 0x1 (most recent call first):\n"
        f'  File "a.py", line 3\n  File "{bootstrap.__file__}", line 220 in run_target\n'
    )
    text = render_failures([failed(1, code=-signal.SIGSEGV, fault=fault)], CONTEXT)
    assert "killed by SIGSEGV (a crash in native code)" in text.splitlines()[0]
    assert text.splitlines()[-1].strip() == 'File "a.py", line 3'


@pytest.mark.parametrize(
    ("scope", "said"),
    [
        ("cgroup", "killed, out of host memory: the memory limit of its cgroup was hit; it had held up to 3.00 GiB"),
        ("host", "killed, probably out of host memory: "),
        (None, "killed by SIGKILL (from outside, or by itself); it had held up to 3.00 GiB"),
    ],
)
def test_a_kill_for_memory_is_named_only_where_the_kernel_counted_one(scope: MemoryKillScope, said: str) -> None:
    end = RankExit(local_rank=1, code=-signal.SIGKILL, time_ns=1, max_rss_bytes=3 << 30)
    text = render_failures([failed(1, exit=end)], ReportContext(hostname="node7", memory_kill=scope))
    assert text.startswith(f"paraplan: rank 1 failed: {said}")


def test_a_gpu_out_of_memory_is_answered_with_numbers_and_with_a_plan_that_needs_less() -> None:
    message = (
        "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.15 GiB of "
        "which 512.00 MiB is free. Including non-PyTorch memory, this process has 78.60 GiB memory in use."
    )
    record = ErrorRecord(**(vars(deep_error(1)) | {"exception_type": "OutOfMemoryError", "message": message}))
    context = ReportContext(hostname="node7", predicted_peak_bytes=70 << 30, smaller_plan="dp8, ZeRO-3")
    text = render_failures([failed(0, record=record)], context)
    assert "  it asked for 2.00 GiB; 512.00 MiB of 79.15 GiB were free\n" in text
    assert "  the plan expected at most 70.0 GiB on a GPU\n  hint: a plan that needs less: dp8, ZeRO-3\n" in text
    assert len(text.splitlines()) <= MAX_REPORT_LINES
    assert "paraplan recommend" in render_failures([failed(0, record=record)], CONTEXT)


GLOO = (
    'Traceback\n  File "train.py", line 4, in <module>\n'
    '  File "/torch/distributed/c10d_logger.py", line 83, in wrapper\n'
    '  File "/torch/distributed/distributed_c10d.py", line 3252, in all_reduce\n    work.wait()\n'
    "RuntimeError: [unbound_buffer.cc:78] Timed out waiting 3000ms for recv operation to complete\n"
)
NCCL = (
    "[rank0]:[E1] [Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5, OpType=ALLREDUCE, "
    "NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600029 milliseconds before timing out."
)


def test_a_collective_that_timed_out_is_told_with_those_who_waited_and_those_who_never_came() -> None:
    record = ErrorRecord(message=GLOO.splitlines()[-1], traceback=GLOO, time_ns=5)
    lost = [failed(rank, cause=Cause.COMMUNICATION, record=record) for rank in (0, 2, 3)]
    text = render_failures([*lost, failed(1, cause=Cause.STOPPED, code=-15)], CONTEXT)
    first = text.splitlines()[0]
    assert first == ("paraplan: a collective timed out: ranks 0, 2-3 waited 3 s in all_reduce; rank 1 never entered it")
    aborted = [failed(rank, code=-6, cause=Cause.ABORT, log_tail=(NCCL,)) for rank in (0, 1)]
    text = render_failures([*aborted, failed(2, cause=Cause.STOPPED, code=-15)], CONTEXT)
    assert "ranks 0-1 waited 600 s in allreduce number 5; rank 2 never entered it" in text.splitlines()[0]


def test_the_rank_that_never_came_is_told_with_where_it_was_on_this_node_and_on_others() -> None:
    record = ErrorRecord(message=GLOO.splitlines()[-1], traceback=GLOO, time_ns=5)
    calls = RankCalls((Call("0", 7, "all_gather", is_done=True),), {"0": (0, 1, 2, 3)})
    context = ReportContext(
        hostname="node7",
        where=Whereabouts(
            {2: (Frame("/usr/lib/python3.11/queue.py", 171, "get"), Frame("/home/me/train.py", 42, "load"))},
            {0: calls, 1: calls},
        ),
        places_elsewhere=("host node8: rank 3 was in save (train.py:50)",),
    )
    lost = failed(1, cause=Cause.COMMUNICATION)  # to rank 0, which gave up a moment before
    failures = [failed(0, cause=Cause.COMMUNICATION, record=record), lost, failed(2, cause=Cause.STOPPED, code=-15)]
    assert render_failures(failures, context).splitlines()[:3] == [
        "paraplan: a collective timed out: ranks 0-1 waited 3 s in all_gather number 7 of ranks 0-3; "
        "rank 2 never entered it",
        "  rank 2 was in get (queue.py:171), called from load (train.py:42)",
        "  host node8: rank 3 was in save (train.py:50)",
    ]
    told = as_node_failure(failures, context)
    assert told.what.startswith("a collective timed out: ranks 0-1 waited 3 s")
    assert told.places == ("rank 2 was in get (queue.py:171), called from load (train.py:42)",)


def test_ranks_that_were_stopped_since_another_node_is_gone_are_at_no_fault() -> None:
    gone = "host node8: its launcher is gone, without a word"
    failures = [failed(rank, cause=Cause.STOPPED, code=-15) for rank in (0, 1)]
    context = ReportContext(hostname="node7", num_nodes=2, stops=(gone,), log_folder="runs/1")
    assert render_failures(failures, context).splitlines() == [
        f"paraplan: the job ends: {gone}",
        "  on host node7 then ended: ranks 0-1 because the launcher stopped them",
        "  logs: runs/1",
    ]
    own = failed(1)
    assert render_failures([failures[0], own], context).startswith("paraplan: rank 1 failed first")


def test_of_a_timeout_on_another_node_the_rank_that_never_came_is_told_where_it_is() -> None:
    what = "a collective timed out: ranks 0-1 waited 6 s in all_reduce number 12 of ranks 0-3"
    first = NodeFailure("node8", rank=0, cause=Cause.COMMUNICATION, time_ns=1, exit_status=1, what=what)
    context = ReportContext(
        hostname="node7",
        where=Whereabouts(stopped=(3,)),
        places_elsewhere=("host node9: rank 5 was in save (a.py:5)",),
    )
    said = render_failure_elsewhere(first, [failed(3, cause=Cause.STOPPED, code=-15)], context)
    assert said.splitlines() == [
        f"paraplan: on host node8 {what}",
        "  rank 3 was stopped, by SIGSTOP or a debugger",
        "  host node9: rank 5 was in save (a.py:5)",
        "  on host node7 then ended: rank 3 because the launcher stopped it",
    ]
    other = replace(first, cause=Cause.OWN_ERROR, what="ValueError: the real bug")
    headline = "paraplan: rank 0 failed first, on host node8: ValueError: the real bug"
    assert render_failure_elsewhere(other, [failed(3)], context).splitlines()[0] == headline


@pytest.mark.parametrize(
    ("frame", "told"),
    [
        ('distributed/pipelining/schedules.py", line 9, in step', "a send or receive over pp"),
        ('distributed/distributed_c10d.py", line 9, in recv', "recv"),
        ('distributed/distributed_c10d.py", line 9, in all_reduce', "all_gather number 7 over tp of ranks 0-1"),
        ('autograd/graph.py", line 9, in _engine_run_backward', "all_gather number 7 over tp of ranks 0-1"),
    ],
)
def test_a_timeout_is_that_of_the_innermost_call_also_where_the_runtime_has_put_it_in_its_words(
    frame: str, told: str
) -> None:
    gloo = "RuntimeError: [unbound_buffer.cc:78] Timed out waiting 3000ms for recv operation to complete\n"
    script = '  File "train.py", line 4, in <module>\n'
    said = "all_gather over tp of ranks 0-1 timed out after 3 s"
    caused = f"\nThe above exception was the direct cause of\n{script}paraplan.CollectiveTimeoutError: {said}"
    record = ErrorRecord(
        message=f"CollectiveTimeoutError: {said}",
        traceback=f'Traceback\n{script}  File "/lib/torch/{frame}\n{gloo}{caused}',
        time_ns=5,
        user_message=said,
        user_hint="every rank must make the same calls",
    )
    calls = RankCalls((Call("1", 7, "all_gather", is_done=True, axis="tp"),), {"1": (0, 1)})
    context = ReportContext(hostname="node7", where=Whereabouts(calls={0: calls}, stopped=(1,)))
    failures = [failed(0, cause=Cause.COMMUNICATION, record=record), failed(1, cause=Cause.STOPPED, code=-15)]
    assert render_failures(failures, context).splitlines()[:3] == [
        f"paraplan: a collective timed out: rank 0 waited 3 s in {told}; rank 1 never entered it",
        "  rank 1 was stopped, by SIGSTOP or a debugger",
        "  hint: every rank must make the same calls",
    ]


def test_the_line_of_the_users_code_is_shown_where_the_traceback_is_long() -> None:
    frames = "".join(f'  File "/venv/site-packages/torch/{name}.py", line 3, in f\n    g()\n' for name in "abcdef")
    traceback = f'Traceback\n  File "/home/me/train.py", line 9, in step\n    f()\n{frames}ValueError: boom\n'
    lines = render_failures([failed(0, record=ErrorRecord("ValueError: boom", traceback, 5))], CONTEXT).splitlines()
    assert lines[2:4] == ['    File "/home/me/train.py", line 9, in step', "      f()"]
    assert lines[4].endswith('torch/e.py", line 3, in f')  # and not the source line of a frame that is left out
    assert lines[-1] == "  ValueError: boom"
    assert MAX_REPORT_LINES - 1 <= len(lines) <= MAX_REPORT_LINES


@pytest.mark.parametrize("width", [40, 80])
def test_a_terminal_gets_lines_that_break_between_words_and_go_on_to_the_right(width: int) -> None:
    others = [failed(rank, cause=Cause.STOPPED) for rank in (0, 1)]
    text = render_failures([failed(2, record=deep_error(1)), *others], CONTEXT)
    fitted = fit_to_width(text, width)
    assert fitted.split() == text.split()
    assert max(map(len, fitted.splitlines())) <= width
    assert "  host node7, local rank 2" in fitted
    assert fit_to_width(text, 0) == fit_to_width(text, 200) == text
    error = fit_to_width(f"error: {'word ' * 20}\nhint: short\n", width).splitlines()
    assert len(error) > 2
    assert all(line == line.lstrip() for line in error)


def test_an_exit_without_a_known_signal_is_still_described() -> None:
    assert describe_exit(-77) == "killed by signal 77"
    assert describe_exit(3) == "exit code 3"


def test_neighbouring_ranks_are_joined() -> None:
    assert ranks_in_words([4]) == "rank 4"
    assert ranks_in_words([7, 0, 2, 1]) == "ranks 0-2, 7"


def test_a_rank_whose_collective_timed_out_did_not_lose_a_connection() -> None:
    record = ErrorRecord(message=GLOO.splitlines()[-1], traceback=GLOO, time_ns=5)
    lost = replace(record, message="RuntimeError: Connection closed by peer", traceback="", time_ns=6)
    failures = [failed(rank, cause=Cause.COMMUNICATION, record=record) for rank in (0, 1)]
    failures += [failed(2, cause=Cause.COMMUNICATION, record=lost)]
    text = render_failures(failures, CONTEXT)
    assert "then ended: rank 1 because a collective timed out; rank 2 because a connection was lost\n" in text


def test_of_a_traceback_the_frames_of_the_hooks_are_left_out() -> None:
    hook = f'  File "{step_hooks.__file__}", line 136, in wait\n    return plain(*arguments)\n           ^^^^^\n'
    traceback = f'Traceback\n  File "/home/me/train.py", line 9, in step\n    f()\n{hook}ValueError: boom\n'
    text = render_failures([failed(0, record=ErrorRecord("ValueError: boom", traceback, 5))], CONTEXT)
    assert text.endswith('  File "/home/me/train.py", line 9, in step\n      f()\n  ValueError: boom\n')


def test_another_node_shows_the_line_of_the_users_code_too_where_it_has_less_room() -> None:
    frames = "".join(f'  File "/venv/site-packages/torch/{name}.py", line 3, in f\n    g()\n' for name in "abcdef")
    traceback = f'Traceback\n  File "/home/me/train.py", line 9, in step\n    f()\n{frames}ValueError: boom\n'
    first = as_node_failure([failed(0, record=ErrorRecord("ValueError: boom", traceback, 5))], CONTEXT)
    context = replace(CONTEXT, hostname="node8", log_folder="runs/1", num_nodes=2)
    for rooms in (context, replace(context, log_folder=None)):
        lines = render_failure_elsewhere(first, [failed(1, cause=Cause.STOPPED)], rooms).splitlines()
        assert '    File "/home/me/train.py", line 9, in step' in lines
        assert lines[-1] == "  ValueError: boom"
    timed_out = replace(first, what="a collective timed out: ranks 0-1 waited 6 s in all_reduce")
    context = replace(context, where=Whereabouts(stopped=(3,)))
    lines = render_failure_elsewhere(timed_out, [failed(1, cause=Cause.STOPPED)], context).splitlines()
    assert lines[4:6] == ['    File "/home/me/train.py", line 9, in step', "      f()"]
    assert len(lines) <= MAX_REPORT_LINES


def test_a_rank_that_could_not_write_its_error_since_the_disk_is_full_is_told_so() -> None:
    context = replace(CONTEXT, log_folder="runs/1", free_bytes=0)
    told = "  hint: the disk of runs/1, to which ranks write, is full or nearly so: 0 B left\n"
    assert told in render_failures([failed(0)], context)
    assert "hint" not in render_failures([failed(0)], replace(context, free_bytes=1 << 30))
    assert "hint" not in render_failures([failed(0, record=deep_error(1))], context)
    assert "hint" not in render_failures([failed(0, code=-signal.SIGKILL)], context)
