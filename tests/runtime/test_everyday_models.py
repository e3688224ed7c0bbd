"""Models with code of their own, as many people write them, train under every plan as in one process."""

from __future__ import annotations

import pytest
import torch
from everyday_models import (
    InADict,
    KeptWeights,
    ManyExperts,
    MemoryReads,
    OwnActivations,
    OwnLinears,
    Padded,
    ReadsMemory,
    SkipsToTheStart,
)
from odd_models import BATCH, Base, difference, train_all
from rank_harness import RankHarness

from paraplan.plan.parallel import ParallelPlan
from paraplan.runtime.pipeline.schedules import disjoint_groups

ALONE = ParallelPlan(num_microbatches=2, micro_batch_size=BATCH // 2)
SPLIT = ALONE.replace(tp=2)
IN_HALVES = ALONE.replace(pp=2, pipeline_schedule="zero_bubble")
INTERLEAVED = ALONE.replace(pp=2, pipeline_schedule="interleaved_1f1b", virtual_pipeline_size=2)


def assert_trained_as_alone(ranks: RankHarness, kinds: list[type[Base]], plan: ParallelPlan) -> None:
    (references,) = ranks.run_alone(train_all, kinds, [ALONE])
    for found in ranks.run(train_all, kinds, [plan], size=2):
        for kind, run, reference in zip(kinds, found[0], references, strict=True):
            assert not isinstance(run, str), (kind, run)
            assert not difference(run, reference), kind


@pytest.mark.ranks
def test_experts_picked_by_a_mask_and_layers_with_code_of_their_own_train_beside_split_layers(
    ranks: RankHarness,
) -> None:
    assert_trained_as_alone(ranks, [ManyExperts, OwnActivations, OwnLinears, ReadsMemory], SPLIT)


@pytest.mark.ranks
def test_experts_picked_by_a_mask_and_skips_to_the_start_train_under_zero_bubble(ranks: RankHarness) -> None:
    assert_trained_as_alone(ranks, [ManyExperts, SkipsToTheStart], IN_HALVES)


@pytest.mark.ranks
def test_weights_that_a_module_keeps_from_its_last_pass_are_copied_with_it(ranks: RankHarness) -> None:
    for plan in (SPLIT.replace(sequence_parallel=True), INTERLEAVED):
        assert_trained_as_alone(ranks, [KeptWeights], plan)


@pytest.mark.ranks
def test_tokens_of_a_rank_attend_to_another_sequence_which_attends_to_them(ranks: RankHarness) -> None:
    plan = ALONE.replace(cp=2)
    assert_trained_as_alone(ranks, [ReadsMemory, MemoryReads, Padded], plan)


@pytest.mark.ranks
def test_blocks_that_hand_on_a_dict_are_refused_where_ranks_have_some_tokens(ranks: RankHarness) -> None:
    for plan in (ALONE.replace(cp=2), SPLIT.replace(sequence_parallel=True), IN_HALVES):
        for found in ranks.run(train_all, [InADict], [plan], size=2):
            assert "layers.0" in found[0][0]
            assert "hidden state" in found[0][0] or "does not take the output" in found[0][0]
    assert_trained_as_alone(ranks, [InADict], SPLIT)


def test_a_weight_that_joins_two_groups_of_a_backward_pass_is_in_one_alone() -> None:
    """As torch returns the groups of `a` and `b` once `c`, which works in both of their blocks, has joined them."""
    first, second, third = (torch.ones(1) * number for number in (1, 2, 3))
    groups = [
        {"params": {"a", "c"}, "intermediates": ["at a", "at b"], "grads": [(first,), (second,)]},
        {"params": {"d"}, "intermediates": ["at d"], "grads": [(third,)]},
        {"params": {"a", "b", "c"}, "intermediates": ["at b", "at a"], "grads": [(second,), (first,)]},
        {"params": {"e"}, "intermediates": ["at e"]},
    ]
    apart, joined = disjoint_groups(groups)
    assert apart == {"params": {"d"}, "intermediates": ["at d"], "grads": [(third,)]}
    assert joined["params"] == {"a", "b", "c"}
    assert dict(zip(joined["intermediates"], joined["grads"], strict=True)) == {"at a": (first,), "at b": (second,)}
