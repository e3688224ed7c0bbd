from __future__ import annotations

import gc
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  # the name that all of PyTorch uses
from torch import nn

from paraplan.errors import ModelError, PlanError
from paraplan.plan.parallel import ParallelPlan
from paraplan.plan.training import OptimizerName, TrainingPrecision, TrainingSpec
from paraplan.runtime.fake.run import TracedMemory, first_rank_of_stage, trace_memory

VOCABULARY, HIDDEN, NUM_BLOCKS, TOKENS = 64, 256, 4, 32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(HIDDEN, 4 * HIDDEN, bias=False)
        self.down = nn.Linear(4 * HIDDEN, HIDDEN, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        change: torch.Tensor = self.down(torch.relu(self.up(hidden)))
        return hidden + change


class Model(nn.Module):
    def __init__(self, num_blocks: int = NUM_BLOCKS) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        logits: torch.Tensor = self.head(hidden)
        return logits


BLOCK_PARAMETERS = 8 * HIDDEN * HIDDEN
PARAMETERS = NUM_BLOCKS * BLOCK_PARAMETERS + VOCABULARY * HIDDEN


def trace(
    *,
    precision: TrainingPrecision = "fp32",
    optimizer: OptimizerName = "adamw",
    stage: int = 0,
    num_blocks: int = NUM_BLOCKS,
    **plan: object,
) -> TracedMemory:
    chosen = ParallelPlan.model_validate(plan)
    training = TrainingSpec(
        global_batch_size=chosen.global_batch_size, seq_length=TOKENS, precision=precision, optimizer=optimizer
    )
    return trace_memory(
        partial(Model, num_blocks), plan=chosen, training=training, rank=first_rank_of_stage(chosen, stage)
    )


def test_one_process_holds_parameters_gradients_and_state_by_hand_count() -> None:
    memory = trace(optimizer="adamw_foreach")
    # So few tokens make the optimizer's step the peak: everything whole, and the roots of the second moments.
    assert memory.phase == "optimizer"
    assert memory.parameter_bytes == memory.gradient_bytes == memory.workspace_bytes == 4 * PARAMETERS
    assert memory.optimizer_state_bytes == pytest.approx(8 * PARAMETERS, rel=0.001)


def test_parts_sum_to_the_total() -> None:
    memory = trace(micro_batch_size=8, precision="bf16").model_dump()
    assert (
        sum(memory[name] for name in memory if name.endswith("_bytes") and name != "total_bytes")
        == (memory["total_bytes"])
    )


def test_autocast_keeps_a_copy_of_every_weight_in_half_precision() -> None:
    single, half = (trace(micro_batch_size=512, precision=name) for name in ("fp32", "bf16"))
    assert single.phase == half.phase == "backward"
    # At the peak the last block's copies, and the head's, may be gone.
    gone = BLOCK_PARAMETERS + VOCABULARY * HIDDEN
    assert 2 * (PARAMETERS - gone) <= half.parameter_bytes - single.parameter_bytes <= 2 * PARAMETERS


def test_more_sequences_keep_more_activations_in_proportion() -> None:
    small, large = (trace(micro_batch_size=size).activation_bytes for size in (512, 1024))
    assert large == pytest.approx(2 * small, rel=0.01)


def test_a_rank_of_a_thousand_holds_one_row_or_column_of_each_parameter() -> None:
    num_blocks = 1  # each is cut in as many parts as there are ranks
    memory = trace(dp=1024, zero_stage=3, micro_batch_size=512, num_blocks=num_blocks)
    # Of a block's second matrix a column: a row would be four times an even share (`plan.sharding`).
    elements = num_blocks * (HIDDEN + HIDDEN) + HIDDEN
    num_steps = 2 * num_blocks + 1  # AdamW counts the steps of each parameter, and the allocator gives 512 bytes for it
    assert memory.optimizer_state_bytes == 8 * elements + 512 * num_steps


def test_ddp_keeps_its_buckets_beside_accumulated_gradients() -> None:
    once, twice = (trace(dp=4, micro_batch_size=512, num_microbatches=count).gradient_bytes for count in (1, 2))
    assert once == pytest.approx(4 * PARAMETERS, rel=0.001)
    assert twice == pytest.approx(8 * PARAMETERS, rel=0.1)  # the first gradients may be in their buckets already


@pytest.mark.with_all  # estimates of each stage are traced in tests of costs
def test_a_stage_holds_its_own_blocks_and_the_activations_in_flight() -> None:
    first, last = (
        trace(pp=2, pipeline_schedule="1f1b", num_microbatches=4, micro_batch_size=256, stage=stage) for stage in (0, 1)
    )
    own = 4 * (NUM_BLOCKS // 2 * BLOCK_PARAMETERS + VOCABULARY * HIDDEN)
    assert first.parameter_bytes == pytest.approx(own, rel=0.001)
    assert (first.pipeline_stage, last.pipeline_stage) == (0, 1)
    assert first.activation_bytes > 1.5 * last.activation_bytes


def test_recompute_keeps_less_and_runs_blocks_again() -> None:
    kept, recomputed = (trace(micro_batch_size=512, recompute=name) for name in ("none", "full"))
    assert recomputed.activation_bytes < kept.activation_bytes / 2
    assert recomputed.total_bytes < kept.total_bytes


def test_neither_a_process_group_nor_a_model_is_left_behind() -> None:
    before = _num_models()
    trace(dp=4)
    assert not dist.is_initialized()
    assert _num_models() == before


def _num_models() -> int:
    gc.collect()
    return sum(type(one) is Model for one in gc.get_objects())


def test_a_model_that_reads_values_fails_with_its_own_line() -> None:
    class Reading(Model):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return super().forward(tokens) * float(tokens.float().mean().item())

    training = TrainingSpec(global_batch_size=1, seq_length=TOKENS, precision="fp32")
    with pytest.raises(ModelError, match="without values"):
        trace_memory(Reading, plan=ParallelPlan(), training=training)


def test_an_optimizer_that_torch_lacks_is_refused() -> None:
    with pytest.raises(PlanError, match="adamw_8bit"):
        trace(optimizer="adamw_8bit")


class AttentionBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN, bias=False)
        self.out = nn.Linear(HIDDEN, HIDDEN, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = hidden.shape
        query, key, value = self.qkv(hidden).view(batch, tokens, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        change: torch.Tensor = self.out(attended.transpose(1, 2).reshape(batch, tokens, width))
        return hidden + change


class AttentionModel(Model):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(AttentionBlock() for _ in range(NUM_BLOCKS))


def test_selective_recompute_frees_the_statistics_of_the_attention_core() -> None:
    def kept(recompute: str) -> int:
        plan = ParallelPlan.model_validate({"micro_batch_size": 256, "recompute": recompute})
        training = TrainingSpec(global_batch_size=256, seq_length=TOKENS, precision="fp32")
        return trace_memory(AttentionModel, plan=plan, training=training).activation_bytes

    # One fp32 number for each of four heads and token, of each block but the last, which may be run again at the peak.
    statistics = 4 * 4 * 256 * TOKENS
    assert kept("selective") <= kept("none") - (NUM_BLOCKS - 1) * statistics


class DropoutBlock(Block):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        change: torch.Tensor = self.down(F.dropout(torch.relu(self.up(hidden)), 0.1))
        return hidden + change


class DropoutModel(Model):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(DropoutBlock() for _ in range(NUM_BLOCKS))


@pytest.mark.parametrize("recompute", ["none", "selective_ops", "full"])
def test_ranks_that_draw_on_their_parts_are_traced_in_repeated_blocks_too(recompute: str) -> None:
    plan = ParallelPlan.model_validate({"tp": 2, "recompute": recompute})
    training = TrainingSpec(global_batch_size=1, seq_length=TOKENS, precision="fp32")
    traced = trace_memory(DropoutModel, plan=plan, training=training)
    assert traced.parameter_bytes < 4 * PARAMETERS
