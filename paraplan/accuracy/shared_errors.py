"""How errors of runs of one source go together, found in measured tables; read from `profiles/shared_errors.json`."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations

import numpy as np

from paraplan.cost.correction import SharedErrors, log_factors, spread_of, weights_of, width_left
from paraplan.cost.plan_table import Floats, Ints
from paraplan.errors import ProfileError
from paraplan.records import Record
from paraplan.resources import profiles_folder

FEWEST_ROWS = 4
"""A source with fewer rows says little of what its rows share."""
MOST_ROWS = 40
"""Rows of a source that are looked at, evenly chosen: all of the largest would only cost time."""
PRIORS = (1.0, 2.0, 4.0, 8.0, 16.0)
"""Values that `prior_runs` may have."""
NUM_DRAWS = 40
"""Choices of rows that are known."""
SHARE = 0.8
"""The share of rows that a range is to hold."""
_STARTS = ((0.15, 4.0, 0.07), (0.15, 40.0, 0.07))
_ROUNDS = 120


class SourceErrors(Record):
    """The errors of one source's runs."""

    source: str
    kinds: tuple[str, ...]
    """The GPU and framework that runs must share."""
    sizes: tuple[tuple[float, ...], ...]
    """Where each run stands among plans."""
    logs: tuple[float, ...]
    """log(measured / predicted) of each run."""
    ranges: tuple[tuple[float, float], ...]
    """Factors between which each run is to lie where nothing is known of its source."""

    def cut(self, most: int = MOST_ROWS) -> SourceErrors:
        """Return `most` of its runs, evenly chosen, or all."""
        count = len(self.logs)
        chosen = [round(place) for place in np.linspace(0, count - 1, min(most, count))]
        return SourceErrors(
            source=self.source,
            kinds=tuple(self.kinds[row] for row in chosen),
            sizes=tuple(self.sizes[row] for row in chosen),
            logs=tuple(self.logs[row] for row in chosen),
            ranges=tuple(self.ranges[row] for row in chosen),
        )


class LeftOut(Record):
    """Errors where some rows of a source are known, and the others are predicted: means over sources."""

    known: int
    """Rows that are known."""
    sources: int
    error: float
    """Mean of |predicted / measured - 1|."""
    coverage: float
    """Share of the other rows that lie in their range."""
    width: float
    """The upper end of the range, divided by the lower one."""


class SharedErrorsFile(Record):
    """The file: how errors of step times and of peaks go together."""

    step_time: SharedErrors
    memory: SharedErrors
    source: str


@cache
def load_shared_errors() -> SharedErrorsFile:
    """Return what comes with paraplan. Raises `ProfileError` for a damaged installation."""
    path = profiles_folder() / "shared_errors.json"
    try:
        return SharedErrorsFile.model_validate(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise ProfileError(f"cannot read {path}: {error}", hint="install paraplan again") from None


def fit_shared_errors(sources: Sequence[SourceErrors]) -> SharedErrors:
    """Return the most likely spreads of errors, each source weighing the same: of its likelihood the mean over rows.

    `prior_runs` is that with which ranges hold nearest to `SHARE` of the other rows of a source where one to three are
    known. Raises `ValueError` without a source of `FEWEST_ROWS`.
    """
    tables = [_Table(source.cut()) for source in sources if len(source.logs) >= FEWEST_ROWS]
    if not tables:
        raise ValueError(f"no source has {FEWEST_ROWS} rows")

    def cost(point: Floats) -> float:
        shared = _shared(point)
        return sum(table.cost(shared) for table in tables)

    found = _shared(min((_least(cost, np.log(start)) for start in _STARTS), key=cost))

    draws = [[_draws(_Table(source), found, known) for source in sources] for known in (1, 2, 3)]

    def distance(prior_runs: float) -> float:
        held = [np.mean([_figures(each, prior_runs)[1] for each in drawn]) for drawn in draws]
        return abs(float(np.mean(held)) - SHARE)

    return found.replace(prior_runs=min(PRIORS, key=distance))


def left_out(sources: Sequence[SourceErrors], shared: SharedErrors, *, known: int) -> LeftOut:
    """Return what is off in rows of sources of which some others are known, drawn `NUM_DRAWS` times.

    What is known makes ranges narrower as it does those that are printed.
    """
    means = [_figures(_draws(_Table(source), shared, known), shared.prior_runs) for source in sources]
    error, coverage, width = (float(value) for value in np.mean(means, axis=0))
    return LeftOut(known=known, sources=len(means), error=error, coverage=coverage, width=math.exp(width))


@dataclass
class _Draw:
    """Rows of a source of which some others are known."""

    rest: Floats
    """The rest of their logarithms."""
    ranges: Floats
    """The logarithms of the ends between which each is to lie where nothing is known, `[N, 2]`."""
    width: Floats
    """The rest of these ranges, whatever the known rows strayed."""
    distance: Floats
    """How far the known rows of a kind are from predictions, in units of their covariance."""
    count: Ints
    """How many known rows of a kind there are."""


def _figures(draws: Sequence[_Draw], prior_runs: float) -> tuple[float, float, float]:
    """Return the mean error of other rows, the share of them that ranges hold, and the length of these."""
    error, coverage, length = [], [], []
    for draw in draws:
        width = draw.width * spread_of(prior_runs, draw.distance, draw.count)
        ends = draw.ranges * width[:, None]
        error.append(np.abs(np.expm1(-draw.rest)).mean())
        coverage.append(((draw.rest >= ends[:, 0]) & (draw.rest <= ends[:, 1])).mean())
        length.append((ends[:, 1] - ends[:, 0]).mean())
    return float(np.mean(error)), float(np.mean(coverage)), float(np.mean(length))


def _draws(table: _Table, shared: SharedErrors, known: int) -> list[_Draw]:
    """Return a source's other rows where some are known, for `NUM_DRAWS` choices of these."""
    generator = np.random.default_rng(0)
    likeness = table.is_same * shared.covariance(table.sizes, table.sizes)
    own = shared.own_log_sd**2 * np.eye(len(table.logs))
    draws = []
    for _ in range(NUM_DRAWS if known else 1):
        chosen = generator.choice(len(table.logs), known, replace=False)
        others = np.setdiff1d(np.arange(len(table.logs)), chosen)
        rest, width = table.logs[others].copy(), np.ones(len(others))
        distance, count = np.zeros(len(others)), np.zeros(len(others), dtype=np.int64)
        for kind in {table.kinds[row] for row in chosen}:
            same = chosen[[table.kinds[row] == kind for row in chosen]]
            near = table.is_same[others, same[0]]
            of_runs, alike = (likeness + own)[np.ix_(same, same)], likeness[np.ix_(others[near], same)]
            weights, distance[near] = weights_of(of_runs, table.logs[same])
            rest[near] -= log_factors(alike, weights)
            width[near] = width_left(shared, alike, of_runs)
            count[near] = len(same)
        draws.append(_Draw(rest, table.ranges[others], width, distance, count))
    return draws


def _shared(point: Floats, *, prior_runs: float = 4.0) -> SharedErrors:
    log_sd, doublings, own = (float(f"{value:.3g}") for value in np.exp(np.clip(point, -6.0, 4.0)))
    return SharedErrors(log_sd=log_sd, doublings=doublings, own_log_sd=own, prior_runs=prior_runs)


class _Table:
    """One source as arrays."""

    def __init__(self, source: SourceErrors) -> None:
        self.sizes, self.logs, self.kinds = np.array(source.sizes), np.array(source.logs), source.kinds
        self.ranges = np.log(np.array(source.ranges))
        self.is_same = np.array(source.kinds)[:, None] == np.array(source.kinds)[None, :]

    def cost(self, shared: SharedErrors) -> float:
        covariance = self.is_same * shared.covariance(self.sizes, self.sizes)
        covariance = covariance + shared.own_log_sd**2 * np.eye(len(self.logs))
        determinant = float(np.linalg.slogdet(covariance)[1])
        return 0.5 * (determinant + float(self.logs @ np.linalg.solve(covariance, self.logs))) / len(self.logs)


def _least(cost: Callable[[Floats], float], start: Floats) -> Floats:
    """Return where a cost is least: along one axis or two after the other, with steps that shrink."""
    axes = [*np.eye(len(start)), *(one - other for one, other in combinations(np.eye(len(start)), 2))]
    point, best, step = start, cost(start), 0.4
    for _ in range(_ROUNDS):
        moved = False
        for axis in axes:
            for way in (step, -step):
                found = cost(point + way * axis)
                if found < best:
                    point, best, moved = point + way * axis, found, True
                    break
        if not moved:
            step /= 2
        if step < 0.01 or not math.isfinite(best):
            break
    return point
