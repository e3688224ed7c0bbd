"""Indexers of sparse attention: their scores in time, in memory and in a note."""

from __future__ import annotations

import pytest

from paraplan.cost.estimate import evaluate_plan, peak_memory
from paraplan.cost.indexers import indexer_notes
from paraplan.cost.plan_table import PlanTable
from paraplan.cost.workload import Workload
from paraplan.hardware.catalogue.profile_files import cluster_from_profile
from paraplan.model.reader import read_model
from paraplan.plan.parallel import ParallelPlan
from paraplan.plan.training import TrainingSpec

SHARDED = ParallelPlan(dp=64, zero_stage=3, recompute="full")
LENGTH, HEADS, LAYERS = 32_768, 64, 61


def workload_of(framework: str, *, has_indexer: bool = True) -> Workload:
    model = read_model("deepseek-v3.2")
    if not has_indexer:
        runs = tuple(run.replace(block=run.block.replace(index_scores=None)) for run in model.runs)
        model = model.replace(runs=runs)
    training = TrainingSpec(global_batch_size=64, seq_length=LENGTH)
    return Workload.of(model, training, cluster_from_profile("hgx-b300", num_nodes=8), framework=framework)


def test_transformers_indexers_hold_and_compute_scores_of_all_tokens_in_fp32() -> None:
    with_scores, without = (workload_of("hf-trainer", has_indexer=has) for has in (True, False))
    held = [peak_memory(one, PlanTable.of_plans([SHARDED])).max() for one in (with_scores, without)]
    made = 2 * 4 * HEADS * LENGTH**2  # before and after an operation on them
    assert 0 < held[0] - held[1] <= made
    spent = [evaluate_plan(one, SHARDED).step.compute_s for one in (with_scores, without)]
    peak = with_scores.cluster.gpu.peak("fp32")
    assert peak is not None
    at_peak = 2 * LAYERS * LENGTH * 2 * HEADS * LENGTH * (128 + 1) / peak  # once more for the backward pass
    assert spent[0] - spent[1] > at_peak
    (note,) = indexer_notes(with_scores)
    assert "512 GiB" in note
    assert "no gradient" in note


def test_fused_kernels_hold_no_matrix_of_scores_and_a_note_says_what_is_left_out() -> None:
    with_scores, without = (workload_of("megatron-core", has_indexer=has) for has in (True, False))
    held = [peak_memory(one, PlanTable.of_plans([SHARDED])).max() for one in (with_scores, without)]
    assert held[0] == pytest.approx(held[1])
    (note,) = indexer_notes(with_scores)
    assert "its own loss is not priced" in note
    assert indexer_notes(without) == ()
