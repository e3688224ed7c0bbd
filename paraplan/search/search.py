"""The search: price the whole space, keep what fits, rank it, and set the tree's answer beside it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from paraplan.cost.estimate import PlanEstimate, estimate_plan, fits, peak_memory, step_times
from paraplan.cost.table import Floats, Ints, PlanTable
from paraplan.cost.workload import Workload
from paraplan.errors import NoPlanFitsError
from paraplan.plan.parallel import ParallelPlan
from paraplan.plan.stages import assign_blocks
from paraplan.search.facts import tree_facts
from paraplan.search.objective import Objective, rank, simplest_of_the_best
from paraplan.search.results import Candidate, Rejection, SearchResult
from paraplan.search.space import PlanSpace
from paraplan.search.tree import decide, family
from paraplan.search.what_fits import fewest_nodes
from paraplan.units import format_bytes

WORTH_NAMING = 1.02
"""A plan outside the tree's answer is named where it is faster by more than this factor."""


def search(workload: Workload, *, objective: Objective = "throughput", num_candidates: int = 10) -> SearchResult:
    """Return the ranked plans for a workload, best by `objective` first.

    Raises `NoPlanFitsError` where no plan fits, with the plan that comes nearest and what it lacks.
    """
    survey = _survey(workload, objective)
    table, seconds, peak = survey.table, survey.seconds, survey.peak_bytes
    rows = _best_of_each_kind(table, rank(objective, seconds=seconds, peak_bytes=peak))
    answer = decide(tree_facts(workload))
    in_tree = [row for row in rows if family(table.plan(row)) in answer.families]
    best = simplest_of_the_best(objective, table, in_tree or rows, seconds=seconds, peak_bytes=peak)
    fastest = int(np.argmin(seconds))
    is_slower = objective == "throughput" and seconds[best] > WORTH_NAMING * seconds[fastest]
    shown = [_candidate(workload, table.plan(row), answer.families) for row in rows[:num_candidates]]
    return SearchResult(
        decisions=answer.decisions,
        families=answer.families,
        best=_detailed(workload, table.plan(best)),
        fastest=_detailed(workload, table.plan(fastest)) if is_slower else None,
        # An uneven cut of the blocks may let a pipeline overtake its neighbours.
        candidates=tuple(sorted(shown, key=_by_memory if objective == "memory" else _by_time)),
        rejections=survey.rejections,
        plans_considered=survey.considered,
    )


@dataclass(frozen=True, eq=False)
class _Survey:
    """What is left of the whole space: the best plans of each kind with their prices, and the rest counted."""

    table: PlanTable
    seconds: Floats
    peak_bytes: Floats
    rejections: tuple[Rejection, ...]
    considered: int


def _survey(workload: Workload, objective: Objective) -> _Survey:
    cluster = workload.cluster
    space = PlanSpace(workload.model, workload.training, cluster.num_gpus, cluster.gpus_per_node)
    kept: list[tuple[PlanTable, Floats, Floats]] = []
    too_large = _TooLarge()
    for chunk in space.chunks():
        peak = peak_memory(workload, chunk)
        fitting = fits(workload, peak)
        too_large.add(chunk.select(~fitting), peak[~fitting])
        table, peak = chunk.select(fitting), peak[fitting]
        if len(table):
            seconds = step_times(workload, table).step_time_s
            best = np.array(_best_of_each_kind(table, rank(objective, seconds=seconds, peak_bytes=peak)))
            kept.append((table.select(best), seconds[best], peak[best]))
    if not kept:
        raise _nothing_fits(workload, space, too_large)
    rejected = Counter(space.rejected)
    if too_large.count:
        rejected[too_large.describe(workload.usable_memory_bytes)] += too_large.count
    return _Survey(
        table=PlanTable.concatenate([table for table, _, _ in kept]),
        seconds=np.concatenate([seconds for _, seconds, _ in kept]),
        peak_bytes=np.concatenate([peak for _, _, peak in kept]),
        rejections=tuple(Rejection(reason=reason, count=count) for reason, count in rejected.most_common()),
        considered=space.considered,
    )


@dataclass
class _TooLarge:
    """The plans that do not fit: how many, how much they need, and the one that comes nearest."""

    count: int = 0
    least_bytes: float = float("inf")
    most_bytes: float = 0.0
    nearest: ParallelPlan | None = None

    def add(self, table: PlanTable, peaks: Floats) -> None:
        if not len(table):
            return
        self.count += len(table)
        self.most_bytes = max(self.most_bytes, float(peaks.max()))
        if float(peaks.min()) < self.least_bytes:
            self.least_bytes = float(peaks.min())
            self.nearest = table.plan(int(np.argmin(peaks)))

    def describe(self, usable_bytes: int) -> str:
        needed = f"{format_bytes(self.least_bytes)} to {format_bytes(self.most_bytes)}"
        return f"need {needed} of {format_bytes(usable_bytes)} usable"


def balanced(workload: Workload, plan: ParallelPlan) -> ParallelPlan:
    """Return `plan` with its blocks cut into stages by cost, the head counted; unchanged without a pipeline."""
    if plan.num_stages == 1:
        return plan
    model, seq_length = workload.model, workload.training.seq_length
    costs = [block.flops_per_token(seq_length) for block in model.blocks]
    head = model.head.flops_per_token(seq_length)
    return plan.replace(stage_blocks=assign_blocks(costs, plan.num_stages, first_extra=0.0, last_extra=head))


def _detailed(workload: Workload, plan: ParallelPlan) -> PlanEstimate:
    even = estimate_plan(workload, plan)
    if plan.num_stages == 1:
        return even
    uneven = estimate_plan(workload, balanced(workload, plan))
    return uneven if uneven.fits and uneven.step.step_time_s <= even.step.step_time_s else even


def _candidate(workload: Workload, plan: ParallelPlan, families: tuple[str, ...]) -> Candidate:
    estimate = _detailed(workload, plan)
    return Candidate(
        plan=estimate.plan,
        in_tree=family(plan) in families,
        step_time_s=estimate.step.step_time_s,
        tokens_per_s_per_gpu=estimate.step.tokens_per_s_per_gpu,
        mfu=estimate.step.mfu,
        peak_memory_bytes=estimate.peak_memory_bytes,
    )


def _by_time(candidate: Candidate) -> float:
    return candidate.step_time_s


def _by_memory(candidate: Candidate) -> float:
    return candidate.peak_memory_bytes


def _best_of_each_kind(table: PlanTable, order: Ints) -> list[int]:
    """Return the first row in `order` of each choice of axes and ZeRO stage."""
    kinds = np.stack([table.dp, table.tp, table.pp, table.cp, table.zero_stage], axis=1)[order]
    _, firsts = np.unique(kinds, axis=0, return_index=True)
    return [int(row) for row in order[np.sort(firsts)]]


def _nothing_fits(workload: Workload, space: PlanSpace, too_large: _TooLarge) -> NoPlanFitsError:
    cluster, usable = workload.cluster, workload.usable_memory_bytes
    if too_large.nearest is None:
        reasons = "; ".join(f"{count:,} plans: {reason}" for reason, count in space.rejected.most_common(3))
        return NoPlanFitsError(
            f"no plan suits {workload.model.name} on {cluster.num_gpus} GPUs: {reasons}",
            hint="change the global batch or the number of GPUs",
        )
    nodes = fewest_nodes(workload)
    enough = f"it fits {nodes * cluster.gpus_per_node} GPUs (--nodes {nodes})" if nodes else "use GPUs with more memory"
    return NoPlanFitsError(
        f"no plan fits: {workload.model.name} on {cluster.num_gpus} GPUs with {format_bytes(usable)} usable each; the "
        f"nearest, {too_large.nearest.describe()}, needs {format_bytes(too_large.least_bytes)}, "
        f"{format_bytes(too_large.least_bytes - usable)} too much",
        hint=f"{enough}, or use a shorter --seq-len",
    )
