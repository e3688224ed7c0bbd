from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paraplan.cost.capacity import FitRow, largest_layer, what_fits
from paraplan.cost.estimate import evaluate_plan
from paraplan.cost.workload import Workload
from paraplan.hardware.catalogue.profile_files import cluster_from_profile
from paraplan.hardware.link_speed import load_link_speeds
from paraplan.model.reader import read_model
from paraplan.plan.parallel import ParallelPlan
from paraplan.plan.training import TrainingSpec


def make(model: str = "llama-3-8b", profile: str = "dgx-h100", **training: object) -> Workload:
    values: dict[str, object] = {"global_batch_size": 64, "seq_length": 4096} | training
    cluster = cluster_from_profile(profile)
    return Workload.of(read_model(model), TrainingSpec.model_validate(values), cluster, load_link_speeds())


def fits(workload: Workload, plan: ParallelPlan, row: FitRow, *, dp: int, micro_batch_size: int) -> bool:
    """Whether a plan of one row fits, by the estimate that users see."""
    zero_stage = row.zero_stage if dp * plan.cp > 1 else 0
    chosen = plan.replace(dp=dp, zero_stage=zero_stage, recompute=row.recompute, micro_batch_size=micro_batch_size)
    return evaluate_plan(workload, chosen).fits


PLANS = (
    ParallelPlan(),
    ParallelPlan(tp=2, sequence_parallel=True),
    ParallelPlan(pp=4, pipeline_schedule="1f1b", num_microbatches=8, stage_blocks=(8, 9, 8, 7)),
)


@pytest.mark.parametrize("plan", PLANS, ids=ParallelPlan.describe)
def test_the_largest_micro_batch_fits_and_one_more_does_not(plan: ParallelPlan) -> None:
    workload = make()
    fixed = plan.tp * plan.pp * plan.cp
    for row in what_fits(workload, plan):
        dp = row.num_gpus // fixed
        size = row.largest_micro_batch
        assert size is None or fits(workload, plan, row, dp=dp, micro_batch_size=size)
        assert not fits(workload, plan, row, dp=dp, micro_batch_size=(size or 0) + 1)


@pytest.mark.parametrize("plan", PLANS, ids=ParallelPlan.describe)
def test_the_fewest_gpus_hold_it_and_one_replica_less_does_not(plan: ParallelPlan) -> None:
    workload = make()
    fixed = plan.tp * plan.pp * plan.cp
    for row in what_fits(workload, plan):
        if row.fewest_gpus is None:
            assert not fits(workload, plan, row, dp=64, micro_batch_size=1)
            continue
        dp = row.fewest_gpus // fixed
        assert fits(workload, plan, row, dp=dp, micro_batch_size=1)
        assert dp == 1 or not fits(workload, plan, row, dp=dp - 1, micro_batch_size=1)


def test_a_pipeline_goes_with_zero_0_and_1_alone() -> None:
    rows = what_fits(make(), PLANS[2])
    assert [(row.zero_stage, row.recompute) for row in rows] == [
        (stage, kind) for stage in (0, 1) for kind in ("none", "selective", "selective_ops", "full")
    ]


@given(seq_length=st.sampled_from([512, 2048, 8192]), dp=st.sampled_from([1, 8, 64]))
def test_more_sharding_and_more_recompute_never_hold_less(seq_length: int, dp: int) -> None:
    rows = what_fits(make(seq_length=seq_length), ParallelPlan(dp=dp))
    size = {(row.zero_stage, row.recompute): row.largest_micro_batch or 0 for row in rows}
    for stage in range(4):
        assert size[stage, "none"] <= size[stage, "selective"] <= size[stage, "full"]
        assert size[stage, "none"] <= size[stage, "selective_ops"] <= size[stage, "full"]
    for kind in ("none", "selective", "selective_ops", "full"):
        assert size[1, kind] <= size[2, kind] <= size[3, kind]


def test_the_largest_layer_of_a_model_that_a_gpu_cannot_hold_is_told() -> None:
    layer = largest_layer(make("gpt3-175b", "gtx-1080-ti-x4", seq_length=2048, precision="fp32"))
    block = 12 * 12_288**2 + 13 * 12_288  # weights, biases and norms
    assert (layer.num_parameters, layer.fits) == (block, False)
    assert layer.name == "block 0"
    assert layer.training_state_bytes == 16 * block  # AdamW in fp32: weight, gradient, two moments
    assert largest_layer(make("gpt2", seq_length=1024)).fits
