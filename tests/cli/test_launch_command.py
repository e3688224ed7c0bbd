"""The command line of `paraplan launch`: help, and bad input that starts nothing."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from forked_launch import launch_forked
from rank_harness import RankHarness

from paraplan.errors import UsageError
from paraplan.launch.handover import ENTRY, become_launcher


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    scratch = folder / "scratch"
    scratch.mkdir(exist_ok=True)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PET_", "OMP_"))}
    return subprocess.run(
        [sys.executable, "-m", "paraplan", "launch", *words],
        cwd=folder,
        env=environment | {"TMPDIR": str(scratch)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_help_says_what_the_command_does_and_lists_both_kinds_of_options(tmp_path: Path) -> None:
    done = run(tmp_path, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("usage: paraplan launch [options] train.py")
    for word in ("--plan PLAN.json", "--nproc-per-node", "--rdzv-backend", "recommend"):
        assert word in done.stdout


def test_the_launchers_process_finds_the_package_that_is_not_installed(tmp_path: Path) -> None:
    """Without site-packages: neither torch nor an installed paraplan is there."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-S", str(ENTRY), "train.py"], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.stderr.splitlines()[-2] == "ModuleNotFoundError: No module named 'torch'", done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "no training script given"),
        (["--nproc-per-node", "0", "train.py"], "--nproc-per-node 0 starts no rank"),
        (["--nproc-per-node", "two ", "train.py"], "--nproc-per-node two "),
        (["--nproc-per-node", "tpu", "train.py"], "tpu"),
        (["no_such.py"], "there is no script no_such.py"),
        (["--plan", "broken.json", "train.py"], "broken.json"),
        (["--plan", "four.json", "--nproc-per-node", "2", "train.py"], "is for 4 ranks"),
        (["--fake", "2", "--hostfile", "hosts", "train.py"], "--fake 2 and --hostfile contradict each other"),
        (["--fake", "2", "--dry-run", "train.py"], "--fake 2 and --dry-run contradict each other"),
        (["--hostfile", "hosts", "--dry-run", "train.py"], "the slots of the hosts in hosts differ (2, unknown)"),
        (["--no-such-option", "train.py"], "unrecognized arguments: --no-such-option"),
        (["--rdzv-backend", "pigeon", "--nnodes", "2", "train.py"], "pigeon"),
    ],
)
def test_bad_input_is_one_sentence_with_a_hint_and_starts_nothing(
    tmp_path: Path, words: list[str], said: str, ranks: RankHarness
) -> None:
    (tmp_path / "train.py").write_text("open('started', 'w')")
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "hosts").write_text("gpu-a slots=2\ngpu-b\n")
    (tmp_path / "four.json").write_text('{"plan": {"dp": 4}}')
    (tmp_path / "scratch").mkdir()
    if not words:
        done = run(tmp_path, *words)
    else:
        done = launch_forked(ranks, tmp_path, *words, environment={"TMPDIR": str(tmp_path / "scratch")})
    assert done.returncode == 2
    assert said in done.stderr
    assert "hint: " in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) <= 3
    assert done.stdout == ""
    assert not (tmp_path / "started").exists()
    assert list((tmp_path / "scratch").iterdir()) == []


def test_a_dry_run_of_a_host_file_shows_all_nodes_once_and_reaches_for_none(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("open('started', 'w')")
    (tmp_path / "hosts").write_text("no-such-host-a slots=2\nme@no-such-host-b slots=2\n")
    done = run(tmp_path, "--hostfile", "hosts", "--dry-run", "--json", "train.py")
    assert (done.returncode, done.stderr) == (0, "")
    ranks = json.loads(done.stdout)["ranks"]
    assert [rank["host"] for rank in ranks] == ["no-such-host-a"] * 2 + ["me@no-such-host-b"] * 2
    assert {rank["environment"]["MASTER_ADDR"] for rank in ranks} == {"no-such-host-a"}


def test_a_port_that_is_taken_is_said_to_be_taken_and_by_whom(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("open('started', 'w')")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        done = run(tmp_path, "--nproc-per-node=2", f"--master-port={port}", "train.py")
    assert done.returncode == 1
    assert f"error: port {port} of this host is taken by " in done.stderr
    assert f"(pid {os.getpid()})" in done.stderr
    (kept,) = tmp_path.glob("paraplan-runs/*/run.json")
    assert json.loads(kept.read_text())["exit_status"] == 1
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "started").exists()


def test_without_torch_the_command_says_how_to_install_it() -> None:
    with pytest.raises(UsageError) as caught:
        become_launcher([], find_module=lambda name: None)
    assert caught.value.hint == "pip install torch"


def test_a_launch_on_windows_says_that_ranks_start_on_linux() -> None:
    with pytest.raises(UsageError, match="this is Windows") as caught:
        become_launcher(["train.py"], platform="win32")
    assert "WSL 2" in (caught.value.hint or "")
