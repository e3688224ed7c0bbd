"""Recompute of chosen operations, and 8-bit inputs, against hand counts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paraplan.cost.blocks.costs import block_costs
from paraplan.cost.communication.collectives import group_links
from paraplan.cost.communication.exchanges import expert_exchange_s, routed_matmul, touched
from paraplan.cost.estimate import evaluate_plan
from paraplan.cost.plan_table import PlanTable
from paraplan.cost.workload import Workload
from paraplan.hardware.catalogue.profile_files import cluster_from_profile
from paraplan.model.config_file import ModelConfig
from paraplan.model.named import known_configs
from paraplan.model.reader import read_fields
from paraplan.model.spec import BlockRun
from paraplan.plan.parallel import ParallelPlan, Recompute
from paraplan.plan.training import TrainingSpec

H, KV, F, HEADS, S = 4096, 1024, 14336, 32, 4096


def made(framework: str, model: str = "llama38b", nodes: int = 1) -> Workload:
    return Workload.of(
        read_fields(ModelConfig(model, known_configs()[model], model, S)),
        TrainingSpec(global_batch_size=64, seq_length=S, precision="bf16", attention="flash"),
        cluster_from_profile("dgx-h100", num_nodes=nodes),
        framework=framework,
    )


def kept_per_token(workload: Workload, recompute: Recompute) -> float:
    table = PlanTable.of_plans([ParallelPlan(dp=8, zero_stage=3, num_microbatches=8, recompute=recompute)])
    costs = block_costs(workload, table)
    return float(costs.later_saved_bytes[costs.key[0], 0]) / S


def test_torch_keeps_the_entry_the_attention_and_every_second_product() -> None:
    # q, v, gate and down of q, k, v, o, gate, up and down; the statistics of attention are fp32, one a head.
    expected = 2 * (H + H + H + KV + F + H) + 4 * HEADS
    assert kept_per_token(made("torchtitan"), "selective_ops") == pytest.approx(expected)


def test_modules_drop_the_outputs_of_norms_and_activations() -> None:
    megatron = made("megatron-core")
    dropped = kept_per_token(megatron, "none") - kept_per_token(megatron, "selective_ops")
    assert dropped == pytest.approx(2 * (H + H + F))


@pytest.mark.parametrize("framework", ["torchtitan", "megatron-core"])
def test_operations_cost_more_than_nothing_and_less_than_whole_blocks(framework: str) -> None:
    plans = [
        ParallelPlan(dp=8, zero_stage=1, num_microbatches=8, recompute=kind)
        for kind in ("none", "selective_ops", "full")
    ]
    workload = made(framework)
    calls = {"host_s_per_block": 0.0}  # modes that see every operation cost the host more than whole blocks
    workload = replace(workload, framework=workload.framework.changed(kernels=calls))
    steps = [evaluate_plan(workload, plan) for plan in plans]
    assert steps[0].step.step_time_s < steps[1].step.step_time_s < steps[2].step.step_time_s
    memory = [max(stage.total_bytes for stage in step.memory) for step in steps]
    assert memory[0] > memory[1] > memory[2]


def test_inputs_of_linear_layers_are_kept_in_8_bits() -> None:
    plain = made("megatron-core")
    narrow = replace(plain, constants=plain.constants.replace(block_matmul_speedup=2.0))
    # The outputs of two norms and the input of down lose a byte each; the output of attention gains one.
    saved = kept_per_token(plain, "none") - kept_per_token(narrow, "none")
    assert saved == pytest.approx(H + H + F - H)


def test_a_token_goes_once_to_a_node() -> None:
    # 8 experts drawn at random over 8 nodes touch 8 (1 - (7/8)^8) = 5.25 of them.
    often, once = (made(name, "qwen330ba3b", nodes=8) for name in ("megatron-core", "megatron-bridge"))
    table = PlanTable.of_plans([ParallelPlan(dp=64, ep=64, zero_stage=1, micro_batch_size=64)])
    seconds = [
        float(expert_exchange_s(each, table, group_links(each, table, "tp"))[0][0])
        - each.framework.experts.exchange_wait_s
        for each in (often, once)
    ]
    assert seconds[1] / seconds[0] == pytest.approx(8 * (1 - (7 / 8) ** 8) / 8, rel=0.05)


def test_inside_a_node_a_token_goes_once_to_a_rank() -> None:
    # 8 experts on 8 ranks: 5.25 of 8 rows, at the rate of NCCL on NVLink 4.
    often, once = (made(name, "qwen330ba3b") for name in ("megatron-core", "megatron-bridge"))
    table = PlanTable.of_plans([ParallelPlan(dp=8, ep=8, zero_stage=1, micro_batch_size=64)])
    seconds = [
        float(expert_exchange_s(each, table, group_links(each, table, "tp"))[0][0])
        - each.framework.experts.exchange_wait_s
        for each in (often, once)
    ]
    assert seconds[1] / seconds[0] == pytest.approx(touched(8.0, 8) / 8, rel=0.05)


def test_a_router_of_half_of_the_groups_reaches_half_of_the_nodes() -> None:
    # DeepSeek-V3: 4 of 8 groups, 8 experts of a token, 8 nodes: 4 (1 - (3/4)^8) = 3.6 nodes in place of 5.25.
    plain = made("megatron-bridge", "deepseekv3", nodes=8)
    routed = {one.group_share for run in plain.model.runs if (one := routed_matmul(run.block))}
    table = PlanTable.of_plans([ParallelPlan(dp=64, ep=64, zero_stage=1, micro_batch_size=64)])
    free = replace(plain, model=plain.model.replace(runs=tuple(map(_without_groups, plain.model.runs))))
    limited, unlimited = (
        float(sum(expert_exchange_s(each, table, group_links(each, table, "tp"))[index][0] for index in (0, 2)))
        for each in (plain, free)
    )
    assert routed == {0.5}
    assert limited / unlimited == pytest.approx(touched(4.0, 8) / touched(8.0, 8), rel=0.05)


def _without_groups(run: BlockRun) -> BlockRun:
    matmuls = tuple(one.replace(group_share=1.0) for one in run.block.matmuls)
    return run.replace(block=run.block.replace(matmuls=matmuls))


def test_no_product_is_faster_than_memory() -> None:
    # The gradient of an expert's weight with few tokens: what it reads and writes decides, not its FLOPs.
    workload = made("megatron-core", "qwen330ba3b")
    costs = block_costs(workload, PlanTable.of_plans([ParallelPlan(dp=8, ep=8, num_microbatches=8)]))
    per_rank = 128 / 8 * 3 * 2048 * 768
    assert float(costs.backward_s[0, 0]) > per_rank * 8 / workload.memory_bandwidth_bytes_per_s


def test_frameworks_without_it_are_not_offered_it() -> None:
    assert made("torchtitan").recomputes == ("none", "selective_ops", "full")
    # Megatron-Core's modules are those of experts.
    assert made("megatron-core").recomputes == ("none", "full")
    assert made("megatron-core", "qwen330ba3b").recomputes == ("none", "selective_ops", "full")
    assert made("paraplan").recomputes == ("none", "selective_ops", "full")
    assert made("huggingface-trainer").recomputes == ("none", "full")


@pytest.mark.parametrize("streams", [2, 4])
def test_full_recompute_keeps_all_residual_streams_which_a_pipeline_sends(streams: int) -> None:
    fields: dict[str, object] = {"model_type": "gemma3n_text", "vocab_size": 512, "hidden_size": 256}
    fields |= {"num_hidden_layers": 5, "num_attention_heads": 8, "num_kv_shared_layers": 0, "altup_num_inputs": streams}
    workload = made("megatron-core")
    workload = Workload.of(
        read_fields(ModelConfig("config", fields)), workload.training, workload.cluster, framework="fsdp"
    )
    assert kept_per_token(workload, "full") == 2 * streams * 256
    costs = block_costs(workload, PlanTable.of_plans([ParallelPlan(dp=8, num_microbatches=8)]))
    assert float(costs.boundary_bytes[costs.key[0]]) == 2 * streams * 256 * S
