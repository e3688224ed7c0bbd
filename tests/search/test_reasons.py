from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from case_selection import with_all
from hypothesis import given
from hypothesis import strategies as st

from paraplan.api.executors import executor_of
from paraplan.cost.estimate import allocator_holds, estimate_plan
from paraplan.cost.plan_table import PlanTable
from paraplan.cost.workload import Workload
from paraplan.plan.parallel import ParallelPlan
from paraplan.report.short_text import memory_verdict, recommendation_lines
from paraplan.search.evaluated_plans import complexities
from paraplan.search.known_runs import is_known, mixture_runs
from paraplan.search.reasons import speed_in_words
from paraplan.search.recommendation import SearchRequest, recommendation
from paraplan.search.results import RANGE, TOLERANCE, SearchResult, complexity
from paraplan.search.search import search
from paraplan.units import format_bytes

MakeWorkload = Callable[..., Workload]
CASES: tuple[dict[str, Any], ...] = (
    {"model": "gpt2", "profile": "titan-rtx-x2", "seq_length": 512, "global_batch_size": 8, "precision": "fp32"},
    {"model": "llama-3-8b", "profile": "dgx-h100", "seq_length": 4096},
    {"model": "llama-3-8b", "profile": "dgx-h100", "seq_length": 32_768},
    {"model": "qwen3-32b", "profile": "dgx-h100", "num_nodes": 2, "seq_length": 20_480, "global_batch_size": 128},
    {"model": "llama-3-8b", "profile": "rtx-4090-x4", "seq_length": 2048, "train": "lora:r=16"},
    {"model": "qwen3-30b-a3b", "profile": "dgx-h100", "seq_length": 4096, "train": "lora:r=16"},
)
"""A job for each cause: the guide's plan is slower, simplicity, risk, offload, range, and a kind that nobody ran."""
MORE_CASES: list[dict[str, Any]] = with_all(
    [
        {"model": "qwen2.5-7b", "profile": "dgx-h100", "num_nodes": 2, "seq_length": 20_480, "global_batch_size": 128},
        {"model": "llama-2-7b", "profile": "a40-x4-bridged", "seq_length": 4096},
        {"model": "mixtral-8x7b", "profile": "dgx-a100", "num_nodes": 4, "seq_length": 4096, "global_batch_size": 256},
        {"model": "llama-3-70b", "profile": "dgx-h100", "num_nodes": 4, "seq_length": 8192, "global_batch_size": 256},
        {
            "model": "llama-3.3-70b",
            "profile": "4xa100",
            "seq_length": 2048,
            "global_batch_size": 16,
            "train": "lora:r=16",
        },
    ]
)


def _level(made: Workload, plan: ParallelPlan) -> int:
    table = PlanTable.of_plans([plan])
    return int(complexities(made, lambda name: getattr(table, name))[0])


def _plan_named(result: SearchResult, words: str) -> ParallelPlan | None:
    guide = () if result.guide is None else (result.guide,)
    fastest = () if result.fastest is None else (result.fastest,)
    known = [*(one.plan for one in result.candidates), *(one.plan for one in (*guide, *fastest))]
    return next((plan for plan in known if plan.describe() == words), None)


@pytest.mark.parametrize(
    "case", [*CASES, *MORE_CASES], ids=lambda case: f"{case['model']}-{case['profile']}-{case['seq_length']}"
)
def test_a_reason_is_true_of_the_plan_that_it_names(workload: MakeWorkload, case: dict[str, Any]) -> None:
    made = workload(**case)
    result = search(made)
    best = result.best
    assert (result.reason is None) == (result.fastest is None or result.fastest.plan.describe() == best.plan.describe())
    assert not re.search(r"-\d+(\.\d+)?% (slower|faster)|(slower|faster) by -", result.remark or "")
    for reason in (result.reason, result.guide_reason):
        if reason is None:
            continue
        other = _plan_named(result, reason.over)
        assert other is not None, "it names a plan of the answer"
        assert other != best.plan
        estimate = estimate_plan(made, other)
        assert reason.gain == pytest.approx(best.step.step_time_s / estimate.step.step_time_s - 1)
        assert (reason.gain <= 0) == (reason.cause == "faster")
        if reason.cause == "simplicity":
            assert _level(made, best.plan) < _level(made, other)
            assert 0 < reason.gain <= 0.1001
        if reason.cause == "allocator":
            assert not allocator_holds(made, estimate)
            assert allocator_holds(made, best)
        if reason.cause == "risk":
            share = estimate.peak_memory_bytes / estimate.usable_memory_bytes
            assert share > max(0.97, best.peak_memory_bytes / best.usable_memory_bytes)
        if reason.cause == "offload":
            assert other.offload != "none"
        if reason.cause == "range":
            assert 0.1 < reason.gain <= (1 + RANGE) * (1 + TOLERANCE["throughput"]) - 1 + 1e-6
            assert (best.plan.tp, best.plan.pp, best.plan.cp, best.plan.ep) == (1, 1, 1, 1)


@pytest.mark.parametrize(
    ("ratio", "words"),
    [(1.0912, "9.1% faster"), (1 / 1.08, "8.0% slower"), (1, "under 0.1% slower"), (0.4, "2.5 times as slow")],
)
def test_no_speed_is_negative(ratio: float, words: str) -> None:
    assert speed_in_words(ratio) == words


def test_one_line_judges_memory_and_the_allocator_decides_it(workload: MakeWorkload) -> None:
    stored = {"base_weights": "nf4:double", "quantizer": "axolotl", "train": "lora:r=16"}
    made = workload("gpt-oss-20b", profile="1xrtx-4090", seq_length=2048, global_batch_size=8, **stored)
    result = search(made)
    assert allocator_holds(made, result.best), "where the allocator says no, the roomier plan is recommended"
    plain = estimate_plan(made, ParallelPlan(micro_batch_size=2, num_microbatches=4, recompute="full"))
    assert plain.fits
    assert not allocator_holds(made, plain)
    assert plain.step.step_time_s < result.best.step.step_time_s
    words, tone = memory_verdict(made, plain)
    assert words.startswith("may not fit: ")
    assert words.count("fit") == 1
    assert tone == "caution"
    labels = [line.label for line in recommendation_lines(recommendation(made, SearchRequest()))]
    assert labels.count("Memory") == 1


def test_the_verdict_on_memory_says_what_offload_keeps_on_the_host(workload: MakeWorkload) -> None:
    made = workload("llama-2-70b", profile="8xa100", seq_length=2048, global_batch_size=8)
    best = search(made, num_candidates=1).best
    words, _ = memory_verdict(made, best)
    assert f"{format_bytes(best.host_bytes_per_node)} of 2.00 TiB in a machine's memory for offload" in words


def test_small_rigs_and_adapters_get_data_parallelism_within_the_range(workload: MakeWorkload) -> None:
    made = workload("llama-3-8b", profile="rtx-4090-x4", seq_length=2048, global_batch_size=16, train="lora:r=16")
    result = search(made)
    assert (result.best.plan.dp, result.best.plan.world_size) == (4, 4)
    assert result.reason is not None
    assert result.reason.cause in ("range", "simplicity")
    far = search(workload("gpt2", profile="titan-rtx-x2", seq_length=512, global_batch_size=8, precision="fp32"))
    assert far.best.plan.pp == 2, "1.28 times as fast is outside"


def test_what_comes_first_is_never_far_slower_than_what_was_left_out(workload: MakeWorkload) -> None:
    adapted = {"profile": "rtx-4090-x4", "seq_length": 4096, "train": "lora:r=16"}
    others = with_all([("qwen3-8b", 64), ("llama-3-8b", 32)])
    for model, batch in (("qwen3-8b", 16), ("mistral-7b", 16), *others):
        made = workload(model, global_batch_size=batch, **adapted)
        result = search(made)
        roomy = [one for one in result.candidates if allocator_holds(made, estimate_plan(made, one.plan))]
        fastest = min(one.step_time_s for one in roomy)
        assert result.best.step.step_time_s <= (1 + RANGE) * (1 + TOLERANCE["throughput"]) * fastest


@pytest.mark.parametrize(
    ("model", "profile", "num_nodes", "framework"),
    [
        ("deepseek-v3", "8xb200", 32, "torchtitan"),
        *with_all([("qwen3-235b-a22b", "8xh100", 32, "megatron-bridge")]),  # which a test below asks of adapters
    ],
)
def test_clusters_of_mixtures_get_a_kind_of_plan_that_somebody_ran(
    workload: MakeWorkload, model: str, profile: str, num_nodes: int, framework: str
) -> None:
    plain = workload(model, profile=profile, num_nodes=num_nodes, seq_length=4096, global_batch_size=2048)
    made = Workload.of(plain.model, plain.training, plain.cluster, plain.links, framework=framework)
    best = search(made, executor=executor_of(made)).best.plan
    assert best.ep > 1
    table = PlanTable.of_plans([best, ParallelPlan(dp=256, zero_stage=3, num_microbatches=8)])
    assert is_known(made, lambda name: getattr(table, name)).tolist() == [True, False]


@pytest.mark.parametrize(
    ("model", "num_nodes", "framework", "ranks", "expected"),
    [
        ("qwen3-235b-a22b", 32, "megatron-core", (2, 4, 8, 64), [False, False, True, True]),
        ("qwen3-235b-a22b", 2, "megatron-core", (2, 8, 16), [False, True, True]),
        ("qwen3-30b-a3b", 2, "torchtitan", (2, 4, 8), [False, True, True]),
        ("gpt-oss-20b", 1, "torchtitan", (2, 4, 8), [True, True, True]),
        ("mixtral-8x7b", 32, "megatron-core", (2, 8), [True, True]),
        ("deepseek-v3", 32, "torchtitan", (2, 4, 8, 16), [False, False, True, True]),
    ],
)
def test_a_known_kind_spreads_experts_as_a_published_run_does(
    workload: MakeWorkload, model: str, num_nodes: int, framework: str, ranks: tuple[int, ...], expected: list[bool]
) -> None:
    plain = workload(model, profile="8xh800", num_nodes=num_nodes, seq_length=4096, global_batch_size=2048)
    made = Workload.of(plain.model, plain.training, plain.cluster, plain.links, framework=framework)
    count = 8 * num_nodes
    plans = [ParallelPlan(dp=count, ep=ep, zero_stage=3, num_microbatches=2048 // count) for ep in ranks]
    table = PlanTable.of_plans(plans)
    assert is_known(made, lambda name: getattr(table, name)).tolist() == expected


def test_a_large_mixture_on_megatron_core_is_spread_as_its_published_runs_are(workload: MakeWorkload) -> None:
    plain = workload("qwen3-235b-a22b", profile="8xh800", num_nodes=32, seq_length=4096, global_batch_size=2048)
    made = Workload.of(plain.model, plain.training, plain.cluster, plain.links, framework="megatron-core")
    best = search(made, executor=executor_of(made)).best.plan
    assert best.ep >= 8


def test_of_plans_that_nobody_ran_none_is_simple(workload: MakeWorkload) -> None:
    plain = workload("qwen3-30b-a3b", profile="8xh100", num_nodes=4, seq_length=4096, global_batch_size=512)
    made = Workload.of(plain.model, plain.training, plain.cluster, plain.links, framework="megatron-core")
    plans = [ParallelPlan(dp=32, zero_stage=stage, num_microbatches=16) for stage in (0, 3)]
    plans += [ParallelPlan(dp=16, pp=2, ep=8, zero_stage=1, num_microbatches=32, pipeline_schedule="1f1b")]
    plans += [ParallelPlan(dp=8, tp=2, pp=2, ep=8, zero_stage=1, num_microbatches=64, pipeline_schedule="1f1b")]
    table = PlanTable.of_plans(plans)
    assert is_known(made, lambda name: getattr(table, name)).tolist() == [False, False, True, True]
    result = search(made, executor=executor_of(made))
    assert result.reason is None or result.reason.cause != "simplicity" or result.best.plan.ep > 1


def _adapted(plain: Workload) -> Workload:
    training = plain.training.replace(train="lora:r=8")
    return Workload.of(plain.model, training, plain.cluster, plain.links, framework="megatron-bridge")


@pytest.mark.parametrize("model", ["qwen3-next-80b-a3b", *with_all(["qwen3-235b-a22b"])])
def test_adapters_of_a_mixture_get_kinds_of_plans_that_trained_adapters(workload: MakeWorkload, model: str) -> None:
    made = _adapted(workload(model, profile="8xh200-sxm-141gb", seq_length=2048, global_batch_size=16))
    best = search(made, executor=executor_of(made)).best.plan
    assert (best.ep > 1, best.zero_stage < 3) == (True, True)
    table = PlanTable.of_plans([ParallelPlan(dp=8, ep=4, zero_stage=stage, num_microbatches=2) for stage in (1, 3)])
    assert is_known(made, lambda name: getattr(table, name)).tolist() == [True, False]


def test_a_plan_that_nobody_ran_names_the_fastest_of_a_kind_that_was_run(workload: MakeWorkload) -> None:
    made = _adapted(workload("qwen3-235b-a22b", profile="8xh100", seq_length=4096, global_batch_size=16))
    remark = search(made, executor=executor_of(made)).remark
    assert remark is not None
    assert "under such a plan on about 8 GPUs is known, and of kinds that were run dp8 x ep8, ZeRO-1" in remark


@pytest.mark.parametrize(
    ("profile", "train"),
    [
        *(("4xrtx-3090", "lora:r=16"), ("8xl40s", "full")),
        *with_all([("4xrtx-3090", "full"), ("8xl40s", "lora:r=16")]),
        *with_all([("4xrtx-4090", "full"), ("4xrtx-4090", "lora:r=16")]),
    ],
)
def test_a_plan_that_is_faster_by_more_than_the_error_is_not_left_out_for_the_error(
    workload: MakeWorkload, profile: str, train: str
) -> None:
    made = workload("qwen3-14b", profile=profile, seq_length=4096, global_batch_size=16, train=train)
    reason = search(made).reason
    assert reason is None or "within the error" not in reason.because or abs(reason.gain) <= TOLERANCE["throughput"]


def test_a_pipeline_that_is_left_out_for_shards_is_compared_with_plans_without_one(workload: MakeWorkload) -> None:
    made = workload("qwen3-4b", profile="rtx-4090-x4", seq_length=4096, global_batch_size=16)
    result = search(made)
    assert result.best.plan.pp == 1
    assert result.reason is not None
    assert result.reason.because.endswith("over plans without a pipeline")


def test_published_runs_of_mixtures_name_their_source() -> None:
    assert {run.family for run in mixture_runs()} >= {"megatron", "fsdp", "deepspeed"}
    assert all(run.source and run.gpus >= 1 for run in mixture_runs())
    assert all(
        (run.experts_per_rank is not None) == (run.ep is not None) == ("ep" in run.axes) for run in mixture_runs()
    )
    plain = [run.gpus for run in mixture_runs() if run.axes == () and run.shards == "full"]
    assert max(plain) == 16


@given(
    pp=st.sampled_from([2, 4, 8]),
    virtual=st.sampled_from([1, 2, 3, 5, 13, 47]),
    count=st.integers(1, 16),
    tp=st.sampled_from([1, 4]),
)
def test_a_pipeline_that_stands_still_is_never_simpler_and_more_virtual_stages_never_are(
    pp: int, virtual: int, count: int, tp: int
) -> None:
    def level(**changes: int) -> int:
        usual = {"dp": 1, "tp": tp, "pp": pp, "cp": 1, "ep": 1, "virtual": virtual, "num_microbatches": count}
        columns = {**usual, **changes}
        found = complexity(lambda name: np.array([columns.get(name, 0)]), seq_length=131072)
        return int(found[0])

    assert level(virtual=virtual + 1, num_microbatches=64) >= level(num_microbatches=64)
    if count * virtual < pp:
        assert level() > level(cp=4, tp=4, num_microbatches=64, offload=2)


def test_small_rigs_that_offload_get_data_parallelism_too(workload: MakeWorkload) -> None:
    made = workload("glm-4-9b", profile="v100-pcie-x4", seq_length=1024, global_batch_size=16, precision="fp16")
    deepspeed = Workload.of(made.model, made.training, made.cluster, framework="deepspeed")
    plan = search(deepspeed, executor=executor_of(deepspeed)).best.plan
    assert (plan.dp, plan.offload) == (4, "optimizer")


def test_small_rigs_get_stages_that_somebody_would_write_within_the_range(workload: MakeWorkload) -> None:
    made = workload("qwen3-30b-a3b", profile="4xrtx-4090", seq_length=2048, global_batch_size=16, train="lora:r=16")
    result = search(made, num_candidates=5)
    assert result.best.plan.virtual_pipeline_size == 1
    assert result.reason is not None
    assert result.reason.gain <= RANGE or result.reason.cause != "range"
    assert max(one.plan.virtual_pipeline_size for one in result.candidates) > 1


def test_data_parallelism_without_room_gives_way_to_a_plan_with_room(workload: MakeWorkload) -> None:
    made = workload("qwen3-235b-a22b", profile="8xa100", seq_length=4096, global_batch_size=64, train="lora:r=16")
    best = search(made, num_candidates=5).best
    assert allocator_holds(made, best)


@pytest.mark.parametrize(
    ("case", "faster"),
    [
        ({"model": "gemma-3-27b", "profile": "rtx-a6000-x2-nvlink", "seq_length": 4096, "global_batch_size": 8}, True),
        ({"model": "mistral-7b", "profile": "rtx-3060-x2", "seq_length": 2048, "global_batch_size": 16}, False),
    ],
)
def test_why_data_parallelism_that_comes_first_is_not_taken_is_said(
    workload: MakeWorkload, case: dict[str, Any], *, faster: bool
) -> None:
    made = workload(**case, train="lora:r=16")
    result = search(made)
    reason = result.plain_reason
    assert result.best.plan.dp == 1
    assert reason is not None
    listed = (*result.candidates, *result.baselines)
    plain = next(one for one in listed if one.plan.describe() == reason.over)
    assert (plain.plan.dp, plain.plan.zero_stage, reason.cause) == (2, 3, "allocator")
    assert not allocator_holds(made, estimate_plan(made, plain.plan))
    assert (plain.step_time_s < result.best.step.step_time_s) == faster == (reason.gain > 0)
    printed = {line.label: line.text for line in recommendation_lines(recommendation(made, SearchRequest()))}
    assert printed["Why not"] == f"{reason.over}, predicted {reason.comparison}: {reason.because}"


def test_data_parallelism_that_is_taken_has_nothing_said_against_it(workload: MakeWorkload) -> None:
    result = search(workload(**CASES[1]))
    assert (result.best.plan.dp, result.plain_reason) == (8, None)
