"""The whole answer to one question: a search, what was asked for beside it, and its plan file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from paraplan.cost.estimate import PlanEstimate
from paraplan.cost.workload import Workload
from paraplan.errors import NoPlanFitsError, PlanError
from paraplan.hardware.cluster import Cluster
from paraplan.plan.executor import ANYTHING, OWN_RUNTIME, Executor
from paraplan.plan.files import (
    PlanFile,
    PlannedPlacement,
)
from paraplan.plan.placement.place import place
from paraplan.plan.placement.traffic import axis_traffic
from paraplan.search.constraints import FREE, Constraints
from paraplan.search.failure import NothingFitsError
from paraplan.search.find_levers import Find as Find
from paraplan.search.results import Objective, SearchResult
from paraplan.search.search import search

if TYPE_CHECKING:
    from paraplan.plan.goodput import FailureRate, GoodputEstimate, MeasuredCosts
    from paraplan.search.by_date import Deadline
    from paraplan.search.comparison import Comparison, Explanation
    from paraplan.search.money import Bought
    from paraplan.search.offers import LeverOffer
    from paraplan.search.own_options import ChosenOptions
    from paraplan.search.sizes import Budget, SizeOffer
    from paraplan.search.what_helps import Help


@dataclass(frozen=True)
class SearchRequest:
    """Request of a recommendation for a workload. `framework` names another framework than paraplan's runtime."""

    objective: Objective | Literal["cost"] = "throughput"
    find: Find | None = None
    framework: str | None = None
    executor: Executor = OWN_RUNTIME
    executors: Callable[[Workload], Executor] = lambda workload: ANYTHING
    """Returns what executes plans for a workload of another framework."""
    fixed: Constraints = FREE
    num_candidates: int = 10
    memory_margin: float = 0.0
    explains: bool = False
    with_front: bool = False
    uses_all_gpus: bool = True
    """Whether a plan takes all GPUs also where fewer train clearly faster."""
    prices_changes: bool = False
    """Whether each change of options, machines and nodes that could help gets a search of its own."""
    earlier: PlanFile | None = None
    tokens: float | None = None
    days: float | None = None
    """In which training on `tokens` is to end, where the number of GPUs is to be found for it."""
    price_per_gpu_hour: float | None = None
    price_source: str | None = None
    """Whose price it is, where the user did not say it."""
    money: float | None = None
    """An amount of which is asked what it trains on, in the currency of the price."""
    failures: FailureRate | None = None
    """How often the job fails; None leaves failures out."""
    failure_costs: MeasuredCosts | None = None
    """Measured costs of failures and checkpoints; what is not known is assumed."""


@dataclass(frozen=True, eq=False)
class Recommendation:
    """The answer: the workload that was planned for (another one where something was to be found), and the search.

    `found` says in a sentence what was found that was to be found, `idle` why GPUs stay idle, `offload` what offload
    costs and what would do without it, `levers` what saves memory where that is short, priced in their order, `helps`
    what would make a step
    faster or smaller. What was not asked for is None or empty.
    """

    workload: Workload
    result: SearchResult
    placement: PlannedPlacement
    framework: str | None = None
    found: str | None = None
    chosen: ChosenOptions | None = None
    """Options of the runtime without which nothing fits."""
    idle: str | None = None
    mixed: str | None = None
    """Cost of the slower of several kinds of GPU, in a sentence; None for one kind."""
    offload: str | None = None
    explanation: Explanation | None = None
    comparison: Comparison | None = None
    budget: Budget | None = None
    goodput: GoodputEstimate | None = None
    bought: Bought | None = None
    """Training that an amount of money buys."""
    price_source: str | None = None
    offers: tuple[SizeOffer, ...] = ()
    levers: tuple[LeverOffer, ...] = ()
    helps: tuple[Help, ...] = ()

    def cut(self, *, num_candidates: int, with_front: bool) -> Recommendation:
        """Return the answer with fewer candidates, and without its front if so asked."""
        result = self.result
        kept = result.replace(
            candidates=result.candidates[:num_candidates], front=result.front if with_front else (), cloud=()
        )
        return replace(self, result=kept)


def recommendation(workload: Workload, question: SearchRequest) -> Recommendation:
    """Return the answer to a question; raise `NoPlanFitsError` where no plan fits, with what would."""
    executor = question.executor
    asked = workload.cluster
    whole = workload
    try:
        workload, found = _found(workload, question, executor=executor)
    except NoPlanFitsError as error:
        raise (_found_with_levers(error, workload, question) if error.is_near else error) from None
    if found is not None and question.find == "fewest-gpus":
        from paraplan.search.sizes import settled_offload

        fixed, fewer = settled_offload(workload, executor=executor, fixed=question.fixed)
        question, found = replace(question, fixed=fixed), "; ".join(filter(None, [found, fewer]))
    chosen = None
    try:
        result, workload, offers, idle = _searched(workload, question, executor=executor)
    except NothingFitsError as error:
        from paraplan.search.offered import explained
        from paraplan.search.own_options import ChosenOptions

        chosen = ChosenOptions.of(workload, executor, question.fixed)
        if chosen is None:
            raise explained(
                error, workload, executor=executor, fixed=question.fixed, executors=question.executors
            ) from None
        result, workload, offers, idle = _searched(chosen.workload, question, executor=executor)
    if found is not None:
        found = "; ".join(filter(None, [found, _roomier(workload, asked, question, result.best)]))
    goodput = None
    if question.failures is not None:
        from paraplan.search.money import goodput_of

        goodput = goodput_of(workload, result.best, question.failures, question.failure_costs)
    return Recommendation(
        workload=workload,
        result=result,
        placement=_placement(workload, result),
        framework=question.framework,
        found=found,
        chosen=chosen,
        idle=idle,
        mixed=_mixed(workload, question, result, executor=executor),
        offload=_offload(workload, asked, question, result, executor=executor),
        explanation=_explanation(result) if question.explains else None,
        comparison=_comparison(workload, question.earlier, result) if question.earlier else None,
        budget=_budget(workload, question.tokens, question.price_per_gpu_hour, result) if question.tokens else None,
        goodput=goodput,
        bought=_bought(workload, question, result, goodput),
        price_source=question.price_source,
        offers=offers,
        levers=_levers(whole, workload, question, result),
        helps=_helps(workload, question, result),
    )


def _levers(
    asked: Workload, workload: Workload, question: SearchRequest, result: SearchResult
) -> tuple[LeverOffer, ...]:
    """Return the levers that find more where something is to be found, and else those beside the plan."""
    best, fixed, executor = result.best, question.fixed, question.executor
    if result.is_partial:
        return ()
    if question.find is not None:
        return _find_levers(asked, workload, question, best)
    from paraplan.search.levers_beside import levers_beside

    return levers_beside(workload, result, executor=executor, fixed=fixed)


def _find_levers(
    asked: Workload, found: Workload | None, question: SearchRequest, best: PlanEstimate | None
) -> tuple[LeverOffer, ...]:
    from paraplan.search.find_levers import find_offers, larger_model

    def look(workload: Workload, fixed: Constraints) -> Workload | None:
        if question.find == "largest-model":
            return larger_model(workload, executor=question.executor, fixed=fixed)
        if question.find == "fewest-gpus" and best is not None and best.plan.offload == "none":
            fixed = replace(fixed, offload="none")  # on how many fewer it fits with offload is said before
        if question.find == "by-date":
            from paraplan.search.by_date import workload_in_time

            return workload_in_time(workload, _deadline(question, question.executor, fixed), found=found)
        larger, words = _found(workload, replace(question, fixed=fixed), executor=question.executor)
        return None if words is None else larger

    assert question.find is not None
    return find_offers(
        asked, found, best, find=question.find, look=look, executor=question.executor, fixed=question.fixed
    )


def _found_with_levers(error: NoPlanFitsError, workload: Workload, question: SearchRequest) -> NoPlanFitsError:
    """Return the error of a `--find` that found nothing with the levers that find something."""
    from paraplan.search.offers import offers_in_words

    offers = _find_levers(workload, None, question, None)
    if any(one.fits for one in offers):
        error.hint = offers_in_words(offers, framework=workload.framework.told_as)
    return error


def _helps(workload: Workload, question: SearchRequest, result: SearchResult) -> tuple[Help, ...]:
    from paraplan.search.what_helps import what_helps

    return what_helps(
        workload,
        result.best,
        executor=question.executor,
        fixed=question.fixed,
        searches=question.prices_changes,
    )


def _searched(
    workload: Workload, question: SearchRequest, *, executor: Executor
) -> tuple[SearchResult, Workload, tuple[SizeOffer, ...], str | None]:
    """Return the search, the workload that it was for, what other numbers of GPUs offered, and why GPUs stay idle."""
    objective: Objective = "throughput" if question.objective == "cost" else question.objective

    def search_on(workload: Workload) -> SearchResult:
        return search(
            workload,
            objective=objective,
            num_candidates=question.num_candidates,
            executor=executor,
            fixed=question.fixed,
            with_front=question.with_front,
            with_second=question.explains,
        )

    if question.objective == "cost":
        from paraplan.search.sizes import cheapest

        best = cheapest(
            workload, search_on, executor=executor, fixed=question.fixed, price_per_gpu_hour=question.price_per_gpu_hour
        )
        return best.result, best.workload, best.offers, None
    if question.uses_all_gpus or question.find is not None or objective == "memory":
        return search_on(workload), workload, (), None
    from paraplan.search.idle_gpus import leaving_idle
    from paraplan.search.mixed_gpus import without_slower

    try:
        result = search_on(workload)
    except (NoPlanFitsError, PlanError):  # fewer GPUs may divide the batch, or allow what is fixed
        result = None
    if result is not None and result.is_partial:
        return result, workload, (), None
    is_mixed = len({gpu.name for gpu in workload.cluster.node.gpus}) > 1
    on_fewer = without_slower if is_mixed else leaving_idle
    fewer = on_fewer(workload, result, search_on, executor=executor, fixed=question.fixed)
    if fewer is not None:
        return fewer.result, fewer.workload, (), fewer.because
    return result or search_on(workload), workload, (), None


def _explanation(result: SearchResult) -> Explanation | None:
    if result.second is None or result.second_reason is None:
        return None
    from paraplan.search.comparison import explain

    return explain(result.best, result.second, result.second_reason)


def _offload(
    workload: Workload, asked: Cluster, question: SearchRequest, result: SearchResult, *, executor: Executor
) -> str | None:
    if result.best.plan.offload == "none":
        return None
    from paraplan.search.sizes import offload_remark

    asked = asked if question.find == "fewest-gpus" else workload.cluster
    return offload_remark(workload, result.best, asked=asked, executor=executor, fixed=question.fixed)


def _mixed(workload: Workload, question: SearchRequest, result: SearchResult, *, executor: Executor) -> str | None:
    if len({gpu.name for gpu in workload.cluster.node.gpus}) < 2:
        return None
    from paraplan.search.mixed_gpus import mixed_remark

    return mixed_remark(workload, result, executor=executor, fixed=question.fixed)


def _roomier(workload: Workload, asked: Cluster, question: SearchRequest, best: PlanEstimate) -> str | None:
    from paraplan.search.sizes import roomier_gpus, roomier_length

    if question.find == "fewest-gpus":
        return roomier_gpus(workload, best, asked=asked, executor=question.executor, fixed=question.fixed)
    if question.find == "longest-sequence":
        return roomier_length(workload, best, executor=question.executor, fixed=question.fixed)
    return None


def _comparison(workload: Workload, earlier: PlanFile, result: SearchResult) -> Comparison:
    from paraplan.search.comparison import compare_with

    return compare_with(workload, earlier, result)


def _bought(
    workload: Workload, question: SearchRequest, result: SearchResult, goodput: GoodputEstimate | None
) -> Bought | None:
    if question.money is None or not question.price_per_gpu_hour:
        return None
    from paraplan.search.money import bought

    return bought(
        workload,
        result.best,
        money=question.money,
        price_per_gpu_hour=question.price_per_gpu_hour,
        tokens=question.tokens,
        goodput=1.0 if goodput is None else goodput.goodput,
    )


def _budget(workload: Workload, tokens: float, price_per_gpu_hour: float | None, result: SearchResult) -> Budget:
    from paraplan.search.sizes import budget

    return budget(workload, result.best, tokens=tokens, price_per_gpu_hour=price_per_gpu_hour)


def _placement(workload: Workload, result: SearchResult) -> PlannedPlacement:
    plan = result.best.plan
    traffic = axis_traffic(plan, workload.training, workload.model)
    return place(plan, workload.cluster, traffic=traffic)


def _deadline(question: SearchRequest, executor: Executor, fixed: Constraints) -> Deadline:
    from paraplan.search.by_date import Deadline

    return Deadline.of(
        tokens=question.tokens, days=question.days, objective=question.objective, executor=executor, fixed=fixed
    )


def _found(workload: Workload, question: SearchRequest, *, executor: Executor) -> tuple[Workload, str | None]:
    """Return the workload to plan for and what was found, in a sentence."""
    training, cluster = workload.training, workload.cluster
    if question.find is None:
        return workload, None
    from paraplan.search.what_fits import fewest_gpus, largest_batch, longest_sequence

    if question.find == "largest-model":  # which was found before
        return workload, f"the largest bundled model that trains without offload: {workload.model.name}"
    if question.find == "by-date":
        from paraplan.search.by_date import by_date

        return by_date(workload, _deadline(question, executor, question.fixed))
    if question.find == "fewest-gpus":
        # With offload nearly all fits, at the pace of the host.
        without = replace(question.fixed, offload=question.fixed.offload or "none")
        smallest, how = fewest_gpus(workload, executor=executor, fixed=without), " without offload"
        if smallest is None or question.fixed.offload is not None:
            smallest, how = smallest or fewest_gpus(workload, executor=executor, fixed=question.fixed), ""
        if smallest is None:
            return workload, None  # the search says what is lacking
        fewest, tried = smallest
        words = f"the fewest GPUs that fit{how}: {fewest.num_gpus} of {cluster.num_gpus}, {tried}"
        return replace(workload, cluster=fewest), words
    if question.find == "largest-batch":
        size = largest_batch(workload, executor=executor, fixed=question.fixed)
        if size is None:
            raise NoPlanFitsError(
                f"not even one sequence of {training.seq_length} tokens fits without gradient accumulation",
                hint="leave out --find, or use more GPUs",
            )
        batch = f"{size} sequences of {training.seq_length} tokens"
        words = f"the largest batch that some plan holds in one micro-batch: {batch}; the fastest plan for it follows"
        return replace(workload, training=training.replace(global_batch_size=size)), words
    length = longest_sequence(workload, executor=executor, fixed=question.fixed)
    if length is None:
        return workload, None
    words = f"the longest sequence that fits: {length} tokens, in a batch of {training.global_batch_size}"
    return replace(workload, training=training.replace(seq_length=length)), words
