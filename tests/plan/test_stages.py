"""Blocks over stages: even splits, and splits by cost that no other split beats."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paraplan.errors import PlanError
from paraplan.plan.parallel import ParallelPlan
from paraplan.plan.stages import assign_blocks, even_split, running_split, stage_blocks, stage_bounds


def slowest_stage(blocks: tuple[int, ...], costs: list[float], first_extra: float, last_extra: float) -> float:
    loads = [sum(costs[start:end]) for start, end in stage_bounds(blocks)]
    loads[0] += first_extra
    loads[-1] += last_extra
    return max(loads)


def all_splits(num_blocks: int, num_stages: int) -> list[tuple[int, ...]]:
    cuts = combinations(range(1, num_blocks), num_stages - 1)
    return [tuple(end - start for start, end in pairwise((0, *cut, num_blocks))) for cut in cuts]


@given(
    costs=st.lists(st.floats(0.1, 10), min_size=1, max_size=9),
    stages=st.integers(1, 4),
    first_extra=st.floats(0, 5),
    last_extra=st.floats(0, 20),
)
def test_no_split_has_a_faster_slowest_stage(
    costs: list[float], stages: int, first_extra: float, last_extra: float
) -> None:
    num_stages = min(stages, len(costs))
    split = assign_blocks(costs, num_stages, first_extra=first_extra, last_extra=last_extra)
    assert sum(split) == len(costs)
    assert min(split) >= 1
    best = min(slowest_stage(other, costs, first_extra, last_extra) for other in all_splits(len(costs), num_stages))
    assert slowest_stage(split, costs, first_extra, last_extra) == pytest.approx(best)


@given(num_blocks=st.integers(1, 64), stages=st.integers(1, 16))
def test_equal_blocks_without_ends_are_split_evenly(num_blocks: int, stages: int) -> None:
    num_stages = min(stages, num_blocks)
    assert assign_blocks([1.0] * num_blocks, num_stages) == even_split(num_blocks, num_stages)


def test_a_heavy_head_takes_blocks_off_the_last_stage() -> None:
    # 8 blocks of 1 and a head of 2: 5 | 3 + 2 is the only split whose slowest stage does 5.
    assert assign_blocks([1.0] * 8, 2, last_extra=2.0) == (5, 3)


def test_the_first_stages_take_the_remainder_of_an_even_split() -> None:
    assert even_split(7, 3) == (3, 2, 2)


def test_a_plan_without_stage_blocks_is_split_evenly_and_one_with_them_as_it_says() -> None:
    plan = ParallelPlan(pp=2, pipeline_schedule="gpipe")
    assert stage_blocks(plan, 5) == (3, 2)
    assert stage_blocks(plan.replace(stage_blocks=(1, 4)), 5) == (1, 4)


def test_stage_blocks_of_another_model_are_refused() -> None:
    plan = ParallelPlan(pp=2, pipeline_schedule="gpipe", stage_blocks=(1, 4))
    with pytest.raises(PlanError, match="sum to 5, and the model has 6 blocks"):
        stage_blocks(plan, 6)


def test_fewer_blocks_than_stages_are_refused() -> None:
    with pytest.raises(PlanError, match="3 pipeline stages for the 2 blocks"):
        assign_blocks([1.0, 1.0], 3)


def test_a_stage_without_a_block_is_refused() -> None:
    plan = ParallelPlan(pp=2, pipeline_schedule="1f1b", stage_blocks=(3, 0))
    with pytest.raises(PlanError, match="leaves a stage without a block"):
        stage_blocks(plan, 3)


@pytest.mark.parametrize(
    ("num_stages", "blocks"),
    [(2, (18, 14)), (4, (9, 9, 8, 6)), (16, (3, *(2,) * 6, 3, *(2,) * 7, 0)), (1, (32,))],
)
def test_a_running_sum_of_costs_gives_the_first_stages_more(num_stages: int, blocks: tuple[int, ...]) -> None:
    # Llama-3-8B with a vocabulary of 131,072, as nanotron counts it: a head is as large as 2.2 blocks.
    hidden, inner = 4096, 14336
    block, head = 4 * hidden**2 + 3 * inner * hidden, 131072 * hidden
    assert running_split(32, num_stages, block_cost=block, head_cost=head) == blocks


@given(blocks=st.integers(1, 96), stages=st.integers(1, 64), head=st.floats(0, 10))
def test_a_running_sum_places_every_block(blocks: int, stages: int, head: float) -> None:
    found = running_split(blocks, stages, block_cost=1.0, head_cost=head)
    assert len(found) == stages
    assert sum(found) == blocks
