"""`paraplan check`: whether a plan trains a model as one process does."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paraplan.api.gradients import check_gradients
from paraplan.api.plans import load_plan
from paraplan.cli.options import JsonOption, ModelArgument
from paraplan.errors import UsageError

if TYPE_CHECKING:
    from paraplan.plan.check import CheckReport

app = typer.Typer(add_completion=False)


@app.command()
def check(
    model: ModelArgument,
    plan_path: Annotated[Path, typer.Option("--plan", metavar="FILE", help="The plan file to check.")],
    ranks: Annotated[int, typer.Option("--ranks", min=1, help="Use at most so many CPU ranks.")] = 8,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Optimizer steps to compare.")] = 3,
    layers: Annotated[
        int | None, typer.Option("--layers", min=1, help="Layers of the smaller model; by default one a stage and one.")
    ] = None,
    seq_len: Annotated[int, typer.Option("--seq-len", min=2, help="Tokens of a sequence.")] = 16,
    keep_width: Annotated[
        bool, typer.Option("--keep-width", help="Shrink the number of layers alone, not their width.")
    ] = False,
    split_by: Annotated[
        str, typer.Option("--split-by", metavar="paraplan|transformers", help="Whose tensor parallelism to check.")
    ] = "paraplan",
    timeout: Annotated[float, typer.Option("--timeout", min=1, help="Seconds after which ranks are stopped.")] = 600,
    as_json: JsonOption = False,
) -> None:
    """Train a small model of MODEL's structure under a plan and in one process, and compare every gradient.

    The model has fewer layers and heads and is narrower; the plan is run on CPU ranks, in fp32, without dropout, every
    axis with two ranks or more. Exits with status 1 if the two part, and names the parameter and the axis to blame.

    Example: paraplan check qwen3-8b --plan plan.json
    """
    if importlib.util.find_spec("torch") is None:
        raise UsageError("paraplan check needs torch, which is not installed", hint="pip install torch")
    if split_by not in ("paraplan", "transformers"):
        raise UsageError(f"--split-by {split_by} is unknown", hint="use paraplan or transformers")
    file = load_plan(plan_path)
    shows = sys.stderr.isatty() and not as_json
    report = check_gradients(
        model,
        file.plan,
        max_ranks=ranks,
        num_steps=steps,
        max_layers=layers,
        seq_length=seq_len,
        keeps_width=keep_width,
        split_by=split_by,
        timeout_s=timeout,
        say=lambda text: typer.echo(f"running {text}", err=True) if shows else None,
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
