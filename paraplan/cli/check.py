"""`paraplan check`: whether a plan, or a script, trains as one process does."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paraplan.api.checking import check_gradients, check_script
from paraplan.api.plans import load_plan
from paraplan.cli import completion
from paraplan.cli.options import JsonOption
from paraplan.errors import UsageError, require_torch

if TYPE_CHECKING:
    from paraplan.plan.check import CheckReport
    from paraplan.script_check.records import ScriptReport

app = typer.Typer(add_completion=False)
_NO_BREAK = "\N{NO-BREAK SPACE}"


@app.command()
def check(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="MODEL | -- ARGUMENTS",
            help="The model whose structure is trained, as for estimate; with --script the script's arguments.",
            autocompletion=completion.models,
        ),
    ] = None,
    plan_path: Annotated[Path | None, typer.Option("--plan", metavar="FILE", help="The plan file to check.")] = None,
    script: Annotated[
        str | None,
        typer.Option("--script", metavar="FILE", help="A training script to check as it is, without a plan."),
    ] = None,
    module: Annotated[bool, typer.Option("--module", help="--script names a module, as `python -m` takes it.")] = False,
    shrink: Annotated[
        bool,
        typer.Option(
            "--shrink", help="With --script: small models in place of those of transformers, with weights drawn."
        ),
    ] = False,
    ranks: Annotated[
        int | None, typer.Option("--ranks", min=1, help="CPU ranks: of a plan at most 8, of a script 4 by default.")
    ] = None,
    steps: Annotated[
        int | None, typer.Option("--steps", min=1, help="Optimizer steps: of a plan 3, of a script 2 by default.")
    ] = None,
    layers: Annotated[
        int | None, typer.Option("--layers", min=1, help="Layers of the smaller model; by default one a stage and one.")
    ] = None,
    seq_len: Annotated[int, typer.Option("--seq-len", min=2, help="Tokens of a sequence.")] = 16,
    keep_width: Annotated[
        bool, typer.Option("--keep-width", help="Shrink the number of layers alone, not their width.")
    ] = False,
    timeout: Annotated[float, typer.Option("--timeout", min=1, help="Seconds after which ranks are stopped.")] = 600,
    as_json: JsonOption = False,
) -> None:
    """Whether parallel training is the training that was meant: of a plan, or of any script.

    With MODEL and --plan a small model of MODEL's structure is trained under the plan and in one process, on CPU ranks,
    in fp32, without dropout, every axis with two ranks or more; every gradient is compared.

    With --script the script runs unchanged on CPU ranks, with DDP, FSDP, DTensors, accelerate, a Trainer or collectives
    of its own, and once in one process that is given all of their batches. Compared are every gradient after its last
    reduction and before it is clipped, the norm of clipping, and every parameter after each step.

    Exits with status 1 if the two part, and names the first parameter that does, and why.

    Examples: paraplan check qwen3-8b --plan plan.json

    paraplan check --script train.py --ranks 4 -- --batch-size 2
    """
    require_torch("paraplan check")
    shows = sys.stderr.isatty() and not as_json

    def say(text: str) -> None:
        if shows:
            typer.echo(f"running {text}", err=True)

    if script is not None:
        if plan_path is not None:
            raise UsageError("--script and --plan are two checks", hint="give one of them")
        found = check_script(
            script,
            words or (),
            num_ranks=ranks or 4,
            num_steps=steps or 2,
            is_module=module,
            shrink=shrink,
            timeout_s=timeout,
            say=say,
        )
        typer.echo(found.to_json() if as_json else "\n".join(script_text(found)))
        if not found.is_equal:
            raise typer.Exit(1)
        return
    if shrink or module:
        name = "--shrink" if shrink else "--module"
        raise UsageError(f"{name} says how --script is run, and none is given", hint="give --script train.py")
    if words is None or len(words) != 1 or plan_path is None:
        raise UsageError("there is nothing to check", hint="give MODEL --plan plan.json, or --script train.py")
    file = load_plan(plan_path)
    report = check_gradients(
        words[0],
        file.plan,
        max_ranks=ranks or 8,
        num_steps=steps or 3,
        max_layers=layers,
        seq_length=seq_len,
        keeps_width=keep_width,
        timeout_s=timeout,
        say=say,
    )
    typer.echo(report.to_json() if as_json else "\n".join(check_text(report)))
    if not report.is_equal:
        raise typer.Exit(1)


def check_text(report: CheckReport) -> list[str]:
    """Return the lines that say what was run, and whether it was equal."""
    lines = [f"{report.model}, as a model of {report.num_model_parameters:,} parameters in fp32, without dropout"]
    lines.append(f"plan      {report.planned.describe()}")
    if report.plan != report.planned:
        lines.append(f"run as    {report.plan.describe()}, on {report.plan.world_size} CPU ranks")
    if report.is_equal:
        lines.append(
            f"equal     to one process in {report.num_steps} steps: losses within {report.loss_error:.0e}, gradients "
            f"{report.gradient_error:.0e}, parameters {report.parameter_error:.0e} (relative)"
        )
        return lines
    gap = report.gap
    assert gap is not None
    what = f"{gap.quantity} of {gap.name}" if gap.name else gap.quantity
    lines.append(
        f"NOT EQUAL to one process: in step {gap.step} on rank {gap.rank} the {what} differs by {gap.error:.2g} of its "
        "size"
    )
    if report.num_unequal > 1:
        lines.append(f"          {report.num_unequal} parameters differ; this is the first of them in the model")
    lines.append(f"losses    {_numbers(report.losses)}; one process {_numbers(report.reference_losses)}")
    if report.blame:
        lines.append(f"to blame  {' and '.join(_blamed(name) for name in report.blame)}")
    elif len(report.planned.describe().split(" x ")) > 1:
        lines.append("to blame  no single axis: the difference stays without any one of them")
    return lines


def _blamed(name: str) -> str:
    if name == "micro-batches":
        return "more than one micro-batch (equal with one)"
    return f"{name} (equal with {name}=1)"


def _numbers(values: tuple[float, ...]) -> str:
    return " ".join(f"{value:.5f}" for value in values)


def script_text(report: ScriptReport) -> list[str]:
    """Return the lines that say what of a script was compared, and where it parts."""
    lines = [
        f"{report.script} on {report.num_ranks} CPU ranks, beside one process on all of their batches: "
        f"{report.num_parameters} parameters, {report.num_steps} step{'s' if report.num_steps > 1 else ''}, "
        f"{report.seconds:.0f}{_NO_BREAK}s"
    ]
    found = report.difference
    if found is None:
        errors = f"{report.gradient_error:.0e} of their size, parameters within {report.parameter_error:.0e}"
        lines.append(f"equal     gradients within {errors}")
    else:
        where = f"before step {found.step + 1}" if found.step == 0 else f"in step {found.step}"
        quantity = "value" if found.quantity == "parameter" else found.quantity
        what = f"{quantity} of {found.name}" if found.name else quantity
        ranks = ", ".join(map(str, found.ranks))
        lines.append(f"NOT EQUAL {where}: the {what} on rank{'s' if len(found.ranks) > 1 else ''} {ranks}")
        lines.append(f"          {found.cause}")
        if found.tolerance:
            lines.append(f"          it differs by {found.error:.2g} of its size; rounding makes {found.tolerance:.0e}")
        if found.num_alike > 1:
            lines.append(f"          {found.num_alike} parameters differ in this step")
    lines.append(f"losses    {_numbers(report.losses)}; one process {_numbers(report.alone_losses)}")
    lines += [f"note      {note}" for note in report.notes]
    return [part for line in lines for part in _wrapped(line)]


def _wrapped(line: str) -> list[str]:
    """Return a line in parts that a terminal of 100 columns shows whole, those after the first indented."""
    parts = textwrap.wrap(line, 100, subsequent_indent=" " * 10, break_long_words=False, break_on_hyphens=False)
    return [part.replace(_NO_BREAK, " ") for part in parts]
