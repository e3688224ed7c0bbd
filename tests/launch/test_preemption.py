"""Ending in time: ranks of the engine save at a step that all agree on, and the job ends with status 75."""

from __future__ import annotations

import http.server
import os
import signal
import threading
from pathlib import Path

import pytest
from forked_launcher import ForkedLauncher
from launching import ForkedLaunch, StartForked, WriteScript, wait_until_dead
from recovery_script import SCRIPT, descendants, losses, read_until_line
from waiting import PATIENCE_S

from paraplan.launch.preemption import kill_wait_s, notice_reader, was_canceled, was_queued_again
from paraplan.launch.spec import ArgumentError


def finish(process: ForkedLauncher) -> tuple[int, str, str]:
    stdout, stderr = process.communicate(timeout=PATIENCE_S)
    return process.returncode, stdout, stderr


@pytest.mark.ranks
@pytest.mark.parametrize(
    "how", ["SIGTERM", *(pytest.param(how, marks=pytest.mark.with_all) for how in ("SIGUSR1", "file"))]
)
def test_a_job_that_is_to_end_saves_and_goes_on_as_if_nothing_had_been(
    how: str, start_forked: StartForked, launch_forked: ForkedLaunch, script: WriteScript, tmp_path: Path
) -> None:
    path, folder, notice = script(SCRIPT), tmp_path / "checkpoint", tmp_path / "notice"
    options = ["--nproc-per-node", 2, *(["--preempt-notice", notice] if how == "file" else [])]
    words = [path, f"folder={folder}", "steps=24"]
    process = start_forked(*options, *words, "pause=0.25")
    assert process.stdout is not None
    lines = [process.stdout.readline() for _ in range(5)]
    if how == "file":
        notice.touch()
    else:
        process.send_signal(getattr(signal, how))
    status, stdout, stderr = finish(process)
    assert status == 75, stderr
    assert "all ranks have saved after" in stderr
    assert "goodput" in stderr
    done = losses("".join(lines) + stdout)
    if how == "file":  # how a job goes on does not depend on what ended it
        return
    again = launch_forked("--no-logs", *options[:2], *words)
    assert again.returncode == 0, again.stderr
    # the last step of the first launch ended in the call that saved, and did not return to be printed
    assert f"begins after {max(done) + 1} steps" in again.stdout
    whole = launch_forked("--no-logs", "--nproc-per-node", 2, path, f"folder={tmp_path / 'none'}", "steps=24")
    assert losses(whole.stdout) == {max(done) + 1: losses(whole.stdout)[max(done) + 1]} | done | losses(again.stdout)


@pytest.mark.ranks
def test_ranks_that_do_not_save_in_time_are_ended(
    start_forked: StartForked, script: WriteScript, tmp_path: Path
) -> None:
    path = script(SCRIPT)
    process = start_forked(
        "--nproc-per-node", 2, "--preempt-window", 1, path, f"folder={tmp_path / 'c'}", "steps=60", "pause=30"
    )  # fmt: skip
    read_until_line(process, "step 1 ")
    process.send_signal(signal.SIGTERM)
    status, _, stderr = finish(process)
    assert status == 128 + signal.SIGTERM
    assert "have not saved within 1 s" in stderr


@pytest.mark.ranks
def test_a_script_may_end_with_status_75_for_reasons_of_its_own(
    launch_forked: ForkedLaunch, script: WriteScript
) -> None:
    ended = launch_forked("--no-logs", "--nproc-per-node", 2, script("import sys; sys.exit(75)"))
    assert ended.returncode == 75
    assert "ended itself with exit code 75" in ended.stderr
    assert "saved" not in ended.stderr


@pytest.mark.ranks
def test_a_job_that_is_to_end_is_not_started_again_where_saving_fails(
    start_forked: StartForked, script: WriteScript, tmp_path: Path
) -> None:
    path = script(
        SCRIPT.replace('engine.resume(options["folder"])', 'engine.resume(options["folder"]); engine.save = None')
    )
    process = start_forked(
        "--no-logs",
        "--nproc-per-node",
        2,
        "--max-restarts",
        3,
        path,
        f"folder={tmp_path / 'c'}",
        "steps=600",
        "pause=0.05",
    )
    read_until_line(process, "step 2 ")
    process.send_signal(signal.SIGTERM)
    status, stdout, stderr = finish(process)
    assert status == 128 + signal.SIGTERM, stderr
    assert "'NoneType' object is not callable" in stderr
    assert "not started again" in stderr
    assert "begins after" not in stdout


@pytest.mark.ranks
def test_a_signal_to_a_child_of_a_rank_is_none_to_the_rank(
    launch_forked: ForkedLaunch, script: WriteScript, tmp_path: Path
) -> None:
    path = script(
        """
        import os, signal, sys, time
        import torch
        from torch import nn
        from paraplan import runtime
        strike = lambda: os.kill(os.getpid(), signal.SIGTERM)
        os.register_at_fork(after_in_child=lambda: strikes_at_once and strike())  # before any hook of the runtime's
        job = runtime.init()
        engine = job.prepare(
            nn.Linear(4, 4),
            loss_fn=nn.functional.mse_loss,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            example_inputs=torch.ones(2, 4),
        )
        engine.resume(sys.argv[1])
        for strikes_at_once in (True, False):
            child = os.fork()
            if not child:
                strike()
                os._exit(0)
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        assert not signal.pthread_sigmask(signal.SIG_BLOCK, [])
        time.sleep(1.3)  # longer than a rank waits for its launcher to say what a signal means
        job.close()
        """
    )
    ended = launch_forked("--no-logs", "--nproc-per-node", 1, path, tmp_path / "c")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split() == [str(-signal.SIGTERM)] * 2


@pytest.mark.ranks
def test_scripts_without_the_engine_get_the_signal_itself(start_forked: StartForked, script: WriteScript) -> None:
    path = script(
        """
        import os, signal, sys, time
        def save(number, frame):
            os.write(1, f"saved by {signal.Signals(number).name}\\n".encode())
            sys.exit(0)
        signal.signal(signal.SIGUSR1, save)
        os.write(1, f"{os.getpid()}\\n".encode())  # in one piece beside what the other rank writes
        time.sleep(60)
        """
    )
    process = start_forked("--nproc-per-node", 2, path)
    assert process.stdout is not None
    pids = [int(process.stdout.readline()) for _ in range(2)]
    process.send_signal(signal.SIGUSR1)
    status, stdout, stderr = finish(process)
    assert status == 128 + signal.SIGUSR1
    assert stdout.count("saved by SIGUSR1") == 2, stderr
    wait_until_dead(*pids)


def test_notices_are_files_commands_and_answers_of_a_server(tmp_path: Path) -> None:
    answers = ["404"]

    class Metadata(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            text = answers[0]
            if text == "garbled":
                self.wfile.write(b"no HTTP\r\n")
                return
            self.send_response(404 if text == "404" else 200)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    server = http.server.HTTPServer(("127.0.0.1", 0), Metadata)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    read = notice_reader(f"http://127.0.0.1:{server.server_port}/preempted")
    try:
        assert read() is None
        for answer in ("FALSE", '{"DocumentIncarnation": 3, "Events": []}', "garbled"):
            answers[0] = answer
            assert read() is None
        answers[0] = '{"DocumentIncarnation": 4, "Events": [{"EventType": "Preempt"}]}'
        assert "Preempt" in str(read())
        answers[0] = "TRUE"
        assert "says TRUE" in str(read())
    finally:
        server.shutdown()
        server.server_close()
    assert read() is None  # a server that is gone is no notice
    file = tmp_path / "notice"
    for source in (str(file), f"command:test -e {file}"):
        read = notice_reader(source)
        assert read() is None
        file.touch()
        assert read() is not None
        file.unlink()


@pytest.mark.parametrize("source", ["", "http:", "command:", "https://"])
def test_a_notice_from_nowhere_is_refused(source: str) -> None:
    with pytest.raises(ArgumentError):
        notice_reader(source)


def test_requeue_belongs_to_slurm(launch_forked: ForkedLaunch, script: WriteScript) -> None:
    assert "SLURM_JOB_ID" not in os.environ
    ended = launch_forked("--requeue", script("pass"))
    assert ended.returncode == 2
    assert "no job of Slurm" in ended.stderr
    ended = launch_forked("--preempt-window", "-1", script("pass"))
    assert (ended.returncode, "is not a time to wait" in ended.stderr) == (2, True)


@pytest.mark.ranks
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_for_all_processes_at_once_is_one_for_the_launcher(
    number: signal.Signals, start_forked: StartForked, script: WriteScript, tmp_path: Path
) -> None:
    """Slurm signals the whole step: launcher, spawner and ranks; and once more when it has queued the job again."""
    scontrol = tmp_path / "bin" / "scontrol"
    scontrol.parent.mkdir()
    is_canceled = number == signal.SIGTERM
    state = "COMPLETING" if is_canceled else "RUNNING"
    answers = f"if [ $1 = show ]; then echo 'KillWait                = 20 sec'; echo 'JobState={state} '; exit; fi"
    scontrol.write_text(f"#!/bin/sh\n{answers}\nkill -TERM $PPID\nsleep 0.3\n")
    scontrol.chmod(0o755)
    path = f"{scontrol.parent}:{os.environ['PATH']}"
    words = [script(SCRIPT), f"folder={tmp_path / 'c'}", "steps=600", "pause=0.1"]
    process = start_forked("--requeue", "--nproc-per-node", 2, *words, PATH=path, SLURM_JOB_ID="7")
    read_until_line(process, "step 3 ")
    for pid in [*descendants(process.pid), process.pid]:
        os.kill(pid, number)
    status, _, stderr = finish(process)
    assert status == 75, stderr
    became = "job 7 was canceled: it is not queued again" if is_canceled else "job 7 is queued again"
    assert stderr.splitlines()[-1].endswith(became)  # the last word: what follows may be cut off
    expected = "they get 16 s for it, since Slurm kills" if is_canceled else "they get 30 s for it\n"
    assert expected in stderr


def test_what_slurm_leaves_of_a_job_is_read() -> None:
    assert kill_wait_s("KillOnBadExit           = 0\nKillWait                = 30 sec\n") == 30.0
    assert kill_wait_s("KillWait = 0 sec") is None
    ended = "JobState=COMPLETING Reason=None RunTime={} TimeLimit={} "
    assert was_canceled(ended.format("00:04:59", "00:05:00"))
    assert was_canceled(ended.format("3-00:00:00", "UNLIMITED"))
    assert not was_canceled(ended.format("1-00:00:03", "1-00:00:00"))  # its time was over
    assert not was_canceled(ended.format("00:00:01", "00:05:00").replace("COMPLETING", "RUNNING"))
    assert kill_wait_s("slurm_load_ctl_conf error") is None
    lost = f"JobState=COMPLETING Reason=BeginTime Requeue=1 Restarts=1 {ended.format('00:00:09', '00:05:00')}"
    assert was_queued_again(lost, restart="0")  # after the loss of a node
    assert not was_queued_again(lost, restart="1")
    assert not was_queued_again(ended.format("00:04:59", "00:05:00"), restart="0")
