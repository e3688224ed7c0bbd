"""`paraplan.launch.run` as other programs use `torch.distributed.run`."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
from forked_launch import Ended, run_program_forked
from launching import WriteScript, launcher_command, launcher_environment, names_in
from rank_harness import RankHarness
from test_spares import TRAIN
from waiting import PATIENCE_S

pytestmark = pytest.mark.ranks

PROGRAM = """
import os, sys, threading
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from paraplan.launch.run import main, parse_min_max_nnodes

threading.Thread(target=threading.Event().wait, daemon=True).start()  # a program with threads cannot be forked
assert parse_min_max_nnodes("2:4") == (2, 4)
main(["--nproc-per-node", "2", "good.py", "word"])
assert "OMP_NUM_THREADS" not in os.environ
for words in (["--nproc-per-node", "unknown", "good.py"], ["--nproc-per-node", "0", "good.py"], ["missing.py"]):
    try:
        main(words)
    except ValueError as error:
        print("refused", flush=True)
try:
    main(["--nproc-per-node", "2", "bad.py"])
except ChildFailedError as error:
    rank, failure = error.get_first_failure()
    print("failed", rank, failure.exitcode, failure.message["message"], flush=True)
"""


RunProgram = Callable[[Path], Ended]


@pytest.fixture
def run(ranks: RankHarness, scratch: Path) -> RunProgram:
    """Run a program in a process that is forked with torch imported."""

    def run_program(program: Path) -> Ended:
        return run_program_forked(ranks, program, environment=launcher_environment(scratch))

    return run_program


def test_main_returns_or_raises_what_torchs_does(run: RunProgram, scratch: Path, script: WriteScript) -> None:
    script("import os, sys; os.write(1, f'good {os.environ[\"RANK\"]} {sys.argv[1:]}\\n'.encode())", "good.py")
    script("import os, time; time.sleep(600 * (os.environ['RANK'] == '0')); raise KeyError('bad')", "bad.py")
    program = script(PROGRAM, "program.py")
    done = run(program)
    lines = done.stdout.splitlines()
    assert sorted(lines[:2]) == ["good 0 ['word']", "good 1 ['word']"]
    assert lines[2:] == ["refused"] * 3 + ["failed 1 1 KeyError: 'bad'"]
    assert names_in(scratch) == []


@pytest.mark.with_all
def test_spares_stand_by_for_a_program_that_launches_too(run: RunProgram, scratch: Path, script: WriteScript) -> None:
    script(TRAIN)
    program = script(
        """
        import threading
        from paraplan.launch.run import main
        threading.Thread(target=threading.Event().wait, daemon=True).start()
        main(["--spare-ranks", "1", "--max-restarts", "1", "--nproc-per-node", "1", "train.py"])
        """,
        "program.py",
    )
    done = run(program)
    assert "rank 0 begins in a spare process" in done.stderr
    assert done.stdout.count("is done") == 1, done.stderr
    # torch makes the folder of its kernels where its compiler is imported, as an optimizer's first step does
    assert [name for name in names_in(scratch) if not name.startswith("torchinductor_")] == []


@pytest.mark.skipif(find_spec("accelerate") is None, reason="accelerate is not installed; the dev extra has it")
def test_accelerates_own_launcher_launches_through_it(run: RunProgram, script: WriteScript) -> None:
    script(
        """
        import os, sys
        words = [os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["ACCELERATE_MIXED_PRECISION"], *sys.argv[1:]]
        words.append("TORCHELASTIC_ERROR_FILE" in os.environ and "paraplan" in os.environ["TORCHELASTIC_ERROR_FILE"])
        os.write(1, f"{' '.join(map(str, words))}\\n".encode())
        """
    )
    program = script(
        """
        import sys
        import torch.distributed
        from paraplan.launch import run
        sys.modules["torch.distributed.run"] = torch.distributed.run = run
        from accelerate.commands.launch import launch_command, launch_command_parser
        words = ["--multi_gpu", "--num_processes", "2", "--mixed_precision", "bf16", "train.py", "--x", "1"]
        launch_command(launch_command_parser().parse_args(words))
        assert run.determine_local_world_size("3") == 3
        config, program, arguments = run.config_from_args(run.get_args_parser().parse_args(["--nnodes=2", "a.py"]))
        assert (config.max_nodes, arguments[-1]) == (2, "a.py")
        """,
        "program.py",
    )
    done = run(program)
    assert sorted(done.stdout.splitlines()) == ["0 2 bf16 --x 1 True", "1 2 bf16 --x 1 True"], done.stderr


def test_the_module_runs_as_torchs_does(run: RunProgram, scratch: Path, script: WriteScript) -> None:
    script("import os, sys; os.write(1, f'{__name__} {sys.argv[1:]}\\n'.encode()); sys.exit(3)", "train.py")
    program = script(
        """
        import os, runpy, sys
        sys.argv[1:] = ["--no-python", sys.executable, "train.py", "word"]
        process = os.fork()  # the module ends its process
        if not process:
            runpy.run_module("paraplan.launch.run", run_name="__main__", alter_sys=True)
        print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]))
        """,
        "program.py",
    )
    done = run(program)
    assert done.stdout == "__main__ ['word']\n3\n", done.stderr
    assert "rank 0 failed" in done.stderr
    assert names_in(scratch) == []


def test_without_standard_streams_ranks_print_to_nowhere_and_have_no_descriptors_of_the_launchers_caller(
    tmp_path: Path, scratch: Path, script: WriteScript
) -> None:
    train = script(
        """
        import os
        import torch
        print("words")
        os.mkdir(f"printed-{os.environ['RANK']}")
        with open(f"open{os.environ['RANK']}", "w") as file:
            file.write(" ".join(sorted(os.listdir("/proc/self/fd"), key=int)))
        """
    )
    with (tmp_path / "open").open("w") as file:
        os.dup2(file.fileno(), 77)
        done = subprocess.run(
            ["/bin/sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *launcher_command("--nproc-per-node", 2, train)],
            cwd=tmp_path,
            env=launcher_environment(scratch),
            pass_fds=[77],
            timeout=PATIENCE_S * 2,
            check=False,
        )
        os.close(77)
    assert done.returncode == 0
    for rank in range(2):
        numbers = (tmp_path / f"open{rank}").read_text().split()
        assert numbers[:3] == ["0", "1", "2"]
        assert "77" not in numbers
    assert {path.name for path in tmp_path.glob("printed-*")} == {"printed-0", "printed-1"}
    assert {path.read_text() for path in tmp_path.glob("paraplan-runs/*/*/*/*/stdout.log")} == {"words\n"}
