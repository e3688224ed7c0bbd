"""The bootstrap in an interpreter of its own: the same process that `python script` would be."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import zipfile
from pathlib import Path
from textwrap import dedent

import pytest

from paraplan.launch.ranks import bootstrap

SELF_PORTRAIT = """
    import json, os, pickle, sys
    import __main__

    class Point:
        pass

    print(json.dumps({
        "main": {k: repr(getattr(__main__, k)) for k in ("__name__", "__file__", "__doc__", "__package__")},
        "spec": getattr(__main__.__spec__, "name", None),
        "is_main": sys.modules["__main__"].__dict__ is globals(),
        "argv": sys.argv,
        "path": sys.path,
        "orig_argv": sys.orig_argv[1:],
        "unbuffered": [sys.stdout.write_through, type(sys.stdout.buffer).__name__],
        "pickled": pickle.loads(pickle.dumps(Point())).__class__ is Point,
        "annotations": __annotations__,
        "future": sys.flags.optimize,
        "cwd": os.getcwd(),
    }))
"""


def run(folder: Path, *words: str, error_file: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = dict(os.environ) | ({"TORCHELASTIC_ERROR_FILE": str(error_file)} if error_file else {})
    environment.pop("PYTHONPATH", None)
    return subprocess.run(
        [sys.executable, "-u", *words], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


def run_bootstrap(folder: Path, *words: str, error_file: Path | None = None) -> subprocess.CompletedProcess[str]:
    return run(folder, bootstrap.__file__, *words, error_file=error_file)


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(dedent(text))
    return path


@pytest.mark.parametrize(
    "words",
    [
        ["job/train.py", "--x", "-m", "--", "a b"],
        ["./job/link.py"],
        ["-m", "package.train", "--x"],
        ["-m", "package"],
        ["package"],
        ["archive.zip"],
    ],
)
def test_a_script_sees_what_it_sees_under_python_alone(tmp_path: Path, words: list[str]) -> None:
    write(tmp_path, "job/train.py", SELF_PORTRAIT)
    (tmp_path / "job/link.py").symlink_to(write(tmp_path, "elsewhere/real.py", SELF_PORTRAIT))
    write(tmp_path, "package/__init__.py", "")
    write(tmp_path, "package/train.py", SELF_PORTRAIT)
    write(tmp_path, "package/__main__.py", SELF_PORTRAIT)
    with zipfile.ZipFile(tmp_path / "archive.zip", "w") as archive:
        archive.writestr("__main__.py", dedent(SELF_PORTRAIT))
    alone, ours = run(tmp_path, *words), run_bootstrap(tmp_path, *words)
    assert ours.stderr == alone.stderr == ""
    assert json.loads(ours.stdout) == json.loads(alone.stdout)


@pytest.mark.parametrize(
    "body",
    [
        "def f(): raise ValueError('boom')\nf()",
        "import sys; sys.exit(3)",
        "import sys; sys.exit('words')",
        "raise SystemExit",
        "1 +",
        "import threading\nthreading.Thread(target=lambda: 1 / 0).start()",
        "import sys\nsys.excepthook = lambda *error: print('own hook', error[0].__name__, error[2].tb_lineno)\n1 / 0",
        "try:\n    1 / 0\nexcept ZeroDivisionError as error:\n    raise KeyError('k') from error",
        "import os; os._exit(5)",
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
        "import os, signal; os.kill(os.getpid(), signal.SIGINT); import time; time.sleep(600)",
        "import atexit; atexit.register(print, 'bye'); raise KeyError",
    ],
)
def test_a_script_ends_as_it_ends_under_python_alone(tmp_path: Path, body: str) -> None:
    write(tmp_path, "train.py", body)
    alone, ours = run(tmp_path, "train.py"), run_bootstrap(tmp_path, "train.py", error_file=tmp_path / "error.json")
    assert (ours.returncode, ours.stdout) == (alone.returncode, alone.stdout)
    assert _without_thread_numbers(ours.stderr) == _without_thread_numbers(alone.stderr)


def test_a_script_is_read_from_a_pipe_once(tmp_path: Path) -> None:
    write(tmp_path, "train.py", "print('words')")
    words = f"cat train.py | {sys.executable} {bootstrap.__file__} /dev/stdin"
    done = subprocess.run(["/bin/sh", "-c", words], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "words\n", "")


def _without_thread_numbers(text: str) -> list[str]:
    return [line for line in text.splitlines() if "Thread-" not in line]


@pytest.mark.parametrize(
    ("body", "message", "exit_code"),
    [
        ("raise ValueError('boom')", "ValueError: boom", "1"),
        ("import sys; sys.exit(3)", "SystemExit: 3", "3"),
        ("import sys; sys.exit('words')", "SystemExit: words", "1"),
        (
            "import threading; threading.Thread(target=lambda: 1 / 0).start()",
            "ZeroDivisionError: division by zero",
            "1",
        ),
    ],
)
def test_a_failure_is_recorded_in_torchruns_format_with_nanoseconds(
    tmp_path: Path, body: str, message: str, exit_code: str
) -> None:
    write(tmp_path, "train.py", body)
    run_bootstrap(tmp_path, "train.py", error_file=tmp_path / "error.json")
    record = json.loads((tmp_path / "error.json").read_text())["message"]
    assert record["message"] == message
    extra = record["extraInfo"]
    assert extra["exit_code"] == exit_code
    assert int(extra["timestamp"]) == int(extra["timestamp_ns"]) // 10**9
    assert bootstrap.__file__ not in extra["py_callstack"]


@pytest.mark.parametrize("body", ["pass", "import sys; sys.exit(0)", "import os; os.fork() or 1 / 0; os.wait()"])
def test_a_rank_that_succeeds_records_nothing_whatever_its_children_do(tmp_path: Path, body: str) -> None:
    write(tmp_path, "train.py", body)
    assert run_bootstrap(tmp_path, "train.py", error_file=tmp_path / "error.json").returncode == 0
    assert not (tmp_path / "error.json").exists()


def test_the_error_of_the_main_thread_replaces_that_of_another_thread(tmp_path: Path) -> None:
    body = """
        import threading
        thread = threading.Thread(target=lambda: 1 / 0)
        thread.start()
        thread.join()
        raise KeyError("main")
    """
    write(tmp_path, "train.py", body)
    run_bootstrap(tmp_path, "train.py", error_file=tmp_path / "error.json")
    assert json.loads((tmp_path / "error.json").read_text())["message"]["message"] == "KeyError: 'main'"


def test_an_error_of_paraplan_is_left_to_the_launcher_with_its_hint(tmp_path: Path) -> None:
    body = """
        from paraplan.errors import PlanError
        raise PlanError("wrong world", hint="make another plan")
    """
    write(tmp_path, "train.py", body)
    done = run_bootstrap(tmp_path, "train.py", error_file=tmp_path / "error.json")
    assert (done.returncode, done.stderr) == (2, "")
    extra = json.loads((tmp_path / "error.json").read_text())["message"]["extraInfo"]
    assert (extra["user_message"], extra["user_hint"]) == ("wrong world", "make another plan")


def test_an_error_file_that_cannot_be_written_does_not_hide_the_error(tmp_path: Path) -> None:
    write(tmp_path, "train.py", "raise ValueError('boom')")
    (tmp_path / "gone").mkdir()
    body = "import shutil; shutil.rmtree('gone'); raise ValueError('boom')"
    write(tmp_path, "train.py", body)
    done = run_bootstrap(tmp_path, "train.py", error_file=tmp_path / "gone" / "error.json")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "ValueError: boom"


def test_a_crash_leaves_the_stack_of_python_beside_the_error_file(tmp_path: Path) -> None:
    write(tmp_path, "train.py", "import os, signal\ndef native():\n    os.kill(os.getpid(), signal.SIGSEGV)\nnative()")
    done = run_bootstrap(tmp_path, "train.py", error_file=tmp_path / "error.json")
    assert done.returncode == -signal.SIGSEGV
    assert "line 3 in native" in (tmp_path / bootstrap.FAULT_FILE).read_text()


def test_an_error_inside_a_training_step_is_recorded_with_the_number_of_the_step(tmp_path: Path) -> None:
    body = """
        import sys, types

        class Engine:
            num_steps = 6
            def step(self):
                raise ValueError("boom")

        engines = sys.modules["paraplan.runtime.engine"] = types.ModuleType("paraplan.runtime.engine")
        engines.Engine = Engine
        Engine().step()
    """
    write(tmp_path, "train.py", body)
    run_bootstrap(tmp_path, "train.py", error_file=tmp_path / "error.json")
    assert json.loads((tmp_path / "error.json").read_text())["message"]["extraInfo"]["step"] == "7"
