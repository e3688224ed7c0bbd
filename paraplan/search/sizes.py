"""Other numbers of GPUs than asked for: their speed, their cost, and what would do without offload."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Protocol

from paraplan.cost.estimate import PlanEstimate, leaves_room
from paraplan.cost.workload import Workload
from paraplan.errors import NoPlanFitsError, PlanError
from paraplan.hardware.cluster import Cluster
from paraplan.plan.executor import OWN_RUNTIME, Executor
from paraplan.records import Record
from paraplan.search.cluster_sizes import counts_between, least_time_s, part_of, smaller_clusters
from paraplan.search.constraints import FREE, Constraints
from paraplan.search.results import SearchResult
from paraplan.search.search import search
from paraplan.search.what_fits import fewest_gpus, longest_sequence, more_gpus, some_plan_fits
from paraplan.units import format_bytes, format_seconds

FACTOR = 4
"""So many times fewer and more GPUs are looked at."""


def scaling(
    workload: Workload,
    *,
    price_per_gpu_hour: float | None = None,
    executor: Executor = OWN_RUNTIME,
    fixed: Constraints = FREE,
) -> tuple[SizeOffer, ...]:
    """Return the best plan on fewer and on more GPUs, the fewest first; sizes on which no plan fits are left out.

    The global batch stays: with more GPUs each has less of it.
    """
    offers = []
    for cluster in _sizes(workload.cluster):
        part = replace(workload, cluster=cluster)
        try:
            found = search(part, num_candidates=1, executor=executor, fixed=fixed)
        except (NoPlanFitsError, PlanError):  # or what is fixed cannot be had on so many
            continue
        offers.append(size_offer(part, found.best, price_per_gpu_hour=price_per_gpu_hour))
    return tuple(offers)


def _sizes(cluster: Cluster) -> Iterator[Cluster]:
    """Yield clusters in steps of two from a quarter of a cluster's GPUs to four times as many.

    There is no more than one machine of those without a network.
    """
    for smaller in smaller_clusters(cluster):
        if smaller.num_gpus * FACTOR >= cluster.num_gpus:
            yield smaller
    nodes = 2 * cluster.num_nodes
    while cluster.network is not None and nodes <= FACTOR * cluster.num_nodes:
        yield cluster.replace(num_nodes=nodes)
        nodes *= 2


SECONDS_PER_HOUR = 3600.0


class SearchOn(Protocol):
    """A search with everything chosen but the machines, which are those of the workload."""

    def __call__(self, workload: Workload) -> SearchResult:
        """Return the ranked plans. Raises `NoPlanFitsError` where none fits."""


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


def cheapest(
    workload: Workload,
    search_on: SearchOn,
    *,
    executor: Executor,
    fixed: Constraints,
    price_per_gpu_hour: float | None,
) -> Cheapest:
    """Return the number of GPUs, up to the workload's, whose best plan costs least for the same tokens.

    `search_on` is asked about numbers in steps of two, then about those beside the cheapest whose least time leaves it
    open. Fewer GPUs rarely cost more; with a limit on memory or on time another number may win. Raises
    `NoPlanFitsError` where no plan fits any of them.
    """
    found: dict[int, tuple[SizeOffer, Workload, SearchResult]] = {}

    def price(cluster: Cluster) -> None:
        part = replace(workload, cluster=cluster)
        try:
            result = search_on(part)
        except (NoPlanFitsError, PlanError):  # or what is fixed cannot be had on so few
            return
        offer = size_offer(part, result.best, price_per_gpu_hour=price_per_gpu_hour)
        found[cluster.num_gpus] = offer, part, result

    coarse = list(smaller_clusters(workload.cluster))
    for cluster in coarse:
        price(cluster)
    if not found:
        search_on(workload)  # says what is lacking
        raise AssertionError("a workload that fits is among its own parts")
    best = min(found, key=lambda count: found[count][0].gpu_hours_per_billion_tokens)
    place = [cluster.num_gpus for cluster in coarse].index(best)
    around = coarse[max(0, place - 1) : place + 2]
    for low, high in pairwise(around):
        for cluster in (part_of(high, count) for count in counts_between(low.num_gpus, high)):
            least_s = least_time_s(replace(workload, cluster=cluster), executor=executor, fixed=fixed)
            offer = min((each[0] for each in found.values()), key=lambda one: one.num_gpus * one.step_time_s)
            if least_s * cluster.num_gpus < offer.num_gpus * offer.step_time_s:
                price(cluster)
    counts = sorted(found)
    best = min(counts, key=lambda count: found[count][0].gpu_hours_per_billion_tokens)
    return Cheapest(found[best][1], found[best][2], tuple(found[count][0] for count in counts))


ROOMY = 0.9
"""Share of usable memory below which a plan leaves room for what an estimate does not see."""
MOST_SEARCHED = 4


def roomier_gpus(
    workload: Workload, best: PlanEstimate, *, asked: Cluster, executor: Executor, fixed: Constraints
) -> str | None:
    """Return in words the next number of GPUs, up to those `asked`, that leaves room where the fewest have little.

    None where the best plan on the fewest leaves enough, and where no number tried does.
    """
    if best.peak_memory_bytes <= ROOMY * best.usable_memory_bytes:
        return None
    counts = [*counts_between(workload.cluster.num_gpus, asked), asked.num_gpus][:MOST_SEARCHED]
    for count in counts:
        part = replace(workload, cluster=part_of(asked, count))
        try:
            plan = search(part, num_candidates=1, executor=executor, fixed=fixed).best
        except (NoPlanFitsError, PlanError):
            continue
        if plan.peak_memory_bytes <= ROOMY * plan.usable_memory_bytes:
            needed, usable = format_bytes(plan.peak_memory_bytes), format_bytes(plan.usable_memory_bytes)
            return f"{count} GPUs leave room: {needed} of {usable}"
    return None


def roomier_length(workload: Workload, best: PlanEstimate, *, executor: Executor, fixed: Constraints) -> str | None:
    """Return in words the longest sequence that leaves room, where the best plan for the longest of all leaves little.

    None where that leaves enough, and where no length does.
    """
    if leaves_room(workload, best):
        return None
    length = longest_sequence(workload, executor=executor, fixed=fixed, with_room=True)
    return None if length is None else f"{length} tokens leave room"


def settled_offload(workload: Workload, *, executor: Executor, fixed: Constraints) -> tuple[Constraints, str | None]:
    """Return what is fixed of plans on the fewest GPUs, and on how many fewer some plan fits with offload, in words.

    GPUs that were counted without offload get a plan without it.
    """
    without = replace(fixed, offload="none")
    if fixed.offload is not None or not some_plan_fits(workload, executor=executor, fixed=without):
        return fixed, None
    found = fewest_gpus(workload, executor=executor, fixed=fixed)
    if found is None or found[0].num_gpus >= workload.cluster.num_gpus:
        return without, None
    return without, f"with offload {found[0].num_gpus} do, at the pace of the host"


def offload_remark(
    workload: Workload, estimate: PlanEstimate, *, asked: Cluster, executor: Executor, fixed: Constraints
) -> str | None:
    """Return in a sentence how long the host takes of a step, and what lets a plan without offload fit.

    `asked` are the machines of the question, of which the workload may have a part. None for a plan without offload,
    for one that was asked to offload, and where a plan without it fits, and is slower.
    """
    if estimate.plan.offload == "none" or fixed.offload is not None:
        return None
    without = replace(fixed, offload="none")
    if some_plan_fits(workload, executor=executor, fixed=without):
        return None
    whole = replace(workload, cluster=asked)
    machines = None
    if asked != workload.cluster:
        fewest = fewest_gpus(whole, executor=executor, fixed=without)
        machines = None if fewest is None else fewest[0]
    if machines is None:
        more = more_gpus(whole, executor=executor, fixed=without)
        ways = [f"{more[1].num_gpus} GPUs ({more[0]})"] if more else []
        machines = more[1] if more else None
    else:
        ways = [_gpus(machines, asked)]
    if machines is not None and machines.num_gpus <= workload.cluster.num_gpus:
        return None
    smaller = replace(workload, training=workload.training.replace(optimizer="adamw_8bit"))
    if workload.training.optimizer == "adamw" and some_plan_fits(smaller, executor=executor, fixed=without):
        ways.append("--optimizer adamw_8bit")
    step = estimate.step
    words = (
        f"nothing fits without offload: the optimizer's step on the host takes {format_seconds(step.optimizer_s)} of "
        f"{format_seconds(step.step_time_s)}"
    )
    return f"{words}. It would fit with {' or '.join(ways)}" if ways else words


def _gpus(machines: Cluster, asked: Cluster) -> str:
    part = f"--gpus-per-node {machines.gpus_per_node}" if machines.gpus_per_node < asked.gpus_per_node else ""
    return f"{machines.num_gpus} GPUs ({part or f'--nodes {machines.num_nodes}'})"
