from __future__ import annotations

import re
from typing import Any

import pytest

from paraplan.errors import PlanError
from paraplan.plan.parallel import ParallelPlan, micro_batches


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"pp": 2}, "pp=2 needs a pipeline_schedule, such as '1f1b'"),
        ({"pipeline_schedule": "1f1b"}, "a schedule goes with pp > 1"),
        ({"sequence_parallel": True}, "needs tp > 1"),
        ({"zero_stage": 1}, "nothing to shard over"),
        ({"zero_stage": 3, "offload": "optimizer"}, "one process takes zero_stage=3 with offload=parameters"),
        ({"zero_stage": 2, "offload": "parameters"}, "nothing to shard over"),
        ({"zero_stage": 3, "offload": "parameters", "tp": 2}, "nothing to shard over"),
        ({"zero_stage": 3, "dp": 4, "zero_shards": 3}, "must divide dp"),
        ({"dp": 4, "zero_shards": 2}, "goes with ZeRO alone"),
        ({"dp": 2, "devices_per_process": 2}, "DataParallel is one process"),
        ({"pp": 2, "dp": 2, "pipeline_schedule": "1f1b", "zero_stage": 3}, "only stages 0 and 1"),
        ({"pp": 2, "pipeline_schedule": "1f1b", "stage_blocks": (1, 2, 3)}, "names 3 stages, but the plan has 2"),
        ({"pp": 2, "pipeline_schedule": "1f1b", "stage_blocks": (-1, 3)}, "no stage has fewer than 0"),
        ({"rank_order": ("pp", "dp", "tp", "tp")}, "each of pp, dp, cp and tp once"),
        ({"dp": 4, "ep": 3}, "ep=3 does not divide dp=4 x cp=1"),
        ({"dp": 4, "zero_stage": 3, "zero_shards": 2, "ep": 2}, "sharded over all replicas"),
        ({"dp": 0}, "greater than 0"),
        ({"data_parallel": 2}, "no field 'data_parallel'"),
    ],
)
def test_plans_that_contradict_themselves_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=re.escape(message)):
        ParallelPlan(**fields)


def test_one_process_gathers_its_parameters_from_the_host() -> None:
    plan = ParallelPlan(zero_stage=3, offload="parameters")
    assert plan.gathers_alone
    assert plan.describe() == "one process, ZeRO-3, micro-batch 1 x 1, offload parameters"
    assert not plan.replace(dp=2).gathers_alone


def test_a_change_is_validated_again() -> None:
    plan = ParallelPlan(dp=2, zero_stage=1)
    with pytest.raises(PlanError, match="nothing to shard over"):
        plan.replace(dp=1)


def test_global_batch_is_micro_batch_times_micro_batches_times_dp() -> None:
    assert ParallelPlan(dp=4, micro_batch_size=2, num_microbatches=8).global_batch_size == 64
    assert micro_batches(64, dp=4, micro_batch_size=2) == 8


def test_a_batch_that_does_not_divide_names_the_nearest_that_do() -> None:
    with pytest.raises(PlanError, match="global batch of 60 or 66"):
        micro_batches(64, dp=3, micro_batch_size=2)


def test_a_plan_describes_itself_in_the_words_of_the_field() -> None:
    plan = ParallelPlan(dp=4, pp=2, zero_stage=1, pipeline_schedule="1f1b", num_microbatches=8, recompute="full")
    assert plan.describe() == "dp4 x pp2, ZeRO-1, 1f1b, micro-batch 1 x 8, recompute full"
    assert ParallelPlan().describe() == "one process, micro-batch 1 x 1"
    uneven = plan.replace(stage_blocks=(17, 15))
    assert uneven.describe() == "dp4 x pp2, ZeRO-1, 1f1b uneven stages, micro-batch 1 x 8, recompute full"
    assert ParallelPlan(dp=4, cp=2, ep=8).describe() == "dp4 x cp2 x ep8, DDP, micro-batch 1 x 1"
