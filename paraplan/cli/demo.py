"""`paraplan demo`: a plan for this machine, and a training that runs it, by the commands that a user would type."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from paraplan.api.checking import example_script
from paraplan.api.machines import probe_topology
from paraplan.cli.terminal import in_lines
from paraplan.errors import NoGpuError, UsageError, require_torch

app = typer.Typer(add_completion=False)

_SCRIPT = "train_lm.py"
_RANKS = 2
_LAST_LINES = 12
"""Lines that are shown of a step that failed."""


@app.command()
def demo(
    folder: Annotated[Path, typer.Argument(help="Where the script, the plan and the logs are written.")] = Path(
        "paraplan-demo"
    ),
    steps: Annotated[int, typer.Option("--steps", min=2, help="Optimizer steps.")] = 60,
) -> None:
    """Train a small language model here: plan for this machine, its GPUs or two CPU processes, then run the plan.

    The text is the sources of Python's standard library. The training script is copied into the folder, to be read and
    changed.
    """
    require_torch("paraplan demo")
    _copy_script(folder)
    started_s = time.monotonic()
    typer.echo(f"$ cd {folder}")
    machine = []
    try:
        probe_topology()
    except NoGpuError:
        measure = ["calibrate", "--ranks", str(_RANKS), "--seconds", "4", "--precision", "fp32", "-o", "machine.json"]
        _run(folder, *measure, is_shown=False)
        machine = ["--profile", "machine.json"]
    training = ["--seq-len", "128", "--global-batch", "16", "--precision", "fp32"]
    _run(folder, "recommend", f"{_SCRIPT}:build_model", *machine, *training, "--top", "2", "-o", "plan.json")
    _run(folder, "launch", "--plan", "plan.json", _SCRIPT, "--steps", str(steps))
    typer.echo(
        f"\nA trained model after {time.monotonic() - started_s:.0f} s. The script is {folder / _SCRIPT}. Next:\n"
        "  paraplan recommend llama-3-8b --profile 8xh100    your model, your machine\n"
        "  paraplan explain training                         your training script\n"
        "  paraplan explain tutorial                         from here to fine-tuned weights"
    )


def _copy_script(folder: Path) -> None:
    """Write the script. Raises `UsageError` where another one of that name is in the folder."""
    text, path = example_script(_SCRIPT).read_bytes(), folder / _SCRIPT
    try:
        if path.exists() and path.read_bytes() != text:
            raise UsageError(f"{path} was changed, and demo would overwrite it", hint="paraplan demo ANOTHER_FOLDER")
        folder.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}", hint="paraplan demo ANOTHER_FOLDER") from None


def _run(folder: Path, *words: str, is_shown: bool = True) -> None:
    """Run a command of paraplan in a folder, below its own line; end as it does where it fails."""
    typer.echo(in_lines(f"\n$ paraplan {' '.join(words)}", sys.stdout))
    sys.stdout.flush()
    done = subprocess.run(
        [sys.executable, "-m", "paraplan", *words],
        cwd=folder,
        check=False,
        text=True,
        capture_output=not is_shown,
    )
    if done.returncode:
        for line in (done.stderr or "").splitlines()[-_LAST_LINES:]:
            typer.echo(line, err=True)
        raise typer.Exit(done.returncode)
    if not is_shown:
        typer.echo(done.stderr.strip().splitlines()[-1])
