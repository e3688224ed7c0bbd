"""Linear layers below 16 bits, and power limits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paraplan.cost.estimate import evaluate_plan
from paraplan.cost.workload import Workload
from paraplan.errors import NoPlanFitsError, PlanError, UnsupportedPlanError
from paraplan.hardware.catalogue.profile_files import cluster_from_profile, load_gpu
from paraplan.model.reader import read_model
from paraplan.model.weight_formats import WeightFormat
from paraplan.plan.executor import OWN_RUNTIME
from paraplan.plan.parallel import ParallelPlan
from paraplan.plan.support import check_supported
from paraplan.plan.training import Fp8Recipe, LinearPrecision, TrainingSpec
from paraplan.search.search import search
from paraplan.search.verification import check_plan

MODEL = read_model("llama-3-8b")
PLAN = ParallelPlan(dp=8, zero_stage=1, num_microbatches=8)


def made(machine: str, linear: LinearPrecision = "16bit") -> Workload:
    training = TrainingSpec(global_batch_size=64, seq_length=4096, attention="flash", linear_precision=linear)
    return Workload.of(MODEL, training, cluster_from_profile(machine), framework="megatron-core")


def compute_s(workload: Workload) -> float:
    return evaluate_plan(workload, PLAN).step.compute_s


def test_products_in_8_bits_are_as_much_faster_as_the_best_of_them_that_was_measured() -> None:
    narrow = made("dgx-h100", "fp8")
    assert narrow.constants.block_matmul_speedup == pytest.approx(1402.6 / 795, rel=1e-3)
    assert 0.5 < compute_s(narrow) / compute_s(made("dgx-h100")) < 0.85
    back = narrow.trained_as(narrow.training.replace(linear_precision="16bit"))
    assert compute_s(back) == compute_s(made("dgx-h100"))


def test_a_recipe_decides_what_is_moved_and_what_stays_in_16_bits() -> None:
    plain = made("dgx-b200", "fp8")

    def scaled(recipe: Fp8Recipe, *, compiled: bool = False) -> Workload:
        return plain.trained_as(plain.training.replace(fp8_recipe=recipe, compiled=compiled))

    delayed = scaled("delayed")
    assert compute_s(delayed) == compute_s(scaled("blockwise"))
    assert compute_s(plain) == compute_s(delayed)  # Megatron-Core's where nobody names another
    added_s = [compute_s(scaled(recipe)) - compute_s(delayed) for recipe in ("tensorwise", "rowwise")]
    assert added_s[1] == pytest.approx(2 * added_s[0], rel=1e-6)  # 4 bytes more than the 4 of one pass, and 2
    compiled = scaled("tensorwise", compiled=True).constants.quantizing_bytes
    assert compiled == delayed.constants.quantizing_bytes  # the maximum is found in the operation before
    half = scaled("rowwise_with_gw_hp")
    assert compute_s(half) > compute_s(scaled("rowwise"))
    assert plain.constants == half.trained_as(plain.training).constants
    with pytest.raises(PlanError, match="scaled rowwise stand beside linear layers in 16bit"):
        TrainingSpec(global_batch_size=8, seq_length=128, fp8_recipe="rowwise")


def test_inputs_are_kept_in_8_bits() -> None:
    wide, narrow = (evaluate_plan(made("dgx-b200", linear), PLAN) for linear in ("16bit", "mxfp8"))
    assert narrow.memory[0].activation_bytes < wide.memory[0].activation_bytes
    training = made("dgx-b200", "mxfp8").training
    kept = [
        evaluate_plan(Workload.of(MODEL, each, cluster_from_profile("dgx-b200"), framework="fsdp"), PLAN).memory[0]
        for each in (training, training.replace(linear_precision="16bit"))
    ]
    assert kept[0].activation_bytes == kept[1].activation_bytes  # torchao casts inputs again


def test_weights_that_are_gathered_in_8_bits_take_half_of_the_links_and_of_the_memory() -> None:
    plan = PLAN.replace(zero_stage=3)
    training = made("dgx-h100", "fp8").training.replace(fp8_recipe="tensorwise", loss="cut")  # blocks are the peak
    narrow, wide = (
        evaluate_plan(Workload.of(MODEL, each, cluster_from_profile("dgx-h100"), framework="torchtitan"), plan)
        for each in (training.replace(fp8_gather=True), training)
    )
    assert 0.6 < narrow.step.data_parallel_wire_s / wide.step.data_parallel_wire_s < 0.9
    saved = wide.memory[0].parameter_bytes - narrow.memory[0].parameter_bytes
    block = MODEL.runs[0].block.num_parameters
    assert saved == pytest.approx(2 * block, rel=0.01)  # two blocks, of a byte an element less
    with pytest.raises(PlanError, match="scaled rowwise have no scale that both"):
        training.replace(fp8_gather=True, fp8_recipe="rowwise")
    with pytest.raises(PlanError, match="gathered in 8 bits stand beside linear layers in 16bit"):
        TrainingSpec(global_batch_size=8, seq_length=128, fp8_gather=True)


def test_a_gpu_without_such_products_refuses_them_with_what_it_has() -> None:
    with pytest.raises(PlanError, match="has no matrix products in mxfp8") as refused:
        made("dgx-h100", "mxfp8")
    assert refused.value.hint == "use --precision bf16 or fp8 in its place"
    with pytest.raises(PlanError, match="has no matrix products in fp8"):
        made("dgx-a100", "fp8")
    with pytest.raises(PlanError, match="precision is fp32"):
        TrainingSpec(global_batch_size=8, seq_length=128, precision="fp32", linear_precision="fp8")


@pytest.mark.parametrize("stored", ["nf4", "nf4:double", "int8", "mxfp4"])
def test_quantized_weights_are_multiplied_in_16_bits_alone(stored: WeightFormat) -> None:
    with pytest.raises(PlanError, match=f"weights in {stored} are multiplied in 16 bits"):
        TrainingSpec(
            global_batch_size=8, seq_length=128, train="lora:r=16", base_weights=stored, linear_precision="fp8"
        )
    TrainingSpec(global_batch_size=8, seq_length=128, train="lora:r=16", base_weights="fp8", linear_precision="fp8")


@pytest.mark.parametrize("load", [0.0, float("nan"), float("inf"), 1e308])
def test_a_load_of_experts_that_no_ranks_have_is_refused(load: float) -> None:
    with pytest.raises(PlanError, match="expert_load"):
        TrainingSpec(global_batch_size=8, seq_length=128, expert_load=load)


def test_a_plan_in_a_format_that_torchao_has_not_is_refused_by_all_that_starts_the_runtime() -> None:
    workload = Workload.of(MODEL, made("dgx-b200", "mxfp8").training, cluster_from_profile("dgx-b200"))
    with pytest.raises(UnsupportedPlanError, match="linear_precision='mxfp8'"):
        check_supported(PLAN, training=workload.training)
    checked = check_plan(workload, PLAN, tolerance=0.05)
    (found,) = (one for one in checked.findings if one.name == "supported")
    assert not found.passed
    assert "--linear-precision mxfp8" in found.message
    with pytest.raises(NoPlanFitsError, match="the runtime has torchao's layers, which are in fp8") as refused:
        search(workload)
    assert refused.value.hint is not None
    assert "--linear-precision mxfp8" in refused.value.hint


def test_paraplans_runtime_multiplies_in_fp8() -> None:
    assert OWN_RUNTIME.reason_of(PLAN, made("dgx-h100", "fp8").training, 32) is None


def test_a_power_limit_slows_products_as_was_measured() -> None:
    whole = made("dgx-h100")
    limited = replace(whole, cluster=whole.cluster.replace(gpu=whole.cluster.gpu.replace(power_limit_w=500)))
    assert 1.0 < compute_s(limited) / compute_s(whole) < 700 / 500
    blackwell = load_gpu("rtx-pro-6000-blackwell").replace(board_power_w=600, power_limit_w=400)
    assert 217 / 317 < blackwell.clock_share < 368 / 513  # TFLOP/s in bf16 and in fp8
    assert whole.cluster.gpu.replace(power_limit_w=800).clock_share == 1.0
