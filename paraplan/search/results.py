"""What a search answers: decisions of the tree, ranked plans, and why the others were left out."""

from __future__ import annotations

from paraplan.cost.estimate import PlanEstimate
from paraplan.plan.parallel import ParallelPlan
from paraplan.records import Record


class Decision(Record):
    """One rule of the decision tree, what it chose, and the numbers that decided."""

    rule: str
    outcome: str
    because: str

    @property
    def question(self) -> str:
        """The rule as what stands before its outcome."""
        return self.rule if self.rule.endswith("?") else f"{self.rule}:"


class Rejection(Record):
    """How many plans one reason ruled out."""

    reason: str
    count: int


class Candidate(Record):
    """One ranked plan, as far as the table shows it. `in_tree` says that the decision tree names its family."""

    plan: ParallelPlan
    in_tree: bool
    step_time_s: float
    tokens_per_s_per_gpu: float
    mfu: float
    peak_memory_bytes: int


class SearchResult(Record):
    """The answer of a search.

    `best` is the plan to use, `second` the best of those with other axes or ZeRO stage, where it was asked for.
    `fastest` stands beside it where a plan outside the tree's families is faster by over 2 %. `candidates` are the
    best plan of each choice of axes and ZeRO stage, fastest first; `front` the plans that no other one beats in both
    time and memory, and `cloud` some of all that were priced, where they were asked for. `remark` says why a plan that
    is not the fastest is recommended.
    `plans_considered` counts the whole space, `plans_priced` those whose memory was computed, `times_priced` those
    whose time was: the others cannot be among the best. `is_runnable` is False for plans that were made for another
    framework, which paraplan does not launch.
    """

    decisions: tuple[Decision, ...]
    families: tuple[str, ...]
    best: PlanEstimate
    fastest: PlanEstimate | None
    candidates: tuple[Candidate, ...]
    rejections: tuple[Rejection, ...]
    plans_considered: int
    plans_priced: int = 0
    times_priced: int = 0
    second: PlanEstimate | None = None
    front: tuple[Candidate, ...] = ()
    cloud: tuple[Candidate, ...] = ()
    remark: str | None = None
    is_runnable: bool = True
