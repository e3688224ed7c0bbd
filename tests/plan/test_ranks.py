from __future__ import annotations

from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paraplan.errors import PlanError
from paraplan.plan.parallel import MEGATRON_RANK_ORDER, ParallelPlan
from paraplan.plan.ranks import RankGrid

degrees = st.integers(min_value=1, max_value=4)
orders = st.sampled_from(list(permutations(MEGATRON_RANK_ORDER)))


@st.composite
def grids(draw: st.DrawFn) -> RankGrid:
    pp = draw(degrees)
    plan = ParallelPlan(
        dp=draw(degrees),
        tp=draw(degrees),
        cp=draw(degrees),
        pp=pp,
        pipeline_schedule="1f1b" if pp > 1 else None,
        rank_order=draw(orders),
    )
    return RankGrid.of_plan(plan)


@given(grids())
def test_every_rank_is_in_exactly_one_group_of_each_axis(grid: RankGrid) -> None:
    for axis in grid.axes:
        members = [rank for group in grid.groups(axis) for rank in group]
        assert sorted(members) == list(range(grid.world_size))


@given(grids())
def test_coordinates_and_rank_are_inverse(grid: RankGrid) -> None:
    for rank in range(grid.world_size):
        assert grid.rank(**grid.coordinates(rank)) == rank


@given(grids())
def test_members_of_a_group_differ_on_their_axis_alone(grid: RankGrid) -> None:
    for axis in grid.axes:
        for group in grid.groups(axis):
            coordinates = [grid.coordinates(rank) for rank in group]
            assert [place[axis] for place in coordinates] == list(range(grid.size(axis)))
            others = [{name: value for name, value in place.items() if name != axis} for place in coordinates]
            assert all(place == others[0] for place in others)


def test_megatron_order_puts_tensor_parallel_ranks_side_by_side() -> None:
    grid = RankGrid.of_plan(ParallelPlan(dp=2, tp=2, pp=2, pipeline_schedule="1f1b"))
    assert grid.groups("tp") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert grid.groups("dp") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert grid.groups("pp") == [[0, 4], [1, 5], [2, 6], [3, 7]]


def test_a_rank_outside_the_world_is_an_error_with_both_numbers() -> None:
    with pytest.raises(PlanError, match=r"rank 4 .* 4 ranks"):
        RankGrid.of_plan(ParallelPlan(dp=4)).coordinates(4)
