"""When ranks start interpreters of their own, and what a forked rank does not inherit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from launching import ForkedLaunch, WriteScript, launcher_command, launcher_environment
from rank_harness import RankHarness

from paraplan.launch.run_folder import HIDDEN, without_secrets
from paraplan.launch.script import ScriptTraits, own_interpreters_reason, read_traits, shadowed_modules


def test_a_module_beside_the_script_with_the_name_of_an_imported_one_is_the_users(
    launch_forked: ForkedLaunch, script: WriteScript, tmp_path: Path
) -> None:
    (tmp_path / "tqdm.py").write_text("WHOSE = 'mine'\n")
    (tmp_path / "secrets").mkdir()
    (tmp_path / "secrets" / "__init__.py").write_text("WHOSE = 'mine too'\n")
    train = script("import os, secrets, tqdm\nos.write(1, f'{tqdm.WHOSE} {secrets.WHOSE}\\n'.encode())")
    done = launch_forked("--nproc-per-node", 2, train)
    assert done.stdout.splitlines() == ["mine mine too"] * 2, done.stderr
    assert done.stderr.count("each rank starts an interpreter of its own") == 1
    assert "secrets" in done.stderr


def test_only_a_module_that_would_be_imported_in_its_place_is_a_clash(tmp_path: Path) -> None:
    here = sys.modules
    assert shadowed_modules(tmp_path, here) == []
    for name in ("json.py", "notes.txt", "model.py", "os.py", "sys.py", "tempfile.pyc.old"):
        (tmp_path / name).write_text("")
    (tmp_path / "pathlib").mkdir()  # no package: Python goes on to the installed one
    (tmp_path / "re").mkdir()
    (tmp_path / "re" / "__init__.py").write_text("")
    assert shadowed_modules(tmp_path, here) == ["json.py", "re"]
    assert shadowed_modules(Path(os.__file__).parent, here) == []  # the very modules that are imported
    assert shadowed_modules(tmp_path / "none", here) == []
    assert shadowed_modules(None, here) == []


def test_a_variable_that_an_imported_module_sets_before_torch_is_honored(
    launch_forked: ForkedLaunch, script: WriteScript, tmp_path: Path
) -> None:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "__init__.py").write_text("from . import early\n")
    (tmp_path / "pkg" / "early.py").write_text("import os\nos.environ['OMP_NUM_THREADS'] = '2'\n")
    # torch reads the variable while it is imported: before that it is set.
    train = script("import pkg, sys\nprint('torch' in sys.modules, pkg.early.os.environ['OMP_NUM_THREADS'])")
    done = launch_forked("--nproc-per-node", 1, train)
    assert done.stdout.splitlines() == ["False 2"], done.stderr
    assert "the script sets OMP_NUM_THREADS, which libraries read while they are imported" in done.stderr


@pytest.mark.parametrize(
    "text",
    [
        "import helper",
        "from helper import run",
        "from helper import *",
        "from package import part",
        "import package.part",
        "def main():\n    import helper",
        "import first",
    ],
)
def test_the_modules_beside_a_script_are_read_for_what_they_set(tmp_path: Path, text: str) -> None:
    early = "import os\nos.environ['KMP_AFFINITY'] = 'x'\n"
    (tmp_path / "helper.py").write_text(early)
    (tmp_path / "first.py").write_text("import second")
    (tmp_path / "second.py").write_text("import first, helper")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    (tmp_path / "package" / "part.py").write_text("from .. import nothing\nfrom . import deep")
    (tmp_path / "package" / "deep.py").write_text(early)
    (tmp_path / "train.py").write_text(text)
    assert read_traits(tmp_path / "train.py").early_variables == ("KMP_AFFINITY",)
    (tmp_path / "train.py").write_text("import torch, broken, missing")
    (tmp_path / "broken.py").write_text("1 +")
    assert read_traits(tmp_path / "train.py").early_variables == ()


@pytest.mark.parametrize(
    ("environment", "reason"),
    [
        ({}, None),
        ({"LD_PRELOAD": ""}, None),
        ({"LD_PRELOAD": "/usr/lib/libjemalloc.so.2:/usr/lib/libtcmalloc_minimal.so.4"}, None),
        ({"LD_PRELOAD": "/opt/tool/libTreeLauncherTargetInjection.so"}, "LD_PRELOAD"),
        ({"LD_PRELOAD": "libjemalloc.so libtrace.so"}, "LD_PRELOAD"),
        ({"NSYS_PROFILING_SESSION_ID": "7"}, "NSYS_PROFILING_SESSION_ID"),
        ({"CUDA_INJECTION64_PATH": "/x.so"}, "CUDA_INJECTION64_PATH"),
    ],
)
def test_tools_that_enter_programs_as_they_start_get_programs(environment: dict[str, str], reason: str | None) -> None:
    said = own_interpreters_reason(ScriptTraits(), environment)
    assert said is None if reason is None else str(said).startswith(reason)


def test_run_folders_are_for_their_user_alone(launch_forked: ForkedLaunch, script: WriteScript, tmp_path: Path) -> None:
    done = launch_forked("--nproc-per-node", 1, script(""), "--api-key=k3y", "--token", "t0ken")
    assert done.returncode == 0, done.stderr
    runs = tmp_path / "paraplan-runs"
    assert [path.stat().st_mode & 0o777 for path in (runs, *runs.glob("2*"))] == [0o700, 0o700]
    text = next(runs.glob("*/run.json")).read_text()
    assert "k3y" not in text
    assert "t0ken" not in text
    assert text.count(HIDDEN) == 2


def test_words_of_a_command_are_kept_but_for_secrets() -> None:
    words = ["train.py", "--tokenizer", "gpt2", "--max-tokens", "8", "--hub_token", "x", "--password=y", "--key", "k"]
    shown = without_secrets([*words, "https://me:hf_abcdefgh@hub"], {"HF_TOKEN": "hf_abcdefgh", "SOME_KEY": "train.py"})
    assert shown == [
        *("train.py", "--tokenizer", "gpt2", "--max-tokens", "8", "--hub_token", HIDDEN, f"--password={HIDDEN}"),
        *("--key", "k", f"https://me:{HIDDEN}@hub"),
    ]


def test_an_error_of_the_launcher_itself_keeps_its_traceback_and_is_no_usage_error(
    tmp_path: Path, scratch: Path, script: WriteScript
) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(
        "import paraplan.launch.ranks.limits as cores\n"
        "def usable_cores():\n    raise OSError(22, 'Invalid argument')\n"
        "cores.usable_cores = usable_cores\n"
    )
    environment = launcher_environment(scratch)
    path = os.pathsep.join([str(tmp_path / "site"), environment.get("PYTHONPATH", "")])
    done = subprocess.run(
        launcher_command("--nproc-per-node", 2, script("import torch")),
        cwd=tmp_path,
        env=environment | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "in usable_cores" in done.stderr
    assert "an error of the launcher itself" in done.stderr
    assert "paraplan launch --help" not in done.stderr


THREADS_OF_A_FORKED_RANK = """
import os, threading
import torch
from paraplan.launch.ranks.forked import enter_rank
from paraplan.launch.ranks.spawner import RankStart

torch.set_num_threads(torch.get_num_threads())  # the process that ranks are forked from has a pool
failed = 0
for _ in range(20):
    pid = os.fork()
    if pid == 0:
        enter_rank(RankStart(("python", "-u", "train.py"), dict(os.environ), None))
        start, errors = threading.Barrier(8), []

        def work():
            start.wait()
            try:
                torch.ones(70_000).to(torch.bfloat16)
            except RuntimeError as error:
                errors.append(error)

        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        os._exit(len(errors) > 0)
    failed += os.waitpid(pid, 0)[1] != 0
"""


def num_failed_forks() -> int:
    names: dict[str, object] = {}
    exec(THREADS_OF_A_FORKED_RANK, names)  # noqa: S102 (the text above)
    assert isinstance(names["failed"], int)
    return names["failed"]


def test_threads_of_a_forked_rank_may_use_torch_at_once(ranks: RankHarness) -> None:
    """Its parent has used torch, as that of a notebook: a loader's threads are the first to use it in the rank."""
    assert ranks.run_alone(num_failed_forks, is_fresh=True) == 0
