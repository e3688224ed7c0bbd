"""Whole jobs with real ranks: what torchrun promises, and what it does not."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from textwrap import dedent
from typing import IO

import pytest
from case_selection import with_all
from launching import (
    ForkedLaunch,
    Launch,
    StartForked,
    WriteScript,
    free_port,
    is_alive,
    launcher_environment,
    names_in,
    read_until,
    wait_until_dead,
)
from waiting import PATIENCE_S, wait_until

from paraplan.launch.ranks.bootstrap import MARKS_VARIABLE
from paraplan.plan.files import PlanFile
from paraplan.plan.parallel import ParallelPlan
from paraplan.shared_memory import STATUS_PAGE_VARIABLE

pytestmark = pytest.mark.ranks

SHOW_RANK = """
    import json, os, sys
    import __main__
    json.dump({
        "environment": dict(os.environ), "argv": sys.argv, "path": sys.path, "file": __file__,
        "orig_argv": sys.orig_argv[1:], "name": __name__, "main": sys.modules["__main__"] is __main__,
        "has_torch": "torch" in sys.modules,
        "is_torchs": "step_hooks" not in sys.modules["torch"].autograd.backward.__code__.co_filename
        if "torch" in sys.modules else True,
        "streams": [
            [stream.name, stream.mode, stream.encoding, stream.errors, stream.line_buffering]
            for stream in (sys.stdin, sys.stdout, sys.stderr)
        ],
    }, open(sys.argv[1] + os.environ["RANK"], "w"))
"""
CHOSEN_BY_EACH_JOB = {"MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE", "OMP_NUM_THREADS"}


def read_ranks(prefix: Path, number: int) -> list[dict[str, object]]:
    return [json.loads(Path(f"{prefix}{rank}").read_text()) for rank in range(number)]


START_METHODS = (
    ("spawn", "import typing_extensions", True),
    *with_all([("spawn", "", False)]),  # what imports the standard library alone is forked without torch, as below
    ("exec", "import typing_extensions", False),
)

OWN_VARIABLES = {STATUS_PAGE_VARIABLE, MARKS_VARIABLE}
"""Where a rank tells how far it is, and that it notes its steps."""


def test_a_rank_sees_what_it_sees_under_torchrun(
    tmp_path: Path, scratch: Path, script: WriteScript, launch: Launch, start_forked: StartForked
) -> None:
    train = script(SHOW_RANK)
    words = ["--nproc-per-node=2", "--max-restarts=3", train.name]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *words, str(tmp_path / "theirs"), "--x", "--"],
        cwd=tmp_path,
        env=launcher_environment(scratch),
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    theirs = read_ranks(tmp_path / "theirs", 2)  # the path is part of argv, so both write to the same
    environments = [their.pop("environment") for their in theirs]
    for start_method, more, has_torch in START_METHODS:
        script(dedent(SHOW_RANK) + more)
        given = (f"--start-method={start_method}", *words, tmp_path / "theirs", "--x", "--")
        if start_method == "spawn":
            ours = launch(*given)
            assert ours.returncode == 0, ours.stderr
        else:  # the ranks are what starts an interpreter
            assert start_forked(*given).wait(PATIENCE_S) == 0
        for their, known, our in zip(theirs, environments, read_ranks(tmp_path / "theirs", 2), strict=True):
            environment = our.pop("environment")
            assert our == their | {"has_torch": has_torch}
            assert environment.keys() - known.keys() == OWN_VARIABLES
            assert known.keys() <= environment.keys()
            assert environment["MASTER_ADDR"] == "127.0.0.1"  # torchrun has the host's name
            for name in known.keys() - CHOSEN_BY_EACH_JOB - {"MASTER_ADDR"}:
                assert environment[name] == known[name], name


def test_a_dry_run_tells_the_environment_that_ranks_then_have(
    tmp_path: Path, script: WriteScript, launch_forked: ForkedLaunch
) -> None:
    (tmp_path / "plan.json").write_text(PlanFile(plan=ParallelPlan(dp=2)).to_json())
    words = ["--plan", "plan.json", "--master-port", free_port(), script(SHOW_RANK).name, tmp_path / "seen"]
    told = json.loads(launch_forked("--dry-run", "--json", *words).stdout)["ranks"]
    assert not (tmp_path / "seen0").exists()
    assert launch_forked(*words).returncode == 0
    for rank, seen in zip(told, read_ranks(tmp_path / "seen", 2), strict=True):
        assert rank["environment"].items() <= seen["environment"].items()
        assert rank["command"][1:] == seen["orig_argv"]


def test_the_rank_that_failed_is_named_though_another_ended_before_it(
    scratch: Path, script: WriteScript, launch_forked: ForkedLaunch
) -> None:
    train = script(
        """
        import sys, threading, time
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")
        dist.barrier()
        if dist.get_rank() == 2:
            def leave(*error):  # once the error is recorded: the others' lost connections come after it
                sys.__excepthook__(*error)
                dist.destroy_process_group()
            sys.excepthook = leave
            threading.Thread(target=time.sleep, args=(3,)).start()
            raise ValueError("the real bug")
        dist.all_reduce(torch.ones(1))
        """
    )
    done = launch_forked("--nproc-per-node", 3, train)
    report = done.stderr[done.stderr.index("paraplan: rank") :].splitlines()
    assert report[0] == "paraplan: rank 2 failed first: ValueError: the real bug"
    assert report[-1].strip() == "ValueError: the real bug"
    assert len(report) <= 10
    assert re.search(r"then ended: .*ranks? [01].* because a connection was lost", done.stderr)
    assert done.returncode == 1
    assert names_in(scratch) == []


@pytest.mark.parametrize(
    ("ending", "status", "words"),
    [
        pytest.param("sys.exit(7)", 7, "the script ended itself with exit code 7", marks=pytest.mark.with_all),
        ("sys.exit('no data')", 1, "the script ended itself with exit code 1: no data"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "killed by SIGKILL"),
    ],
)
def test_a_job_ends_with_the_status_of_the_rank_that_failed(
    scratch: Path, script: WriteScript, launch_forked: ForkedLaunch, ending: str, status: int, words: str
) -> None:
    train = script(
        f"""
        import os, signal, sys, time
        if os.environ["RANK"] == "1":
            {ending}
        time.sleep(600)
        """
    )
    done = launch_forked("--nproc-per-node", 2, train)
    assert done.returncode == status
    assert f"paraplan: rank 1 failed first: {words}" in done.stderr
    assert "rank 0 because the launcher stopped it" in done.stderr
    assert names_in(scratch) == []


def test_ranks_that_torch_starts_itself_are_reported_too(
    scratch: Path, script: WriteScript, launch_forked: ForkedLaunch
) -> None:
    train = script("import sys; sys.exit(7)")
    done = launch_forked("--run-path", "--nproc-per-node", 1, train)
    assert done.returncode == 7, done.stderr
    report = done.stderr[done.stderr.index("paraplan: rank") :].splitlines()
    assert report[0] == "paraplan: rank 0 failed: exit code 7"
    assert not any(line.startswith("Traceback") for line in report)
    assert "leaked semaphore" not in done.stderr
    assert names_in(scratch) == []


def test_a_plan_sets_the_ranks_and_reaches_them(
    tmp_path: Path, script: WriteScript, launch_forked: ForkedLaunch
) -> None:
    (tmp_path / "plan.json").write_text(PlanFile(plan=ParallelPlan(dp=1, pp=2, pipeline_schedule="gpipe")).to_json())
    train = script(
        """
        import os, time
        words = ("plan", os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["PARAPLAN_PLAN"])
        os.write(1, " ".join(words).encode())
        if os.environ["RANK"] == "0":
            open("written", "w").close()
        if os.environ["RANK"] == "1":
            while not os.path.exists("written"):
                time.sleep(0.01)
            from paraplan.errors import PlanError
            raise PlanError("the model is another one", hint="make a plan for this model")
        """
    )
    done = launch_forked("--plan", "plan.json", train)
    assert f"plan 0 2 {tmp_path / 'plan.json'}" in done.stdout
    assert done.returncode == 2
    report = done.stderr[done.stderr.index("paraplan: rank") :].splitlines()
    assert report[0].endswith(": the model is another one")
    assert report[1] == "  hint: make a plan for this model"
    assert "pp 1 dp 0 cp 0 tp 0" in report[2]
    assert "Traceback" not in done.stderr


def test_failed_ranks_are_started_again_as_often_as_allowed(
    script: WriteScript, launch_forked: ForkedLaunch, scratch: Path
) -> None:
    train = script(
        """
        import os, sys
        attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
        os.write(1, f"attempt {attempt} of {os.environ['TORCHELASTIC_MAX_RESTARTS']} ".encode())
        sys.exit(5 if attempt == "0" else 0)
        """
    )
    long_path = scratch / ("x" * 200)  # no socket of the launcher's has a path in it
    long_path.mkdir()
    done = launch_forked("--nproc-per-node", 2, "--max-restarts", 1, train, TMPDIR=str(long_path))
    assert (done.returncode, done.stdout.count("attempt 1 of 1")) == (0, 2), done.stderr
    again = "the script ended itself with exit code 5; restarting all ranks (0 of 1 restarts left)"
    assert again in done.stderr
    assert "started 2 times" in done.stderr
    assert names_in(long_path) == []


EDITABLE = """
    import sys, types  # an import hook, as setuptools leaves one for `pip install -e`
    from importlib.util import spec_from_file_location
    found = lambda name, path=None, target=None: spec_from_file_location(name, {!r}) if name == "job" else None
    sys.meta_path.append(types.SimpleNamespace(find_spec=found))
"""


def test_modules_programs_and_logs_are_torchruns(
    tmp_path: Path, script: WriteScript, launch: Launch, launch_forked: ForkedLaunch
) -> None:
    job = script("import os, sys; print('module', os.environ['RANK'], sys.argv[1:])", "hidden.py")
    script(EDITABLE.format(str(job)), "sitecustomize.py")
    logs = ("--log-dir", "logs", "--redirects", "3", "--tee", "0:1")
    done = launch(*logs, "--nproc-per-node", 2, "-m", "job", "--x", PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[default0]:module 0 ['--x']\n"
    logs = {path.parent.name: path.read_text() for path in tmp_path.glob("logs/*/attempt_0/*/stdout.log")}
    assert logs == {"0": "module 0 ['--x']\n", "1": "module 1 ['--x']\n"}
    wait = "test $RANK = 0 && touch written; while [ ! -e written ]; do sleep 0.05; done; test $RANK = 0 || exit 4"
    done = launch_forked("--no-python", "--nproc-per-node", 2, "sh", "-c", f"echo $RANK ${{local_rank}}; {wait}")
    assert sorted(done.stdout.splitlines()) == ["0 0", "1 1"]
    assert done.returncode == 4


def read_words(stream: IO[str], number: int) -> list[str]:
    """Read so many words, each with a space after it; ranks write into each other's lines."""
    return read_until(stream, lambda text: text.count(" ") == number).split()


def test_ctrl_c_while_ranks_are_being_started_reaches_them_as_it_is(
    tmp_path: Path, scratch: Path, start_forked: StartForked
) -> None:
    rank = """
        trap 'echo SIGINT >> told; exit' INT
        trap 'echo SIGTERM >> told; exit' TERM
        [ $RANK = 0 ] && read -r _ _ _ launcher _ < /proc/$PPID/stat && kill -INT $launcher
        while true; do sleep 0.05; done
    """
    done = start_forked("--nproc-per-node", 8, "--no-python", "sh", "-c", rank)
    _, said = done.communicate(PATIENCE_S)
    assert done.returncode == 130, said
    assert set((tmp_path / "told").read_text().split()) == {"SIGINT"}
    assert names_in(scratch) == []


STUBBORN = """
    import os, signal, sys, time
    import typing_extensions  # as above
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    child = os.fork()
    os.write(1, f"{os.getpid()} ".encode())
    time.sleep(600)
"""


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_ranks_that_ignore_signals_end_with_the_launcher_and_so_do_their_children(
    scratch: Path, script: WriteScript, start_forked: StartForked, number: signal.Signals, status: int
) -> None:
    with start_forked("--nproc-per-node", 2, "--shutdown-timeout", 1, script(STUBBORN)) as process:
        assert process.stdout is not None
        pids = [int(word) for word in read_words(process.stdout, 4)]
        assert all(map(is_alive, pids))
        process.send_signal(number)
        assert process.wait(timeout=PATIENCE_S) == status
        assert process.stdout.read() == ""  # ends only when nobody holds the pipe any more
        assert "Traceback" not in (process.stderr.read() if process.stderr else "")
    wait_until_dead(*pids)  # a process closes its pipes before it is gone
    wait_until(lambda: not names_in(scratch))  # after SIGKILL the spawner cleans up by itself


def test_a_forked_rank_is_like_a_process_of_its_own(script: WriteScript, launch_forked: ForkedLaunch) -> None:
    train = script(
        """
        import os, pickle, random, sys, threading
        import numpy, torch
        from torch.utils.data import DataLoader, Dataset

        class Squares(Dataset):
            def __len__(self):
                return 8
            def __getitem__(self, index):
                return index * index

        def main():
            assert threading.active_count() == 1 and not torch.cuda.is_initialized()
            assert type(pickle.loads(pickle.dumps(Squares()))) is Squares
            for method in sys.argv[1:] if os.environ["RANK"] == "0" else ("fork",):
                loader = DataLoader(Squares(), batch_size=4, num_workers=1, multiprocessing_context=method)
                assert [batch.tolist() for batch in loader] == [[0, 1, 4, 9], [16, 25, 36, 49]], method
            seeds = [random.random(), numpy.random.random(), torch.rand(1).item()]
            line = [*seeds, torch.get_num_threads(), os.environ["OMP_NUM_THREADS"]]
            os.write(1, " ".join(map(str, [*line, os.linesep])).encode())

        if __name__ == "__main__":
            main()
        """
    )
    methods = ("fork", "spawn", *with_all(["forkserver"]))  # which finds the script's classes as spawn does
    done = launch_forked("--nproc-per-node", 2, train, *methods, OMP_NUM_THREADS="2")
    assert done.returncode == 0, done.stderr
    assert "OMP_NUM_THREADS" not in done.stderr
    first, second = [line.split() for line in done.stdout.splitlines()]
    assert not set(first[:3]) & set(second[:3])
    assert first[3:] == second[3:]
    assert first[3] in ("1", "2")  # torch takes no more threads than there are cores
    assert first[4] == "2"


ENDINGS = """
    import atexit, gc, os, sys, threading, time, weakref
    import torch

    folder = f"{sys.argv[1]}{os.environ['RANK']}"
    os.mkdir(folder)

    def note(text, os=os, folder=folder, open=open):
        with open(os.path.join(folder, "notes"), "a") as file:
            file.write(text + "\\n")

    class Noted:
        def __init__(self, name):
            self.name = name
        def __del__(self, note=note):
            note(f"deleted {self.name}")

    unclosed = open(os.path.join(folder, "unclosed"), "w")
    unclosed.write("written at the end")
    kept = Noted("of main")
    _private = Noted("private")
    kept.cycle = kept
    watched = Noted("watched")
    weakref.finalize(watched, note, "finalized")
    atexit.register(note, "exit function")
    threading.Thread(target=lambda: (threading.main_thread().join(), note("thread"))).start()
    sys.stdout.write("no newline at the end")
    note("collecting" if gc.isenabled() and gc.get_threshold()[0] else "not collecting")
"""


def test_a_forked_rank_ends_as_one_with_an_interpreter_of_its_own(
    tmp_path: Path, script: WriteScript, launch_forked: ForkedLaunch
) -> None:
    train = script(ENDINGS)
    seen = {}
    for method in ("spawn", "exec"):
        done = launch_forked(
            "--nproc-per-node=1", f"--start-method={method}", f"--log-dir=logs-{method}", "-r=3", train, method
        )
        assert done.returncode == 0, done.stderr
        seen[method] = {
            str(path.relative_to(tmp_path)).replace(method, ""): path.read_text()
            for path in (tmp_path / f"{method}0").iterdir()
        }
        for path in tmp_path.glob(f"logs-{method}/*/attempt_0/*/std*.log"):
            seen[method][f"{path.parent.name}/{path.name}"] = path.read_text()
    forked, alone = (seen[method].pop("0/notes").splitlines() for method in ("spawn", "exec"))
    assert forked[:4] == alone[:4] == ["collecting", "thread", "exit function", "finalized"]
    # Python promises no order among the last objects, nor that an interpreter deletes those in cycles
    assert len(set(forked)) == len(forked) == 7
    assert set(alone) <= set(forked)
    assert seen["spawn"] == seen["exec"]
    assert seen["exec"]["0/unclosed"] == "written at the end"


@pytest.mark.parametrize("fails", [False, True])
def test_what_ranks_have_begun_in_the_background_goes_on_after_a_job_that_ended_well_and_is_named(
    tmp_path: Path, script: WriteScript, launch_forked: ForkedLaunch, fails: bool
) -> None:
    train = script(
        f"""
        import subprocess, sys
        upload = subprocess.Popen(["sh", "-c", "read line < go; echo uploaded > uploaded"])
        open("upload", "w").write(str(upload.pid))
        sys.exit({int(fails)})
        """
    )
    os.mkfifo(tmp_path / "go")
    done = launch_forked("--nproc-per-node=1", train)
    assert done.returncode == fails, done.stderr
    upload = int((tmp_path / "upload").read_text())
    named = f"paraplan: the ranks have ended and leave running what they started in the background: {upload} (sh -c "
    assert (named in done.stderr) is not fails
    if fails:
        wait_until_dead(upload)
        return
    (tmp_path / "go").write_text("\n")
    wait_until_dead(upload)
    assert (tmp_path / "uploaded").read_text() == "uploaded\n"


@pytest.mark.parametrize("start_method", ["spawn", pytest.param("exec", marks=pytest.mark.with_all)])
def test_a_job_that_hangs_is_ended_with_the_stacks_of_its_ranks(
    scratch: Path, script: WriteScript, launch_forked: ForkedLaunch, start_method: str
) -> None:
    train = script(
        """
        import os, threading, time
        import typing_extensions  # as above
        def wait_for_others():
            threading.Event().wait()
        def load_data():
            while True: time.sleep(0.2)
        end = time.monotonic() + 3.5
        while time.monotonic() < end:  # longer than the timeout, but it tells of progress
            time.sleep(0.5); print("at work", flush=True)
        load_data() if os.environ["RANK"] == "1" else wait_for_others()
        """
    )
    done = launch_forked("--nproc-per-node=3", "--hang-timeout=2", f"--start-method={start_method}", train)
    assert done.returncode == 124, done.stderr
    lines = done.stderr.splitlines()
    assert lines[-1] == "  rank 1 in load_data (train.py:7)"
    assert lines[-2].startswith("  ranks 0, 2 in wait (threading.py:")
    assert lines[-2].endswith("called from wait_for_others (train.py:5)")
    assert names_in(scratch) == []
