"""What a number of tokens takes: time, GPU-hours and money; and the cheapest number of GPUs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from paraplan.cost.estimate import PlanEstimate
from paraplan.cost.workload import Workload
from paraplan.errors import NoPlanFitsError, PlanError
from paraplan.records import Record
from paraplan.search.results import SearchResult
from paraplan.search.what_fits import smaller_clusters

SECONDS_PER_HOUR = 3600.0


class SearchOn(Protocol):
    """A search with everything chosen but the machines, which are those of the workload."""

    def __call__(self, workload: Workload, *, explains_failure: bool) -> SearchResult:
        """Return the ranked plans; say what would help where none fits, with `explains_failure`."""


class Budget(Record):
    """Training on `tokens` with one plan. `cost` is in the currency of the price, None without one.

    Only steps are counted: no start, no checkpoints, no failures.
    """

    tokens: float
    steps: float
    seconds: float
    gpu_hours: float
    cost: float | None = None


class SizeOffer(Record):
    """The best plan on one number of GPUs. Cost is per billion tokens, in the currency of the price."""

    num_gpus: int
    plan: str
    step_time_s: float
    gpu_hours_per_billion_tokens: float
    cost_per_billion_tokens: float | None = None


@dataclass(frozen=True, eq=False)
class Cheapest:
    """The cheapest number of GPUs: its workload, its search, and what every number offered."""

    workload: Workload
    result: SearchResult
    offers: tuple[SizeOffer, ...]


def budget(workload: Workload, estimate: PlanEstimate, *, tokens: float, price_per_gpu_hour: float | None) -> Budget:
    """Return what training on `tokens` takes under a plan."""
    steps = tokens / workload.training.tokens_per_step
    seconds = steps * estimate.step.step_time_s
    gpu_hours = seconds * estimate.plan.world_size / SECONDS_PER_HOUR
    cost = None if price_per_gpu_hour is None else gpu_hours * price_per_gpu_hour
    return Budget(tokens=tokens, steps=steps, seconds=seconds, gpu_hours=gpu_hours, cost=cost)


def size_offer(workload: Workload, estimate: PlanEstimate, *, price_per_gpu_hour: float | None) -> SizeOffer:
    """Return what one plan takes for a billion tokens."""
    billion = budget(workload, estimate, tokens=1e9, price_per_gpu_hour=price_per_gpu_hour)
    return SizeOffer(
        num_gpus=workload.cluster.num_gpus,
        plan=estimate.plan.describe(),
        step_time_s=estimate.step.step_time_s,
        gpu_hours_per_billion_tokens=billion.gpu_hours,
        cost_per_billion_tokens=billion.cost,
    )


def cheapest(workload: Workload, search_on: SearchOn, *, price_per_gpu_hour: float | None) -> Cheapest:
    """Return the number of GPUs, up to the workload's, whose best plan costs least for the same tokens.

    `search_on` is asked about each number. Fewer GPUs rarely cost more; with a limit on memory or on time another
    number may win. Raises `NoPlanFitsError` where no plan fits any of them.
    """
    offers: list[SizeOffer] = []
    best: tuple[float, Workload, SearchResult] | None = None
    for cluster in smaller_clusters(workload.cluster):
        part = replace(workload, cluster=cluster)
        try:
            result = search_on(part, explains_failure=False)
        except (NoPlanFitsError, PlanError):  # or what is fixed cannot be had on so few
            continue
        offer = size_offer(part, result.best, price_per_gpu_hour=price_per_gpu_hour)
        offers.append(offer)
        if best is None or offer.gpu_hours_per_billion_tokens < best[0]:
            best = (offer.gpu_hours_per_billion_tokens, part, result)
    if best is None:
        search_on(workload, explains_failure=True)  # says what is lacking
        raise AssertionError("a workload that fits is among its own parts")
    return Cheapest(workload=best[1], result=best[2], offers=tuple(offers))
