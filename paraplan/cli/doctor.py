"""`paraplan doctor`: measure the machines of a job without a job, on one or many nodes."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from paraplan.errors import UsageError, require_torch
from paraplan.launch.handover import become_launcher
from paraplan.launch.parser import parse_arguments

_MODULE = "paraplan.measure.health"

app = typer.Typer()


@app.command(context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
def doctor(
    context: typer.Context,
    seconds: Annotated[float, typer.Option(help="How long to measure, about.", min=1.0, max=86_400.0)] = 20.0,
    report: Annotated[str | None, typer.Option(help="Write all that was measured to this file, as JSON.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
) -> None:
    """Measure matmuls, memory, links and disks of all ranks, and name what is slower than its like.

    All other options are those of `paraplan launch`: --nproc-per-node, --nnodes and --rdzv-endpoint on every node,
    --hostfile, --gpus. Exit status 1: something stands out.
    """
    require_torch("paraplan doctor")
    words = ["--seconds", str(seconds)]
    words += ["--report", report] if report is not None else []
    words += ["--json"] if json else []
    arguments = [*context.args, "--no-logs", "-m", _MODULE, *words]
    script = parse_arguments(arguments, os.environ).training_script
    if script != _MODULE:
        raise UsageError(f"paraplan doctor runs no script, and {script} is one", hint="leave it out")
    become_launcher(arguments)
