"""Each branch of the guide, with a machine and a model that lead there."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from paraplan.cost.workload import Workload
from paraplan.hardware.interconnect import Verdict
from paraplan.plan.parallel import ParallelPlan
from paraplan.search.tree import TreeAnswer, TreeFacts, decide, family, tree_facts

MakeWorkload = Callable[..., Workload]


def answer(workload: Workload) -> TreeAnswer:
    return decide(tree_facts(workload))


def outcome(result: TreeAnswer, rule: str) -> str:
    return next(decision.outcome for decision in result.decisions if rule in decision.rule)


def test_a_model_that_fits_one_gpu_is_trained_with_ddp_or_zero(workload: MakeWorkload) -> None:
    result = answer(workload("gpt2"))
    assert result.families == ("DDP", "ZeRO")
    assert outcome(result, "model fit one GPU").startswith("yes")


def test_a_model_that_does_not_fit_leaves_the_choice_to_the_cost_model_over_nvlink(workload: MakeWorkload) -> None:
    result = answer(workload("llama-3-8b", seq_length=4096))
    assert {"ZeRO", "PP", "TP"} <= set(result.families)
    assert outcome(result, "largest layer").startswith("yes")


def test_without_nvlink_a_pipeline_comes_first(workload: MakeWorkload) -> None:
    result = answer(workload("llama-2-7b", profile="rtx-4090-x4"))
    assert result.families[0] == "PP"
    assert outcome(result, "connected fast").startswith("no")


def test_a_layer_that_does_not_fit_needs_tensor_parallelism_or_zero(workload: MakeWorkload) -> None:
    result = answer(workload("gpt3-175b", profile="aws-g4dn.12xlarge"))
    assert result.families[0] == "TP"
    assert "PP" not in result.families
    assert outcome(result, "largest layer").startswith("no")


def test_a_fast_network_allows_zero_or_all_three_axes(workload: MakeWorkload) -> None:
    result = answer(workload("llama-3-70b", num_nodes=8))
    assert result.families[:2] == ("ZeRO", "PP x TP x DP")
    assert outcome(result, "nodes connected").startswith("yes")


def test_a_slow_network_asks_for_all_three_axes_with_zero_1(workload: MakeWorkload) -> None:
    result = answer(workload("llama-2-7b", profile="rtx-3090-x2", num_nodes=4))
    assert result.families[0] == "PP x TP x DP"
    assert "ZeRO" not in result.families
    assert "ZeRO-1" in outcome(result, "nodes connected")


@pytest.mark.parametrize("profile", ["titan-rtx-x2-nvlink", "titan-rtx-x2"])
def test_ddp_and_data_parallel_in_one_process_are_compared_by_their_predicted_steps(
    workload: MakeWorkload, profile: str
) -> None:
    found = answer(workload(profile=profile, precision="fp16"))
    because = next(one.because for one in found.decisions if "DataParallel" in one.rule)
    assert outcome(found, "DataParallel in one process") == "DDP"
    assert re.search(r"predicted for one micro-batch: DDP \d+ ms, DataParallel \d+ ms", because)


def test_sequences_whose_activations_fit_no_gpu_need_context_parallelism(workload: MakeWorkload) -> None:
    long = answer(workload("llama-3-70b", num_nodes=8, seq_length=524288, global_batch_size=8))
    assert outcome(long, "activations of one sequence") == "no: context parallelism divides its tokens"
    assert long.families[:2] == ("CP x DP", "PP x TP x CP x DP")
    kept = tree_facts(workload("llama-3-8b", seq_length=8192)).sequence_bytes
    assert kept >= 32 * 8192 * 4096 * 2  # the input of each block
    short = answer(workload("llama-3-70b", num_nodes=8))
    assert outcome(short, "activations of one sequence") == "yes"
    assert not any("CP" in name for name in short.families)


def test_experts_are_spread_where_the_framework_can(workload: MakeWorkload) -> None:
    found = answer(workload("mixtral-8x7b", num_nodes=2))
    assert outcome(found, "experts").startswith("expert parallelism")
    assert all("experts" not in one.rule for one in answer(workload("llama-3-8b")).decisions)


def test_one_gpu_has_no_choice(workload: MakeWorkload) -> None:
    assert answer(workload("gpt2", gpus=1)).families == ("single",)


def test_every_decision_gives_the_numbers_that_decided(workload: MakeWorkload) -> None:
    for decision in answer(workload("llama-3-70b", num_nodes=8)).decisions:
        assert any(character.isdigit() for character in decision.because)


@pytest.mark.parametrize(
    ("plan", "name"),
    [
        (ParallelPlan(), "single"),
        (ParallelPlan(dp=2), "DDP"),
        (ParallelPlan(dp=2, zero_stage=3), "ZeRO"),
        (ParallelPlan(pp=2, pipeline_schedule="1f1b"), "PP"),
        (ParallelPlan(pp=2, tp=2, dp=2, pipeline_schedule="1f1b"), "PP x TP x DP"),
    ],
)
def test_plans_belong_to_the_families_of_the_tree(plan: ParallelPlan, name: str) -> None:
    assert family(plan) == name


def test_the_threshold_between_fast_and_slow_decides() -> None:
    facts = TreeFacts(
        num_gpus=4,
        num_nodes=1,
        usable_memory_bytes=20,
        training_state_bytes=30,
        least_step_bytes=5,
        largest_layer_bytes=10,
        node=Verdict(is_fast=True, bandwidth_bytes_per_s=5e10, threshold_bytes_per_s=4e10, because="50 of 40"),
    )
    assert facts.node is not None
    assert "TP x DP" in decide(facts).families
    assert decide(facts.replace(node=facts.node.replace(is_fast=False))).families[0] == "PP"
    for ddp_s, words in ((1.01, "DDP"), (1.1, "DataParallel in one process is faster; the search keeps to DDP")):
        small = decide(facts.replace(training_state_bytes=5, ddp_step_s=ddp_s, one_process_step_s=1.0))
        assert outcome(small, "DataParallel in one process") == words


def test_cpu_processes_are_not_asked_about_dataparallel(workload: MakeWorkload) -> None:
    made = workload("gpt2", "cpu", global_batch_size=8, seq_length=128)
    rules = [decision.rule for decision in decide(tree_facts(made)).decisions]
    assert rules
    assert not any("DataParallel" in rule for rule in rules)
