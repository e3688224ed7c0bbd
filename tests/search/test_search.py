from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from case_selection import with_all

from paraplan.cost.capacity import least_state_bytes
from paraplan.cost.cost_model import CostModel
from paraplan.cost.estimate import estimate_plan, peak_memory, step_times
from paraplan.cost.framework import FrameworkProfile
from paraplan.cost.framework_files import load_framework
from paraplan.cost.plan_table import SCHEDULES, Floats, PlanTable
from paraplan.cost.workload import Workload
from paraplan.errors import NoPlanFitsError
from paraplan.plan.executor import ANYTHING, OWN_RUNTIME, Executor
from paraplan.plan.parallel import ParallelPlan
from paraplan.plan.support import unsupported_reason
from paraplan.search.constraints import Constraints
from paraplan.search.degrees import all_degrees
from paraplan.search.failure import NothingFitsError
from paraplan.search.lower_bound import least_step_s
from paraplan.search.rank_orders import ORDERS
from paraplan.search.recommendation import SearchRequest, recommendation
from paraplan.search.results import TOLERANCE, SearchResult, complexity
from paraplan.search.search import search
from paraplan.search.space import PlanSpace
from paraplan.search.stage_splits import BalancedSplits
from paraplan.search.what_fits import fewest_gpus, fewest_nodes, largest_batch, longest_sequence
from paraplan.units import format_bytes

MEGATRON_CORE = load_framework("megatron-core")
PARAPLAN = load_framework("paraplan")

MakeWorkload = Callable[..., Workload]


_KNOWN: dict[tuple[int, str], tuple[Workload, SearchResult]] = {}


def found(made: Workload, **asked: Any) -> SearchResult:
    """Return a search that several tests look at, made once; the workload is kept, so that its id stays its own."""
    key = id(made), repr(sorted(asked.items()))
    if key not in _KNOWN:
        _KNOWN[key] = made, search(made, **asked)
    return _KNOWN[key][1]


@pytest.mark.parametrize(
    ("model", "profile", "seq_length"),
    [("gpt2", "dgx-h100", 1024), ("llama-3-8b", "dgx-h100", 4096), ("gpt2-xl", "rtx-3090-x2", 1024)],
)
def test_what_is_recommended_fits_and_runs(workload: MakeWorkload, model: str, profile: str, seq_length: int) -> None:
    made = workload(model, profile=profile, seq_length=seq_length)
    result = found(made)
    for candidate in result.candidates:
        plan = candidate.plan
        assert candidate.peak_memory_bytes <= made.usable_memory_bytes
        assert plan.world_size == made.cluster.num_gpus
        assert plan.global_batch_size == made.training.global_batch_size
        assert unsupported_reason(plan, num_blocks=made.model.num_blocks) is None


def test_a_pipeline_of_unlike_stages_is_recommended_only_where_all_of_them_fit(workload: MakeWorkload) -> None:
    made = workload("gpt-oss-120b", profile="rtx-3090-x2", num_nodes=32, seq_length=512, global_batch_size=24)
    result = search(made)
    assert result.best.fits
    for candidate in result.candidates:
        estimate = estimate_plan(made, candidate.plan)
        assert estimate.fits
        assert candidate.step_time_s == pytest.approx(estimate.step.step_time_s)
        assert candidate.tokens_per_s_per_gpu == pytest.approx(estimate.step.tokens_per_s_per_gpu)


def test_a_framework_is_planned_the_schedules_that_it_has(workload: MakeWorkload) -> None:
    made = replace(workload("gpt2", gpus=4), framework=MEGATRON_CORE)
    space = PlanSpace(made, executor=ANYTHING)
    schedules = {int(one) for chunk in space.chunks() for one in chunk.table.schedule[chunk.table.pp > 1]}
    assert {SCHEDULES[one] for one in schedules} == {"1f1b", "interleaved_1f1b"}
    assert space.rejected["Megatron-Core has no zero_bubble schedule"]


def brute_force(made: Workload, *, executor: Executor) -> tuple[Floats, Floats]:
    """Return seconds and peak bytes of all plans that fit, under every order of ranks."""
    seconds, peaks = [], []
    for chunk in PlanSpace(made, executor).chunks():
        peak = peak_memory(made, chunk.table)
        fitting = peak <= made.usable_memory_bytes
        for order in ORDERS:
            seconds.append(step_times(made, chunk.table.select(fitting).ordered(order)).step_time_s)
            peaks.append(peak[fitting])
    return np.concatenate(seconds), np.concatenate(peaks)


@pytest.mark.parametrize(
    ("model", "profile", "nodes", "gpus", "batch", "executor"),
    [
        ("gpt2", "dgx-h100", 1, 4, 4, OWN_RUNTIME),
        ("qwen2.5-0.5b", "rtx-3090-x2", 2, None, 4, ANYTHING),
        *with_all(
            [("gpt2-xl", "rtx-3090-x2", 1, None, 4, OWN_RUNTIME), ("gpt2", "aws-g5-12xlarge", 2, None, 8, OWN_RUNTIME)]
        ),
    ],
)
def test_the_search_loses_nothing_that_brute_force_finds(
    workload: MakeWorkload, model: str, profile: str, nodes: int, gpus: int | None, batch: int, executor: Executor
) -> None:
    made = workload(model, profile=profile, num_nodes=nodes, gpus=gpus, global_batch_size=batch)
    seconds, peaks = brute_force(made, executor=executor)
    many = search(made, num_candidates=1000, executor=executor, with_front=True)
    assert many.candidates[0].step_time_s == pytest.approx(seconds.min())
    few = search(made, num_candidates=2, executor=executor)
    assert [one.plan for one in few.candidates] == [one.plan for one in many.candidates[:2]]
    smallest = search(made, objective="memory", executor=executor)
    assert smallest.candidates[0].peak_memory_bytes == pytest.approx(peaks.min(), rel=1e-6)
    beaten = np.zeros(len(seconds), dtype=bool)
    for point in many.front:
        beaten |= (point.step_time_s <= seconds * (1 + 1e-9)) & (point.peak_memory_bytes <= 1.011 * peaks)
    assert beaten.all()


def test_replicas_of_small_groups_are_found_where_the_network_is_slow(workload: MakeWorkload) -> None:
    made = workload("llama-3.2-1b", "aws-g5-48xlarge", num_nodes=4, seq_length=2048, global_batch_size=32)
    best = search(made, fixed=Constraints(tp=1, pp=1, cp=1)).best
    assert best.plan.zero_shards is not None
    whole = estimate_plan(made, best.plan.replace(zero_shards=None))
    assert best.step.step_time_s < whole.step.step_time_s


@pytest.mark.parametrize(("framework", "nodes", "task"), [(PARAPLAN, 1, "dpo"), (MEGATRON_CORE, 2, "sft")])
def test_no_plan_is_faster_than_its_least_time(
    workload: MakeWorkload, framework: FrameworkProfile, nodes: int, task: str
) -> None:
    sizes = {"num_nodes": nodes, "seq_length": 4096, "global_batch_size": 16, "task": task}
    made = replace(workload("llama-3-8b", **sizes), framework=framework)  # type: ignore[arg-type]
    for chunk in PlanSpace(made, ANYTHING).chunks():
        some = chunk.table.select(np.arange(0, len(chunk.table), 7))
        assert (least_step_s(made, some) <= step_times(made, some).step_time_s * (1 + 1e-9)).all()


def test_candidates_are_ranked_and_differ_in_their_axes(workload: MakeWorkload) -> None:
    candidates = found(workload("llama-3-8b", seq_length=4096)).candidates
    seconds = [candidate.step_time_s for candidate in candidates]
    kinds = [(plan.dp, plan.tp, plan.pp, plan.cp, plan.zero_stage) for plan in (row.plan for row in candidates)]
    assert len(set(kinds)) == len(kinds)
    assert seconds == sorted(seconds)


def test_every_plan_is_ranked_or_counted_with_its_reason(workload: MakeWorkload) -> None:
    made = workload("llama-3-8b", seq_length=4096)
    result = found(made)
    assert result.plans_considered > sum(rejection.count for rejection in result.rejections)
    assert any("usable" in rejection.reason for rejection in result.rejections)


def test_where_nothing_fits_the_nearest_plan_and_what_it_lacks_are_named(workload: MakeWorkload) -> None:
    made = workload("llama-2-7b", profile="rtx-3090-x2")
    with pytest.raises(
        NoPlanFitsError, match=r"fit their 21.2 GiB, but not the 64.0 GiB of a node .*: .* needs"
    ) as failure:
        recommendation(made, SearchRequest())
    with pytest.raises(NoPlanFitsError, match=r"no plan fits: llama-2-7b on 2 GPUs .* too much"):
        search(made, fixed=Constraints(offload="none"))
    nodes = fewest_nodes(made)
    assert nodes is not None
    assert "profile='4xrtx-3090': " in str(failure.value)  # a node is filled before there are more
    assert search(workload("llama-2-7b", profile="4xrtx-3090")).best.fits
    assert search(workload("llama-2-7b", profile="rtx-3090-x2", num_nodes=nodes)).best.fits
    with pytest.raises(NoPlanFitsError):
        search(workload("llama-2-7b", profile="rtx-3090-x2", num_nodes=nodes // 2))


def test_what_the_nearest_plan_lacks_is_counted_with_its_own_communicators(workload: MakeWorkload) -> None:
    made = workload("llama-2-13b", profile="a40-x4-bridged", global_batch_size=16, seq_length=16384)
    with pytest.raises(NothingFitsError) as failure:
        search(made, fixed=Constraints(offload="none"))
    nearest = failure.value.nearest
    assert nearest.usable_memory_bytes < made.usable_memory_bytes, "of more than one axis"
    lacking = nearest.peak_memory_bytes - nearest.usable_memory_bytes
    limit = format_bytes(nearest.usable_memory_bytes)
    assert f"with {limit} usable each" in str(failure.value)
    assert f"{format_bytes(lacking)} too much" in str(failure.value)


def test_stages_are_cut_by_cost_so_that_the_head_weighs(workload: MakeWorkload) -> None:
    # The head of Llama-3-8B does the work of about 2.4 layers.
    made = workload("llama-3-8b", seq_length=4096)
    cut = BalancedSplits(made).cut(8, "none")
    assert cut is not None
    assert sum(cut) == 32
    assert cut[-1] < cut[0]


def test_an_uneven_cut_is_searched_and_is_faster_where_the_head_is_large(workload: MakeWorkload) -> None:
    made = workload("llama-3-8b", seq_length=4096)
    plan = next(one.plan for one in found(made).candidates if one.plan.pp > 1)
    assert plan.stage_blocks is not None
    even = estimate_plan(made, plan.replace(stage_blocks=None)).step.step_time_s
    assert estimate_plan(made, plan).step.step_time_s < even


def test_the_memory_objective_takes_the_plan_that_needs_least(workload: MakeWorkload) -> None:
    made = workload("llama-3-8b", seq_length=4096)
    fast, small = found(made), search(made, objective="memory")
    assert small.best.peak_memory_bytes < fast.best.peak_memory_bytes
    assert small.best.step.step_time_s > fast.best.step.step_time_s
    peaks = [candidate.peak_memory_bytes for candidate in small.candidates]
    assert peaks == sorted(peaks)


def test_the_simplest_plan_within_the_tolerance_of_the_fastest_is_recommended(workload: MakeWorkload) -> None:
    made = workload("llama-3-8b", seq_length=4096, global_batch_size=64)
    fast, usual = search(made, objective="fastest"), found(made)
    assert fast.best.plan == fast.candidates[0].plan == usual.candidates[0].plan
    assert (fast.best.plan.pp > 1, fast.fastest, fast.remark) == (True, None, None)
    assert usual.best.plan.describe() == "dp8, ZeRO-3, micro-batch 1 x 8"
    assert usual.fastest is not None
    assert fast.best.step.step_time_s < usual.best.step.step_time_s <= 1.1 * fast.best.step.step_time_s
    assert usual.remark is not None
    assert usual.remark.startswith(
        f"chosen over {fast.best.plan.describe()}, predicted 5.1% faster, because it is simpler"
    )


def test_a_plan_that_is_clearly_faster_is_recommended_whatever_the_guide_says(workload: MakeWorkload) -> None:
    long = search(workload("llama-3-405b", num_nodes=2048, seq_length=131072, global_batch_size=128))
    assert (long.candidates[0].plan.cp == 16, long.best.step.mfu > 0.3) == (True, True)
    result = search(workload("gpt2", profile="titan-rtx-x2", seq_length=512, global_batch_size=8, precision="fp32"))
    assert result.best.plan.pp == 2
    assert result.guide is not None
    assert result.guide.step.step_time_s > 1.25 * result.best.step.step_time_s
    assert result.remark == "Hugging Face's guide would choose dp2, DDP, micro-batch 4 x 1, predicted 28.3% slower"


def test_complexity_counts_what_makes_a_plan_hard_to_run() -> None:
    ordered = [
        ParallelPlan(dp=8),
        ParallelPlan(dp=8, zero_stage=3, recompute="full"),
        ParallelPlan(dp=8, zero_stage=3, recompute="selective_ops"),
        ParallelPlan(dp=8, zero_stage=3, zero_shards=4),
        ParallelPlan(tp=2, pp=4, num_microbatches=4, pipeline_schedule="1f1b"),
        ParallelPlan(dp=8, zero_stage=3, offload="parameters"),
        ParallelPlan(tp=2, pp=4, num_microbatches=4, pipeline_schedule="interleaved_1f1b", virtual_pipeline_size=2),
    ]
    table = PlanTable.of_plans(ordered)

    def levels_of(seq_length: int) -> list[int]:
        levels: list[int] = complexity(
            lambda column: np.asarray(getattr(table, column)), seq_length=seq_length
        ).tolist()
        return levels

    assert levels_of(4096) == [0, 1, 2, 3, 4, 5, 6]
    table = PlanTable.of_plans([ParallelPlan(dp=4, cp=2), ParallelPlan(dp=4, tp=2)])
    assert levels_of(4096) == [6, 2]  # of 2,048 tokens a rank there is nothing to divide, nor of 4,096 in all
    assert levels_of(8192) == [2, 2]


def test_a_pipeline_whose_other_stages_are_slower_than_those_looked_at_first_is_not_taken_for_the_best(
    workload: MakeWorkload,
) -> None:
    """Chunks of one and of two blocks: with all stages the pipeline takes 1.5 times what the first price says."""
    made = workload("llama-3-405b", "dgx-h100", num_nodes=2048, seq_length=131_072, global_batch_size=2048)
    fixed = Constraints(tp=4, recompute="full", micro_batch_size=1, sequence_parallel=True, offload="none")
    result = search(made, fixed=fixed)
    assert result.best.plan.pp == 1
    fastest = min(candidate.step_time_s for candidate in result.candidates)
    assert result.best.step.step_time_s <= (1 + TOLERANCE["throughput"]) * fastest


def test_recompute_that_a_framework_has_by_default_makes_its_plans_no_harder(workload: MakeWorkload) -> None:
    made = workload("llama-3-8b", seq_length=8192, global_batch_size=64, compiled=True)
    sharded = Constraints(dp=8, zero_stage=2)
    chosen = search(replace(made, framework=load_framework("torchtitan")), executor=ANYTHING, fixed=sharded).best.plan
    assert chosen.recompute == "selective_ops"
    plans = PlanTable.of_plans([chosen, chosen.replace(recompute="full")])
    for by_default, levels in ((True, [1, 1]), (False, [2, 1])):
        found_levels = complexity(
            lambda column: np.asarray(getattr(plans, column)), seq_length=8192, ops_by_default=by_default
        )
        assert found_levels.tolist() == levels


def test_plain_fsdp_and_ddp_stand_beside_the_best_also_where_they_do_not_fit(workload: MakeWorkload) -> None:
    made = workload("llama-3-8b", seq_length=4096, global_batch_size=64)
    fsdp, ddp = found(made).baselines
    assert (fsdp.baseline, fsdp.fits, fsdp.plan.describe()) == ("FSDP", True, "dp8, ZeRO-3, micro-batch 1 x 8")
    assert (ddp.baseline, ddp.fits, ddp.plan.zero_stage, ddp.plan.dp) == ("DDP", False, 0, 8)
    assert ddp.peak_memory_bytes > made.usable_memory_bytes
    assert search(made, fixed=Constraints(tp=2)).baselines == ()
    # What a framework cannot run is no baseline of it.
    large = workload("gpt3-175b", num_nodes=8, global_batch_size=64)
    refusing = Executor("none", lambda plan, training, blocks: "no FSDP" if plan.zero_stage == 3 else None)
    assert [one.baseline for one in search(large, executor=refusing).baselines] == ["DDP"]


def test_the_products_of_axes_are_those_of_the_world() -> None:
    products = {(one.dp, one.tp, one.pp, one.cp) for one in all_degrees(12)}
    everything = range(1, 13)
    expected = {
        (dp, tp, pp, cp)
        for dp in everything
        for tp in everything
        for pp in everything
        for cp in everything
        if dp * tp * pp * cp == 12
    }
    assert products == expected


def test_context_parallelism_goes_where_keys_have_to_be_repeated_and_sequence_parallelism_where_tokens_divide(
    workload: MakeWorkload,
) -> None:
    made = workload("llama-3-8b", num_nodes=4, seq_length=4 * 32 * 3, global_batch_size=1)
    space = PlanSpace(made, fixed=Constraints(tp=4))
    tables = [chunk.table for chunk in space.chunks()]
    cp = np.concatenate([table.cp for table in tables])
    sequence = np.concatenate([table.sequence_parallel for table in tables])
    assert 8 in cp  # 8 heads of queries and 2 of keys a rank of tp: each of these goes to 4 ranks of cp
    assert set(sequence[cp == 8]) == {0, 1}
    uneven = PlanSpace(workload("llama-3-8b", num_nodes=4, seq_length=8 * 6, global_batch_size=1), fixed=space.fixed)
    tables = [chunk.table for chunk in uneven.chunks()]
    assert all(not table.sequence_parallel[table.cp == 8].any() for table in tables)
    assert uneven.rejected["tp does not divide the tokens of a rank, as sequence parallelism needs it"]


def test_every_plan_of_the_space_is_one_that_the_runtime_executes_and_the_others_are_counted(
    workload: MakeWorkload,
) -> None:
    made = workload("gpt2", global_batch_size=24, precision="fp32")
    space = PlanSpace(made)
    chunks = list(space.chunks())
    counted = sum(space.variants[degrees] for chunk in chunks for degrees in chunk.degrees)
    assert counted + sum(space.rejected.values()) == space.considered
    for chunk in chunks:
        for row in range(0, len(chunk.table), 3):
            plan = chunk.table.plan(row)
            assert plan.world_size == 8
            assert plan.global_batch_size == 24
            assert unsupported_reason(plan, num_blocks=12, precision="fp32") is None


def test_compiled_blocks_are_neither_split_nor_copied(workload: MakeWorkload) -> None:
    made = workload("gpt2", global_batch_size=24, precision="fp32", compiled=True)
    space = PlanSpace(made)
    for chunk in space.chunks():
        assert set(chunk.table.tp.tolist()) == {1}
        assert set(chunk.table.virtual.tolist()) == {1}
    assert space.rejected["whether torch.compile follows split layers depends on the model's code"] > 0
    assert space.rejected["copies of blocks are not compiled"] > 0


def test_plans_for_other_frameworks_hold_what_the_runtime_does_not_execute(workload: MakeWorkload) -> None:
    made = workload("qwen2.5-0.5b", seq_length=4096)  # 2 key heads, which tokens are exchanged for
    own, other = search(made), search(made, executor=ANYTHING)
    assert own.is_runnable
    assert not other.is_runnable
    own_reasons, other_reasons = ({one.reason for one in result.rejections} for result in (own, other))
    assert own_reasons - other_reasons == {"1f1b needs a micro-batch for each stage"}


def test_the_order_of_ranks_keeps_tensor_parallelism_inside_the_fast_links(workload: MakeWorkload) -> None:
    made = workload("llama-3-70b", profile="dgx-a100", num_nodes=4, global_batch_size=128, seq_length=4096)
    for candidate in search(made).candidates:
        if candidate.plan.tp > 1:
            assert candidate.plan.rank_order[-1] == "tp"


def test_what_fits_is_found_with_nothing_larger_that_does(workload: MakeWorkload) -> None:
    made = workload("llama-3-8b", seq_length=4096, global_batch_size=8)
    plain = Constraints(tp=1, pp=1, offload="none")  # less to try for every size
    fewest = fewest_gpus(made, fixed=plain)
    assert fewest is not None
    assert 1 < fewest[0].num_gpus <= 8
    batch = largest_batch(made, fixed=plain)
    assert batch is not None
    assert batch % 8 == 0
    length = longest_sequence(made, fixed=plain)
    assert length is not None
    assert length > 4096
    assert longest_sequence(workload("gpt2", global_batch_size=8), fixed=plain) == 1024


@pytest.mark.parametrize(
    ("model", "profile", "training"),
    [
        ("llama-3.2-1b", "dgx-h100", {}),  # tied ends
        ("qwen3-30b-a3b", "dgx-h100", {"optimizer": "adafactor"}),
        ("llama-3-8b", "rtx-3090-x2", {"train": "lora:r=16", "base_weights": "nf4"}),
        ("gpt2-xl", "rtx-3090-x2", {"precision": "bf16-pure", "optimizer": "adamw_8bit"}),
        ("gpt2", "dgx-h100", {"optimizer": "muon"}),
    ],
)
def test_no_plan_holds_less_than_the_least_of_weights_and_optimizer(
    workload: MakeWorkload, model: str, profile: str, training: dict[str, Any]
) -> None:
    made = CostModel.of_workload(workload(model, profile=profile, **training))
    tables = [chunk.table for chunk in PlanSpace(made, OWN_RUNTIME, Constraints(offload="none")).chunks()]
    least = min(float(peak_memory(made, table).min()) for table in tables if len(table))
    assert 0 < least_state_bytes(made) <= made.cluster.num_gpus * least


def test_one_long_sequence_goes_over_more_ranks_than_its_heads_divide(workload: MakeWorkload) -> None:
    made = workload("qwen2.5-7b", profile="8xa100", seq_length=131072, global_batch_size=1)  # 28 heads
    fastest = search(made).candidates[0].plan
    assert fastest.cp * fastest.tp == 8
    assert fastest.cp > 4
