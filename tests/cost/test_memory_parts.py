"""Each part of a plan's memory against a count by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from paraplan.cost.blocks.costs import block_costs
from paraplan.cost.estimate import evaluate_plan
from paraplan.cost.framework import FrameworkProfile
from paraplan.cost.framework_files import FrameworkCatalog, load_framework
from paraplan.cost.memory.optimizers import optimizer_states
from paraplan.cost.memory.overheads import matmul_workspace_bytes
from paraplan.cost.memory.peak import host_bytes, loss_backward_bytes, step_copies_bytes
from paraplan.cost.memory.rank import RankMemory
from paraplan.cost.pipeline.stages import chunk_in_flight, even_stage
from paraplan.cost.plan_table import PlanTable
from paraplan.cost.workload import Workload
from paraplan.model.config_file import ModelConfig
from paraplan.model.reader import read_fields
from paraplan.model.shapes import TransformerShapes, model_from_shapes
from paraplan.plan.parallel import ParallelPlan
from paraplan.plan.training import OptimizerName
from paraplan.units import GIB, MIB


def table_framework(words: str) -> FrameworkProfile:
    found = FrameworkCatalog().find(words)
    assert found is not None
    return found


COMPOSER = table_framework("composer")
FLAGSCALE = table_framework("flagscale")
MEGATRON_2022 = FrameworkCatalog().bundled("megatron-lm-2022")
MEGATRON_CORE = load_framework("megatron-core")
MEGATRON_CORE_LOCAL = table_framework("megatron-core transformer-impl=local")
MEGATRON_DEEPSPEED = load_framework("megatron-deepspeed")

MakeWorkload = Callable[..., Workload]
H, A, S, V, LAYERS = 512, 8, 256, 1024, 8
BLOCK = 12 * H * H + 13 * H
EMBEDDING = (V + S) * H


def gpt(workload: MakeWorkload, framework: FrameworkProfile, **training: object) -> Workload:
    shapes = TransformerShapes(num_layers=LAYERS, hidden_size=H, num_heads=A, vocab_size=V, max_seq_length=S)
    made = workload(**{"seq_length": S, "attention": "eager", **training})
    return replace(made, model=model_from_shapes(shapes), framework=framework)


def rank(workload: Workload, stage: int = 0, **plan: object) -> RankMemory:
    table = PlanTable.of_plans([ParallelPlan.model_validate(plan)])
    blocks = even_stage(table, workload.model.num_blocks, np.array([stage]))
    return RankMemory.of(workload, table, block_costs(workload, table), blocks)


def one(values: object) -> float:
    return float(np.asarray(values)[0])


def block_bytes(workload: Workload, **plan: object) -> float:
    table = PlanTable.of_plans([ParallelPlan.model_validate(plan)])
    costs = block_costs(workload, table)
    return float(costs.saved_bytes[costs.key[0], 0])


B = 4  # sequences of a micro-batch


@pytest.mark.parametrize(
    ("plan", "bytes_per_sbh"),
    [  # Korthikanti et al. 2022, Table 2
        ({}, 34 + 5 * A * S / H),
        ({"tp": 4}, 10 + 24 / 4 + 5 * A * S / (H * 4)),
        ({"tp": 4, "sequence_parallel": True}, 34 / 4 + 5 * A * S / (H * 4)),
        ({"tp": 4, "sequence_parallel": True, "recompute": "selective"}, 34 / 4),
        ({"recompute": "full"}, 2),
        ({"cp": 4}, (34 + 5 * A * S / H) / 4),
    ],
)
def test_a_gpt_block_keeps_what_the_table_of_korthikanti_says(
    workload: MakeWorkload, plan: dict[str, object], bytes_per_sbh: float
) -> None:
    kept = block_bytes(gpt(workload, MEGATRON_CORE_LOCAL), micro_batch_size=B, **plan)
    # The table leaves out what norms keep of each token: two fp32 statistics, of two norms.
    assert kept == pytest.approx(bytes_per_sbh * S * B * H, rel=0.015)


def test_without_dropout_no_masks_are_kept(workload: MakeWorkload) -> None:
    made = gpt(workload, MEGATRON_CORE_LOCAL)
    shapes = TransformerShapes(
        num_layers=LAYERS, hidden_size=H, num_heads=A, vocab_size=V, max_seq_length=S, dropout=0.0
    )
    dry = replace(made, model=model_from_shapes(shapes))
    masks = 2 * H + 3 * A * S  # of two residual dropouts; of the scores' own, and the scores that are left
    assert block_bytes(made, micro_batch_size=B) - block_bytes(dry, micro_batch_size=B) == S * B * masks


@pytest.mark.parametrize(
    ("optimizer", "matrix", "vector", "embedding"),
    [
        ("adamw", 8 * H * H, 8 * H, 8 * V * H),
        ("adamw_8bit", 2 * (1 + 4 / 256) * H * H, 8 * H, 2 * (1 + 4 / 256) * V * H),
        ("adafactor", 4 * (H + H), 4 * H, 4 * (V + H)),
        ("muon", 4 * H * H, 8 * H, 8 * V * H),
        ("sgd_momentum", 4 * H * H, 4 * H, 4 * V * H),
        ("sgd", 0, 0, 0),
        ("schedule_free_adamw", 8 * H * H, 8 * H, 8 * V * H),
        ("schedule_free_sgd", 4 * H * H, 4 * H, 4 * V * H),
        ("galore_adamw", 4 * 3 * min(128, H) * H, 8 * H, 8 * V * H),  # two states and a projection at rank 128
    ],
)
def test_optimizers_keep_their_states(optimizer: OptimizerName, matrix: float, vector: float, embedding: float) -> None:
    fields = {
        "model_type": "llama",
        "hidden_size": H,
        "intermediate_size": H,
        "num_hidden_layers": 2,
        "num_attention_heads": A,
        "num_key_value_heads": A,
        "vocab_size": V,
        "tie_word_embeddings": False,
    }
    model = read_fields(ModelConfig("config", fields))
    states = optimizer_states(model, optimizer)
    block = 7 * matrix + 2 * vector  # query, key, value, output, gate, up, down; two norms
    assert states.blocks * (7 * H * H + 2 * H) == pytest.approx(block)
    assert states.embedding * V * H == pytest.approx(embedding)
    assert states.head * (V * H + H) == pytest.approx(embedding + vector)


def test_foreach_steps_copy_all_loops_one_and_fused_none(workload: MakeWorkload) -> None:
    made = workload(precision="fp32", optimizer="adamw_foreach")
    total, largest, weight = 124_439_808, (50257 + 1024) * 768, 3072 * 768
    assert one(step_copies_bytes(rank(made))) == 4 * total
    # FSDP's sharded parameters are stepped through one by one: two copies of the largest, one of another.
    assert one(step_copies_bytes(rank(made, dp=8, zero_stage=1))) == 4 * (2 * largest + weight) / 8
    assert one(step_copies_bytes(rank(workload(precision="fp32")))) == 0
    assert one(step_copies_bytes(rank(workload(precision="fp32", optimizer="adafactor")))) == 4 * total
    assert one(step_copies_bytes(rank(workload(precision="fp32", optimizer="muon")))) == 9 * largest


@pytest.mark.parametrize("zero_stage", [0, 1])
def test_megatron_holds_18_bytes_a_parameter_or_6_and_a_share_of_12(workload: MakeWorkload, zero_stage: int) -> None:
    held = rank(gpt(workload, MEGATRON_CORE), dp=4, zero_stage=zero_stage)
    parameters = LAYERS * BLOCK + EMBEDDING + 2 * H
    each = 18 if zero_stage == 0 else 6 + 12 / 4
    state = one(held.weight_bytes) + one(held.final_gradient_bytes) + one(held.optimizer_bytes)
    assert state == pytest.approx(each * parameters)


def counts(stage: int, **plan: object) -> list[float]:
    table = PlanTable.of_plans([ParallelPlan.model_validate(plan)])
    blocks = even_stage(table, 16, np.array([stage]))
    return [float(kept) for kept in chunk_in_flight(table, blocks)[:, 0]]


def test_interleaved_chunks_are_started_in_groups_of_pp_micro_batches() -> None:
    plan = {"pp": 4, "pipeline_schedule": "interleaved_1f1b", "virtual_pipeline_size": 2, "num_microbatches": 16}
    # Rank 0 starts 6 + 4 + 1 chunks: four micro-batches through each of its chunks, three more through the first.
    assert counts(0, **plan) == [7, 4]
    assert counts(1, **plan) == [5, 4]
    # The last rank goes backward as soon as its last chunk has one.
    assert counts(3, **plan) == [4, 1]
    assert counts(0, **{**plan, "num_microbatches": 4}) == [4, 4]


def test_only_the_first_micro_batch_has_logits_when_an_interleaved_pipeline_turns(workload: MakeWorkload) -> None:
    made = gpt(workload, MEGATRON_CORE)
    plan = {"pp": 4, "pipeline_schedule": "interleaved_1f1b", "virtual_pipeline_size": 2, "num_microbatches": 8}
    last = rank(made, 3, **plan)
    assert one(last.head_in_flight) == 1
    assert one(last.num_logits) == S * V
    assert one(rank(made, 0, **plan).num_logits) == 0


def test_activations_of_a_rank_are_those_of_its_chunks_in_flight(workload: MakeWorkload) -> None:
    made = gpt(workload, MEGATRON_CORE)
    plan = {"pp": 4, "pipeline_schedule": "interleaved_1f1b", "virtual_pipeline_size": 2, "num_microbatches": 8}
    block = block_bytes(made)
    assert one(rank(made, 3, **plan).kept_bytes) == pytest.approx((4 + 1) * block)
    assert one(rank(made, 2, **plan).kept_bytes) == pytest.approx((4 + 3) * block)


@pytest.mark.parametrize(("tp", "framework", "each"), [(1, MEGATRON_CORE, 6), (4, MEGATRON_CORE, 6), (1, COMPOSER, 4)])
def test_the_loss_holds_its_bytes_a_logit(
    workload: MakeWorkload, tp: int, framework: FrameworkProfile, each: int
) -> None:
    held = rank(gpt(workload, framework), tp=tp, micro_batch_size=B)
    assert one(loss_backward_bytes(held)) == each * B * S * V / tp


def test_torch_pipelines_allocate_every_receive_and_keep_what_is_in_flight(workload: MakeWorkload) -> None:
    made = workload()
    plan = {"pp": 4, "pipeline_schedule": "1f1b", "num_microbatches": 8, "micro_batch_size": B}
    boundary = 2 * B * 1024 * 768
    # Rank 1 receives from both sides, and keeps what it sent of three micro-batches.
    assert one(rank(made, 1, **plan).passed_bytes) == (2 * 8 + 3) * boundary
    assert one(rank(made, 3, **plan).passed_bytes) == 8 * boundary


def test_deepspeed_flattens_gradients_to_reduce_and_to_step(workload: MakeWorkload) -> None:
    made = gpt(workload, MEGATRON_DEEPSPEED)
    parameters = LAYERS * BLOCK + EMBEDDING + 2 * H
    held = rank(made, dp=4, zero_stage=1)
    assert one(held.bucket_bytes) == 2 * parameters  # less than 5e8
    assert one(held.flat_step_bytes) == 6 * parameters / 4
    apart = rank(replace(made, framework=made.framework.changed(storage={"gradient_bytes": 4})), dp=4, zero_stage=1)
    assert one(apart.final_gradient_bytes) == (4 + 2) * parameters
    assert one(apart.flat_step_bytes) == 0


def test_deepspeeds_third_stage_steps_one_group_after_the_other(workload: MakeWorkload) -> None:
    made = gpt(workload, load_framework("deepspeed-zero"))
    parameters = LAYERS * BLOCK + EMBEDDING + 2 * H
    assert one(rank(made, dp=4, zero_stage=3).flat_step_bytes) == 6 * parameters / 4  # less than a group's 1e9
    grouped = made.framework.data_parallel.sharding.replace(flat_step_elements=1000.0)
    small = replace(made, framework=made.framework.changed(data_parallel={"sharding": grouped}))
    assert one(rank(small, dp=4, zero_stage=3).flat_step_bytes) == 6 * 1000
    assert one(rank(small, dp=4, zero_stage=2).flat_step_bytes) == 6 * parameters / 4


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_deepspeeds_gradients_are_on_the_host_where_its_optimizer_is(workload: MakeWorkload, stage: int) -> None:
    made = gpt(workload, load_framework("deepspeed-zero"))
    plan = {"dp": 4 if stage else 1, "zero_stage": stage}
    here, away = rank(made, **plan), rank(made, offload="optimizer", **plan)
    assert one(here.final_gradient_bytes) > 0
    assert one(away.final_gradient_bytes) == 0
    assert one(away.bucket_bytes) > 0


def test_ddp_has_buckets_beside_gradients_that_accumulate(workload: MakeWorkload) -> None:
    made = workload(precision="fp32")
    whole = 4 * 124_439_808
    assert one(rank(made, dp=8).gradient_bytes) == whole
    assert one(rank(made, dp=8, num_microbatches=2).gradient_bytes) == 2 * whole
    assert one(rank(made, num_microbatches=2).gradient_bytes) == whole


@pytest.mark.parametrize(
    ("profile", "framework", "size_bytes"),
    [
        ("dgx-a100", None, 2 * (8 * MIB + 128 * 1024)),
        ("dgx-h100", None, 2 * 32 * MIB),
        ("dgx-h100", MEGATRON_CORE, 3 * 32 * MIB),
        ("dgx-a100", MEGATRON_CORE, 2 * (8 * MIB + 128 * 1024) + 4 * MIB),
    ],
)
def test_matmuls_keep_the_workspaces_of_their_libraries(
    workload: MakeWorkload, profile: str, framework: FrameworkProfile | None, size_bytes: int
) -> None:
    made = workload(profile=profile)
    assert matmul_workspace_bytes(made if framework is None else replace(made, framework=framework)) == size_bytes


def test_a_stated_workspace_takes_the_place_of_torchs_own(workload: MakeWorkload) -> None:
    made = replace(workload(profile="dgx-a100"), framework=MEGATRON_CORE)
    made = replace(made, constants=made.constants.replace(cublas_workspace_bytes=32 * MIB))
    assert matmul_workspace_bytes(made) == 2 * 32 * MIB + 4 * MIB


def test_an_offloaded_optimizer_leaves_the_gpu_for_the_host(workload: MakeWorkload) -> None:
    made = workload()
    plan = ParallelPlan(dp=8, zero_stage=3, offload="optimizer")
    on_gpu = evaluate_plan(made, plan.replace(offload="none")).memory[0]
    moved = evaluate_plan(made, plan).memory[0]
    share = 124_439_808 / 8
    assert on_gpu.optimizer_state_bytes == pytest.approx(8 * share, rel=1e-4)
    assert moved.optimizer_state_bytes == 0
    # Both moments, fp32 parameters and fp32 gradients.
    assert moved.host_bytes == pytest.approx(16 * share)
    assert on_gpu.host_bytes == 0


def test_offloaded_parameters_leave_only_what_is_gathered(workload: MakeWorkload) -> None:
    held = rank(workload(), dp=8, zero_stage=3, offload="parameters")
    assert one(held.weight_bytes) == one(held.optimizer_bytes) == one(held.final_gradient_bytes) == 0
    assert one(held.gathered_bytes(num_blocks=1)) == 2 * ((50257 + 1024) * 768 + 2 * 768 + 12 * 768**2 + 13 * 768)


def test_masters_are_not_counted_twice_on_the_host(workload: MakeWorkload) -> None:
    made = gpt(workload, MEGATRON_CORE)
    plan = PlanTable.of_plans([ParallelPlan(offload="optimizer")])
    stage = even_stage(plan, LAYERS, np.array([0]))
    parameters = LAYERS * BLOCK + EMBEDDING + 2 * H
    assert one(host_bytes(RankMemory.of(made, plan, block_costs(made, plan), stage))) == 16 * parameters


@pytest.mark.parametrize(
    ("stage", "offload", "micro_batches", "each"),
    [
        # Masters, both moments and fp32 gradients; then 16-bit gradients as they arrive, and 16-bit parameters.
        (2, "optimizer", 1, 16),
        (2, "optimizer", 4, 18),
        (3, "optimizer", 1, 18),
        (3, "parameters", 1, 20),
        (3, "parameters", 4, 20),
    ],
)
def test_deepspeed_has_16_bit_gradients_and_parameters_on_the_host_beside_fp32_ones(
    workload: MakeWorkload, stage: int, offload: str, micro_batches: int, each: int
) -> None:
    made = gpt(workload, load_framework("deepspeed-zero"))
    held = rank(made, dp=4, zero_stage=stage, offload=offload, num_microbatches=micro_batches)
    assert one(host_bytes(held)) == pytest.approx(each * one(held.parameters) / 4)


def test_nvidia_smi_shows_the_allocators_cache_the_context_and_nccl(workload: MakeWorkload) -> None:
    several, alone = (evaluate_plan(workload(gpus=gpus), ParallelPlan(dp=gpus)).memory[0] for gpus in (8, 1))
    for memory, beside in ((several, GIB), (alone, GIB // 2)):
        # One step's largest blocks, the loss's, stand beside those of its blocks.
        assert memory.device_bytes - beside >= memory.total_bytes / 0.94
        assert memory.device_bytes - beside <= 1.5 * memory.total_bytes / 0.94


def test_a_token_is_kept_once_for_every_expert_that_it_goes_to(workload: MakeWorkload) -> None:
    fields = {
        "model_type": "qwen2_moe",
        "hidden_size": H,
        "intermediate_size": H,
        "moe_intermediate_size": H,
        "shared_expert_intermediate_size": H,
        "num_hidden_layers": 2,
        "num_attention_heads": A,
        "num_key_value_heads": A,
        "num_experts": 16,
        "decoder_sparse_step": 1,
        "vocab_size": V,
    }

    def kept(experts_per_token: int) -> float:
        model = read_fields(ModelConfig("config", {**fields, "num_experts_per_tok": experts_per_token}))
        made = replace(workload(seq_length=S, attention="flash"), model=model, framework=MEGATRON_CORE)
        return block_bytes(made)

    # A row of an expert: its input, gate, up and their product; its weight twice in fp32. Its output is not read again.
    row = 2 * (H + 3 * H) + 2 * 4
    assert kept(4) - kept(2) == pytest.approx(2 * row * S)


def test_a_position_bias_is_kept_once_for_a_micro_batch(workload: MakeWorkload) -> None:
    fields = {
        "model_type": "t5",
        "d_model": H,
        "d_kv": H // A,
        "d_ff": 4 * H,
        "num_layers": 2,
        "num_heads": A,
        "vocab_size": V,
    }
    model = read_fields(ModelConfig("config", fields))
    made = replace(workload(seq_length=S), model=model)
    first, second, third = (block_bytes(made, micro_batch_size=size) for size in (1, 2, 3))
    assert third - second == second - first
    # What does not grow with the micro-batch: the bias of each head and pair of tokens, and the 64-bit bucket of each.
    assert first - (second - first) == (2 * A + 8) * S * S


def test_flagscale_keeps_the_activated_gate(workload: MakeWorkload) -> None:
    made = workload("llama-3-8b", seq_length=S, attention="flash")
    plain, own = (block_bytes(replace(made, framework=framework)) for framework in (MEGATRON_2022, FLAGSCALE))
    assert own - plain == S * 2 * 14336


@pytest.mark.parametrize(
    ("degrees", "pairs", "larger"),
    [
        ({"dp": 8}, 0, 1),
        ({"tp": 8}, 0, 1),
        ({"dp": 2, "tp": 4}, 1, 2),
        ({"dp": 2, "tp": 2, "pp": 2}, 3, 2),
        ({"dp": 2, "cp": 2, "tp": 2}, 2, 2),
        ({"tp": 2, "pp": 4}, 1, 3),
    ],
)
def test_each_group_that_ranks_are_in_has_a_communicator_in_the_gpus_memory(
    workload: MakeWorkload, degrees: dict[str, int], pairs: int, larger: int
) -> None:
    made = workload(global_batch_size=16)
    schedule = {"pipeline_schedule": "1f1b", "num_microbatches": 8} if "pp" in degrees else {}
    plan = ParallelPlan(**degrees, micro_batch_size=1, **schedule)
    estimate = evaluate_plan(made, plan)
    beside = pairs * 544 * MIB + larger * 688 * MIB
    usable = (made.cluster.gpu_memory_bytes - made.constants.context_bytes - beside) * 0.94
    assert estimate.usable_memory_bytes == int(usable)
    none = replace(made, constants=made.constants.replace(communicator_bytes=0, pair_communicator_bytes=0))
    shown, without = estimate.memory[0].device_bytes, evaluate_plan(none, plan).memory[0].device_bytes
    assert shown - without == beside
