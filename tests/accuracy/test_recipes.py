from __future__ import annotations

import pytest

from paraplan.accuracy.measured_runs import MeasuredRun, UnusableRow, read_runs
from paraplan.accuracy.prediction import estimate_run
from paraplan.accuracy.run_workload import BundledData, plan_of_run, workload_of_run
from paraplan.model.named import known_configs

DATA = BundledData(configs=known_configs())
RUN = MeasuredRun(
    id="one",
    gpu="GB200",
    gpus_per_node=4,
    num_gpus=8,
    model_name="Qwen3_30B_a3B",
    seq_len=4096,
    precision="fp8",
    framework="Megatron-Bridge / Megatron-Core",
    ep=8,
    zero_stage=1,
    micro_batch=4,
    global_batch=512,
    nonstandard_features="MXFP8",
)


def seconds(run: MeasuredRun) -> float:
    completed = DATA.completed(run)
    workload = workload_of_run(completed, DATA)
    return estimate_run(completed, workload, plan_of_run(completed, workload.framework)).step.step_time_s


def test_a_recipe_fills_in_what_a_row_leaves_blank_by_its_release() -> None:
    before, after = (DATA.completed(RUN.replace(release=release)) for release in ("26.04", "26.06"))
    assert (before.dispatcher, before.cuda_graphs, before.overlaps_experts) == ("hybridep", "layers", False)
    assert (after.dispatcher, after.cuda_graphs, after.overlaps_experts) == ("hybridep", "full", True)
    assert DATA.completed(RUN) == after.replace(release="")  # no release: the newest
    own = DATA.completed(RUN.replace(dispatcher="alltoall", recompute="full"))
    assert (own.dispatcher, own.recompute, own.cuda_graphs) == ("alltoall", "full", "full")


@pytest.mark.parametrize("changes", [{"framework": "torchtitan"}, {"model_name": "Mixtral-8x7B"}])
def test_a_run_that_no_recipe_suits_stays_as_it_is(changes: dict[str, str]) -> None:
    run = RUN.replace(**changes)
    assert DATA.completed(run) == run


def test_overlap_and_a_graph_of_the_iteration_make_a_step_faster() -> None:
    plain = RUN.replace(release="26.04", cuda_graphs="none", overlaps_experts=False)
    beside = plain.replace(overlaps_experts=True)
    whole = beside.replace(cuda_graphs="full")
    assert seconds(plain) > seconds(beside) > seconds(whole)
    # NCCL's all-to-all sends a token to each of its experts, DeepEP and HybridEP once to each rank.
    assert seconds(plain.replace(dispatcher="alltoall")) > seconds(plain)


def test_cells_of_unknown_words_are_told_with_the_known_ones() -> None:
    table = "id,gpu,num_gpus,layers,hidden,heads,seq_len,global_batch,dispatcher\na,A100,8,2,64,4,128,8,{}\n"
    known, unknown = (read_runs(table.format(word), source="x")[0] for word in ("All-to-All", "pigeons"))
    assert isinstance(known, MeasuredRun)
    assert known.dispatcher == "alltoall"
    assert isinstance(unknown, UnusableRow)
    assert unknown.reason == "dispatcher='pigeons' is no known alltoall, deepep, hybridep"


def test_where_rows_over_a_capacity_are_dropped_nobody_waits_for_counts() -> None:
    plain = RUN.replace(release="25.09", nonstandard_features="FP8")
    dropped = DATA.completed(plain.replace(model_name="Qwen3_30B_a3B (tokendrop)"))
    assert (dropped.capacity_factor, dropped.dispatcher) == (1.0, "alltoall")
    same = DATA.completed(plain).replace(dispatcher="alltoall")
    assert seconds(dropped) < seconds(same)
    assert seconds(dropped.replace(capacity_factor=1.5)) > seconds(dropped)


def test_deepseek_trains_a_layer_for_multi_token_prediction_unless_its_name_says_not() -> None:
    run = RUN.replace(model_name="DeepSeekV3", ep=64, num_gpus=256)
    assert DATA.completed(run).mtp_layers == 1
    assert DATA.completed(run.replace(model_name="DeepSeekV3 (w/o MTP)")).mtp_layers == 0
