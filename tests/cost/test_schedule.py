"""Pipelines: the simulation against what papers say, and the forms that a search uses against the simulation."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paraplan.cost.pipeline.bubble import Pipelines, StageRuns, pipeline_s
from paraplan.cost.pipeline.simulation import PassSeconds, Timeline, simulate_pipeline
from paraplan.cost.plan_table import SCHEDULES, ScheduleCode
from paraplan.errors import PlanError
from paraplan.plan.parallel import ScheduleName


def equal_stages(count: int) -> PassSeconds:
    """Return stages of one second forward and two backward, half of that for weights."""
    return PassSeconds(np.full(count, 1.0), np.full(count, 2.0), np.full(count, 1.0))


def simulated(schedule: ScheduleName, *, ranks: int, count: int, virtual: int = 1) -> Timeline:
    return simulate_pipeline(schedule, equal_stages(ranks * virtual), num_ranks=ranks, num_microbatches=count)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_equal_stages_leave_a_bubble_of_p_minus_1_micro_batches(schedule: ScheduleName) -> None:
    # Narayanan et al. 2021, section 2.2.1: (p - 1) (t_f + t_b).
    assert simulated(schedule, ranks=4, count=8).end_s == pytest.approx((8 + 3) * 3.0)


@pytest.mark.parametrize(("virtual", "ranks", "count"), [(2, 4, 8), (4, 4, 8), (2, 8, 32)])
def test_interleaving_divides_the_bubble_by_the_chunks(virtual: int, ranks: int, count: int) -> None:
    # Narayanan et al. 2021, section 2.2.2: (p - 1) (t_f + t_b) / v, with chunks of a v-th of a stage.
    end_s = simulated("interleaved_1f1b", ranks=ranks, count=count, virtual=virtual).end_s
    assert end_s == pytest.approx(count * virtual * 3.0 + (ranks - 1) * 3.0)


def test_zero_bubble_leaves_what_the_paper_says() -> None:
    # Qi et al. 2024, section 2.2: (p - 1) (t_f + t_b - 2 t_w) for ZB-H1, t_b the gradient of the input: here 4 - 1.
    assert simulated("zero_bubble", ranks=4, count=8).end_s == pytest.approx(8 * 3.0 + 3 * (1.0 + 1.0 - 1.0))


def test_a_timeline_names_every_operation_once_and_in_time() -> None:
    timeline = simulated("zero_bubble", ranks=3, count=5, virtual=2)
    ends = {}
    for operations in timeline.ranks:
        for before, after in pairwise(operations):
            assert before.end_s <= after.start_s
        ends.update({(one.kind, one.micro_batch, one.virtual_stage): one for one in operations})
    assert len(ends) == 3 * 5 * 6
    assert timeline.busy_s(0) == pytest.approx(5 * 2 * 3.0)
    for (kind, micro_batch, stage), one in ends.items():
        if kind == "forward" and stage > 0:
            assert one.start_s >= ends["forward", micro_batch, stage - 1].end_s
        if kind == "backward" and stage < 5:
            assert one.start_s >= ends["backward", micro_batch, stage + 1].end_s
        if kind == "weight":
            assert one.start_s >= ends["backward", micro_batch, stage].end_s


def test_stages_that_do_not_divide_over_the_ranks_are_refused() -> None:
    with pytest.raises(PlanError, match="3 stages do not divide over 2"):
        simulate_pipeline("1f1b", equal_stages(3), num_ranks=2, num_microbatches=4)
    with pytest.raises(PlanError, match=r"10 micro-batches do not make equal rounds.*use 9 or 12"):
        simulate_pipeline("interleaved_1f1b", equal_stages(6), num_ranks=3, num_microbatches=10)


@st.composite
def pipelines(draw: st.DrawFn) -> Pipelines:
    """One pipeline of a wide set: ends of other length than the middle and two kinds of middle stages."""
    schedule = draw(st.sampled_from([name for name in SCHEDULES if name]))
    ranks = draw(st.integers(1, 12))
    virtual = draw(st.integers(2, 3)) if schedule == "interleaved_1f1b" and ranks > 1 else 1
    number = ranks * virtual
    count = draw(st.integers(1, 130))
    count -= count % ranks if virtual > 1 and count > ranks else 0
    larger = draw(st.integers(0, max(0, number - 2)))
    counts = [1, larger, number - 2 - larger, 1] if number > 1 else [1, 0, 0, 0]
    ratio = draw(st.floats(1.0, 3.0))
    factors = [draw(st.floats(0.4, 2.5)), draw(st.sampled_from([1.0, 1.25, 1.5])), 1.0, draw(st.floats(0.4, 2.5))]
    forward = np.array([factors]).T
    backward = forward * ratio
    backward[0] *= draw(st.floats(0.7, 1.4))
    backward[3] *= draw(st.floats(0.6, 1.4))
    return Pipelines(
        schedule=np.array([SCHEDULES.index(schedule) if ranks > 1 else 0]),
        pp=np.array([ranks]),
        virtual=np.array([virtual]),
        num_microbatches=np.array([count]),
        stages=StageRuns(
            counts=np.array([counts]).T,
            passes=PassSeconds(forward, backward, backward * draw(st.floats(0.3, 0.5))),
        ),
    )


def simulated_s(pipeline: Pipelines) -> float:
    """Return the seconds of a table of one pipeline, by simulation."""
    runs, counts = pipeline.stages, pipeline.stages.counts[:, 0]
    passes = runs.passes
    stages = PassSeconds(
        *(np.repeat(each[:, 0], counts) for each in (passes.forward_s, passes.backward_s, passes.weight_s))
    )
    return simulate_pipeline(
        SCHEDULES[pipeline.schedule[0]] or "gpipe",
        stages,
        num_ranks=int(pipeline.pp[0]),
        num_microbatches=int(pipeline.num_microbatches[0]),
    ).end_s


@settings(max_examples=60, deadline=None)
@given(pipelines())
def test_the_form_that_is_searched_with_is_within_a_percent_of_the_simulation(pipeline: Pipelines) -> None:
    expected_s = simulated_s(pipeline)
    assert pipeline_s(pipeline)[0] == pytest.approx(expected_s, rel=0.01)


def test_equal_pipelines_of_a_table_have_equal_times_and_others_their_own() -> None:
    runs = StageRuns(
        counts=np.array([[4, 4, 4]]),
        passes=PassSeconds(np.array([[1.0, 1.0, 2.0]]), np.array([[2.0, 2.0, 4.0]]), np.zeros((1, 3))),
    )
    schedule = np.full(3, ScheduleCode.ONE_FORWARD_ONE_BACKWARD)
    found = pipeline_s(Pipelines(schedule, np.full(3, 4), np.ones(3, dtype=np.int64), np.full(3, 8), runs))
    assert found.tolist() == pytest.approx([33.0, 33.0, 66.0])
