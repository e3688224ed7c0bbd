"""What a run leaves in its folder, and that it needs neither the folder nor a disk with space to run."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import shlex
import shutil
import signal
import subprocess
import sys
import termios
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from launching import (
    ForkedLaunch,
    StartForked,
    WriteScript,
    is_alive,
    launcher_command,
    launcher_environment,
    names_in,
    read_until,
    wait_until_dead,
)
from waiting import PATIENCE_S

from paraplan.launch.faults.failures import last_lines
from paraplan.launch.faults.report import say
from paraplan.launch.ranks.copier import Copy, serve_copies
from paraplan.launch.run_folder import RUNS_FOLDER, RunFolder, open_run_folder
from paraplan.launch.spec import ONE_NODE, ArgumentError, LaunchSpec
from paraplan.plan.files import PlanFile
from paraplan.plan.parallel import ParallelPlan

FULL = Path("/dev/full")

SPEAK = """
    import os, sys, time
    os.write(1, f"out {os.environ['RANK']} {os.isatty(1)}\\n".encode())
    os.write(2, f"err {os.environ['RANK']}\\n".encode())
    if os.environ["RANK"] == "0":
        open("written", "w").close()
        time.sleep(600)
    while not os.path.exists("written"):
        time.sleep(0.01)
    os.write(2, b"the last words\\n")
    os._exit(9)
"""


@pytest.mark.ranks
def test_a_run_keeps_its_command_versions_plan_and_what_each_rank_wrote(
    tmp_path: Path, scratch: Path, script: WriteScript, launch_forked: ForkedLaunch
) -> None:
    (tmp_path / "plan.json").write_text(PlanFile(plan=ParallelPlan(dp=2)).to_json())
    done = launch_forked("--plan", "plan.json", script(SPEAK), "a b")
    assert done.returncode == 9
    assert sorted(done.stdout.splitlines()) == ["out 0 False", "out 1 False"]
    (run,) = [path for path in (tmp_path / RUNS_FOLDER).iterdir() if path.is_dir()]
    kept = json.loads((run / "run.json").read_text())
    assert kept["command"] == f"paraplan launch --plan plan.json {tmp_path / 'train.py'} 'a b'"
    assert (kept["exit_status"], kept["attempts"]) == (9, 1)
    assert kept["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert PlanFile.from_json((run / "plan.json").read_text(), source="kept").plan == ParallelPlan(dp=2)
    logs = {f"{path.parent.name}/{path.name}": path.read_text() for path in run.glob("*/attempt_0/*/std*.log")}
    assert logs == {
        "0/stdout.log": "out 0 False\n",
        "0/stderr.log": "err 0\n",
        "1/stdout.log": "out 1 False\n",
        "1/stderr.log": "err 1\nthe last words\n",
    }
    assert f"  logs: {run.relative_to(tmp_path)}\n" in done.stderr
    assert done.stderr.splitlines()[-1].strip() == "the last words"
    assert (tmp_path / RUNS_FOLDER / ".gitignore").read_text() == "*\n"
    assert names_in(scratch) == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    mount = shutil.which("mount")
    folder = tmp_path / "small"
    folder.mkdir()
    words = [mount or "mount", "-t", "tmpfs", "-o", "size=32k", "tmpfs", str(folder)]
    if mount is None or os.geteuid() != 0 or subprocess.run(words, capture_output=True, check=False).returncode:
        pytest.skip("a small disk is made by mounting one, which needs root")
    yield folder
    subprocess.run([shutil.which("umount") or "umount", str(folder)], check=True)


@pytest.mark.ranks
def test_a_full_disk_loses_logs_and_nothing_else(
    small_disk: Path, scratch: Path, script: WriteScript, launch_forked: ForkedLaunch
) -> None:
    train = script(
        """
        import os, time
        for _ in range(2000):
            os.write(1, b"x" * 99 + b"\\n")
        open(f"written{os.environ['RANK']}", "w").close()
        while not (os.path.exists("written0") and os.path.exists("written1")):
            time.sleep(0.01)
        raise ValueError("boom")
        """
    )
    done = launch_forked("--log-dir", small_disk, "--nproc-per-node", 2, train)
    assert done.returncode == 1
    assert done.stdout == ("x" * 99 + "\n") * 4000
    assert "cannot be written any more: No space left on device" in done.stderr
    assert "paraplan: rank " in done.stderr
    assert "ValueError: boom" in done.stderr
    assert names_in(scratch) == []


@pytest.mark.skipif(not FULL.exists(), reason="this system has no device that is always full")
def test_a_console_on_a_full_disk_loses_what_is_shown_and_nothing_else(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    source, sink = os.pipe()
    console = os.open(FULL, os.O_WRONLY)
    pid = os.fork()
    if pid == 0:
        serve_copies([Copy(source, console, str(tmp_path / "stdout.log"))], close=[sink])
    os.close(source)
    os.close(console)
    for _ in range(100):
        os.write(sink, b"a line\n")  # to a stream that is closed it is an error
    os.close(sink)
    assert os.waitpid(pid, 0)[1] == 0
    assert (tmp_path / "stdout.log").read_text() == "a line\n" * 100
    said = "cannot be written any more: No space left on device"
    assert capfd.readouterr().err == f"paraplan: standard error {said}; {tmp_path}/stdout.log goes on\n"


@pytest.mark.skipif(not FULL.exists(), reason="this system has no device that is always full")
def test_the_launcher_goes_on_where_its_own_lines_find_no_space() -> None:
    stream = FULL.open("w", buffering=1)
    with contextlib.redirect_stderr(stream):
        say("a warning")
    with contextlib.suppress(OSError):
        stream.close()


@pytest.mark.ranks
def test_on_a_terminal_ranks_write_to_a_terminal_and_the_log_has_what_they_wrote(
    tmp_path: Path, scratch: Path, script: WriteScript
) -> None:
    ours, theirs = pty.openpty()
    train = script(
        """
        import os, time
        os.write(1, f"on a terminal {os.isatty(1)} {os.isatty(2)}\\n".encode())
        while os.get_terminal_size(1) != (71, 20):
            time.sleep(0.05)
        """
    )
    process = subprocess.Popen(
        launcher_command("--nproc-per-node", 1, train),
        cwd=tmp_path,
        env=launcher_environment(scratch),
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)
    said = b""
    while b"on a terminal" not in said:
        said += os.read(ours, 1 << 16)
    termios.tcsetwinsize(ours, (20, 71))
    os.killpg(process.pid, signal.SIGWINCH)  # as the kernel does where it is the terminal of the session
    while True:
        try:
            data = os.read(ours, 1 << 16)
        except OSError:  # the last writer has closed the terminal
            break
        said += data
        if not data:
            break
    os.close(ours)
    assert process.wait(timeout=PATIENCE_S) == 0
    assert b"on a terminal True True\r\n" in said
    (log,) = (tmp_path / RUNS_FOLDER).glob("*/*/attempt_0/0/stdout.log")
    assert log.read_text() == "on a terminal True True\n"


@pytest.mark.ranks
def test_a_second_ctrl_c_ends_ranks_that_would_have_had_more_time(
    scratch: Path, script: WriteScript, start_forked: StartForked
) -> None:
    train = script(
        """
        import os, signal, time
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: os.write(1, b"asked "))
        os.write(1, f"{os.getpid()} ".encode())
        while True:
            time.sleep(600)
        """
    )
    with start_forked("--nproc-per-node", 1, "--shutdown-timeout", 500, train) as process:
        assert process.stdout is not None
        word = read_until(process.stdout, lambda text: text.endswith(" "))
        process.send_signal(signal.SIGINT)
        read_until(process.stdout, lambda text: text == "asked ")  # the launcher has begun to stop the ranks
        assert process.stderr is not None
        said = read_until(process.stderr, lambda text: "after SIGINT; Ctrl-C kills it\n" in text)
        assert "waiting up to 500 s for rank 0 to end" in said
        assert "death signal" not in said
        assert is_alive(int(word))
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=PATIENCE_S) == 130
    wait_until_dead(int(word))
    assert names_in(scratch) == []


def test_a_script_that_changes_the_folder_fails_with_its_error_where_the_log_folder_is_a_relative_one(
    launch_forked: ForkedLaunch, script: WriteScript, tmp_path: Path
) -> None:
    path = script("import os; os.chdir('/'); raise KeyError('lost')")
    done = launch_forked("--log-dir", "run", "--nproc-per-node", 2, path)
    assert "failed first: KeyError: 'lost'" in done.stderr
    assert list((tmp_path / "run").rglob("error.json"))  # of the rank that was first, at least


def test_a_current_folder_that_was_removed_is_said(tmp_path: Path, scratch: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    command = shlex.join(launcher_command("--nproc-per-node", 2, __file__))
    done = subprocess.run(
        ["/bin/sh", "-c", f"rmdir ../gone; exec {command}"],
        cwd=gone,
        env=launcher_environment(scratch),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.splitlines()[0] == "error: the current folder cannot be used: no such file or directory"


def test_without_logs_or_where_nothing_can_be_written_the_folder_is_elsewhere(tmp_path: Path) -> None:
    spec = LaunchSpec(training_script="train.py")
    folder = open_run_folder(spec, ONE_NODE, keeps_logs=False, current_folder=tmp_path)
    assert folder.is_temporary
    folder.path.rmdir()
    assert list(tmp_path.iterdir()) == []
    folder = open_run_folder(spec, ONE_NODE, keeps_logs=True, current_folder=tmp_path / "no" / "such")
    assert not folder.is_temporary
    folder.path.rmdir()


def test_launches_that_start_together_keep_their_runs_in_one_place(tmp_path: Path) -> None:
    names = [f"train{number}.py" for number in range(16)]
    start = threading.Barrier(len(names))

    def open_one(name: str) -> RunFolder:
        spec = LaunchSpec(training_script=name)
        start.wait(PATIENCE_S)
        return open_run_folder(spec, ONE_NODE, keeps_logs=True, current_folder=tmp_path)

    with ThreadPoolExecutor(len(names)) as pool:
        folders = list(pool.map(open_one, names))
    assert {folder.path.parent for folder in folders} == {tmp_path / RUNS_FOLDER}


def test_a_log_folder_that_cannot_be_made_is_an_error_with_its_name(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    spec = LaunchSpec(training_script="train.py", log_dir=str(tmp_path / "file" / "logs"))
    with pytest.raises(ArgumentError, match="file/logs cannot be made: Not a directory"):
        open_run_folder(spec, ONE_NODE, keeps_logs=True, current_folder=tmp_path)


def test_the_last_lines_of_a_log_are_what_stands_at_its_end(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("first\n\n10 %\r20 %\r30 %\nlast\n\n")
    assert last_lines(tmp_path / "log", 2) == ("30 %", "last")
    assert last_lines(tmp_path / "none", 2) == ()
