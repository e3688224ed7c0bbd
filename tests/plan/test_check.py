"""Smaller plans for a check: every axis stays, and the plan stays one that can be run."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from paraplan.plan.check import axes_of, smaller_plan, without
from paraplan.plan.parallel import ParallelPlan
from paraplan.plan.support import unsupported_reason

BIG = ParallelPlan(
    dp=16,
    tp=8,
    pp=8,
    zero_stage=1,
    sequence_parallel=True,
    pipeline_schedule="1f1b",
    micro_batch_size=4,
    num_microbatches=64,
    stage_blocks=(5, 4, 4, 4, 4, 4, 4, 3),
)


def test_a_large_plan_becomes_eight_ranks_with_all_its_axes() -> None:
    plan = smaller_plan(BIG, max_ranks=8)
    assert (plan.dp, plan.tp, plan.pp, plan.world_size) == (2, 2, 2, 8)
    assert plan.sequence_parallel
    assert plan.num_microbatches == 4
    assert plan.micro_batch_size == 2


@given(
    dp=st.integers(1, 64),
    tp=st.integers(1, 16),
    pp=st.integers(1, 16),
    count=st.integers(1, 64),
    ranks=st.integers(1, 16),
)
def test_axes_and_micro_batches_stay_and_the_plan_runs(dp: int, tp: int, pp: int, count: int, ranks: int) -> None:
    count = max(count, pp)
    schedule = "1f1b" if pp > 1 else None
    plan = ParallelPlan(dp=dp, tp=tp, pp=pp, pipeline_schedule=schedule, num_microbatches=count)
    small = smaller_plan(plan, max_ranks=ranks)
    assert axes_of(small) == axes_of(plan)
    assert small.world_size <= max(ranks, 2 ** len(axes_of(plan)) * 3)
    assert (small.num_microbatches > 1) == (count > 1)
    assert unsupported_reason(small) == unsupported_reason(plan)


def test_without_an_axis_goes_what_belongs_to_it() -> None:
    for axis in axes_of(BIG):
        assert axis not in axes_of(without(BIG, axis))
    assert without(BIG, "pp").pipeline_schedule is None
    assert not without(BIG, "tp").sequence_parallel
    assert without(BIG, "dp").zero_stage == 0
