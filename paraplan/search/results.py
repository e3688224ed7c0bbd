"""Results of a search, and the order of better and worse plans."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np

from paraplan.cost.estimate import PlanEstimate
from paraplan.cost.plan_table import Floats, Ints, RecomputeCode
from paraplan.plan.parallel import AXES, ParallelPlan
from paraplan.records import Record
from paraplan.search.reasons import Reason

Objective = Literal["throughput", "fastest", "memory", "simplicity"]
Baseline = Literal["DDP", "FSDP", "guide"]


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
    """One ranked plan, as far as the table shows it."""

    plan: ParallelPlan
    in_tree: bool
    """True where Hugging Face's guide names its family."""
    step_time_s: float
    tokens_per_s_per_gpu: float
    mfu: float
    peak_memory_bytes: int
    fits: bool = True
    baseline: Baseline | None = None
    """Why it stands in the table beside the best: everybody knows what it is."""


class SearchResult(Record):
    """The answer of a search."""

    decisions: tuple[Decision, ...]
    """Questions of Hugging Face's decision tree, and the numbers that decided."""
    families: tuple[str, ...]
    """The families of plans that it names."""
    best: PlanEstimate
    """The plan to use: the simplest of those within the tolerance of the fastest."""
    fastest: PlanEstimate | None
    """The fastest plan, where a simpler one is recommended."""
    candidates: tuple[Candidate, ...]
    """The best plan of each choice of axes and ZeRO stage, fastest first."""
    baselines: tuple[Candidate, ...]
    """Plans that everybody knows, also where they do not fit: plain DDP and FSDP, and the guide's."""
    rejections: tuple[Rejection, ...]
    plans_considered: int
    """The whole space."""
    plans_priced: int = 0
    """Plans whose memory was computed."""
    times_priced: int = 0
    """Plans whose time was computed: the others cannot be among the best."""
    guide: PlanEstimate | None = None
    """The fastest plan of the guide's families, where the recommended plan is of none of them."""
    roomier: PlanEstimate | None = None
    """The fastest plan without offload that leaves `SPARE` of the memory, where the recommended one does not."""
    second: PlanEstimate | None = None
    """The best of those with other axes or ZeRO stage, where it was asked for."""
    second_reason: Reason | None = None
    """Why the recommended plan is chosen over that."""
    front: tuple[Candidate, ...] = ()
    """The plans that no other one beats in both time and memory, where they were asked for."""
    cloud: tuple[Candidate, ...] = ()
    """Some of all that were priced, where they were asked for."""
    is_partial: bool = False
    """Whether it was ended early, with the best of what was priced until then."""
    reason: Reason | None = None
    """Why the recommended plan is chosen over the fastest, None where it is that."""
    guide_reason: Reason | None = None
    """Why it is chosen over the guide's plan, None where it is of the guide's families."""
    plain_reason: Reason | None = None
    """Why it is chosen over plain FSDP or DDP where these come first, None where it is that or clearly faster."""
    remark: str | None = None
    """Both reasons in words, and what else is to know of the choice."""
    objective: Objective = "throughput"
    """Objective of the ranking."""
    is_runnable: bool = True
    """False for plans that were made for another framework, which paraplan does not launch."""


TOLERANCE: dict[Objective, float] = {"throughput": 0.1, "fastest": 0.0, "memory": 0.01, "simplicity": 0.2}
"""The simplest plan within this share of the best is recommended.

For throughput this is about the mean error of predicted step times over sources (the README has it): plans that are
closer cannot be told apart.
"""


RANGE = 0.27
"""On small rigs plans beyond plain data parallelism have to be faster by more. Judgement: between the mean error of
first predictions of unseen sources and the end of their range (`profiles/accuracy.json`)."""
SMALL_RIG = 8
"""GPUs of one node on which that holds for all trainings; for adapters it does on any."""
FEW_TOKENS, FEWEST_TOKENS = 4096, 2048
"""Tokens of one sequence on a rank of cp below which cp is rare, and unknown: of 124 published runs with cp
(`profiles/runs`), tests of frameworks apart, 7 leave fewer than the first number, and none fewer than the second."""
SHORTEST_SPLIT = 8192
"""Tokens of the shortest sequences that cp divides in a published run (`profiles/runs`): it is unknown below."""


FEW_VIRTUAL, USUAL_VIRTUAL = 4, 12
"""Virtual stages: of 50 published runs that interleave (`profiles/runs`) 18 have at most the first number, all but 4 at
most the second."""
IDLE = 30
"""The complexity of a pipeline in which ranks wait because there are fewer micro-batches than stages."""


def rank(objective: Objective, *, seconds: Floats, peak_bytes: Floats) -> Ints:
    """Return the rows in the order of an objective: by step time, or by peak memory; the other breaks ties."""
    keys = (seconds, peak_bytes) if objective == "memory" else (peak_bytes, seconds)
    return np.lexsort(keys).astype(np.int64)


def complexity(column: Callable[[str], Ints], *, seq_length: int, ops_by_default: bool = False) -> Ints:
    """Return how much there is to each plan, by its columns: what makes it harder to run, to debug and to explain.

    Each axis beside dp, offload, virtual stages, uneven stages, sharding in groups and ranks in another order than
    Megatron-LM's count 2, offloaded parameters 4, sharding over dp (ZeRO) and recompute of chosen operations 1: of
    these nothing where the framework does so by default.
    Context parallelism that leaves a rank fewer than `FEW_TOKENS` counts twice, and fewer than `FEWEST_TOKENS`, or of
    sequences below `SHORTEST_SPLIT`, once more each: it stands for data parallelism there.
    Virtual stages count again beyond `FEW_VIRTUAL` and `USUAL_VIRTUAL`. A pipeline that its micro-batches do not fill
    once is simple under no axes: it counts `IDLE`.
    """
    virtual = column("virtual")
    twice = [column(axis.name) > 1 for axis in AXES if axis.name != "dp"]
    twice += [(column("cp") > 1) & (seq_length // column("cp") < few) for few in (FEW_TOKENS, FEWEST_TOKENS)]
    twice.append((column("cp") > 1) & (seq_length < SHORTEST_SPLIT))
    twice += [
        virtual > 1,
        virtual > FEW_VIRTUAL,
        virtual > USUAL_VIRTUAL,
        *(column(name) > 0 for name in ("split", "shards", "order")),
    ]
    counted = sum((each.astype(np.int64) for each in twice), start=column("offload").astype(np.int64))
    chooses = (column("recompute") == RecomputeCode.SELECTIVE_OPS) & (not ops_by_default)
    levels = 2 * counted + (column("zero_stage") > 0) + chooses
    is_idle = column("num_microbatches") * virtual < column("pp")
    return np.asarray(np.where(is_idle, IDLE, levels))


SPARE = 0.1
"""Share of usable memory that a plan leaves which is named beside one that leaves less than half of that."""
ROOMY, BRIM = 0.97, 0.99
"""Shares of usable memory: plans that need more run out of it once in eight times, and every second time.

So they do if predictions are as far off as in `profiles/accuracy.json`.
"""


def faults(offload: Ints, memory_share: Floats) -> Floats:
    """Return what shares of its time a plan may take longer that lacks the faults of this one.

    Copies to the host are the least sure of all that is predicted: PCIe is shared, CPUs differ. `memory_share` is the
    peak over the usable memory; a run that ends out of memory has been for nothing.
    """
    return np.asarray(0.25 * (offload > 0) + 0.25 * (memory_share > ROOMY) + 0.75 * (memory_share > BRIM))
