"""Tokens that an amount of money trains on, and the largest model that it trains."""

from __future__ import annotations

from paraplan.cost.estimate import PlanEstimate
from paraplan.cost.workload import Workload
from paraplan.errors import NoPlanFitsError, PlanError
from paraplan.plan.executor import Executor
from paraplan.plan.goodput import (
    FailureRate,
    GoodputEstimate,
    MeasuredCosts,
    assumed_costs,
    best_interval,
    estimate_goodput,
)
from paraplan.records import Record
from paraplan.search.cluster_sizes import least_time_s
from paraplan.search.constraints import Constraints
from paraplan.search.search import search

COMPUTE_OPTIMAL = 20.0
"""Tokens for each parameter that a compute-optimal model trains on (Hoffmann et al., Training Compute-Optimal Large
Language Models, arXiv 2203.15556, table 3: 20.2 B tokens for 1 B parameters, 205.1 B for 10 B)."""

_SECONDS_PER_HOUR = 3600.0


class Bought(Record):
    """Training that money buys with one plan. Only steps count, and with `goodput` what failures leave of them."""

    money: float
    price_per_gpu_hour: float
    gpu_hours: float
    seconds: float
    tokens: float
    wanted_tokens: float
    """Number of tokens to train on: asked for, or the compute-optimal number."""
    is_compute_optimal: bool
    """Whether `wanted_tokens` is that number, for nobody asked for another."""
    wanted_cost: float
    goodput: float


def goodput_of(
    workload: Workload, estimate: PlanEstimate, failures: FailureRate, measured: MeasuredCosts | None
) -> GoodputEstimate:
    """Return what failures leave of the job's time, with checkpoints at the best interval in whole steps."""
    cluster, step_s = workload.cluster, estimate.step.step_time_s
    mtbf_s = failures.of_job_s(num_gpus=cluster.num_gpus, num_nodes=cluster.num_nodes)
    costs = assumed_costs(num_parameters=workload.model.parameters.total, num_nodes=cluster.num_nodes)
    if measured is not None:
        costs = measured.completed(costs)
    steps = max(1, round(best_interval(mtbf_s, costs, step_s=step_s) / step_s))
    return estimate_goodput(mtbf_s, costs, interval_s=steps * step_s)


def optimal_tokens(workload: Workload) -> float:
    """Return the compute-optimal number of tokens of a workload's model, by all of its parameters."""
    return COMPUTE_OPTIMAL * workload.model.parameters.total


def bought(
    workload: Workload,
    estimate: PlanEstimate,
    *,
    money: float,
    price_per_gpu_hour: float,
    tokens: float | None,
    goodput: float = 1.0,
) -> Bought:
    """Return what `money` buys of training under a plan."""
    gpu_hours = money / price_per_gpu_hour
    seconds = gpu_hours * _SECONDS_PER_HOUR / estimate.plan.world_size
    trained = seconds * goodput / estimate.step.step_time_s * workload.training.tokens_per_step
    wanted = tokens or optimal_tokens(workload)
    return Bought(
        money=money,
        price_per_gpu_hour=price_per_gpu_hour,
        gpu_hours=gpu_hours,
        seconds=seconds,
        tokens=trained,
        wanted_tokens=wanted,
        is_compute_optimal=tokens is None,
        wanted_cost=money * wanted / trained,
        goodput=goodput,
    )


def affords(
    workload: Workload,
    *,
    money: float,
    price_per_gpu_hour: float,
    tokens: float | None,
    executor: Executor,
    fixed: Constraints,
) -> bool:
    """Return whether `money` trains a workload's model on `tokens`, by default the compute-optimal number."""
    steps = (tokens or optimal_tokens(workload)) / workload.training.tokens_per_step
    gpu_seconds = money / price_per_gpu_hour * _SECONDS_PER_HOUR
    limit_s = gpu_seconds / workload.cluster.num_gpus / steps
    if least_time_s(workload, executor=executor, fixed=fixed) > limit_s:
        return False
    try:
        found = search(workload, num_candidates=1, executor=executor, fixed=fixed)
    except (NoPlanFitsError, PlanError):
        return False
    return found.best.step.step_time_s <= limit_s
