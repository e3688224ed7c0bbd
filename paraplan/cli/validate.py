"""`paraplan validate`: predictions against measured runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from paraplan.api.calibrations import load_calibration
from paraplan.api.validation import Validation
from paraplan.api.validation import validate as validate_runs
from paraplan.cli.options import CalibrationOption, JsonOption
from paraplan.cli.terminal import make_console, show_note
from paraplan.cli.validate_tables import print_factors, print_fits, print_scores, print_skipped, print_sweeps
from paraplan.errors import PlanError
from paraplan.progress import is_stopped

app = typer.Typer(add_completion=False)


@app.command()
def validate(
    files: Annotated[list[Path], typer.Argument(metavar="RUNS.csv", help="Tables of measured runs.")],
    everything: Annotated[
        bool, typer.Option("--all", help="Score also rows of low quality or with nonstandard features.")
    ] = False,
    why: Annotated[
        bool, typer.Option("--why", help="Name the one factor that would explain most of each source's errors.")
    ] = False,
    calibration: CalibrationOption = None,
    keep: Annotated[
        bool, typer.Option("--keep", help="Keep these runs as your own: later estimates on such GPUs are corrected.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Predict measured runs from their configuration alone, and print what the predictions are worth.

    Scored are rows of quality A, B or none without nonstandard features, in bf16, fp16 or fp32; the others stand apart.
    Errors are given by source, GPU, framework and parallelism. A sweep is what one source measured of one model on one
    set of GPUs, four plans or more: of it the rank correlation of a sequence's time, and how much longer the plan with
    the best prediction took than the best of all; and the same at each global batch apart.
    Blank cells take stated defaults: bf16, AdamW, the framework's attention kernel, degrees of 1, micro-batches of 1,
    8 GPUs a node with NVLink where the GPU has it, the shapes of the bundled model of that name or a vocabulary of
    50304; no recompute if that fits, else full; of a batch that is not stated only the memory is compared. Rows are
    priced as paraplan estimate prices the same settings. Without --calibration nothing is fitted.
    --json has of each row its prediction, the range of this (predicted_step_time_low_s and _high_s, the same of peaks),
    what published runs say of its framework on its GPU (evidence), and the risk that it runs out of memory
    (out_of_memory_risk).
    --why multiplies constants and parts of the estimates one by one by 1/4 to 4, over up to 24 rows of each source;
    Ctrl-C ends it with the sources so far.
    """
    tables = {str(path): _text(path) for path in files}
    fitted = load_calibration(calibration) if calibration else None
    found = validate_runs(tables, calibration=fitted, everything=everything)
    for source, columns in found.unread.items():
        names = [f"{name} (did you mean {near}?)" if near else name for name, near in columns.items()]
        show_note(f"nothing is read from these columns of {source}: {', '.join(names)}")
    if keep:
        from paraplan.api.history import keep_table

        show_note(keep_table(found))
    if as_json:
        explained = {"why": [one.model_dump() for one in found.factors()]} if why else {}
        typer.echo(json.dumps(found.to_dict() | explained, indent=2))
        return
    _print(found)
    if why:
        factors = found.factors()
        print_factors(make_console(), factors)
        if is_stopped():
            show_note(f"stopped after {len({one.source for one in factors})} sources")


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise PlanError(f"cannot read {path}: {reason}", hint="give a CSV file with one row a run") from None


def _print(found: Validation) -> None:
    console = make_console()
    by_id = {prediction.id: prediction for _, prediction in found.rows}
    print_scores(console, found.scored.step_time, found.scored.memory, by_id)
    print_sweeps(console, **found.scored.sweeps)
    if found.others.rows:
        console.print("[bold]Not scored:[/bold] low quality, unusual features, or another precision\n", markup=True)
        print_scores(console, found.others.step_time, found.others.memory, by_id, brief=True)
        print_sweeps(console, **found.others.sweeps)
    print_fits(console, found.fits)
    print_skipped(console, found.skipped, scored=len(found.scored.rows), total=len(found.rows))
