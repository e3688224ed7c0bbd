"""Streams that run beside each other, counted by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paraplan.cost.streams import BlockSeconds, Task, run_streams, sharded_tasks


def test_streams_slow_each_other_while_both_work() -> None:
    both = [Task("compute", 3.0), Task("communication", 1.0)]
    assert run_streams(both, slowdown=1.0).total_s == pytest.approx(3.0)
    times = run_streams(both, slowdown=1.2)
    assert times.total_s == pytest.approx(1.2 + 2.0)
    assert times.busy_s == pytest.approx({"compute": 3.2, "communication": 1.2})
    assert times.ends_s == pytest.approx((3.2, 1.2))


def test_a_task_waits_for_those_that_it_names_and_for_its_stream() -> None:
    tasks = [Task("communication", 1.0), Task("compute", 2.0, after=(0,)), Task("communication", 1.0, after=(1,))]
    assert run_streams(tasks, slowdown=2.0).total_s == pytest.approx(4.0)
    with pytest.raises(ValueError, match=r"tasks \[0, 1\] wait for each other"):
        run_streams([Task("compute", 1.0, after=(1,)), Task("communication", 1.0, after=(0,))], slowdown=1.0)


def test_gathers_hide_behind_the_neighbour_and_the_first_and_the_last_do_not() -> None:
    block = BlockSeconds(forward_s=1.0, backward_s=2.0, gather_s=0.5, reduce_s=0.5)
    tasks = sharded_tasks([block] * 3, num_microbatches=1)
    assert run_streams(tasks, slowdown=1.0).total_s == pytest.approx(0.5 + 3 * 3.0 + 0.5)


@given(
    st.lists(st.tuples(*[st.floats(0.0, 5.0)] * 4), min_size=1, max_size=6),
    st.integers(1, 3),
    st.floats(1.0, 1.5),
)
def test_a_step_is_no_shorter_than_each_stream_and_no_longer_than_all_in_a_row(
    rows: list[tuple[float, float, float, float]], count: int, slowdown: float
) -> None:
    tasks = sharded_tasks([BlockSeconds(*row) for row in rows], num_microbatches=count)
    total_s = run_streams(tasks, slowdown=slowdown).total_s
    by_stream = {name: sum(one.seconds for one in tasks if one.stream == name) for name in ("compute", "communication")}
    assert total_s >= max(by_stream.values()) - 1e-9
    assert total_s <= sum(by_stream.values()) * slowdown + 1e-9
