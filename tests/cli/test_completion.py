"""What a shell completes: names of models, machines, GPUs, frameworks, targets, pages, and the launcher's options."""

from __future__ import annotations

import os
import pty
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from paraplan.cli.main import app

SCRIPTS = {shell: f"_PARAPLAN_COMPLETE=source_{shell} paraplan" for shell in ("bash", "zsh", "fish")}
ASKED = ("paraplan recommend gpt2 --profile dgx-h1", "dgx-h100")


def run_shell(*command: str, folder: Path) -> str:
    """Return what a shell prints that finds `paraplan` in a folder of its own."""
    program = folder / "paraplan"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m paraplan "$@"\n')
    program.chmod(0o755)
    env = os.environ | {"PATH": f"{folder}:{os.environ['PATH']}", "HOME": str(folder)}
    return subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, check=True).stdout


def needs(shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")


def test_bash_completes_a_machine(tmp_path: Path) -> None:
    needs("bash")
    line, offered = ASKED
    script = f'eval "$({SCRIPTS["bash"]})"; COMP_WORDS=({line}); COMP_CWORD=4; _paraplan_completion paraplan; '
    assert run_shell("bash", "--norc", "-c", f'{script}echo "${{COMPREPLY[@]}}"', folder=tmp_path).split() == [offered]


def test_fish_completes_a_machine(tmp_path: Path) -> None:
    needs("fish")
    line, offered = ASKED
    script = f"{SCRIPTS['fish']} | source; complete -C '{line}'"
    assert run_shell("fish", "--no-config", "-c", script, folder=tmp_path).split() == [offered]


def test_zsh_completes_a_machine_on_a_terminal(tmp_path: Path) -> None:
    needs("zsh")
    line, offered = ASKED
    run_shell("true", folder=tmp_path)  # puts paraplan there
    setup = f'autoload -U compinit; compinit -D -u; eval "$({SCRIPTS["zsh"]})"; print RE""ADY\n'
    env = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "HOME": str(tmp_path), "TERM": "dumb"}
    main, side = pty.openpty()
    shell = subprocess.Popen(
        [shutil.which("zsh") or "zsh", "-f", "-i"],
        stdin=side,
        stdout=side,
        stderr=side,
        env=env,
        start_new_session=True,
    )
    try:
        os.write(main, setup.encode())
        read_until(main, "READY")
        os.write(main, f"{line}\t".encode())
        assert offered in read_until(main, offered)
    finally:
        shell.kill()
        shell.wait()
        os.close(main)
        os.close(side)


def read_until(terminal: int, wanted: str, *, seconds: float = 20) -> str:
    """Return what a terminal shows up to a text, or in so many seconds."""
    shown, deadline = "", time.monotonic() + seconds
    while wanted not in shown and time.monotonic() < deadline:
        if select.select([terminal], [], [], 0.1)[0]:
            shown += os.read(terminal, 65536).decode(errors="replace")
    return shown


def completed(line: str) -> list[str]:
    """Return what bash is offered for the last word of a line, asked as its script asks, in this process."""
    words = {"_PARAPLAN_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(line.split(" ")) - 1)}
    return CliRunner().invoke(app, [], prog_name="paraplan", env=words).stdout.split()


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("paraplan recommend llama-3-8", "llama-3-8b"),
        ("paraplan recommend gpt2 --profile dgx-h1", "dgx-h100"),
        ("paraplan recommend gpt2 --profile 4xrtx-30", "4xrtx-3090"),
        ("paraplan estimate gpt2 --gpu rtx-30", "rtx-3090"),
        ("paraplan recommend gpt2 --framework torcht", "torchtitan"),
        ("paraplan export plan.json --to acc", "accelerate"),
        ("paraplan explain mem", "memory"),
        ("paraplan launch --nproc", "--nproc-per-node"),
        ("paraplan rec", "recommend"),
        ("paraplan estimate gpt2 --optimizer adamw_8", "adamw_8bit"),
        ("paraplan estimate gpt2 --base-weights nf", "nf4:double"),
        ("paraplan estimate gpt2 --train lo", "lora:r=16"),
        ("paraplan launch --preflight m", "measure"),
        ("paraplan launch --rdzv-backend c", "c10d"),
        ("paraplan launch --start-method forks", "forkserver"),
    ],
)
def test_names_are_completed(line: str, offered: str) -> None:
    assert offered in completed(line)
