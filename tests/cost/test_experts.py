from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from paraplan.cost.blocks.costs import block_costs
from paraplan.cost.blocks.routing import busiest_load
from paraplan.cost.communication.collectives import expert_links
from paraplan.cost.constants import CostConstants
from paraplan.cost.estimate import PlanEstimate, evaluate_plan
from paraplan.cost.framework import FrameworkProfile
from paraplan.cost.framework_files import load_framework
from paraplan.cost.notes import workload_notes
from paraplan.cost.plan_table import PlanTable
from paraplan.cost.workload import Workload
from paraplan.hardware.catalogue.profile_files import cluster_from_profile
from paraplan.model.config_file import ModelConfig
from paraplan.model.reader import read_fields, read_model
from paraplan.model.spec import Matmul
from paraplan.plan.parallel import ParallelPlan
from paraplan.plan.stack import StackSettings
from paraplan.plan.training import Fp8Recipe, LinearPrecision, TrainingSpec

MEGATRON_CORE = load_framework("megatron-core")

MakeWorkload = Callable[..., Workload]
DP = ParallelPlan(dp=8, num_microbatches=8)
EXPERTS = 32 * 8 * 3 * 4096 * 14336  # Mixtral 8x7B: layers, experts, gate, up and down projection
DENSE = 46_702_792_704 - EXPERTS


@pytest.fixture
def mixtral(workload: MakeWorkload) -> Workload:
    made = workload("mixtral-8x7b", seq_length=4096)
    return replace(made, training=made.training.replace(expert_load=1.0), framework=MEGATRON_CORE)


def parts(estimate: PlanEstimate) -> tuple[int, int, int]:
    memory = estimate.memory[0]
    return memory.parameter_bytes, memory.gradient_bytes, memory.optimizer_state_bytes


@pytest.mark.parametrize("ep", [1, 2, 4, 8])
def test_each_rank_holds_its_share_of_the_experts_and_all_of_the_rest(mixtral: Workload, ep: int) -> None:
    held = DENSE + EXPERTS / ep
    parameters, gradients, states = parts(evaluate_plan(mixtral, DP.replace(ep=ep)))
    assert parameters == pytest.approx(2 * held, rel=1e-6)
    assert gradients == pytest.approx(4 * held, rel=1e-6)
    assert states == pytest.approx(12 * held, rel=1e-6)


@pytest.mark.parametrize(("stage", "ep"), [(1, 2), (1, 8), (2, 4), (3, 2), (3, 8)])
def test_zero_shards_experts_over_the_ranks_that_hold_the_same_ones(mixtral: Workload, stage: int, ep: int) -> None:
    # A rank's shard does not depend on ep: each expert's state is once in the world, over dp / ep ranks or over dp.
    states = parts(evaluate_plan(mixtral, DP.replace(zero_stage=stage, ep=ep)))[2]
    assert states == pytest.approx(12 * (DENSE + EXPERTS) / 8, rel=1e-6)


def test_groups_of_experts_are_neighbours_and_cross_the_links_between_them(workload: MakeWorkload) -> None:
    made = replace(workload("mixtral-8x7b", num_nodes=2, seq_length=4096), framework=MEGATRON_CORE)
    plans = [
        ParallelPlan(dp=8, tp=2, ep=4, sequence_parallel=True),
        ParallelPlan(dp=8, tp=2, ep=8, sequence_parallel=True),
        ParallelPlan(dp=4, cp=2, tp=2, ep=4, sequence_parallel=True),
    ]
    exchange, alike = expert_links(made, PlanTable.of_plans(plans))
    kinds = [exchange.speeds["all_to_all"][key].kind for key in exchange.key]
    assert exchange.size.tolist() == [4, 8, 4]
    assert alike.size.tolist() == [2, 1, 2]
    assert kinds == ["nvswitch-4", "rdma", "nvswitch-4"]


def test_the_exchange_is_counted_by_hand(mixtral: Workload) -> None:
    # Two experts a token: forward two rows of 4096 elements there and back, backward their gradients there and back.
    plan = DP.replace(ep=8)
    exchange, _ = expert_links(mixtral, PlanTable.of_plans([plan]))
    once = float(exchange.all_to_all_s(np.array([4096 * 2 * 4096 * 2.0]))[0])
    step = evaluate_plan(mixtral, plan).step
    wait = mixtral.framework.experts.exchange_wait_s
    assert step.expert_parallel_s == pytest.approx(32 * (4 * once + 2 * wait) * plan.num_microbatches)
    again = evaluate_plan(mixtral, plan.replace(recompute="full")).step
    assert again.expert_parallel_s == pytest.approx(1.5 * step.expert_parallel_s)
    assert evaluate_plan(mixtral, DP).step.expert_parallel_s == 0


def test_beside_tensor_parallelism_a_layer_gathers_a_row_for_each_expert_of_a_token(mixtral: Workload) -> None:
    plan = ParallelPlan(dp=4, tp=2, ep=4, sequence_parallel=True, num_microbatches=16)
    split, plain = (evaluate_plan(mixtral, each).step for each in (plan, plan.replace(ep=1)))
    assert split.tensor_parallel_s == pytest.approx(plain.tensor_parallel_s, rel=0.05)
    assert split.expert_parallel_s > 0


def test_whole_experts_on_ranks_of_tensor_parallelism_share_work_and_send_less(mixtral: Workload) -> None:
    plan = DP.replace(dp=4, tp=2, ep=4, sequence_parallel=True, micro_batch_size=2)
    mixtral = replace(mixtral, training=mixtral.training.replace(global_batch_size=64))
    whole = replace(mixtral, framework=MEGATRON_CORE.changed(experts={"over_tensor_ranks": True}))
    steps = [evaluate_plan(each, plan).step for each in (mixtral, whole)]
    assert steps[1].compute_s < steps[0].compute_s, "narrow products are slower"
    # One of the two all-reduces of a block is left.
    assert steps[1].tensor_parallel_s == pytest.approx(steps[0].tensor_parallel_s / 2, rel=0.05)
    assert steps[1].expert_parallel_s < steps[0].expert_parallel_s
    assert parts(evaluate_plan(whole, plan)) == parts(evaluate_plan(mixtral, plan))
    alone = [evaluate_plan(each, plan.replace(ep=1)).step.expert_parallel_s for each in (mixtral, whole)]
    assert alone[0] == 0
    assert alone[1] > 0, "the ranks of tp have different experts"


def test_fewer_experts_with_more_rows_each_compute_no_slower(mixtral: Workload) -> None:
    seconds = [evaluate_plan(mixtral, DP.replace(ep=ep)).step.compute_s for ep in (1, 2, 4, 8)]
    assert seconds == sorted(seconds, reverse=True)


def test_overlap_saves_what_it_saved_where_both_were_measured() -> None:
    # Qwen3-30B-A3B on 16 H100 with HybridEP and graphs of layers: 24.71 s a step, 20.99 with overlap (NVIDIA).
    training = TrainingSpec(global_batch_size=1024, seq_length=4096, attention="flash", expert_load=1.0)
    plain = Workload.of(read_model("qwen3-30b-a3b"), training, cluster_from_profile("dgx-h100", num_nodes=2))
    bridge = load_framework("megatron-bridge")
    plan = ParallelPlan(dp=16, ep=16, zero_stage=1, num_microbatches=64)
    alone_s, beside_s = (
        evaluate_plan(replace(plain, framework=bridge, training=training.replace(stack=stack)), plan).step.step_time_s
        for stack in (StackSettings(), StackSettings(overlaps_experts=True))
    )
    assert alone_s == pytest.approx(24.71, rel=0.1)
    assert alone_s - beside_s == pytest.approx(24.71 - 20.99, rel=0.2)


QWEN = read_model("qwen3-30b-a3b")


def step_s(machine: str, plan: ParallelPlan, *, framework: FrameworkProfile, gbs: int, **training: Any) -> float:
    """Return the seconds of a step of Qwen3-30B-A3B with an even load."""
    spec = TrainingSpec(global_batch_size=gbs, seq_length=4096, attention="flash", expert_load=1.0, **training)
    cluster = cluster_from_profile(machine, num_nodes=plan.world_size // 8)
    return evaluate_plan(Workload.of(QWEN, spec, cluster, framework=framework), plan).step.step_time_s


@pytest.mark.parametrize(
    ("linear", "recipe", "measured_s"),
    # Model TFLOP/s of bf16, blockwise fp8 and mxfp8 as steps: pull request 5728 of NVIDIA/Megatron-LM and pull request
    # 2499 of NVIDIA-NeMo/Megatron-Bridge; tensorwise fp8: the latter's docs/performance-summary-archive.md, 26.06.
    [("16bit", None, 25.07), ("fp8", "blockwise", 24.82), ("fp8", "tensorwise", 29.70)],
)
def test_small_experts_in_8_bits_gain_no_more_than_was_measured(
    linear: LinearPrecision, recipe: Fp8Recipe | None, measured_s: float
) -> None:
    bridge = load_framework("megatron-bridge")
    if recipe == "tensorwise":  # its recipe has no graphs
        bridge = bridge.changed(kernels={"host_s_per_block": 0.002})
    plan = ParallelPlan(dp=16, ep=16, zero_stage=1, num_microbatches=64)
    found = step_s("dgx-h100", plan, framework=bridge, gbs=1024, linear_precision=linear, fp8_recipe=recipe)
    assert found == pytest.approx(measured_s, rel=0.17)
    narrow, wide = (
        step_s(
            "dgx-b200",
            ParallelPlan(dp=8, ep=8, zero_stage=1, micro_batch_size=4, num_microbatches=16),
            framework=load_framework("megatron-bridge"),
            gbs=512,
            linear_precision=each,
        )
        for each in ("mxfp8", "16bit")
    )
    assert wide == pytest.approx(11.04, rel=0.05)
    assert narrow / wide == pytest.approx(546 / 555, abs=0.13)  # 0.83 where starts of casts cost nothing


def test_each_tensor_of_each_expert_is_quantized_by_itself_where_its_product_starts_by_itself() -> None:
    plan = ParallelPlan(dp=8, ep=8, zero_stage=1, num_microbatches=8)
    core = dispatching(MEGATRON_CORE, host_s_per_layer=0.0).changed(kernels={"host_s_per_block": 0.0})
    grouped = core.changed(kernels={"engine": False})

    def added_s(recipe: Fp8Recipe, framework: FrameworkProfile, ep: int) -> float:
        """Return what a recipe adds to delayed scales, which cast all experts at once."""
        chosen = plan.replace(ep=ep)
        of = [
            step_s("dgx-h100", chosen, framework=framework, gbs=64, linear_precision="fp8", fp8_recipe=each)
            for each in (recipe, "delayed")
        ]
        return of[0] - of[1]

    assert added_s("blockwise", grouped, 8) == pytest.approx(0.0, abs=1e-9)
    eight, four = (added_s("blockwise", core, ep) for ep in (8, 4))
    assert four == pytest.approx(2 * eight, rel=0.05)  # twice the experts a rank
    assert added_s("tensorwise", core, 8) > 2 * eight


def dispatching(framework: FrameworkProfile, **values: object) -> FrameworkProfile:
    return framework.changed(experts={"dispatcher": framework.experts.dispatcher.replace(**values)})


def test_rows_are_padded_for_8_bits_alone(mixtral: Workload) -> None:
    padded, plain = (
        replace(mixtral, framework=dispatching(MEGATRON_CORE, padding_row_moves=moves)) for moves in (4.0, 0.0)
    )
    plan = DP.replace(ep=8)
    assert evaluate_plan(padded, plan).step == evaluate_plan(plain, plan).step
    narrow = [
        evaluate_plan(replace(each, constants=each.constants.replace(block_matmul_speedup=2.0)), plan).step.compute_s
        for each in (padded, plain)
    ]
    assert narrow[0] > narrow[1]


def test_an_even_load_by_consecutive_experts_sends_a_token_to_one_rank_alone() -> None:
    # Qwen3-30B-A3B on 8 MI355X: 32,768 tokens a micro-batch arrive at each rank, of which 7 of 8 come from others.
    training = TrainingSpec(global_batch_size=512, seq_length=4096, attention="flash", expert_load=1.0)
    plain = Workload.of(read_model("qwen3-30b-a3b"), training, cluster_from_profile("8xmi355x"))
    primus = dispatching(load_framework("primus"), sends_tokens_once=True).changed(experts={"exchange_wait_s": 0.0})
    random = primus.changed(experts={"consecutive_when_even": False})
    plan = ParallelPlan(dp=8, ep=8, zero_stage=1, micro_batch_size=8, num_microbatches=8)
    once, often = (
        evaluate_plan(replace(plain, framework=each), plan).step.expert_parallel_s for each in (primus, random)
    )
    links = expert_links(replace(plain, framework=primus), PlanTable.of_plans([plan]))[0]
    assert once == pytest.approx(48 * 8 * 4 * float(links.all_to_all_s(np.array([32768 * 2048 * 2.0]))[0]))
    assert 4.5 < often / once < 8 * (1 - (7 / 8) ** 8)
    natural = replace(plain, framework=primus, training=training.replace(expert_load=1.1))
    assert evaluate_plan(natural, plan).step.expert_parallel_s > often


def test_the_busiest_rank_of_experts_decides(mixtral: Workload) -> None:
    uneven = replace(mixtral, training=mixtral.training.replace(expert_load=1.5))
    before, after = (evaluate_plan(each, DP.replace(ep=8)).step for each in (mixtral, uneven))
    wait = 2 * 32 * DP.num_microbatches * mixtral.framework.experts.exchange_wait_s
    # Of a message, the start does not grow, and what it ramps up over grows as its root.
    assert 1.35 < (after.expert_parallel_s - wait) / (before.expert_parallel_s - wait) < 1.5
    assert 1.2 < after.compute_s / before.compute_s < 1.5


@pytest.mark.parametrize(
    ("num_experts", "ranks", "measured"),
    [
        (256, 64, 1.30),  # DeepSeek-V3 with a bias (UltraEP, arXiv 2606.04101, figure 11)
        (256, 64, 1.21),  # the same after 18 steps (marin-community/marin issue 7668)
        (64, 64, 1.72),  # of single experts under a loss (Wang et al. 2024, arXiv 2408.15664, table 2)
        (64, 64, 1.52),
        (8, 8, 1.13),  # eight experts under a loss (shawntan/scattermoe issue 10)
    ],
)
def test_the_load_that_routers_leave_is_near_what_was_measured(num_experts: int, ranks: int, measured: float) -> None:
    training = TrainingSpec(global_batch_size=8, seq_length=128)
    (found,) = busiest_load(training, CostConstants(), experts(num_experts), ranks=np.array([ranks]))
    assert found - 1 == pytest.approx(measured - 1, rel=0.7)


@pytest.mark.parametrize(
    ("num_experts", "ranks", "measured"),
    [
        (32, 2, 1.09),  # gpt-oss 20B on 2.8 million tokens of instructions (see `CostConstants`)
        (32, 4, 1.22),
        (32, 8, 1.60),
        (32, 16, 2.27),
        (256, 32, 2.56),  # DeepSeek-R1 on a translation task (see `CostConstants`)
    ],
)
def test_trained_routers_leave_a_load_near_what_was_measured(num_experts: int, ranks: int, measured: float) -> None:
    text = TrainingSpec(global_batch_size=8, seq_length=128, expert_load="trained")
    (found,) = busiest_load(text, CostConstants(), experts(num_experts), ranks=np.array([ranks]))
    assert found - 1 == pytest.approx(measured - 1, rel=0.6)


@pytest.mark.parametrize(
    "told", [{"train": "lora:r=8"}, {"task": "dpo"}, {"expert_load": "trained"}, {"train": "head", "task": "grpo"}]
)
def test_what_tells_of_a_trained_model_tells_of_its_load(told: dict[str, str]) -> None:
    plain, ranks = TrainingSpec(global_batch_size=8, seq_length=128), np.array([8])
    trained = plain.replace(**told)
    natural, load, even = (
        float(busiest_load(each, CostConstants(), experts(128), ranks=ranks)[0])
        for each in (plain, trained, trained.replace(expert_load=1.0))
    )
    assert load > natural > even == 1


def test_routers_load_more_ranks_less_evenly_and_a_rank_with_all_experts_is_the_mean() -> None:
    training, ranks = TrainingSpec(global_batch_size=8, seq_length=128), np.array([1, 2, 4, 8, 64])
    natural = busiest_load(training, CostConstants(), experts(128), ranks=ranks)
    assert natural[0] == 1
    assert (np.diff(natural) > 0).all()
    assert (busiest_load(training, CostConstants(), experts(256), ranks=ranks)[1:] < natural[1:]).all()
    stated = busiest_load(training.replace(expert_load=1.1), CostConstants(), experts(128), ranks=ranks)
    assert stated.tolist() == [1.0, 1.1, 1.1, 1.1, 1.1]


@pytest.mark.parametrize(("num_experts", "chosen", "ranks"), [(128, 8, 8), (64, 6, 8), (8, 2, 8), (256, 8, 64)])
def test_tokens_that_pad_load_the_rank_with_the_most_of_the_experts_that_all_of_them_go_to(
    num_experts: int, chosen: int, ranks: int
) -> None:
    drawn = np.random.default_rng(0).permuted(np.tile(np.arange(num_experts), (20_000, 1)), axis=1)[:, :chosen]
    rank_of = drawn // (num_experts // ranks)
    largest = np.stack([(rank_of == rank).sum(axis=1) for rank in range(ranks)]).max(axis=0).mean()
    half = TrainingSpec(global_batch_size=8, seq_length=128, sample_length=64)
    matmul, counts = experts(num_experts, chosen), np.array([1, ranks])
    alone, found = busiest_load(half, CostConstants(), matmul, ranks=counts)
    full = busiest_load(half.replace(sample_length=None, expert_load="trained"), CostConstants(), matmul, ranks=counts)[
        1
    ]
    assert alone == 1
    assert found == pytest.approx((largest * ranks / chosen + full) / 2, rel=0.02)
    assert busiest_load(half.replace(expert_load=1.0), CostConstants(), matmul, ranks=counts).tolist() == [1, 1]


@pytest.mark.parametrize(
    ("num_experts", "chosen", "ranks"), [(6, 5, 4), (8, 8, 5), (60, 4, 8), (16, 1, 16), (4, 2, 64)]
)
def test_padding_has_a_load_where_ranks_do_not_divide_the_experts(num_experts: int, chosen: int, ranks: int) -> None:
    padded = TrainingSpec(global_batch_size=8, seq_length=128, sample_length=1)
    (found,) = busiest_load(padded, CostConstants(), experts(num_experts, chosen), ranks=np.array([ranks]))
    assert 1 <= found <= ranks


def experts(count: int, chosen: int = 8) -> Matmul:
    return Matmul(name="experts", k=64, n=64, num_experts=count, rows_per_token=chosen)


def test_natural_routing_costs_experts_and_exchanges_their_busiest_rank(mixtral: Workload) -> None:
    natural = replace(mixtral, training=mixtral.training.replace(expert_load=None))
    before, after = (evaluate_plan(each, DP.replace(ep=8)) for each in (mixtral, natural))
    assert after.step.expert_parallel_s > before.step.expert_parallel_s
    assert 1.05 < after.step.compute_s / before.step.compute_s < 1.2
    (load,) = busiest_load(natural.training, natural.constants, experts(8, 2), ranks=np.array([8]))
    # Of each of two rows a token: the token, gate, up and their product, in 16 bits, of 32 layers.
    kept = 32 * 4096 * 2 * (4096 + 3 * 14336) * 2
    more = after.memory[0].activation_bytes - before.memory[0].activation_bytes
    assert more == pytest.approx(kept * (load - 1), rel=0.02)
    assert parts(after) == parts(before)


def test_ranks_that_have_all_experts_are_loaded_alike(mixtral: Workload) -> None:
    uneven = replace(mixtral, training=mixtral.training.replace(expert_load=1.5))
    assert evaluate_plan(uneven, DP).step == evaluate_plan(mixtral, DP).step


def test_gradients_of_experts_are_averaged_over_fewer_ranks(mixtral: Workload) -> None:
    wires = [evaluate_plan(mixtral, DP.replace(ep=ep)).step.data_parallel_wire_s for ep in (1, 2, 8)]
    assert wires == sorted(wires, reverse=True)
    alone = evaluate_plan(mixtral, DP.replace(ep=8)).step.data_parallel_wire_s
    assert alone == pytest.approx(wires[0] * DENSE / (DENSE + EXPERTS), rel=0.1)


def test_autocast_leaves_experts_in_fp32_where_the_weights_are(workload: MakeWorkload) -> None:
    made = workload("mixtral-8x7b", seq_length=4096)
    whole = replace(made, training=made.training.replace(precision="fp32"))

    def compute_s(of: Workload, stage: int, micro_batch: int = 1) -> float:
        return evaluate_plan(of, DP.replace(zero_stage=stage, micro_batch_size=micro_batch)).step.compute_s

    # ZeRO gathers 16-bit weights, DDP keeps fp32 ones: 67 of 989 TFLOP/s on an H100, and most of the work is experts.
    assert compute_s(made, 0) > 5 * compute_s(made, 1)
    assert compute_s(made, 0) < compute_s(whole, 0)
    of_fp16 = replace(made, framework=MEGATRON_CORE)
    assert compute_s(of_fp16, 0) == pytest.approx(compute_s(of_fp16, 1))
    dense = workload("llama-3-8b", seq_length=4096)
    # Casts of weights, which DDP alone has, are few beside the work of large micro-batches.
    assert compute_s(dense, 0, 4) == pytest.approx(compute_s(dense, 1, 4), rel=0.1)


def test_a_model_without_experts_has_none_to_share_out(workload: MakeWorkload) -> None:
    made = replace(workload("llama-3-8b", seq_length=4096), framework=MEGATRON_CORE)
    assert not block_costs(made, PlanTable.of_plans([DP])).expert_parameters.any()


def test_all_experts_of_llama_4_compute_every_token_in_transformers_own_code_alone(workload: MakeWorkload) -> None:
    fields: dict[str, Any] = {"model_type": "llama4_text", "vocab_size": 512, "hidden_size": 512}
    fields |= {"num_hidden_layers": 4, "num_attention_heads": 8, "num_local_experts": 8, "intermediate_size": 1024}
    base = workload("mixtral-8x7b", seq_length=1024)
    model = read_fields(ModelConfig("config", fields))
    frameworks = ("transformers", "torchtitan", "megatron-core")
    library, *own = (Workload.of(model, base.training, base.cluster, framework=name) for name in frameworks)
    assert "all 8 experts of a layer compute every token" in " ".join(workload_notes(library))
    products = [one for one in library.model.runs[0].block.matmuls if one.num_experts > 1]
    assert [one.dense_rows_per_token for one in products] == [8.0, 8.0]
    for other in own:
        block = other.model.runs[0].block
        assert {one.dense_rows_per_token for one in block.matmuls} == {None}
        assert other.model.training_flops_per_token(1024) == library.model.training_flops_per_token(1024)
        for tensors in (block.saved, block.saved_fused):
            (tokens,) = (one for one in tensors if one.role == "tokens_by_expert")
            assert tokens.elements_per_token == 512
        assert not any("all 8 experts" in note for note in workload_notes(other))
