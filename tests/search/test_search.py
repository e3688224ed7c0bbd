from __future__ import annotations

from collections.abc import Callable

import pytest

from paraplan.cost.estimate import estimate_plan
from paraplan.cost.table import PlanTable
from paraplan.cost.workload import Workload
from paraplan.errors import NoPlanFitsError
from paraplan.plan.support import unsupported_reason
from paraplan.search.search import balanced, search
from paraplan.search.space import PlanSpace, all_degrees
from paraplan.search.what_fits import fewest_nodes

MakeWorkload = Callable[..., Workload]


@pytest.mark.parametrize(
    ("model", "profile", "seq_length"),
    [("gpt2", "dgx-h100", 1024), ("llama-3-8b", "dgx-h100", 4096), ("gpt2-xl", "rtx-3090-x2", 1024)],
)
def test_what_is_recommended_fits_and_runs(workload: MakeWorkload, model: str, profile: str, seq_length: int) -> None:
    made = workload(model, profile=profile, seq_length=seq_length)
    result = search(made)
    for candidate in result.candidates:
        plan = candidate.plan
        assert candidate.peak_memory_bytes <= made.usable_memory_bytes
        assert plan.world_size == made.cluster.num_gpus
        assert plan.global_batch_size == made.training.global_batch_size
        assert unsupported_reason(plan, num_blocks=made.model.num_blocks) is None


def test_the_search_finds_what_brute_force_finds(workload: MakeWorkload) -> None:
    made = workload("gpt2-xl", profile="rtx-3090-x2", global_batch_size=16)
    table = PlanTable.concatenate(list(PlanSpace(made.model, made.training, 2, 2).chunks()))
    estimates = [estimate_plan(made, table.plan(row)) for row in range(len(table))]
    fastest_s = min(estimate.step.step_time_s for estimate in estimates if estimate.fits)
    assert search(made).candidates[0].step_time_s <= fastest_s * (1 + 1e-9)


def test_candidates_are_ranked_and_differ_in_their_axes(workload: MakeWorkload) -> None:
    candidates = search(workload("llama-3-8b", seq_length=4096)).candidates
    seconds = [candidate.step_time_s for candidate in candidates]
    kinds = [(plan.dp, plan.tp, plan.pp, plan.cp, plan.zero_stage) for plan in (row.plan for row in candidates)]
    assert len(set(kinds)) == len(kinds)
    assert seconds == sorted(seconds)


def test_every_plan_is_ranked_or_counted_with_its_reason(workload: MakeWorkload) -> None:
    made = workload("llama-3-8b", seq_length=4096)
    result = search(made)
    assert result.plans_considered > sum(rejection.count for rejection in result.rejections)
    assert any("usable" in rejection.reason for rejection in result.rejections)


def test_where_nothing_fits_the_nearest_plan_and_what_it_lacks_are_named(workload: MakeWorkload) -> None:
    made = workload("llama-2-7b", profile="rtx-3090-x2")
    with pytest.raises(NoPlanFitsError, match=r"no plan fits: llama-2-7b on 2 GPUs .* too much") as failure:
        search(made)
    nodes = fewest_nodes(made)
    assert nodes is not None
    assert f"it fits {2 * nodes} GPUs (--nodes {nodes})" in str(failure.value)
    assert search(workload("llama-2-7b", profile="rtx-3090-x2", num_nodes=nodes)).best.fits
    with pytest.raises(NoPlanFitsError):
        search(workload("llama-2-7b", profile="rtx-3090-x2", num_nodes=nodes // 2))


def test_stages_are_cut_by_cost_so_that_the_head_weighs(workload: MakeWorkload) -> None:
    # The head of Llama-3-8B does the work of about 2.4 layers.
    made = workload("llama-3-8b", seq_length=4096)
    table = PlanTable.concatenate(list(PlanSpace(made.model, made.training, 8, 8).chunks()))
    row = next(row for row in range(len(table)) if table.pp[row] == 8)
    cut = balanced(made, table.plan(row)).stage_blocks
    assert cut is not None
    assert sum(cut) == 32
    assert cut[-1] < cut[0]


def test_the_memory_objective_takes_the_plan_that_needs_least(workload: MakeWorkload) -> None:
    made = workload("llama-3-8b", seq_length=4096)
    fast, small = search(made), search(made, objective="memory")
    assert small.best.peak_memory_bytes < fast.best.peak_memory_bytes
    assert small.best.step.step_time_s > fast.best.step.step_time_s
    peaks = [candidate.peak_memory_bytes for candidate in small.candidates]
    assert peaks == sorted(peaks)


def test_simplicity_gives_up_at_most_two_percent(workload: MakeWorkload) -> None:
    made = workload("gpt2")
    fast, simple = search(made), search(made, objective="simplicity")
    assert simple.best.step.step_time_s <= 1.02 * min(row.step_time_s for row in fast.candidates)
    assert simple.best.plan.zero_stage <= fast.best.plan.zero_stage


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


def test_every_plan_of_the_space_is_one_that_the_runtime_executes_and_the_others_are_counted(
    workload: MakeWorkload,
) -> None:
    made = workload("gpt2", global_batch_size=24, precision="fp32")
    space = PlanSpace(made.model, made.training, 8, 8)
    table = PlanTable.concatenate(list(space.chunks()))
    assert len(table) + sum(space.rejected.values()) == space.considered
    for row in range(len(table)):
        plan = table.plan(row)
        assert plan.world_size == 8
        assert plan.global_batch_size == 24
        assert unsupported_reason(plan, num_blocks=12, precision="fp32") is None
