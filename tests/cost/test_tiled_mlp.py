"""MLPs over tiles of a sequence: what they keep and cost, held against a published benchmark, and who has them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from paraplan.api.executors import executor_of
from paraplan.cost.blocks.saved_tensors import Shardings, kept_tensors, sharding_columns, tensor_bytes
from paraplan.cost.blocks.tiled_mlp import beside_mlp, tile_bytes
from paraplan.cost.estimate import PlanEstimate, estimate_plan
from paraplan.cost.plan_table import PlanTable
from paraplan.cost.workload import Workload
from paraplan.plan.executor import OWN_RUNTIME
from paraplan.plan.parallel import ParallelPlan
from paraplan.plan.stack import StackSettings
from paraplan.search.constraints import Constraints
from paraplan.search.levers import lacking, levers

MakeWorkload = Callable[..., Workload]
PLAN = ParallelPlan(dp=8, zero_stage=3, recompute="full")


def tiled(made: Workload, tile: int | None) -> Workload:
    return made.trained_as(made.training.replace(stack=StackSettings(mlp_tile=tile)))


def estimates(made: Workload, plan: ParallelPlan) -> tuple[PlanEstimate, PlanEstimate]:
    whole, parts = (estimate_plan(tiled(made, tile), plan) for tile in (None, 4096))
    return whole, parts


def test_a_tiled_mlp_holds_and_takes_what_ms_swift_measured(workload: MakeWorkload) -> None:
    """github.com/modelscope/ms-swift/pull/7090: FSDP2 on H800, 4096 x 12288, 131,072 tokens in 4 tiles."""
    made = tiled(workload("qwen3-8b", seq_length=131072, global_batch_size=8, attention="flash"), 32768)
    training, block = made.training, made.model.runs[0].block
    shardings = Shardings.of_columns(sharding_columns(PlanTable.of_plans([PLAN])), training)
    rest = beside_mlp(block, training)
    kept = {id(tensor) for tensor in rest.saved}
    inner = [one for one in kept_tensors(block, training, fused_kernels=False) if id(one) not in kept]
    sizes = [float(tensor_bytes(block, one, training, shardings, is_first=True)[0]) for one in inner]
    tile = float(tile_bytes(block, training, shardings, fused_kernels=False)[0])
    input_bytes = 131072 * 4096 * 2
    assert sum(sizes) + max(sizes) - (tile - input_bytes) == pytest.approx((22240 - 10176) * 1e6, rel=0.05)
    whole, parts = estimates(made, ParallelPlan(dp=8, zero_stage=3))
    mlp_share = (parts.step.step_time_s - whole.step.step_time_s) / (whole.step.compute_s)
    assert 0.0 < mlp_share < 0.42
    assert parts.peak_memory_bytes < whole.peak_memory_bytes


@pytest.mark.parametrize("train", ["full", "lora:r=16"])
@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
def test_tiles_save_memory_of_long_sequences_for_one_more_forward_pass(
    workload: MakeWorkload, train: str, recompute: str
) -> None:
    made = workload("llama-3-8b", seq_length=65536, global_batch_size=8, attention="flash", loss="liger", train=train)
    whole, parts = estimates(made, PLAN.replace(recompute=recompute))
    assert parts.peak_memory_bytes < 0.95 * whole.peak_memory_bytes
    assert whole.step.step_time_s < parts.step.step_time_s < 1.34 * whole.step.step_time_s


def test_blocks_with_experts_have_no_tiles(workload: MakeWorkload) -> None:
    made = workload("qwen3-30b-a3b", seq_length=65536, global_batch_size=8, attention="flash", loss="liger")
    whole, parts = estimates(made, PLAN)
    assert parts == whole


def test_the_lever_is_offered_by_who_has_it_and_told_of_who_has_not(workload: MakeWorkload) -> None:
    made = workload("llama-3-8b", seq_length=65536, global_batch_size=8)
    deepspeed, titan = (
        Workload.of(made.model, made.training, made.cluster, framework=name) for name in ("deepspeed", "torchtitan")
    )
    (lever,) = [one for one in levers(deepspeed, Constraints(), executor_of(deepspeed)) if "mlp_tile" in one.options]
    assert lever.options == "--stack mlp_tile=4096"
    assert lacking(lever, deepspeed, executor_of(deepspeed)) is None
    assert "over whole sequences" in (lacking(lever, titan, executor_of(titan)) or "")
    assert lacking(lever, made, OWN_RUNTIME) is None
    short = workload("llama-3-8b", seq_length=4096, global_batch_size=8)
    assert not [one for one in levers(short, Constraints(), OWN_RUNTIME) if "mlp_tile" in one.options]
