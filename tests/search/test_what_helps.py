from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from case_selection import with_all

from paraplan.api.executors import executor_of
from paraplan.cost.estimate import estimate_plan
from paraplan.cost.workload import Workload
from paraplan.errors import NoPlanFitsError
from paraplan.plan.executor import ANYTHING, OWN_RUNTIME
from paraplan.plan.parallel import ParallelPlan
from paraplan.search.constraints import Constraints
from paraplan.search.recommendation import SearchRequest, recommendation
from paraplan.search.search import search
from paraplan.search.what_fits import more_gpus
from paraplan.search.what_helps import WORTH_SAYING, what_helps

MakeWorkload = Callable[..., Workload]


def test_options_are_priced_with_the_plan_as_it_is_on_many_gpus(workload: MakeWorkload) -> None:
    made = workload("llama-3-8b", profile="dgx-h100", num_nodes=3, seq_length=4096, global_batch_size=192)
    fixed = Constraints(recompute="none")  # blocks whose chosen operations run again are not compiled
    best = search(made, num_candidates=1, fixed=fixed).best
    helps = what_helps(made, best, fixed=fixed)
    compiled = next(one for one in helps if one.options == "--compile")
    same = estimate_plan(made.trained_as(made.training.replace(compiled=True)), best.plan)
    assert compiled.is_same_plan
    assert compiled.step_time_s == pytest.approx(same.step.step_time_s)
    assert compiled.saved_s == pytest.approx(best.step.step_time_s - same.step.step_time_s)
    assert compiled.saved_bytes == best.peak_memory_bytes - same.peak_memory_bytes
    assert next(one for one in helps if one.costs_nothing) == compiled
    assert not {"-0%", "+0%"} & {one.change_in_words for one in helps}
    assert all(one.share >= WORTH_SAYING or one.saved_bytes > 0 for one in helps)


@pytest.mark.parametrize(
    ("model", "profile", "fields"),
    [
        ("qwen3-8b", "4xrtx-4090", {"train": "lora:r=16", "seq_length": 8192}),
        *with_all(
            [("gemma-3-27b", "2xrtx-3090", {"train": "lora:r=16", "base_weights": "nf4:double", "seq_length": 4096})]
        ),
    ],
)
def test_a_free_option_that_saves_much_memory_gets_a_plan_in_the_room_that_it_leaves(
    workload: MakeWorkload, model: str, profile: str, fields: dict[str, object]
) -> None:
    made = workload(model, profile=profile, global_batch_size=16, **fields)
    best = search(made, num_candidates=1).best
    (liger,) = (one for one in what_helps(made, best) if one.options == "--loss liger")
    found = search(made.trained_as(made.training.replace(loss="liger")), num_candidates=1).best
    assert liger.plan == found.plan != best.plan
    assert liger.step_time_s == pytest.approx(found.step.step_time_s)
    assert liger.costs_nothing
    assert found.plan.describe() in liger.in_words


def test_each_change_gets_its_best_plan_beside_nodes_and_machines(workload: MakeWorkload) -> None:
    made = workload("llama-3-8b", profile="rtx-4090-x4", seq_length=2048, global_batch_size=16)
    best = search(made, num_candidates=1).best
    helps = what_helps(made, best, searches=True)
    options = {one.options: one for one in helps}
    assert "--nodes 2" in options
    assert sum(one.startswith("--profile 4x") for one in options) == 2
    lora = options["--train lora:r=16"]
    found = search(made.trained_as(made.training.replace(train="lora:r=16")), num_candidates=1).best
    assert (lora.plan, lora.step_time_s) == (found.plan, pytest.approx(found.step.step_time_s))
    assert not lora.keeps_training
    assert [one.saved_s for one in helps] == sorted((one.saved_s for one in helps), reverse=True)


def test_what_is_asked_for_already_is_not_offered(workload: MakeWorkload) -> None:
    made = workload("llama-3-8b", profile="dgx-h100", seq_length=4096, global_batch_size=64)
    changed = made.trained_as(made.training.replace(compiled=True, loss="liger", train="lora:r=16"))
    helps = what_helps(changed, search(changed, num_candidates=1).best)
    taken = {"--compile", "--loss liger", "--train lora:r=16", "--optimizer adamw_8bit"}
    assert not taken & {one.options for one in helps}


def test_where_nothing_fits_larger_gpus_that_do_are_named(workload: MakeWorkload) -> None:
    made = workload("llama-3-8b", profile="1xrtx-4090", seq_length=16384, global_batch_size=2)
    with pytest.raises(NoPlanFitsError, match="no plan fits") as caught:
        recommendation(made, SearchRequest())
    assert "--profile 1xa100-sxm-80gb" in (caught.value.hint or "")


def test_recompute_and_offload_that_were_fixed_are_priced_free_of_it(workload: MakeWorkload) -> None:
    made = workload("llama-3-8b", profile="dgx-h100", seq_length=4096, global_batch_size=64)
    plain = Constraints(tp=1, pp=1, cp=1, recompute="full", offload="optimizer")
    best = search(made, num_candidates=1, executor=ANYTHING, fixed=plain).best
    helps = {one.options: one for one in what_helps(made, best, executor=ANYTHING, fixed=plain, searches=True)}
    chosen = search(made, num_candidates=1, executor=ANYTHING, fixed=replace(plain, recompute="none")).best
    assert helps["--recompute none"].plan == chosen.plan
    assert helps["--offload none"].saved_s > 0
    assert helps["--offload none"].keeps_training


def test_where_memory_is_tight_what_saves_some_may_cost_time(workload: MakeWorkload) -> None:
    made = workload("llama-3.2-1b", profile="dgx-h100", gpus=1, seq_length=4096, global_batch_size=64)
    size = next(
        size
        for size in (64, 32, 16, 8, 4, 2)
        if estimate_plan(made, ParallelPlan(micro_batch_size=size, num_microbatches=64 // size)).fits
    )
    best = estimate_plan(made, ParallelPlan(micro_batch_size=size, num_microbatches=64 // size))
    tight = best.replace(usable_memory_bytes=int(best.peak_memory_bytes / 0.97))
    roomy = best.replace(usable_memory_bytes=2 * best.peak_memory_bytes)
    full = estimate_plan(made, best.plan.replace(recompute="full"))
    assert 1.03 < full.step.step_time_s / best.step.step_time_s < 1.5
    of_tight = {one.options: one for one in what_helps(made, tight)}
    assert of_tight["--recompute full"].saved_bytes == best.peak_memory_bytes - full.peak_memory_bytes > 0
    assert "--recompute full" not in {one.options for one in what_helps(made, roomy)}
    assert of_tight[f"--micro-batch {size // 2}"].plan.global_batch_size == 64


def test_an_option_that_the_plan_does_not_go_with_gets_its_own_plan(workload: MakeWorkload) -> None:
    made = workload("llama-3-8b", profile="dgx-h100", seq_length=8192, global_batch_size=64)
    best = search(made, num_candidates=1, fixed=Constraints(tp=2, pp=1)).best
    compiled = next(one for one in what_helps(made, best) if one.options == "--compile")
    assert not compiled.is_same_plan
    assert OWN_RUNTIME.reason_of(compiled.plan, made.training.replace(compiled=True), 32) is None


def test_a_node_is_filled_before_there_are_more(workload: MakeWorkload) -> None:
    made = workload("llama-3-8b", profile="1xh100", seq_length=4096, global_batch_size=16)
    found = more_gpus(made)
    assert found is not None
    assert (found[0], found[1].num_gpus) == ("--profile 2xh100-sxm-80gb", 2)


def _under_megatron(made: Workload) -> Workload:
    return Workload.of(made.model, made.training, made.cluster, made.links, framework="megatron-core")


def test_another_exchange_of_experts_helps_where_framework_and_gpu_have_it(workload: MakeWorkload) -> None:
    words = {"profile": "8xh100", "num_nodes": 4, "seq_length": 4096, "global_batch_size": 512}
    plan = ParallelPlan(dp=32, ep=8, zero_stage=1, num_microbatches=16, recompute="full")
    options = dict[str, set[str]]()
    for model, profile in (("qwen3-30b-a3b", "8xh100"), ("qwen3-30b-a3b", "8xa100"), ("llama-3-8b", "8xh100")):
        made = _under_megatron(workload(model, **(words | {"profile": profile})))
        each = plan if made.model.num_experts > 1 else plan.replace(ep=1)
        helps = what_helps(made, estimate_plan(made, each), executor=executor_of(made))
        options[f"{model} {profile}"] = {one.options for one in helps}
        assert not any("--train" in one.options for one in helps), "32 GPUs train a model"
    has = {name: "--stack dispatcher=deepep" in found for name, found in options.items()}
    assert has == {"qwen3-30b-a3b 8xh100": True, "qwen3-30b-a3b 8xa100": False, "llama-3-8b 8xh100": False}
    assert "--precision fp8" in options["llama-3-8b 8xh100"]
    assert "--precision fp8" not in options["qwen3-30b-a3b 8xa100"]
