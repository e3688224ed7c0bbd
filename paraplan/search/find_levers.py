"""Results of `--find` with each lever: longer sequences, larger batches, fewer GPUs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

from paraplan.cost.estimate import PlanEstimate
from paraplan.cost.workload import Workload
from paraplan.errors import ParaplanError
from paraplan.model.reader import bundled_models, read_model
from paraplan.plan.executor import Executor
from paraplan.progress import is_stopped
from paraplan.search.cluster_sizes import part_of
from paraplan.search.constraints import Constraints
from paraplan.search.lever_trials import MOST_OFFERS, offer_of
from paraplan.search.levers import Lever, lacking, levers
from paraplan.search.offers import LeverOffer
from paraplan.search.what_fits import some_plan_fits
from paraplan.units import gpus

Find = Literal["fewest-gpus", "by-date", "largest-model", "largest-batch", "longest-sequence"]
"""Goal of `--find`."""

Look = Callable[[Workload, Constraints], "Workload | None"]
"""Returns the workload that is found, None where nothing is."""


WORTH_FINDING = 0.03
"""Share of what was found before: a lever that finds less more is left out."""


def find_offers(
    asked: Workload,
    found: Workload | None,
    best: PlanEstimate | None,
    *,
    find: Find,
    look: Look,
    executor: Executor,
    fixed: Constraints,
) -> tuple[LeverOffer, ...]:
    """Return the levers that find more, or as much on fewer GPUs, and those that the framework lacks, in their order.

    `found` is what was found without a lever, and `best` its plan: None where nothing was. Each lever is priced there,
    where it says what the lever costs, and else where it finds something. What costs nothing is kept beside the next.
    """
    offers, missing = list[LeverOffer](), list[LeverOffer]()
    most = None if found is None else _value(find, found)
    kept: Lever | None = None
    for alone in levers(asked, fixed, executor):
        lever, more = kept.beside(alone) if kept else alone, None
        if lacking(lever, found or asked, executor) is None:
            if len(offers) == MOST_OFFERS or is_stopped():
                continue
            try:
                more = look(lever.workload(_left(find, asked, most)), lever.constraints(fixed))
            except ParaplanError:  # nothing with it
                continue
            if more is None or (most is not None and _value(find, more) <= most + WORTH_FINDING * abs(most)):
                continue
        # What a lever costs takes a search, which one that finds nothing does without.
        tried = offer_of(lever, found or asked, executor=executor, fixed=fixed, without=best)
        if tried is None:
            continue
        offer = tried[0]
        if more is None:
            missing.append(offer)
            continue
        if found is None:
            priced = offer_of(lever, more, executor=executor, fixed=fixed)
            offer = offer if priced is None else priced[0]
        offers.append(offer.replace(found=_in_words(find, more)))
        most = _value(find, more)
        kept = lever if offer.is_free or found is None else kept
    return (*offers, *missing)


def _left(find: Find, asked: Workload, most: int | None) -> Workload:
    """Return the workload on the machines that a lever has to do with, which are fewer than those that were found."""
    if find != "fewest-gpus" or most is None:
        return asked
    per_node = asked.cluster.gpus_per_node
    count = int(-most * (1 - WORTH_FINDING))
    count = count if count < per_node else count // per_node * per_node
    return asked if count < 1 else replace(asked, cluster=part_of(asked.cluster, count))


def _value(find: Find, workload: Workload) -> int:
    """Return what was found as a number of which more is better."""
    if find == "longest-sequence":
        return workload.training.seq_length
    if find == "largest-model":
        return (workload.whole_model or workload.model).parameters.total
    return workload.training.global_batch_size if find == "largest-batch" else -workload.cluster.num_gpus


def _in_words(find: Find, workload: Workload) -> str:
    if find == "longest-sequence":
        return f"{workload.training.seq_length} tokens"
    if find == "largest-model":
        return workload.model.name
    if find == "largest-batch":
        return f"{workload.training.global_batch_size} sequences"
    return gpus(workload.cluster.num_gpus)


def larger_model(workload: Workload, *, executor: Executor, fixed: Constraints) -> Workload | None:
    """Return the workload of the largest bundled model that some plan trains so without offload.

    None where it is not larger than the workload's own.
    """
    own = (workload.whole_model or workload.model).parameters.total
    without = replace(fixed, offload=fixed.offload or "none")
    models = [read_model(name) for name in bundled_models()]
    for model in sorted(models, key=lambda one: one.parameters.total, reverse=True):
        if model.parameters.total <= own:
            return None
        try:
            other = replace(workload, model=model, whole_model=None).trained_as(workload.training)
            fits = some_plan_fits(other, executor=executor, fixed=without)
        except ParaplanError:  # it has no such layers, or no sequences of that length
            continue
        if fits:
            return other
    return None
