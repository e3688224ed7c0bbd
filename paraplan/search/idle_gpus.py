"""Where fewer GPUs than there are train faster: numbers that do not divide the batch or the model, slow networks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import gcd, inf

from paraplan.cost.workload import Workload
from paraplan.errors import NoPlanFitsError, PlanError
from paraplan.hardware.cluster import Cluster
from paraplan.plan.executor import Executor
from paraplan.search.cluster_sizes import can_take_less, counts_between, part_of, smaller_clusters
from paraplan.search.comparison import compared_parts, part_words
from paraplan.search.constraints import Constraints
from paraplan.search.results import SearchResult
from paraplan.search.search import search
from paraplan.search.sizes import SearchOn
from paraplan.units import format_seconds

WORTH_IDLE = 0.9
"""GPUs stay idle where a step takes less than this share of what it takes on all: more than predictions are off."""
COMPUTE_SCALES = 0.8
"""On half the GPUs kernels take twice as long; small kernels take less than that, to this share of it."""
MOST_TRIED = 6
"""So many numbers of GPUs are searched beside all of them."""


@dataclass(frozen=True, eq=False)
class LeavingIdle:
    """A search on fewer GPUs than there are, its workload, and why in a sentence."""

    workload: Workload
    result: SearchResult
    because: str


def leaving_idle(
    workload: Workload, result: SearchResult | None, search_on: SearchOn, *, executor: Executor, fixed: Constraints
) -> LeavingIdle | None:
    """Return the search on the fewer GPUs that train clearly faster than all do (`result`); None where none do.

    Without a `result` no plan is there for all, and fewer that share the batch out better take their place. Numbers
    of which no plan is so fast are passed over.
    """
    best = fastest_part(workload, _promising(workload, result), result, executor=executor, fixed=fixed)
    if best is None:
        return None
    fewer = search_on(best)
    return LeavingIdle(best, fewer, _in_words(workload, best, result, fewer))


def fastest_part(
    workload: Workload,
    clusters: Iterable[Cluster],
    result: SearchResult | None,
    *,
    executor: Executor,
    fixed: Constraints,
) -> Workload | None:
    """Return the workload on the fastest of `clusters`, None where none is clearly faster than `result`.

    Those of which no plan is so fast are passed over without a whole search.
    """
    limit_s = inf if result is None else WORTH_IDLE * result.best.step.step_time_s
    best: Workload | None = None
    for cluster in clusters:
        part = replace(workload, cluster=cluster)
        try:
            if not can_take_less(part, limit_s, executor=executor, fixed=fixed):
                continue
            found = search(part, num_candidates=1, executor=executor, fixed=fixed)
        except (NoPlanFitsError, PlanError):
            continue
        if found.best.step.step_time_s < limit_s:
            limit_s, best = found.best.step.step_time_s, part
    return best


def _promising(workload: Workload, result: SearchResult | None) -> list[Cluster]:
    """Return smaller clusters that may be faster: those that share the batch out better, and those in steps of two.

    What all GPUs compute takes fewer of them longer, if not in proportion where kernels are small.
    """
    cluster, batch = workload.cluster, workload.training.global_batch_size
    share = gcd(cluster.num_gpus, batch) / cluster.num_gpus
    counts = {count for count in counts_between(0, cluster) if gcd(count, batch) / count > share}
    if result is not None:
        step = result.best.step
        fewest = COMPUTE_SCALES * cluster.num_gpus * step.compute_s / (WORTH_IDLE * step.step_time_s)
        halves = {each.num_gpus for each in smaller_clusters(cluster)} - {cluster.num_gpus}
        counts = {count for count in counts | halves if count >= fewest}
    best_first = sorted(counts, key=lambda count: (-gcd(count, batch), -count))
    return [part_of(cluster, count) for count in best_first[:MOST_TRIED]]


def _in_words(workload: Workload, part: Workload, result: SearchResult | None, fewer: SearchResult) -> str:
    """Return how many GPUs are used of how many, what that gains, and why."""
    batch, count, used = workload.training.global_batch_size, workload.cluster.num_gpus, part.cluster.num_gpus
    step = f"uses {used} of {count} GPUs: {format_seconds(fewer.best.step.step_time_s)} a step"
    divides = f"{count} GPUs do not divide {batch} sequences"
    if result is None:
        return f"{step}, no plan with all {count}" + (f" ({divides})" if batch % count else "")
    step += f", {format_seconds(result.best.step.step_time_s)} with all {count}"
    if batch % count and not batch % used:
        return f"{step} ({divides})"
    part_of_step = max(compared_parts(fewer.best, result.best), key=lambda one: one.difference_s)
    return f"{step} ({part_words(part_of_step.name)} takes {format_seconds(part_of_step.difference_s)} longer there)"
