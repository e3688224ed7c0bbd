"""`paraplan compare`: a predicted step beside a measured one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from paraplan.cli.options import JsonOption
from paraplan.errors import PlanError
from paraplan.report.step_profile import measured_profile, predicted_profile
from paraplan.report.trace_comparison import TraceComparison, compare_steps
from paraplan.report.trace_reading import Trace, read_trace

app = typer.Typer(add_completion=False)


@app.command()
def compare(
    predicted: Annotated[
        Path, typer.Argument(metavar="PREDICTED", help="A trace that paraplan estimate or recommend --trace wrote.")
    ],
    measured: Annotated[
        Path, typer.Argument(metavar="MEASURED", help="A trace that torch.profiler exported on one rank (.json, .gz).")
    ],
    rank: Annotated[
        int | None, typer.Option("--rank", min=0, help="The rank that was measured; else as the trace says, else 0.")
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option("--steps", min=1, help="Steps in the measured trace, where it has no marks of torch.profiler."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Lay a trace of a run beside a predicted step, and name the largest differences.

    Example: paraplan compare predicted.json rank0.json.gz
    """
    ours, theirs = _read(predicted), _read(measured)
    number = rank if rank is not None else theirs.rank or 0
    prediction = predicted_profile(ours, rank=number)
    comparison = compare_steps(prediction, measured_profile(theirs, steps=steps).replace(rank=number))
    if as_json:
        typer.echo(json.dumps(_report(comparison), indent=2))
        return
    from paraplan.cli.compare_tables import print_comparison  # rich, which --json does without

    print_comparison(comparison)


def _read(path: Path) -> Trace:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise PlanError(f"cannot read the trace {path}: {error.strerror}", hint="give a file that exists") from None
    return read_trace(data, source=str(path))


def _report(comparison: TraceComparison) -> dict[str, object]:
    found: dict[str, object] = comparison.model_dump()
    for name in ("parts", "collectives"):
        found[name] = [part.model_dump() | {"difference_s": part.difference_s} for part in getattr(comparison, name)]
    return found
