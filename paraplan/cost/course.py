"""The course of one step of one plan's pipeline: which rank does what when."""

from __future__ import annotations

import numpy as np

from paraplan.cost.blocks import block_costs
from paraplan.cost.schedule_simulation import StageSeconds, Timeline, simulate_pipeline
from paraplan.cost.stages import even_stage
from paraplan.cost.step import rank_seconds
from paraplan.cost.table import PlanTable
from paraplan.cost.workload import Workload
from paraplan.plan.parallel import ParallelPlan


def pipeline_course(workload: Workload, plan: ParallelPlan) -> Timeline | None:
    """Return every rank's operations of one step with their start and end, None for a plan without a pipeline.

    Seconds are those of the estimate: of each rank's blocks, with recomputation, what tensor parallelism adds and the
    sends that are waited for. The chunks of a rank take equal shares of its time, embedding and head apart.
    """
    if plan.pipeline_schedule is None:
        return None
    table = PlanTable.of_plans([plan])
    costs = block_costs(workload, table)
    bounds = None if plan.stage_blocks is None else np.cumsum([0, *plan.stage_blocks])
    stages = [even_stage(table, workload.model.num_blocks, np.array([rank]), bounds) for rank in range(plan.pp)]
    ranks = rank_seconds(workload, table, costs, stages)
    last = plan.num_stages - 1
    seconds = []
    for stage in range(plan.num_stages):
        rank = ranks[stage % plan.pp]
        end_s, chunks = float(rank.end_s[0]), plan.virtual_pipeline_size
        own_end_s = end_s if stage in (0, last) else 0.0
        # A third of embedding and head is their forward pass, a third the gradient of their weights.
        forward_s = (float(rank.forward_s[0]) - end_s / 3) / chunks + own_end_s / 3
        backward_s = (float(rank.backward_s[0]) - end_s * 2 / 3) / chunks + own_end_s * 2 / 3
        weight_s = (float(rank.weight_s[0]) - end_s / 3) / chunks + own_end_s / 3
        seconds.append(StageSeconds(forward_s=forward_s, backward_s=backward_s, weight_s=weight_s))
    schedule = plan.pipeline_schedule
    is_interleaved = schedule == "1f1b" and plan.virtual_pipeline_size > 1
    return simulate_pipeline(
        "interleaved_1f1b" if is_interleaved else schedule,
        seconds,
        num_ranks=plan.pp,
        num_microbatches=plan.num_microbatches,
    )
