"""The fewest GPUs that train on a number of tokens in a number of days."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, Self

from paraplan.cost.workload import Workload
from paraplan.errors import NoPlanFitsError, PlanError, UsageError
from paraplan.hardware.cluster import Cluster
from paraplan.plan.executor import Executor
from paraplan.search.cluster_sizes import first_between, larger_clusters, least_time_s, smaller_clusters
from paraplan.search.constraints import Constraints
from paraplan.search.results import Objective
from paraplan.search.search import search
from paraplan.units import format_count, format_days

_SECONDS_PER_DAY = 86_400
_EXAMPLE = "for example --find by-date --tokens 1T --days 30"
_MOST_GAIN = 100.0  # no lever makes a step so much faster: 8 bits halve it, copies from the host that go leave a tenth


@dataclass(frozen=True)
class Deadline:
    """How much is trained in how many days, by which plans."""

    tokens: float
    days: float
    objective: Objective
    executor: Executor
    fixed: Constraints

    @classmethod
    def of(
        cls,
        *,
        tokens: float | None,
        days: float | None,
        objective: Objective | Literal["cost"],
        executor: Executor,
        fixed: Constraints,
    ) -> Self:
        """Return what is asked for. Raises `UsageError` where tokens or days are missing."""
        if objective == "cost":
            raise UsageError(
                "--find by-date chooses the number of GPUs, and so does --objective cost", hint="leave out one"
            )
        if tokens is None or days is None:
            raise UsageError("--find by-date needs to know how much is trained, and in how many days", hint=_EXAMPLE)
        return cls(tokens, days, objective, executor, fixed)


def by_date(workload: Workload, deadline: Deadline) -> tuple[Workload, str | None]:
    """Return the workload on the fewest GPUs that train on the tokens in time, and in a sentence how long they take.

    Numbers of GPUs go up to many times those asked about. Those are passed over that no plan could make so fast. Raises
    `NoPlanFitsError` where no number is in time.
    """
    tokens, days, step_times = deadline.tokens, deadline.days, _StepTimes(workload, deadline)
    found = _in_time(step_times, deadline)
    if found is None:
        return _too_slow(step_times, deadline)
    first, tried = found
    taken = tokens / workload.training.tokens_per_step * step_times.of(first) / _SECONDS_PER_DAY
    words = f"the fewest GPUs that take {format_days(days)} or less: {first.num_gpus}, {tried}"
    return replace(workload, cluster=first), f"{words}; {format_count(tokens)} tokens take {format_days(taken)}"


def workload_in_time(workload: Workload, deadline: Deadline, *, found: Workload | None) -> Workload | None:
    """Return what `by_date` finds, None where no number of GPUs is in time.

    On more GPUs than those of what was `found` before nothing is looked for.
    """
    most_gpus = math.inf if found is None else found.cluster.num_gpus
    fewest = _in_time(_StepTimes(workload, deadline), deadline, most_gpus=most_gpus)
    return None if fewest is None else replace(workload, cluster=fewest[0])


def _in_time(step_times: _StepTimes, deadline: Deadline, *, most_gpus: float = math.inf) -> tuple[Cluster, str] | None:
    """Return the fewest GPUs that are in time, and how many were tried in words."""
    workload = step_times.workload
    limit_s = deadline.days * _SECONDS_PER_DAY / (deadline.tokens / workload.training.tokens_per_step)

    def is_in_time(cluster: Cluster) -> bool:
        return step_times.least_of(cluster) <= limit_s and step_times.of(cluster) <= limit_s

    too_few = 0
    for cluster in _numbers_of_gpus(workload):
        if is_in_time(cluster):
            return first_between(too_few, cluster, is_in_time)
        too_few = cluster.num_gpus
        if too_few >= most_gpus:
            break
    return None


def _numbers_of_gpus(workload: Workload) -> tuple[Cluster, ...]:
    return (*smaller_clusters(workload.cluster), *larger_clusters(workload.cluster))


class _StepTimes:
    """Seconds of a step on numbers of GPUs, each looked at once; infinite where no plan fits."""

    def __init__(self, workload: Workload, deadline: Deadline) -> None:
        self.workload, self.deadline = workload, deadline
        self.known: dict[int, float] = {}
        self.known_least: dict[int, float] = {}

    def of(self, cluster: Cluster) -> float:
        """Return the step of the best plan. Raises `KeyboardInterrupt` where the search was stopped."""
        if cluster.num_gpus not in self.known:
            self.known[cluster.num_gpus] = self._searched(cluster)
        return self.known[cluster.num_gpus]

    def least_of(self, cluster: Cluster) -> float:
        """Return what no plan goes below."""
        if cluster.num_gpus not in self.known_least:
            part = replace(self.workload, cluster=cluster)
            least = least_time_s(part, executor=self.deadline.executor, fixed=self.deadline.fixed)
            self.known_least[cluster.num_gpus] = least
        return self.known_least[cluster.num_gpus]

    def _searched(self, cluster: Cluster) -> float:
        try:
            found = search(
                replace(self.workload, cluster=cluster),
                objective=self.deadline.objective,
                num_candidates=1,
                executor=self.deadline.executor,
                fixed=self.deadline.fixed,
            )
        except (NoPlanFitsError, PlanError):  # or what is fixed cannot be had on so many
            return float("inf")
        if found.is_partial:  # there is no best so far of numbers of GPUs
            raise KeyboardInterrupt
        return found.best.step.step_time_s


def _too_slow(step_times: _StepTimes, deadline: Deadline) -> tuple[Workload, str | None]:
    workload, tokens = step_times.workload, deadline.tokens
    best_s = float("inf")
    for cluster in sorted(_numbers_of_gpus(workload), key=step_times.least_of):
        if step_times.least_of(cluster) < best_s:
            best_s = min(best_s, step_times.of(cluster))
    if best_s == float("inf"):
        return workload, None  # the search says what is lacking
    best = tokens / workload.training.tokens_per_step * best_s / _SECONDS_PER_DAY
    raise NoPlanFitsError(
        f"no number of GPUs tried trains on {format_count(tokens)} tokens in {format_days(deadline.days)}: the best "
        f"takes {format_days(best)}",
        hint="give a larger --global-batch, which more GPUs share out, or more days",
        is_near=best <= _MOST_GAIN * deadline.days,
    )
