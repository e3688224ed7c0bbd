from __future__ import annotations

import os
import resource
import subprocess
from pathlib import Path

import pytest
from forked_launch import launch_words
from launching import StartForked, WriteScript, launcher_command, launcher_environment
from rank_harness import RankHarness
from waiting import PATIENCE_S

from paraplan.launch.preflight import Findings, check_limits, num_files
from paraplan.launch.ranks.limits import Limit, Limits, advice_on_limits, raise_open_files

NO_LIMIT = Limit(None, None)


def limits(**changes: object) -> Limits:
    free: dict[str, object] = {"files": NO_LIMIT, "tasks": NO_LIMIT, "num_tasks": 5, "locked_bytes": None}
    return Limits(**(free | changes))  # type: ignore[arg-type]


def check(found: Limits, *, num_ranks: int = 8, world_size: int = 8, infiniband: Path = Path("/none")) -> Findings:
    return check_limits(found, num_ranks=num_ranks, world_size=world_size, num_threads=1, infiniband=infiniband)


def launch_under(limit: str, train: Path, scratch: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = launcher_command("--nproc-per-node", 8, train)
    return subprocess.run(
        [*words, "bash", "-c", f'ulimit {limit}; exec "$0" "$@"', *command],
        cwd=scratch,
        env=launcher_environment(scratch, HOME=str(scratch)),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


def launch_with_few_files(folder: str, words: list[str]) -> int:
    resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
    os.chdir(folder)
    os.dup2(os.open("said", os.O_WRONLY | os.O_CREAT, 0o600), 2)
    return launch_words(words)


def test_a_launch_with_too_few_open_files_says_how_many_it_needs_and_how_to_raise_them(
    script: WriteScript, tmp_path: Path, ranks: RankHarness
) -> None:
    words = ["--nproc-per-node", "8", str(script("import torch"))]
    assert ranks.run_alone(launch_with_few_files, str(tmp_path), words, is_fresh=True) == 1
    said = (tmp_path / "said").read_text()
    assert "a process may have 40 open files (ulimit -n), and 8 ranks need 72" in said
    assert "the hard limit is 40" in said
    assert "Traceback" not in said


def test_a_user_with_too_few_processes_is_told_so_before_ranks_start(scratch: Path) -> None:
    caps = "+dac_override,+dac_read_search"  # the interpreter may lie where no other user may look
    nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    nobody += [f"--inh-caps={caps}", f"--ambient-caps={caps}"]
    try:
        subprocess.run([*nobody, "true"], capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("root alone may become another user, whom the limit holds")
    scratch.chmod(0o777)
    train = scratch / "train.py"
    train.write_text("import torch")
    done = launch_under("-u 30", train, scratch, *nobody)
    assert done.returncode == 1, done.stderr
    assert "this user may have 30 processes and threads (ulimit -u) and has " in done.stderr
    assert "8 ranks need about 92 more" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_way_out_is_a_command_where_the_user_may_raise_the_limit() -> None:
    found = check(limits(files=Limit(64, 1 << 20)))
    assert found.hint == "ulimit -n 4096"
    found = check(limits(tasks=Limit(50, 10_000)))
    assert (found.problems, found.hint) == (
        ("this user may have 50 processes and threads (ulimit -u) and has 5: 8 ranks need about 92 more",),
        "ulimit -u 4096",
    )


def test_usual_limits_are_fine() -> None:
    usual = limits(files=Limit(1024, 1 << 20), tasks=Limit(10_000, 10_000))
    assert check(usual) == Findings()


def test_a_large_world_is_warned_of_what_gloo_opens_and_refused_where_a_launcher_cannot_open_as_much() -> None:
    found = check(limits(files=Limit(1024, 1 << 20)), world_size=512)
    assert found.problems == ()
    assert "a process may have 1024 open files (ulimit -n): with gloo a rank of 512 may need 2088" in found.warnings[0]
    found = check(limits(files=Limit(1024, 1024)), world_size=512)
    assert found.problems == ("a process may have 1024 open files (ulimit -n), and 512 ranks need 2088",)


def test_memory_that_may_not_be_locked_is_named_where_nodes_have_infiniband(tmp_path: Path) -> None:
    few = limits(locked_bytes=Limit(64 << 10, 64 << 10))
    assert check(few, world_size=16, infiniband=tmp_path) == Findings()
    (tmp_path / "mlx5_0").mkdir()
    assert check(few, infiniband=tmp_path) == Findings()  # one node alone
    warning = check(few, world_size=16, infiniband=tmp_path).warnings[0]
    assert warning.startswith("64.0 KiB may be locked in memory (ulimit -l)")
    assert "(* hard memlock unlimited)" in warning
    assert check(limits(), world_size=16, infiniband=tmp_path) == Findings()


def test_a_launcher_opens_as_many_files_as_it_needs_where_it_may() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
        raise_open_files(num_files(100))
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (min(440, hard), hard)
        raise_open_files(300)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == min(440, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_rank_that_opens_too_many_files_is_told_the_limit(script: WriteScript, start_forked: StartForked) -> None:
    train = script(
        """
        import os, resource
        resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))
        kept = [os.open("/dev/null", os.O_RDONLY) for _ in range(200)]
        """
    )
    done = start_forked("--nproc-per-node", 1, train)
    _, said = done.communicate(PATIENCE_S)
    assert done.returncode == 1
    assert "Too many open files" in said
    assert "hint: a process may have " in said


def test_errors_of_other_kinds_get_no_advice_on_limits() -> None:
    few = limits(tasks=Limit(500, 8192))
    assert advice_on_limits("RuntimeError: can't start new thread", limits=few) == (
        "this user may have 500 processes and threads: ulimit -u 4096"
    )
    assert advice_on_limits("BlockingIOError: [Errno 11] Resource temporarily unavailable", limits=limits())
    assert advice_on_limits("ValueError: a batch of 3") is None
