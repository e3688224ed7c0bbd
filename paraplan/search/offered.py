"""Offers where nothing fits: levers, those that keep all on the GPUs first, then other machines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from paraplan.cost.workload import Workload
from paraplan.plan.executor import Executor
from paraplan.search.constraints import Constraints
from paraplan.search.failure import NothingFitsError
from paraplan.search.lever_trials import MOST_OFFERS, LeverTrials
from paraplan.search.offers import LeverOffer


def explained(
    error: NothingFitsError,
    workload: Workload,
    *,
    executor: Executor,
    fixed: Constraints,
    executors: Callable[[Workload], Executor],
) -> NothingFitsError:
    """Return the error with what would fit: cheap levers first, then shorter sequences and other machines."""
    trials = LeverTrials(workload, executor, fixed, nearest=error.nearest, executors=executors)
    offers = _at_the_pace_of_gpus(trials, trials.offers(looks_for_fewest=True))
    return error.offering(offers + trials.beyond(), framework=workload.framework.told_as)


def _at_the_pace_of_gpus(trials: LeverTrials, offers: tuple[LeverOffer, ...]) -> tuple[LeverOffer, ...]:
    """Return offers after those that fit with all on the GPUs, which are looked for where none of them does."""
    fitting = [one for one in offers if one.fits]
    if trials.fixed.offload is not None or not fitting or not all(one.offloads_parameters for one in fitting):
        return offers
    within = replace(
        trials, fixed=replace(trials.fixed, offload="none"), nearest=None, stays_on_gpus=True, kept=[], left_out=[]
    )
    first = [one for one in within.offers(looks_for_fewest=True) if one.fits]
    told = {one.options for one in first}
    left = fitting[: max(1, MOST_OFFERS - len(first))]
    rest = (one for one in offers if one.options not in told and (one in left or not one.fits))
    return (*first, *rest)
