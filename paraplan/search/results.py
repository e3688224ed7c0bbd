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
    """The answer of a search: `best` is the plan to use.

    `fastest` stands beside it where a plan outside the tree's families is faster by over 2 %. `candidates` are the
    best plan of each choice of axes and ZeRO stage, fastest first.
    """

    decisions: tuple[Decision, ...]
    families: tuple[str, ...]
    best: PlanEstimate
    fastest: PlanEstimate | None
    candidates: tuple[Candidate, ...]
    rejections: tuple[Rejection, ...]
    plans_considered: int
