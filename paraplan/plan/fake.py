"""Finding of one rank of a fake launch: its memory by parts, and what it would have sent."""

from __future__ import annotations

from paraplan.plan.memory_record import MemoryParts
from paraplan.plan.parallel import ParallelPlan
from paraplan.plan.training import TrainingPrecision
from paraplan.records import Record

MOST_FAKE_RANKS = 1024
FAKE_VARIABLE = "PARAPLAN_FAKE"
"""Environment variable that makes `runtime.init` return a job without values, which writes its report to that file."""


class CountedCollective(Record):
    """Calls of one operation in one group in a step. `total_bytes` sums their messages, as nccl-tests count them.

    A message is what a rank gives or gets of the operation, whichever is more.
    """

    operation: str
    group: str
    num_ranks: int
    count: int
    total_bytes: int


class _FakeRank(Record):
    rank: int
    world_size: int
    pipeline_stage: int
    plan: ParallelPlan | None
    precision: TrainingPrecision
    num_parameters: int


class FakeRankReport(MemoryParts, _FakeRank):
    """Bytes of one rank at the moment when most were allocated; the parts sum to `total_bytes`.

    `phase` is what the rank was doing then. `num_parameters` are those of the whole model. `collectives` are those of
    the second step, the first of which makes buffers and groups. `left_out` says what of the script was not run.
    `plan` is None for a script that shards by torch's own means. `host` is what the rank holds in the host's memory of
    the model, its gradients and the optimizer's states, None where that is nothing; `is_on_cpu` says that all is there.
    """

    phase: str
    host: MemoryParts | None = None
    is_on_cpu: bool = False
    collectives: tuple[CountedCollective, ...] = ()
    left_out: tuple[str, ...] = ()
