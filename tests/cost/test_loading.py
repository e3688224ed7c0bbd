"""What loading takes by each framework's way, and what is said of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paraplan.cost.estimate import estimate_plan
from paraplan.cost.framework_files import FrameworkCatalog
from paraplan.cost.loading import LoadingEstimate, loading_of, some_way_loads
from paraplan.cost.workload import Workload
from paraplan.errors import ParaplanError
from paraplan.hardware.catalogue.profile_files import cluster_from_profile
from paraplan.model.reader import read_model
from paraplan.plan.parallel import ParallelPlan
from paraplan.plan.training import TrainingSpec
from paraplan.report.estimate_json import estimate_report
from paraplan.report.short_text import plan_lines

GIB = 2**30
ZERO_3 = ParallelPlan(dp=8, zero_stage=3, num_microbatches=1, recompute="full")


def made(model: str, framework: str, profile: str = "dgx-h100", **fields: Any) -> Workload:
    training = TrainingSpec(global_batch_size=8, seq_length=1024, **fields)
    return Workload.of(read_model(model), training, cluster_from_profile(profile), framework=framework)


def loaded(workload: Workload, plan: ParallelPlan = ZERO_3) -> LoadingEstimate:
    found = loading_of(workload, estimate_plan(workload, plan))
    assert found is not None
    return found


def test_fsdp_without_efficient_loading_has_all_weights_on_each_gpu() -> None:
    found = loaded(made("qwen3-30b-a3b", "fsdp"))
    assert found.option == "cpu_ram_efficient_loading: true"
    assert found.way == "first_rank_host"
    assert found.fits
    assert found.without is not None
    assert found.without.gpu_bytes == pytest.approx(30.53e9 * 4, rel=0.01)
    assert not found.without.fits
    assert found.is_worth_saying
    assert "which does not fit" in found.in_words


def test_weights_that_are_quantized_while_they_are_loaded_stand_on_each_gpu_with_one_tensor_in_16_bits() -> None:
    found = loaded(made("llama-3-70b", "fsdp", train="lora:r=8", base_weights="nf4"))
    assert found.way == "each_rank_gpu"
    embedding = 128256 * 8192 * 2
    assert found.gpu_bytes == found.weights_bytes + embedding


@pytest.mark.parametrize(
    ("framework", "way"),
    [("fsdp", "first_rank_host"), ("huggingface-trainer", "first_rank_host"), ("deepspeed-zero", "each_rank_host")],
)
def test_transformers_4_keeps_quantized_shards_in_the_memory_of_the_host(framework: str, way: str) -> None:
    fields = {"train": "lora:r=8", "base_weights": "nf4"}
    before = made("llama-3-70b", framework, "rtx-4090-x8", **fields)
    refused = loaded(before)
    assert not refused.fits
    assert "--framework fsdp --quantizer transformers-4" in refused.way_out
    found = loaded(made("llama-3-70b", framework, "rtx-4090-x8", **fields, quantizer="transformers-4"))
    assert found.way == way
    assert found.fits_gpu
    assert found.gpu_bytes < found.weights_bytes / 2
    replicas = loading_of(before, estimate_plan(before, ZERO_3.model_copy(update={"zero_stage": 1})))
    assert replicas is None or replicas.way != way


def test_releases_before_4_47_read_quantized_weights_and_a_file_of_the_checkpoint_on_every_rank() -> None:
    fields = {"train": "lora:r=32", "base_weights": "nf4:double", "quantizer": "transformers-4"}
    workload = made("llama-2-70b", "fsdp", "rtx-4090-x2", **fields)
    workload = replace(workload, cluster=workload.cluster.replace(host_memory_bytes=125 * 10**9))
    found = loaded(workload, ZERO_3.replace(dp=2, offload="parameters", num_microbatches=4))
    assert found.option == "transformers 4.47 or later"
    assert found.fits
    assert found.without is not None
    assert found.without.way == "each_rank_host"
    # https://github.com/axolotl-ai-cloud/axolotl/pull/1742: 125 GB were too few, 250 enough, for two ranks.
    assert found.without.host_bytes_per_node == pytest.approx(2 * (found.weights_bytes + 10e9))
    assert found.without.host_bytes_per_node > 0.75 * 125e9
    assert found.is_worth_saying
    assert "each rank of a machine reads all weights" in found.in_words


def test_transformers_4_is_no_way_out_for_models_that_came_after_it() -> None:
    fields = {"train": "lora:r=8", "base_weights": "nf4"}
    found = loaded(made("qwen3.5-122b-a10b", "fsdp", "rtx-4090-x8", **fields))
    assert not found.fits
    assert "transformers" not in found.way_out
    with pytest.raises(ParaplanError, match="transformers 4 has no models of the type qwen3_5_moe"):
        made("qwen3.5-122b-a10b", "fsdp", **fields, quantizer="transformers-4")


def test_no_number_of_nodes_loads_what_has_no_room_whole() -> None:
    fields = {"train": "lora:r=16", "base_weights": "nf4"}
    whole = made("llama-2-70b", "fsdp", "2xrtx-3090", **fields)
    many = replace(whole, cluster=whole.cluster.replace(num_nodes=64))
    assert [some_way_loads(each) for each in (whole, many)] == [False, False]
    assert some_way_loads(made("llama-2-70b", "fsdp", "2xrtx-3090", quantizer="transformers-4", **fields))
    assert some_way_loads(made("llama-2-70b", "fsdp", "2xl40s", **fields))


def test_a_release_below_16_bits_is_whole_on_each_gpu_where_it_is_dequantized() -> None:
    workload = made("gpt-oss-120b", "fsdp", train="lora:r=8")
    found = loaded(workload)
    assert found.gpu_bytes == pytest.approx(116.8e9 * 2, rel=0.01)
    assert not found.fits
    assert "a copy of the release in 16 bits" in found.in_words
    (line,) = (one for one in plan_lines(workload, estimate_plan(workload, ZERO_3)) if one.label == "Loading")
    assert line.tone == "bad"
    assert line.text.startswith("cannot be loaded so")


def test_every_rank_of_a_machine_reads_all_weights_where_scripts_build_the_model_whole() -> None:
    found = loaded(made("llama-3-8b", "paraplan"))
    assert found.way == "shards"
    assert found.without is not None
    assert found.without.host_bytes_per_node == 8 * found.weights_bytes


def test_weights_are_read_into_the_memory_that_a_gpu_shares_with_its_host() -> None:
    plan = ParallelPlan(num_microbatches=8)
    for model, fits in (("llama-3-8b", True), ("llama-3-70b", False)):
        found = loaded(made(model, "paraplan", "dgx-spark", train="lora:r=8"), plan)
        assert found.without is not None
        assert found.without.fits is fits
        assert ("which does not fit" in found.in_words) is not fits


def test_ranks_of_megatron_read_their_own_shares_and_nothing_is_said() -> None:
    workload = made("llama-3-8b", "megatron-core")
    plan = ParallelPlan(dp=2, tp=4, zero_stage=1, num_microbatches=4)
    found = loaded(workload, plan)
    assert found.way == "shards"
    assert found.host_bytes_per_node == 0
    assert not found.is_worth_saying
    assert "Loading" not in {line.label for line in plan_lines(workload, estimate_plan(workload, plan))}


def test_it_stands_in_json_beside_the_step() -> None:
    workload = made("qwen3-30b-a3b", "fsdp")
    report = estimate_report(workload, estimate_plan(workload, ZERO_3))["loading"]
    assert report["way"] == "first_rank_host"
    assert report["fits"] is True
    assert report["without"]["way"] == "each_rank_gpu"
    assert {"gpu_bytes", "host_bytes_per_node", "weights_bytes", "in_words"} <= set(report)


@settings(max_examples=30, deadline=None)
@given(
    framework=st.sampled_from(FrameworkCatalog().names()),
    model=st.sampled_from(["llama-3-8b", "qwen3-30b-a3b", "gpt-oss-20b", "gpt2"]),
    stage=st.sampled_from([0, 1, 2, 3]),
    train=st.sampled_from([{}, {"train": "lora:r=8"}, {"train": "lora:r=8", "base_weights": "nf4"}]),
)
def test_loading_never_takes_less_than_the_shares_nor_more_than_all_weights_for_each_rank(
    framework: str, model: str, stage: int, train: dict[str, str]
) -> None:
    workload = made(model, framework, **train)
    plan = ParallelPlan(dp=8, zero_stage=stage, num_microbatches=1, recompute="full")
    try:
        estimate = estimate_plan(workload, plan)
    except ParaplanError:  # the framework cannot train so
        return
    found = loading_of(workload, estimate)
    if found is None:
        return
    largest = max(one.num_elements for one, _ in workload.model.all_parameters) * 4
    kept = max(stage.parameter_bytes for stage in estimate.memory)
    for one in filter(None, (found, found.without)):
        assert one.host_bytes_per_node <= 8 * one.weights_bytes
        assert one.gpu_bytes <= max(one.weights_bytes, kept) + largest
        if one.way != "each_rank_gpu":
            assert one.gpu_bytes >= kept
        assert one.fits == (one.fits_gpu and one.host_bytes_per_node <= (one.host_memory_bytes or float("inf")))
        assert one.in_words
