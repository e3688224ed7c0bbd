"""`paraplan validate`: predictions against measured runs."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError

from paraplan.cli.options import CalibrationOption, JsonOption
from paraplan.cli.terminal import make_console
from paraplan.cli.validate_tables import print_fits, print_scores, print_skipped, print_sweeps
from paraplan.cost.calibration import Calibration, read_calibration
from paraplan.cost.described_run import workload_of_run
from paraplan.cost.scoring import Score, SweepScore, score, score_fits, score_sweeps
from paraplan.cost.validation import RunPrediction, is_standard, plan_of_run, predict_run
from paraplan.errors import ParaplanError, PlanError
from paraplan.hardware.link_speed import LinkSpeedTable, load_link_speeds
from paraplan.hardware.profile_files import list_gpus
from paraplan.hardware.profiles import GpuProfile
from paraplan.model.named import Fields, known_configs
from paraplan.plan.runs import MeasuredRun, UnusableRow, read_runs

app = typer.Typer(add_completion=False)

Row = tuple[MeasuredRun | UnusableRow, RunPrediction]


@app.command()
def validate(
    files: Annotated[list[Path], typer.Argument(metavar="RUNS.csv", help="Tables of measured runs.")],
    everything: Annotated[
        bool, typer.Option("--all", help="Score also rows of low quality or with nonstandard features.")
    ] = False,
    calibration: CalibrationOption = None,
    as_json: JsonOption = False,
) -> None:
    """Predict measured runs from their configuration alone, and print what the predictions are worth.

    Scored are rows of quality A, B or none without nonstandard features, in bf16, fp16 or fp32; the others stand apart.
    Errors are given by source, GPU, framework and parallelism. A sweep is what one source measured of one model on one
    set of GPUs, four plans or more: of it the rank correlation of a sequence's time, and how much longer the plan with
    the best prediction took than the best of all; and the same at each global batch apart.
    Blank cells take stated defaults: bf16, AdamW, the framework's attention kernel, degrees of 1, micro-batches of 1,
    8 GPUs a node with NVLink where the GPU has it, the shapes of the bundled model of that name or a vocabulary of
    50304; no recompute if that fits, else full; of a batch that is not stated only the memory is compared. FP8 doubles
    the rate of linear layers, LoRA is predicted as full training. Without --calibration nothing is fitted.
    """
    entries = [entry for path in files for entry in _read(path)]
    fitted = read_calibration(_text(calibration), source=str(calibration)) if calibration else None
    gpus, links, known = list_gpus(), load_link_speeds(), known_configs()
    rows: list[Row] = [(entry, _predict(entry, gpus, links, known, fitted)) for entry in entries]
    if as_json:
        typer.echo(json.dumps(_report(rows, everything=everything), indent=2))
        return
    _print(rows, everything=everything)


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise PlanError(f"cannot read {path}: {reason}", hint="give a CSV file with one row a run") from None


def _read(path: Path) -> list[MeasuredRun | UnusableRow]:
    return read_runs(_text(path), source=str(path))


def _predict(
    entry: MeasuredRun | UnusableRow,
    gpus: list[GpuProfile],
    links: LinkSpeedTable,
    known: dict[str, Fields],
    fitted: Calibration | None,
) -> RunPrediction:
    if isinstance(entry, UnusableRow):
        return RunPrediction(id=entry.id, source="", gpu="", framework="", skipped=entry.reason)
    try:
        workload = workload_of_run(entry, gpus, links, known)
        if fitted is not None:
            workload = fitted.applied_to(workload)
        return predict_run(entry, workload, plan_of_run(entry))
    except ParaplanError as error:
        reason = error.message
    except ValidationError as error:
        reason = error.errors()[0]["msg"].removeprefix("Value error, ")
    return RunPrediction(id=entry.id, source=entry.source, gpu=entry.gpu, framework=entry.framework, skipped=reason)


def _is_scored(row: Row, *, everything: bool) -> bool:
    entry, prediction = row
    return isinstance(entry, MeasuredRun) and prediction.skipped is None and (everything or is_standard(entry))


def _scores(rows: list[Row]) -> tuple[Score, Score]:
    predictions = [prediction for _, prediction in rows]
    return score(predictions, "step_time_error"), score(predictions, "memory_error")


def _sweeps(rows: list[Row]) -> dict[str, SweepScore]:
    pairs = [(entry, prediction) for entry, prediction in rows if isinstance(entry, MeasuredRun)]
    return {"sweeps": score_sweeps(pairs), "batch_sweeps": score_sweeps(pairs, at_one_batch=True)}


def _report(rows: list[Row], *, everything: bool) -> dict[str, Any]:
    is_scored = [_is_scored(row, everything=everything) for row in rows]
    scored = [row for row, counts in zip(rows, is_scored, strict=True) if counts]
    others = [row for row, counts in zip(rows, is_scored, strict=True) if not counts and row[1].skipped is None]
    skipped = [prediction for _, prediction in rows if prediction.skipped is not None]
    return {
        "rows": [row[1].model_dump() | {"scored": counts} for row, counts in zip(rows, is_scored, strict=True)],
        "summary": _summary(scored)
        | {
            "others": _summary(others),
            "fits": score_fits(prediction for _, prediction in rows).model_dump(),
            "skipped": {
                "rows": len(skipped),
                "share": len(skipped) / max(1, len(rows)),
                "reasons": dict(Counter(prediction.skipped for prediction in skipped).most_common()),
            },
        },
    }


def _summary(rows: list[Row]) -> dict[str, Any]:
    step_time, memory = _scores(rows)
    sweeps = {name: found.model_dump() for name, found in _sweeps(rows).items()}
    return {
        "step_time": _figures(step_time) | sweeps,
        "memory": _figures(memory),
    }


def _figures(figures: Score) -> dict[str, Any]:
    return figures.all_rows.model_dump() | figures.model_dump(exclude={"all_rows"})


def _print(rows: list[Row], *, everything: bool) -> None:
    console = make_console()
    scored = [row for row in rows if _is_scored(row, everything=everything)]
    others = [row for row in rows if not _is_scored(row, everything=everything) and row[1].skipped is None]
    by_id = {prediction.id: prediction for _, prediction in rows}
    print_scores(console, *_scores(scored), by_id)
    print_sweeps(console, **_sweeps(scored))
    if others:
        console.print("[bold]Not scored:[/bold] low quality, unusual features, or another precision\n")
        print_scores(console, *_scores(others), by_id, brief=True)
        print_sweeps(console, **_sweeps(others))
    print_fits(console, score_fits(prediction for _, prediction in rows))
    skipped = [prediction for _, prediction in rows if prediction.skipped is not None]
    print_skipped(console, skipped, scored=len(scored), total=len(rows))
