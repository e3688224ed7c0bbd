"""How far predictions are from measured runs: the tables of `docs/accuracy.md`, the README's summary, the ranges.

Step times and peaks come from rows that `paraplan validate` scores: complete, nothing unusual, 16 or 32 bits. Peaks of
the others have a table of their own: rows with features that a plan does not express, and rows that state too little.
`profiles/accuracy.json`, from which predictions get their ranges and risks, is made of the first predictions
(`scripts/first_predictions.py`) of rows of quality A and B of sources that came later, and of all runs that ran or ran
out of memory. Printed are how many rows of sources left out the ranges hold, and how far off sources that came later
are today, mixtures of experts apart. Rows without a measured step time or peak are counted. `scripts/pages.py` writes
all this.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from statistics import fmean, median
from typing import Literal, TypeVar

from marked import TextOf, between

from paraplan.accuracy.measured_runs import MeasuredRun, read_runs
from paraplan.accuracy.ranges import (
    SHARE,
    AccuracyTable,
    Errors,
    Evidence,
    MemoryRisk,
    Peak,
    Ratio,
    errors_by_evidence,
    evidence_of,
)
from paraplan.accuracy.run_prediction import PEAKS, RunPrediction
from paraplan.accuracy.run_workload import BundledData, workload_of_run
from paraplan.accuracy.scoring import ErrorSummary, FitScore, Outcomes, Score, SweepScore, outcomes, score_fits
from paraplan.api.validation import Row, Validation
from paraplan.api.validation import validate as validate_runs
from paraplan.errors import ParaplanError
from paraplan.model.named import known_configs

README = Path(__file__).parent.parent / "README.md"
PAGE = README.parent / "paraplan" / "docs" / "accuracy.md"
RUNS = README.parent / "profiles" / "runs"
KNOWN = tuple(path for path in sorted((RUNS / "known").glob("*.csv")) if path.stem not in ("fine_tuning", "peft"))
"""Tables of sources that were there while the cost model was made."""
KNOWN_FINE_TUNING = tuple(RUNS / "known" / f"{name}.csv" for name in ("fine_tuning", "peft"))
_ORDINALS = ("second", "third", "fourth", "fifth", "sixth", "seventh", "eighth")
LATER = tuple(
    RUNS / f"{name}_sources.csv" for name in ("later", "newest", "blind", *(f"{each}_blind" for each in _ORDINALS))
)
LATER_FINE_TUNING = RUNS / "later_fine_tuning.csv"
FOUND = (LATER[0], LATER_FINE_TUNING, *LATER[1:])
"""Tables in the order in which they were written down."""
LAST = 6
Kind = TypeVar("Kind")
FIRST = RUNS.parent / "first_predictions.csv"
ACCURACY = Path(__file__).parent.parent / "profiles" / "accuracy.json"
START, END = "<!-- trust -->\n", "<!-- /trust -->"


def validate(files: Sequence[Path]) -> tuple[tuple[Score, Score, Score], str, AccuracyTable]:
    """Return the scores of step times and of memory over the rows that are scored, and of memory over the others.

    Beside them stand a sentence about sweeps, and what ranges and risks are made of.
    """
    found = validated(tuple(files))
    later = validated(LATER, everything=True).rows
    tuned = validated((*KNOWN_FINE_TUNING, LATER_FINE_TUNING), everything=True).rows
    standard, others = found.scored, found.others
    scores = standard.step_time, standard.memory, others.memory
    rows = [row for _, row in found.rows]
    nothing = sum(row.step_time_error is None and row.memory_error is None for row in rows)
    left_out = f"\n{nothing} rows that were not measured, or cannot be predicted, are left out.\n" if nothing else ""
    everything = (*found.rows, *later, *tuned)
    accuracy, poor = accuracy_of(everything), poor_rows(FOUND)
    sentences = [
        unseen_sentence([row for _, row in later if row.id not in poor]),
        sentence(**standard.sweeps),
        range_sentence(accuracy),
        afterwards_sentence([row for _, row in everything]),
        fits_sentence(score_fits(found.rows), risks_left_out(everything)) + left_out,
    ]
    return scores, "\n".join(sentences), accuracy


@cache
def validated(files: tuple[Path, ...], *, everything: bool = False) -> Validation:
    """Return the predictions of some tables."""
    return validate_runs({path.name: path.read_text() for path in files}, everything=everything)


def tell_failures(rows: Sequence[Row]) -> list[Row]:
    """Return the runs of sources that publish runs out of memory; others say nothing of how often plans fail."""
    telling = {row.source for row in outcomes(rows).out_of_memory}
    return [(run, row) for run, row in rows if row.source in telling]


def risk_of(ended: Outcomes, *, without: str | None = None) -> MemoryRisk:
    """Return the risk of running out of memory that runs tell, those of one source left out."""
    return MemoryRisk.of(
        [
            (row.allocator_share, failed)
            for failed, group in ((False, ended.ran), (True, ended.out_of_memory))
            for row in group
            if row.allocator_share is not None and row.source != without
        ]
    )


def risks_left_out(rows: Sequence[Row]) -> FitScore:
    """Return the score of risks, each source's told by the others that publish failures."""
    told = tell_failures(rows)
    ended = outcomes(told)
    lines = {source: risk_of(ended, without=source) for source in {row.source for _, row in told}}
    return score_fits(
        [
            (run, row.replace(out_of_memory_risk=lines[row.source].at(row.allocator_share)))
            for run, row in told
            if row.allocator_share is not None
        ]
    )


def accuracy_of(rows: Sequence[Row]) -> AccuracyTable:
    """Return what ranges and risks are made of, from the runs of all tables beside their predictions."""
    timed = [row for _, row in rows if row.step_time_error is not None]
    return AccuracyTable(
        measured=measured_on(timed),
        step_time=errors_by_evidence(first_ratios(timed).values()),
        memory=errors_by_reading(first_peaks(row for _, row in rows).values()),
        memory_risk=risk_of(outcomes(tell_failures(rows))),
    )


def first_ratios(timed: Sequence[RunPrediction]) -> dict[str, tuple[Evidence, Ratio]]:
    """Return by row its source with measured / first prediction, and what the other sources measured of its kind."""
    by_source = {source: [row for row in timed if row.source == source] for source in {row.source for row in timed}}
    first, poor = first_predictions("step_time_s"), poor_rows(FOUND)
    ratios = dict[str, tuple[Evidence, Ratio]]()
    for source, own in by_source.items():
        measured = measured_on(row for row in timed if row.source != source)
        for row in (row for row in own if row.id in first and row.id not in poor):
            assert row.measured_step_time_s is not None
            kind = evidence_of(row.framework_profile if row.is_known_framework else "", row.gpu_profile, measured)
            ratios[row.id] = (kind, (source, row.measured_step_time_s / first[row.id]))
    return ratios


def measured_on(rows: Iterable[RunPrediction]) -> dict[str, dict[str, int]]:
    """Return by framework the GPUs on which its step times were measured, with the number of sources.

    Frameworks that no profile describes stand together as `other`, which is no name of one.
    """
    sources: dict[str, dict[str, set[str]]] = {}
    for row in rows:
        sources.setdefault(row.framework_profile if row.is_known_framework else "other", {}).setdefault(
            row.gpu_profile, set()
        ).add(row.source)
    return {
        framework: {gpu: len(found) for gpu, found in sorted(gpus.items())}
        for framework, gpus in sorted(sources.items())
    }


def first_peaks(rows: Iterable[RunPrediction]) -> dict[str, tuple[Peak, Ratio]]:
    """Return by row what was read as its peak, and its source with measured / first prediction."""
    first, poor = first_predictions("peak_memory_bytes"), poor_rows(FOUND)
    return {
        row.id: (PEAKS[row.memory_reading], (row.source, row.measured_peak_memory_bytes / first[row.id]))
        for row in rows
        if row.memory_reading and row.measured_peak_memory_bytes and row.id in first and row.id not in poor
    }


def errors_by_reading(peaks: Iterable[tuple[Peak, Ratio]]) -> dict[Peak, Errors]:
    """Return the errors of peaks by what was read, where several sources did."""
    ratios: dict[Peak, list[Ratio]] = {}
    for kind, ratio in peaks:
        ratios.setdefault(kind, []).append(ratio)
    return {kind: Errors.of(ratios[kind]) for kind in sorted(ratios) if len({name for name, _ in ratios[kind]}) > 1}


def first_predictions(column: Literal["step_time_s", "peak_memory_bytes"]) -> dict[str, float]:
    """Return the first predictions by row, of sources that were written down before."""
    with FIRST.open(newline="") as file:
        return {row["id"]: float(row[column]) for row in csv.DictReader(file) if row[column]}


def poor_rows(files: Iterable[Path]) -> set[str]:
    """Return the rows of quality C, which leave open what decides their time."""
    rows = [row for path in files for row in csv.DictReader(io.StringIO(path.read_text()))]
    return {row["id"] for row in rows if row["quality"] == "C"}


def sentence(sweeps: SweepScore, batch_sweeps: SweepScore) -> str:
    """Return in words how often the best plan of a sweep is found."""
    if not sweeps.sweeps:
        return ""
    return (
        f"Of {len(sweeps.sweeps)} sweeps, four or more plans that one source measured for one model on one set of "
        f"GPUs, the plan with the best\nprediction takes {sweeps.top1_regret:.1%} longer for a sequence than the best "
        f"measured, {sweeps.worst_regret:.0%} at worst (rank correlation {sweeps.rank_correlation:.2f}); at\none "
        f"global batch, in {len(batch_sweeps.sweeps)} sweeps, {batch_sweeps.top1_regret:.1%} and "
        f"{batch_sweeps.worst_regret:.0%}.\n"
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


def range_sentence(accuracy: AccuracyTable) -> str:
    """Return in words how wide ranges are, and what they hold of sources left out."""
    return "\n".join(
        [
            f"Step times are told with a range that is to hold {SHARE:.0%} of runs, by what published runs say of this",
            "framework on this GPU: both were measured together, one was (or both, apart), neither. Ranges come",
            "from first predictions, a source with the root of its runs as its weight; what they hold is told of",
            "sources left out.\n",
            "| this framework on this GPU | range | runs | sources | runs held | mean of sources |",
            "| --- | --: | --: | --: | --: | --: |",
            *(range_row(kind, errors) for kind, errors in accuracy.step_time.items()),
            "",
            "A class of which few sources or none are known has the range of the one before.\n",
            "Peaks, by what is read:\n",
            "| peak | range | runs | sources | runs held | mean of sources |",
            "| --- | --: | --: | --: | --: | --: |",
            *(range_row(reading, errors) for reading, errors in accuracy.memory.items()),
            "",
        ]
    )


def afterwards_sentence(rows: Sequence[RunPrediction]) -> str:
    """Return in words what ranges hold of tables that were found after those they are made of."""
    times = first_ratios([row for row in rows if row.step_time_error is not None])
    times_held = held_afterwards(times, errors_by_evidence)
    peaks_held = held_afterwards(first_peaks(rows), errors_by_reading)

    def shares(held: Sequence[tuple[str, bool]]) -> str:
        sources = {name: [is_in for source, is_in in held if source == name] for name, _ in held}
        return f"{fmean(is_in for _, is_in in held):.0%} and {fmean(map(fmean, sources.values())):.0%}"

    (all_times, last_times), (all_peaks, last_peaks) = (
        [shares([one for table in tables for one in table]) for tables in (held, held[-LAST:])]
        for held in (times_held, peaks_held)
    )
    return (
        f"Made only of the tables that were there before, ranges of step times hold {all_times} (runs, mean of "
        f"sources)\nof the {len(times_held)} tables that were found afterwards, {last_times} of the last {LAST}; those "
        f"of peaks {all_peaks}, and {last_peaks}.\n"
    )


def held_afterwards(
    ratios: Mapping[str, tuple[Kind, Ratio]], errors: Callable[[Iterable[tuple[Kind, Ratio]]], Mapping[Kind, Errors]]
) -> list[list[tuple[str, bool]]]:
    """Return for each table but the first the sources of its runs, and whether the ranges of those before hold them."""
    tables = [[ratios[name] for name in row_ids(path) if name in ratios] for path in FOUND]
    held = []
    for number, table in enumerate(tables[1:], start=1):
        known = errors(one for before in tables[:number] for one in before)
        held.append(
            [(source, known[kind].low <= ratio <= known[kind].high) for kind, (source, ratio) in table if kind in known]
        )
    return held


def row_ids(path: Path) -> list[str]:
    """Return the names of the rows of a table."""
    return [row["id"] for row in csv.DictReader(io.StringIO(path.read_text()))]


def range_row(name: str, errors: Errors) -> str:
    """Return one range as a row of Markdown."""
    shares = f"{errors.held_rows:.0%} | {errors.held_sources:.0%}"
    return f"| {name} | {errors.low - 1:+.0%} to {errors.high - 1:+.0%} | {errors.rows} | {errors.sources} | {shares} |"


def fits_sentence(fits: FitScore, risks: FitScore) -> str:
    """Return in words how often a run that ended, or ran out of memory, was predicted to, and what risks are worth."""
    alarms = fits.ran - fits.ran_predicted
    told, failed = fits.out_of_memory_predicted, fits.out_of_memory
    lines = [
        f"Fits or not: of {failed} runs that ran out of memory {told} ({told / max(1, failed):.0%}) were predicted to, "
        f"of {fits.ran} that ran {alarms} ({alarms / max(1, fits.ran):.0%}) too.\n",
        "Risks are made of sources that publish runs out of memory; what became of a source's runs is told of risks",
        "that the others make.\n",
        "| told risk of running out of memory | runs | ran out | mean of sources |",
        "| --- | --: | --: | --: |",
        *(
            f"| {one.low:.0%} to {min(1.0, one.high):.0%} | {one.rows} | {one.failed / one.rows:.0%} | "
            f"{one.failed_share_of_sources or 0:.0%} |"
            for one in risks.by_risk
            if one.rows
        ),
    ]
    if fits.ended_otherwise:
        lines.append(
            f"\nOf {fits.ended_otherwise} more that failed memory is not the reason: in the same sweep a run with no "
            "less on each GPU\nended well, on as many GPUs or fewer."
        )
    return "\n".join((*lines, ""))


def table(title: str, figures: Score, *, shows_sources: bool = True) -> str:
    """Return one row a source where they are shown, then all rows and the mean of the sources."""
    rows = [f"| {source} | {cells(row)} |" for source, row in figures.by_source.items()]
    return "\n".join(
        [
            f"| {title}: source | rows | mean error | median | worst | bias |",
            "| --- | --: | --: | --: | --: | --: |",
            *(rows if shows_sources else ()),
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
    held = {kind: each.held_sources for kind, each in accuracy.step_time.items()}
    fits = next(line for line in sweeps.splitlines() if line.startswith("Fits or not"))
    return "\n".join(
        [
            f"- Step time: {step.mean_of_sources or 0:.1%} off on average over {len(step.by_source)} published sources "
            f"({step.all_rows.rows} runs, {step.all_rows.median_ape or 0:.1%} in the median).",
            f"- Peak memory: {peak.mean_of_sources or 0:.1%} over {len(peak.by_source)} sources.",
            f"- Ranges that are to hold {SHARE:.0%} of runs hold {held['measured']:.0%} of a source left out where its "
            f"framework on its GPU was measured, {held['partly measured']:.0%} where one of the two was.",
            f"- {fits}",
            "- Nothing is fitted to a run. Eager code on large clusters, and networks that a source does not describe, "
            "are the weakest.\n",
        ]
    )


def pages(text_of: TextOf) -> dict[Path, str]:
    """Return the page, the README and the ranges with the figures of today; `text_of` reads what they were."""
    titles = ("step time", "peak memory", "peak memory of other runs")
    scores, sweeps, accuracy = validate(KNOWN)
    tables = [
        table(title, figures, shows_sources=title != titles[-1]) for title, figures in zip(titles, scores, strict=True)
    ]
    tables.insert(1, sweeps)
    return {
        PAGE: between(text_of(PAGE), START, END, "\n" + "\n".join(tables) + "\n"),
        README: between(text_of(README), START, END, summary(scores, sweeps, accuracy)),
        ACCURACY: accuracy.model_dump_json(indent=2) + "\n",
    }
