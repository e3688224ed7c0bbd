"""Check what a calibration to a few runs of a source is worth on its other runs, before and after, over several draws.

    python scripts/check_calibration.py RUNS.csv [more.csv ...] [--runs 8] [--draws 5]

Each source with 12 scored runs or more counts, and the runs of BLOOM's log that are 14,336 wide. Fails where the mean
error over sources is above 7 % after calibration, or a source's is half a point above that before it: draws differ by
more.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
from pydantic import ValidationError

from paraplan.accuracy.calibration import Calibration, calibrate
from paraplan.accuracy.factors import CalibrationRun
from paraplan.accuracy.measured_runs import MeasuredRun, read_runs
from paraplan.accuracy.prediction import estimate_run, is_standard
from paraplan.accuracy.run_workload import BundledData, plan_of_run, workload_of_run
from paraplan.cost.estimate import step_times
from paraplan.cost.plan_table import PlanTable
from paraplan.errors import ParaplanError
from paraplan.model.named import known_configs

FEWEST, LIMIT, TOLERANCE = 12, 0.07, 0.005
WIDE, WIDTH = "bloom-prequel", 14336
"""A source of which all runs of that width count too: they are scored whatever their precision of gradients, which the
table counts as unusual."""


def systems(files: list[Path]) -> dict[str, list[CalibrationRun]]:
    """Return the runs of each source that has enough."""
    data = BundledData(configs=known_configs())
    found: dict[str, list[CalibrationRun]] = {}
    for file in files:
        for run in read_runs(file.read_text(), source=file.name):
            if not isinstance(run, MeasuredRun) or run.measured_step_time_s is None:
                continue
            is_wide = run.source == WIDE and run.hidden == WIDTH
            if not is_wide and not is_standard(run):
                continue
            try:
                workload = workload_of_run(run, data)
                plan = estimate_run(run, workload, plan_of_run(run, workload.framework)).plan
            except (ParaplanError, ValidationError):
                continue  # `paraplan validate` says which, and why
            name = f"{run.source}, {WIDTH} wide" if is_wide else run.source
            found.setdefault(name, []).append(CalibrationRun(workload, plan, run.measured_step_time_s))
    return {name: runs for name, runs in sorted(found.items()) if len(runs) >= FEWEST}


def mean_error(runs: list[CalibrationRun], fitted: Calibration | None) -> float:
    """Return the mean error of runs under a calibration, or none."""
    errors = []
    for run in runs:
        workload = fitted.applied_to(run.workload) if fitted else run.workload
        predicted = step_times(workload, PlanTable.of_plans([run.plan])).step_time_s[0]
        errors.append(abs(predicted / run.measured_step_time_s - 1))
    return float(np.mean(errors))


def main() -> None:
    """Print one line a source: errors on the runs that were left out, before and after, over the draws."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, metavar="RUNS.csv")
    parser.add_argument("--runs", type=int, default=8)
    parser.add_argument("--draws", type=int, default=5)
    options = parser.parse_args()
    for file in options.files:
        if not file.is_file():
            parser.error(f"{file} is not a file: give tables of runs")
    found = systems(options.files)
    means = []
    print(f"{'source':28s} runs   before    after (each draw)   said by leave-one-out")
    for source, runs in found.items():
        before: list[float] = []
        after: list[float] = []
        promised: list[float] = []
        for seed in range(options.draws):
            order = np.random.default_rng(seed).permutation(len(runs))
            rest = [runs[row] for row in order[options.runs :]]
            if not rest:
                continue
            fitted = calibrate([runs[row] for row in order[: options.runs]], source=source)
            before.append(mean_error(rest, None))
            after.append(mean_error(rest, fitted))
            promised.append(fitted.error_left_out)
        draws = " ".join(f"{error:.1%}" for error in after)
        means.append(tuple(float(np.mean(errors)) for errors in (before, after, promised)))
        print(f"{source:28s} {len(runs):4d}   {means[-1][0]:6.1%}   {means[-1][1]:6.1%} ({draws})   {means[-1][2]:.1%}")
    overall = [float(np.mean(column)) for column in zip(*means, strict=True)]
    print(f"{'mean of the sources':28s} {len(means):4d}   {overall[0]:6.1%}   {overall[1]:6.1%}   {overall[2]:.1%}")
    worse = [name for name, (was, now, _) in zip(found, means, strict=True) if now > was + TOLERANCE]
    if worse:
        print(f"worse than before: {', '.join(worse)}")
    sys.exit(1 if worse or overall[1] > LIMIT else 0)


if __name__ == "__main__":
    main()
