from __future__ import annotations

from collections.abc import Callable

import pytest

from paraplan.cost.estimate import estimate_plan
from paraplan.cost.workload import Workload
from paraplan.errors import NoPlanFitsError
from paraplan.plan.executor import OWN_RUNTIME
from paraplan.plan.training import TrainingSpec
from paraplan.search.constraints import FREE
from paraplan.search.fine_tuning import fine_tuning_ways, trainings
from paraplan.search.recommendation import SearchRequest, recommendation
from paraplan.search.search import search

MakeWorkload = Callable[..., Workload]


def test_what_would_help_fits_and_is_the_search_of_that_training(workload: MakeWorkload) -> None:
    made = workload("llama-3-8b", profile="rtx-4090-x2", seq_length=2048, global_batch_size=16)
    ways = {way.name: way for way in fine_tuning_ways(made, executor=OWN_RUNTIME, fixed=FREE)}
    assert {"LoRA", "QLoRA"} <= set(ways)
    assert ways["QLoRA"].fewest_gpus == 1
    for way in ways.values():
        assert way.peak_memory_bytes <= way.usable_memory_bytes
    training = made.training.replace(train="lora:r=16")
    best = search(made.trained_as(training), num_candidates=1).best
    assert ways["LoRA"].tokens_per_s_per_gpu <= best.step.tokens_per_s_per_gpu * 1.001


def test_the_ways_stand_beside_a_plan_with_offload_and_no_other(workload: MakeWorkload) -> None:
    offloaded = recommendation(
        workload("llama-3-8b", profile="rtx-4090-x2", seq_length=2048, global_batch_size=16), SearchRequest()
    )
    assert offloaded.result.best.plan.offload != "none"
    speeds = [way.tokens_per_s_per_gpu for way in offloaded.ways]
    assert speeds
    assert speeds == sorted(speeds, reverse=True)
    fitting = recommendation(workload("gpt2", profile="dgx-h100", seq_length=1024), SearchRequest())
    assert fitting.ways == ()


def test_nothing_fits_says_what_would(workload: MakeWorkload) -> None:
    made = workload("llama-3-8b", profile="1xh100", seq_length=8192, global_batch_size=8)
    with pytest.raises(NoPlanFitsError) as caught:
        recommendation(made, SearchRequest())
    assert caught.value.hint is not None
    for options in ("--precision bf16-pure --optimizer adamw_8bit", "--train lora:r=16", "--base-weights nf4:double"):
        assert options in caught.value.hint


def test_lora_is_searched_over_replicas_shards_and_pipelines(workload: MakeWorkload) -> None:
    made = workload("llama-3-8b", profile="rtx-4090-x2", seq_length=2048, global_batch_size=16)
    result = search(made.trained_as(made.training.replace(train="lora:r=16")))
    found = {(one.plan.pp > 1, one.plan.zero_stage) for one in result.candidates if one.fits}
    assert {(True, 0), (False, 3)} <= found
    # One count of FLOPs, without products for frozen weights, is behind all figures.
    best = result.best.step
    for one in result.candidates:
        assert one.mfu / one.tokens_per_s_per_gpu == pytest.approx(best.mfu / best.tokens_per_s_per_gpu)


def test_no_quantized_plan_splits_tensors(workload: MakeWorkload) -> None:
    made = workload("llama-3-8b", profile="dgx-h100", seq_length=2048, global_batch_size=16)
    quantized = made.trained_as(made.training.replace(train="lora:r=16", base_weights="nf4"))
    result = search(quantized)
    assert all(one.plan.tp == 1 for one in result.candidates)
    assert any("cannot divide nf4" in rejection.reason for rejection in result.rejections)
    assert estimate_plan(quantized, result.best.plan).fits


def test_products_in_8_bits_leave_4_bit_weights_out() -> None:
    wide = TrainingSpec(global_batch_size=8, seq_length=128)
    assert [name for name, _, _ in trainings(wide)] == ["Pure bf16", "LoRA", "QLoRA"]
    assert [name for name, _, _ in trainings(wide.replace(linear_precision="fp8"))] == ["Pure bf16", "LoRA"]
