"""`paraplan validate`: predictions against measured runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, get_args

import typer
from pydantic import ValidationError
from rich.console import Console
from rich.table import Table

from paraplan.cli.options import JsonOption
from paraplan.cost.validation import (
    ErrorSummary,
    RunPrediction,
    Score,
    habits_of_run,
    is_standard,
    padded_vocabulary,
    plan_of_run,
    predict_run,
    score,
    training_of_run,
)
from paraplan.cost.workload import Workload
from paraplan.errors import ParaplanError, PlanError
from paraplan.hardware.described import DescribedMachines, described_cluster
from paraplan.hardware.link_speed import LinkSpeedTable, load_link_speeds
from paraplan.hardware.profile_files import list_gpus
from paraplan.hardware.profiles import GpuProfile
from paraplan.model.shapes import Activation, TransformerShapes, model_from_shapes
from paraplan.plan.runs import MeasuredRun, UnusableRow, read_runs

app = typer.Typer(add_completion=False)

DEFAULT_VOCABULARY = 50304


@app.command()
def validate(
    files: Annotated[list[Path], typer.Argument(metavar="RUNS.csv", help="Tables of measured runs.")],
    everything: Annotated[
        bool, typer.Option("--all", help="Score also rows of low quality or with nonstandard features.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Predict measured runs from their configuration alone, and print the errors by source.

    Scored are rows of quality A or B without nonstandard features, in bf16, fp16 or fp32; the others are predicted too.
    Blank cells take stated defaults: bf16, AdamW, the framework's attention kernel, degrees of 1, micro-batches of 1,
    8 GPUs a node with NVLink where the GPU has it, a vocabulary of 50304. Step times use no calibration.
    """
    rows = [entry for path in files for entry in _read(path)]
    gpus, links = list_gpus(), load_link_speeds()
    predictions = [_predict(entry, gpus, links) for entry in rows]
    scored = [
        isinstance(entry, MeasuredRun) and prediction.skipped is None and (everything or is_standard(entry))
        for entry, prediction in zip(rows, predictions, strict=True)
    ]
    if as_json:
        typer.echo(json.dumps(_report(predictions, scored), indent=2))
        return
    _print(predictions, scored)


def _read(path: Path) -> list[MeasuredRun | UnusableRow]:
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise PlanError(f"cannot read {path}: {reason}", hint="give a CSV file with one row a run") from None
    return read_runs(text, source=str(path))


def _predict(entry: MeasuredRun | UnusableRow, gpus: list[GpuProfile], links: LinkSpeedTable) -> RunPrediction:
    if isinstance(entry, UnusableRow):
        return RunPrediction(id=entry.id, source="", gpu="", framework="", skipped=entry.reason)
    try:
        machines = DescribedMachines(
            gpu=entry.gpu,
            num_gpus=entry.num_gpus,
            gpus_per_node=entry.gpus_per_node,
            link=entry.intra_node_link,
            network_bits_per_s_per_gpu=entry.inter_node_gbps_per_gpu and entry.inter_node_gbps_per_gpu * 1e9,
        )
        habits = habits_of_run(entry)
        workload = Workload(
            model=model_from_shapes(_shapes(entry)),
            training=training_of_run(entry, habits),
            cluster=described_cluster(machines, gpus),
            links=links,
            habits=habits,
        )
        return predict_run(entry, workload, plan_of_run(entry))
    except ParaplanError as error:
        reason = error.message
    except ValidationError as error:
        reason = error.errors()[0]["msg"].removeprefix("Value error, ")
    return RunPrediction(id=entry.id, source=entry.source, gpu=entry.gpu, framework=entry.framework, skipped=reason)


def _shapes(run: MeasuredRun) -> TransformerShapes:
    activation: Activation = "gelu"
    for known in get_args(Activation):
        if run.activation.lower() == known:
            activation = known
    return TransformerShapes(
        name=run.model_name or run.id,
        num_layers=run.layers,
        hidden_size=run.hidden,
        num_heads=run.heads,
        num_kv_heads=run.kv_heads,
        ffn_hidden_size=run.ffn_hidden,
        vocab_size=padded_vocabulary(run, run.vocab or DEFAULT_VOCABULARY),
        max_seq_length=run.seq_len,
        activation=activation,
        tied_embeddings=bool(run.tied_embeddings),
    )


def _score(predictions: list[RunPrediction], scored: list[bool], name: str) -> Score:
    by_source: dict[str, list[float]] = {}
    for prediction, is_scored in zip(predictions, scored, strict=True):
        error = getattr(prediction, name)
        if is_scored and error is not None:
            by_source.setdefault(prediction.source, []).append(error)
    return score(by_source)


def _report(predictions: list[RunPrediction], scored: list[bool]) -> dict[str, Any]:
    summary = {}
    for title, name in (("step_time", "step_time_error"), ("memory", "memory_error")):
        figures = _score(predictions, scored, name)
        summary[title] = figures.all_rows.model_dump() | figures.model_dump(exclude={"all_rows"})
    rows = zip(predictions, scored, strict=True)
    return {"rows": [row.model_dump() | {"scored": is_scored} for row, is_scored in rows], "summary": summary}


def _print(predictions: list[RunPrediction], scored: list[bool]) -> None:
    console = Console(highlight=False)
    for title, name in (("Step time", "step_time_error"), ("Peak memory", "memory_error")):
        figures = _score(predictions, scored, name)
        if figures.all_rows.rows:
            console.print(_table(title, figures))
            console.print()
    skipped = [prediction for prediction in predictions if prediction.skipped]
    console.print(f"{sum(scored)} rows scored of {len(predictions)}, {len(skipped)} skipped")
    for prediction in skipped[:10]:
        console.print(f"  {prediction.id}: {prediction.skipped}", style="dim")


def _table(title: str, figures: Score) -> Table:
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1), pad_edge=False)
    table.add_column("source")
    for heading in ("rows", "MAPE", "median", "worst", "bias"):
        table.add_column(heading, justify="right")
    for source, summary in figures.by_source.items():
        table.add_row(source, *_cells(summary))
    table.add_row("all rows", *_cells(figures.all_rows), style="bold")
    table.add_row("mean of the sources", str(len(figures.by_source)), f"{figures.mean_of_sources or 0:.1%}", "", "", "")
    return table


def _cells(summary: ErrorSummary) -> list[str]:
    shares = (summary.mape, summary.median_ape, summary.max_ape)
    return [str(summary.rows), *(f"{share or 0:.1%}" for share in shares), f"{summary.bias or 0:+.1%}"]
