"""How far predictions are from measured runs: the tables of `docs/accuracy.md`, the README's summary, the ranges.

Step times and peaks come from rows that `paraplan validate` scores: complete, nothing unusual, 16 or 32 bits. Peaks of
the others have a table of their own: rows with features that a plan does not express, and rows that state too little.
The residuals of the scored rows, and those of quality A and B of `later_sources.csv`, `newest_sources.csv`,
`blind_sources.csv`, `second_blind_sources.csv` and `third_blind_sources.csv` in `profiles/runs`, go into
`profiles/accuracy.json`, from which predictions get their intervals; how many rows of sources left out these hold is
printed, and how far off the sources of these files are, mixtures of experts apart. Rows without a measured step time or
peak are counted. `scripts/pages.py` writes all this.
"""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import fmean, median
from typing import Any

from marked import TextOf, between

from paraplan.accuracy.intervals import SHARE, AccuracyTable, FittedErrors, accuracy_of, fitted_errors
from paraplan.accuracy.measured_runs import MeasuredRun, read_runs
from paraplan.accuracy.run_prediction import RunPrediction
from paraplan.accuracy.run_workload import BundledData, workload_of_run
from paraplan.accuracy.scoring import ErrorSummary, Score, score
from paraplan.errors import ParaplanError
from paraplan.model.named import known_configs

README = Path(__file__).parent.parent / "README.md"
PAGE = README.parent / "paraplan" / "docs" / "accuracy.md"
RUNS = README.parent / "profiles" / "runs"
KNOWN = tuple(path for path in sorted((RUNS / "known").glob("*.csv")) if path.stem not in ("fine_tuning", "peft"))
"""Tables of sources that were there while the cost model was made."""
LATER = tuple(RUNS / f"{name}_sources.csv" for name in ("later", "newest", "blind", "second_blind", "third_blind"))
ACCURACY = Path(__file__).parent.parent / "profiles" / "accuracy.json"
START, END = "<!-- trust -->\n", "<!-- /trust -->"


def validate(files: Sequence[Path]) -> tuple[tuple[Score, Score, Score], str, AccuracyTable]:
    """Return the scores of step times and of memory over the rows that are scored, and of memory over the others.

    Beside them stand a sentence about sweeps, and the residuals from which intervals are made.
    """
    texts = {file.name: file.read_text() for file in files}
    rows, summary = predicted(texts)
    later, _ = predicted({path.name: without_poor_rows(path.read_text()) for path in LATER}, "--all")
    standard, others = ([row for scored, row in rows if scored == kind] for kind in (True, False))
    step_time = summary["step_time"]
    scores = score(standard, "step_time_error"), score(standard, "memory_error"), score(others, "memory_error")
    nothing = sum(row.step_time_error is None and row.memory_error is None for _, row in rows)
    left_out = f"\n{nothing} rows that were not measured, or cannot be predicted, are left out.\n" if nothing else ""
    accuracy, fitted = accuracy_of([*standard, *(row for _, row in later)], others), fitted_errors(standard)
    sentences = [
        fitted_table(fitted),
        unseen_sentence([row for _, row in later]),
        sentence(step_time["sweeps"], step_time["batch_sweeps"]),
        interval_sentence(accuracy),
        fits_sentence(summary["fits"]) + left_out,
    ]
    return scores, "\n".join(sentences), accuracy


def predicted(texts: Mapping[str, str], *options: str) -> tuple[list[tuple[bool, RunPrediction]], dict[str, Any]]:
    """Return the rows of tables, given by name, with whether each is scored, and the summary of `paraplan validate`."""
    with tempfile.TemporaryDirectory() as folder:
        for name, text in texts.items():
            (Path(folder) / name).write_text(text)
        files = [str(Path(folder) / name) for name in texts]
        command = [sys.executable, "-m", "paraplan", "validate", *files, "--json", *options]
        finished = subprocess.run(command, capture_output=True, text=True, check=False)
    if finished.returncode:
        sys.exit(finished.stderr)
    answer = json.loads(finished.stdout)
    return [(row.pop("scored"), RunPrediction.model_validate(row)) for row in answer["rows"]], answer["summary"]


def without_poor_rows(text: str) -> str:
    """Return a table without its rows of quality C, which leave open what decides their time."""
    reader = csv.DictReader(io.StringIO(text))
    kept = io.StringIO()
    writer = csv.DictWriter(kept, reader.fieldnames or ())
    writer.writeheader()
    writer.writerows(row for row in reader if row["quality"] != "C")
    return kept.getvalue()


def sentence(sweeps: dict[str, Any], batch_sweeps: dict[str, Any]) -> str:
    """Return in words how often the best plan of a sweep is found."""
    if not sweeps["sweeps"]:
        return ""
    regret, worst, ranks = sweeps["top1_regret"], sweeps["worst_regret"], sweeps["rank_correlation"]
    return (
        f"Of {len(sweeps['sweeps'])} sweeps, four or more plans that one source measured for one model on one set of "
        f"GPUs, the plan with the best\nprediction takes {regret:.1%} longer for a sequence than the best "
        f"measured, {worst:.0%} at worst (rank correlation {ranks:.2f}); at\none "
        f"global batch, in {len(batch_sweeps['sweeps'])} sweeps, {batch_sweeps['top1_regret']:.1%} and "
        f"{batch_sweeps['worst_regret']:.0%}.\n"
    )


def fitted_table(fitted: Mapping[str, FittedErrors]) -> str:
    """Return what one factor would make of each source's step times, with the source in its fit and left out of it."""
    rows = [(source, (each.as_predicted, each.in_sample, each.left_out)) for source, each in fitted.items()]
    means = tuple(fmean(errors) for errors in zip(*(errors for _, errors in rows), strict=True))
    lines = [
        f"| {source} | " + " | ".join(f"{error:.1%}" for error in errors) + " |"
        for source, errors in (*rows, ("**mean of the sources**", means))
    ]
    return "\n".join(
        [
            "No constant is fitted to these runs. If one factor for each family of frameworks were, the median of",
            "measured over predicted, sources would be off by:\n",
            "| step time: source | as predicted | fitted, in sample | fitted to the other sources |",
            "| --- | --: | --: | --: |",
            *lines,
            "",
        ]
    )


def unseen_sentence(rows: Sequence[RunPrediction]) -> str:
    """Return in words how far off sources are that no constant has seen, all of them and their mixtures of experts."""
    mixtures = ids_of_mixtures()
    kept = [row for row in rows if row.step_time_error is not None]
    parts = []
    for chosen in (kept, [row for row in kept if row.id in mixtures]):
        errors: dict[str, list[float]] = {}
        for row in chosen:
            errors.setdefault(row.source, []).append(abs(row.step_time_error or 0.0))
        means = [fmean(each) for each in errors.values()]
        parts.append(f"{len(means)} sources ({len(chosen)} rows): {fmean(means):.1%}, median {median(means):.1%}")
    return (
        "Step times of sources that no constant has seen (`profiles/runs`, quality A and B), mean over sources:\n"
        f"{parts[0]}; mixtures of experts among them, {parts[1]}.\n"
    )


def ids_of_mixtures() -> set[str]:
    """Return which rows of the later tables train mixtures of experts."""
    data = BundledData(configs=known_configs())
    runs = [run for path in LATER for run in read_runs(path.read_text(), source=path.name)]
    found = set()
    for run in (run for run in runs if isinstance(run, MeasuredRun)):
        with suppress(ParaplanError, ValueError):  # rows that are not modelled were left out before
            blocks = [one.block for one in workload_of_run(data.completed(run), data).model.runs]
            if any(matmul.num_experts > 1 for block in blocks for matmul in block.matmuls):
                found.add(run.id)
    return found


def interval_sentence(accuracy: AccuracyTable) -> str:
    """Return in words what intervals made without a source hold of it."""
    return (
        f"Step times are told with a range that is to hold {SHARE:.0%} of runs. Made from the other sources it holds "
        f"{accuracy.coverage:.0%} of those of a\nsource left out, where one of n rows weighs as the root of n "
        f"({accuracy.coverage_of_rows:.0%} of all rows, {accuracy.coverage_of_sources:.0%} on average over sources).\n"
    )


def fits_sentence(fits: dict[str, int]) -> str:
    """Return in words how often a run that ended, or ran out of memory, was predicted to."""
    alarms = fits["ran"] - fits["ran_predicted"]
    told, failed = fits["out_of_memory_predicted"], fits["out_of_memory"]
    sentence = (
        f"Fits or not: of {failed} runs that ran out of memory {told} ({told / max(1, failed):.0%}) were predicted to, "
        f"of {fits['ran']} that ran {alarms} ({alarms / max(1, fits['ran']):.0%}) too.\n"
    )
    if not fits["ended_otherwise"]:
        return sentence
    return (
        f"{sentence}\nOf {fits['ended_otherwise']} more that failed memory is not the reason: in the same sweep a run "
        "with no less on each GPU\nended well, on as many GPUs or fewer.\n"
    )


def table(title: str, figures: Score) -> str:
    """Return one row a source, then all rows and the mean of the sources."""
    rows = [f"| {source} | {cells(row)} |" for source, row in figures.by_source.items()]
    return "\n".join(
        [
            f"| {title}: source | rows | mean error | median | worst | bias |",
            "| --- | --: | --: | --: | --: | --: |",
            *rows,
            f"| **all rows** | {cells(figures.all_rows)} |",
            f"| **mean of the sources** | {len(rows)} | {figures.mean_of_sources or 0:.1%} | | | |\n",
        ]
    )


def cells(row: ErrorSummary) -> str:
    """Return the figures of one row as Markdown cells."""
    shares = " | ".join(f"{share or 0:.1%}" for share in (row.mape, row.median_ape, row.max_ape))
    return f"{row.rows} | {shares} | {row.bias or 0:+.1%}"


def summary(scores: Sequence[Score], sweeps: str, accuracy: AccuracyTable) -> str:
    """Return the five lines that say most."""
    step, peak = scores[0], scores[1]
    fits = next(line for line in sweeps.splitlines() if line.startswith("Fits or not"))
    return "\n".join(
        [
            f"- Step time: {step.mean_of_sources or 0:.1%} off on average over {len(step.by_source)} published sources "
            f"({step.all_rows.rows} runs, {step.all_rows.median_ape or 0:.1%} in the median).",
            f"- Peak memory: {peak.mean_of_sources or 0:.1%} over {len(peak.by_source)} sources.",
            f"- Ranges that are to hold {SHARE:.0%} of runs hold {accuracy.coverage:.0%} of sources left out.",
            f"- {fits}",
            "- Nothing is fitted to a run. Eager code on large clusters, and networks that a source does not describe, "
            "are the weakest.\n",
        ]
    )


def pages(text_of: TextOf) -> dict[Path, str]:
    """Return the page, the README and the ranges with the figures of today; `text_of` reads what they were."""
    titles = ("step time", "peak memory", "peak memory of other runs")
    scores, sweeps, accuracy = validate(KNOWN)
    tables = [table(title, figures) for title, figures in zip(titles, scores, strict=True)]
    tables.insert(1, sweeps)
    return {
        PAGE: between(text_of(PAGE), START, END, "\n" + "\n".join(tables) + "\n"),
        README: between(text_of(README), START, END, summary(scores, sweeps, accuracy)),
        ACCURACY: accuracy.model_dump_json(indent=2) + "\n",
    }
