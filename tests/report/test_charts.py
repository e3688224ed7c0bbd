"""What the charts of a report are drawn from."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from paraplan.cli.estimate_tables import shown_stages as stages_in_text
from paraplan.cost.estimate import estimate_plan
from paraplan.cost.timeline import StepTimeline, step_timeline
from paraplan.cost.workload import Workload
from paraplan.plan.parallel import ParallelPlan
from paraplan.plan.ranks import RankGrid
from paraplan.report.charts import memory_chart, shown_stages
from paraplan.report.rank_map import axis_groups, map_table
from paraplan.report.timeline_chart import shown_rows, timeline_chart
from paraplan.units import GIB

MakeWorkload = Callable[..., Workload]
PIPELINE = ParallelPlan(dp=2, pp=4, num_microbatches=8, pipeline_schedule="1f1b")


def timeline(workload: MakeWorkload, plan: ParallelPlan) -> StepTimeline:
    load = workload("gpt2", global_batch_size=plan.global_batch_size)
    return step_timeline(load, estimate_plan(load, plan))


def bars_of(panel: dict[str, Any]) -> list[dict[str, Any]]:
    bars: list[dict[str, Any]] = panel["data"]["values"]
    return bars


def test_the_bars_of_a_rank_fill_the_step_without_a_gap(workload: MakeWorkload) -> None:
    found = timeline(workload, PIPELINE)
    panel = timeline_chart(found, width=1040)
    for rank in range(4):
        row = [bar for bar in bars_of(panel) if bar["row"] == f"rank {rank}"]
        assert row[0]["start"] == pytest.approx(0.0)
        assert row[-1]["end"] == pytest.approx(found.step_time_s * 1e3)  # milliseconds: the step is short
        assert all(later["start"] == pytest.approx(earlier["end"]) for earlier, later in pairwise(row))


def test_a_long_step_is_drawn_as_its_beginning_and_its_end(workload: MakeWorkload) -> None:
    found = timeline(workload, PIPELINE.replace(num_microbatches=256))
    first, last = timeline_chart(found, width=340)["vconcat"]
    assert first["title"].startswith("the first ")
    assert "forward" in {bar["kind"] for bar in bars_of(first)}
    assert {"backward", "optimizer"} <= {bar["kind"] for bar in bars_of(last)}


def test_what_follows_the_passes_does_not_push_them_out(workload: MakeWorkload) -> None:
    found = timeline(workload, PIPELINE.replace(num_microbatches=256))
    slow = replace(found, optimizer_s=found.operations_end_s, step_time_s=2 * found.operations_end_s)
    _, last = timeline_chart(slow, width=340)["vconcat"]
    assert "around the end of the passes" in last["title"]
    assert "backward" in {bar["kind"] for bar in bars_of(last)}


def test_long_pipelines_show_their_ends() -> None:
    assert shown_rows(4) == [0, 1, 2, 3]
    assert shown_rows(64) == [*range(8), *range(56, 64)]


def test_the_fullest_stage_of_a_long_pipeline_is_drawn(workload: MakeWorkload) -> None:
    load = workload("gpt2", global_batch_size=64)
    stage = estimate_plan(load, PIPELINE.replace(num_microbatches=32)).memory[0]
    long = [stage.replace(pipeline_stage=number, total_bytes=1000 + (number == 20)) for number in range(40)]
    for drawn in (shown_stages(long), stages_in_text(long)):
        numbers = [each.pipeline_stage for each in drawn]
        assert numbers == sorted(set(numbers))
        assert {0, 1, 20, 39} <= set(numbers)
    assert len(shown_stages(long)) == len(shown_stages(long[:16])) == 16


def test_the_parts_of_a_bar_sum_to_the_memory_of_its_stage(workload: MakeWorkload) -> None:
    estimate = estimate_plan(workload("gpt2", global_batch_size=16), PIPELINE)
    rows = memory_chart(estimate, capacity_bytes=80 * GIB)["layer"][0]["data"]["values"]
    for stage in shown_stages(estimate.memory):
        mine = [row["gib"] for row in rows if row["stage"].startswith(f"stage {stage.pipeline_stage}:")]
        assert sum(mine) * GIB == pytest.approx(stage.total_bytes)


@pytest.mark.parametrize("order", [("pp", "dp", "cp", "tp"), ("dp", "pp", "cp", "tp")])
def test_ranks_of_one_number_are_one_group_of_the_grid(order: Any) -> None:
    plan = PIPELINE.replace(tp=2, rank_order=order)
    grid = RankGrid.of_plan(plan)
    for groups in axis_groups(plan):
        for group in grid.groups(groups.axis):
            assert len({groups.group_of[rank] for rank in group}) == 1
        assert len(set(groups.group_of)) == len(grid.groups(groups.axis))
        numbers = re.findall(r"<td style=[^>]*>(\d+)</td>", map_table(groups, ranks_per_node=8))
        assert numbers == [str(number) for number in groups.group_of]


def test_a_map_of_many_machines_shows_the_first_and_the_last() -> None:
    plan = ParallelPlan(dp=256, num_microbatches=1)
    text = map_table(axis_groups(plan.replace(tp=2))[0], ranks_per_node=8)
    assert re.findall(r"node (\d+)", text) == [str(node) for node in (*range(8), *range(56, 64))]
    assert "machines between" in text
