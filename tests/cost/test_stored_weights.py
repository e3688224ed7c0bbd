"""What is said of weights that a storage format does not reach, and the ways to have them stored so."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from paraplan.cost.estimate import estimate_plan, peak_memory
from paraplan.cost.plan_table import PlanTable
from paraplan.cost.stored_weights import storage_notes, wider_quantizers
from paraplan.cost.workload import Workload
from paraplan.errors import NoPlanFitsError
from paraplan.plan.parallel import ParallelPlan
from paraplan.search.recommendation import SearchRequest, recommendation
from paraplan.search.search import search

MakeWorkload = Callable[..., Workload]


def qlora(make: MakeWorkload, model: str, **fields: str) -> Workload:
    made = make(model, profile="1xrtx-4090", seq_length=2048, global_batch_size=4)
    return made.trained_as(
        made.training.replace(**{"train": "lora:r=16,targets=q|k|v|o", "base_weights": "nf4:double"} | fields)
    )


def test_experts_that_stay_in_16_bits_are_told_with_the_way_out(workload: MakeWorkload) -> None:
    (note,) = storage_notes(qlora(workload, "qwen3-30b-a3b"))
    for words in (
        "transformers 5",
        "29.0 B of 30.5 B",
        "54.0 GiB",
        "--quantizer axolotl",
        "quantize_moe_experts",
        "transformers-4",
    ):
        assert words in note


@pytest.mark.parametrize(
    "fields",
    [
        {"quantizer": "axolotl"},
        {"quantizer": "unsloth"},
        {"quantizer": "transformers-4"},
        {"base_weights": "int4"},
        {"base_weights": "bf16"},
    ],
)
def test_nothing_is_told_where_experts_are_stored_so_too(workload: MakeWorkload, fields: dict[str, str]) -> None:
    assert not storage_notes(qlora(workload, "qwen3-30b-a3b", **fields))


def test_a_dense_model_is_told_nothing(workload: MakeWorkload) -> None:
    assert not storage_notes(qlora(workload, "llama-3-8b"))
    assert not wider_quantizers(qlora(workload, "llama-3-8b"))


def test_a_format_that_nobody_trains_over_is_told(workload: MakeWorkload) -> None:
    (note,) = storage_notes(qlora(workload, "gpt-oss-20b", base_weights="mxfp4"))
    assert "trains no adapters over mxfp4" in note


def test_what_stores_experts_is_tried_with_a_fused_loss_where_it_alone_is_not_enough(workload: MakeWorkload) -> None:
    made = qlora(workload, "qwen3-30b-a3b")
    long = made.trained_as(made.training.replace(seq_length=8192))
    with pytest.raises(NoPlanFitsError) as caught:
        recommendation(long, SearchRequest())
    assert re.search(r"--loss liger --quantizer axolotl: \d", caught.value.hint or "")
    assert search(qlora(workload, "qwen3-30b-a3b", quantizer="axolotl")).best.fits


def test_what_peft_makes_of_all_linear_is_told_where_it_is_more(workload: MakeWorkload) -> None:
    made = workload("qwen3-30b-a3b", profile="dgx-h100", seq_length=2048, global_batch_size=8)
    (note,) = storage_notes(made.trained_as(made.training.replace(train="lora:r=16")))
    assert "981 M parameters more" in note
    assert "targets=all-linear|experts" in note
    for train in ("full", "lora:r=16,targets=q", "lora:r=16,targets=all-linear|experts", "dora:r=16"):
        assert not storage_notes(made.trained_as(made.training.replace(train=train)))


def test_experts_that_are_dequantized_before_their_product_stay_for_the_backward_pass(workload: MakeWorkload) -> None:
    stored = qlora(workload, "qwen3-30b-a3b", quantizer="axolotl", train="lora:r=16,targets=q|v")
    plans = [ParallelPlan(recompute=how, num_microbatches=4) for how in ("full", "none")]
    once, all_layers = (peak_memory(stored, PlanTable.of_plans([plan]))[0] for plan in plans)
    of_experts = 28.99e9 * 2
    assert all_layers - once > 0.9 * of_experts


@pytest.mark.parametrize(("base", "each"), [("bf16", 2.0), ("nf4", 0.5)])
def test_offloaded_weights_that_are_frozen_lie_in_the_hosts_memory(
    workload: MakeWorkload, base: str, each: float
) -> None:
    made = workload("llama-2-70b", profile="8xa10", seq_length=2048, global_batch_size=16)
    made = made.trained_as(made.training.replace(train="lora:r=16", base_weights=base))
    plan = ParallelPlan(dp=8, zero_stage=3, micro_batch_size=1, num_microbatches=2, recompute="full")
    offloaded = estimate_plan(made, plan.replace(offload="parameters"))
    stored = each * made.model.parameters.total
    assert stored < offloaded.host_bytes_per_node < 1.3 * stored
    assert estimate_plan(made, plan).host_bytes_per_node == 0
