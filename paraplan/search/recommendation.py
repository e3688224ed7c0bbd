"""The whole answer to one question: a search and what was asked for beside it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from paraplan.cost.workload import Workload
from paraplan.errors import NoPlanFitsError
from paraplan.hardware.cluster import Cluster
from paraplan.plan.files import PlanFile, PlannedPlacement
from paraplan.plan.placement import place
from paraplan.plan.traffic import axis_traffic
from paraplan.search.fixed import FREE, Constraints
from paraplan.search.objective import Objective
from paraplan.search.results import SearchResult
from paraplan.search.search import search

if TYPE_CHECKING:  # what most calls do not ask for is imported when it is asked for
    from paraplan.search.budget import Budget, SizeOffer
    from paraplan.search.changes import Comparison
    from paraplan.search.explain import Explanation

Find = Literal["fewest-gpus", "largest-batch", "longest-sequence"]


@dataclass(frozen=True)
class SearchRequest:
    """What is asked of a workload. `framework` names another framework than paraplan's runtime."""

    objective: Objective | Literal["cost"] = "throughput"
    find: Find | None = None
    framework: str | None = None
    fixed: Constraints = FREE
    num_candidates: int = 10
    explains: bool = False
    with_front: bool = False
    earlier: PlanFile | None = None
    tokens: float | None = None
    price_per_gpu_hour: float | None = None


@dataclass(frozen=True, eq=False)
class Recommendation:
    """The answer: the workload that was planned for (another one where something was to be found), and the search.

    `found` says in a sentence what was found that was to be found, `offload` what offload costs and what would do
    without it. What was not asked for is None or empty.
    """

    workload: Workload
    result: SearchResult
    placement: PlannedPlacement
    framework: str | None = None
    found: str | None = None
    offload: str | None = None
    explanation: Explanation | None = None
    comparison: Comparison | None = None
    budget: Budget | None = None
    offers: tuple[SizeOffer, ...] = ()

    def cut(self, *, num_candidates: int, with_front: bool) -> Recommendation:
        """Return the answer with fewer candidates, and without its front if so asked."""
        result = self.result
        kept = result.replace(
            candidates=result.candidates[:num_candidates], front=result.front if with_front else (), cloud=()
        )
        return replace(self, result=kept)


def recommendation(workload: Workload, question: SearchRequest) -> Recommendation:
    """Return the answer to a question; raise `NoPlanFitsError` where no plan fits."""
    runnable_only = question.framework is None
    asked = workload.cluster
    workload, found = _found(workload, question, runnable_only=runnable_only)
    result, workload, offers = _searched(workload, question, runnable_only=runnable_only)
    return Recommendation(
        workload=workload,
        result=result,
        placement=_placement(workload, result),
        framework=question.framework,
        found=found,
        offload=_offload(workload, asked, question, result, runnable_only=runnable_only),
        explanation=_explanation(result) if question.explains else None,
        comparison=_comparison(workload, question.earlier, result) if question.earlier else None,
        budget=_budget(workload, question.tokens, question.price_per_gpu_hour, result) if question.tokens else None,
        offers=offers,
    )


def _searched(
    workload: Workload, question: SearchRequest, *, runnable_only: bool
) -> tuple[SearchResult, Workload, tuple[SizeOffer, ...]]:
    """Return the search, the workload that it was for, and what other numbers of GPUs offered."""
    objective: Objective = "throughput" if question.objective == "cost" else question.objective

    def search_on(workload: Workload, *, explains_failure: bool) -> SearchResult:
        return search(
            workload,
            objective=objective,
            num_candidates=question.num_candidates,
            runnable_only=runnable_only,
            fixed=question.fixed,
            with_front=question.with_front,
            with_second=question.explains,
            explains_failure=explains_failure,
        )

    if question.objective != "cost":
        return search_on(workload, explains_failure=True), workload, ()
    from paraplan.search.budget import cheapest

    best = cheapest(workload, search_on, price_per_gpu_hour=question.price_per_gpu_hour)
    return best.result, best.workload, best.offers


def _explanation(result: SearchResult) -> Explanation | None:
    if result.second is None:
        return None
    from paraplan.search.explain import explain
    from paraplan.search.tree import family

    is_named = family(result.second.plan) in result.families or family(result.best.plan) not in result.families
    return explain(result.best, result.second, is_named=is_named)


def _offload(
    workload: Workload, asked: Cluster, question: SearchRequest, result: SearchResult, *, runnable_only: bool
) -> str | None:
    if result.best.plan.offload == "none":
        return None
    from paraplan.search.without_offload import offload_remark

    asked = asked if question.find == "fewest-gpus" else workload.cluster
    return offload_remark(workload, result.best, asked=asked, runnable_only=runnable_only, fixed=question.fixed)


def _comparison(workload: Workload, earlier: PlanFile, result: SearchResult) -> Comparison:
    from paraplan.search.changes import compare_with

    return compare_with(workload, earlier, result)


def _budget(workload: Workload, tokens: float, price_per_gpu_hour: float | None, result: SearchResult) -> Budget:
    from paraplan.search.budget import budget

    return budget(workload, result.best, tokens=tokens, price_per_gpu_hour=price_per_gpu_hour)


def _placement(workload: Workload, result: SearchResult) -> PlannedPlacement:
    plan = result.best.plan
    traffic = axis_traffic(plan, workload.training, workload.model)
    placed = place(plan, workload.cluster, traffic=traffic)
    return PlannedPlacement(local_gpus=placed.local_gpus, slowest_bytes_per_s=placed.slowest_bytes_per_s)


def _found(workload: Workload, question: SearchRequest, *, runnable_only: bool) -> tuple[Workload, str | None]:
    """Return the workload to plan for and what was found, in a sentence."""
    training, cluster = workload.training, workload.cluster
    if question.find is None:
        return workload, None
    from paraplan.search.what_fits import fewest_gpus, largest_batch, longest_sequence

    if question.find == "fewest-gpus":
        smallest = fewest_gpus(workload, runnable_only=runnable_only, fixed=question.fixed)
        if smallest is None:
            return workload, None  # the search says what is lacking
        words = f"the fewest GPUs that fit: {smallest.num_gpus} of {cluster.num_gpus}, tried in steps of two"
        return replace(workload, cluster=smallest), words
    if question.find == "largest-batch":
        size = largest_batch(workload, runnable_only=runnable_only, fixed=question.fixed)
        if size is None:
            raise NoPlanFitsError(
                f"not even one sequence of {training.seq_length} tokens fits without gradient accumulation",
                hint="leave out --find, or use more GPUs",
            )
        batch = f"{size} sequences of {training.seq_length} tokens"
        words = f"the largest batch that some plan holds in one micro-batch: {batch}; the fastest plan for it follows"
        return replace(workload, training=training.replace(global_batch_size=size)), words
    length = longest_sequence(workload, runnable_only=runnable_only, fixed=question.fixed)
    if length is None:
        return workload, None
    words = f"the longest sequence that fits: {length} tokens, in a batch of {training.global_batch_size}"
    return replace(workload, training=training.replace(seq_length=length)), words
