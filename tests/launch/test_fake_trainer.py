"""`paraplan launch --fake` of the stock Trainer on a model that transformers shards as it loads it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from forked_launch import launch_forked
from rank_harness import RankHarness

from paraplan.launch.fake.report import FakeLaunchReport
from paraplan.plan.fake import FakeRankReport

SCRIPT = """
import sys
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Trainer, TrainingArguments
from transformers.distributed import DistributedConfig

folder, sizes = sys.argv[1], dict(word.split("=") for word in sys.argv[2:])
sizes = {name: int(size) for name, size in sizes.items()}
model = AutoModelForCausalLM.from_pretrained(
    folder, dtype=torch.float32, distributed_config=DistributedConfig(**sizes) if sizes else None
)
arguments = TrainingArguments(
    folder + "/out", per_device_train_batch_size=2, max_steps=9, report_to=[], save_strategy="no", disable_tqdm=True
)
rows = [{"input_ids": torch.arange(16) + row, "labels": torch.arange(16) + row} for row in range(64)]
Trainer(model=model, args=arguments, train_dataset=rows).train()
"""
HIDDEN, INNER, EXPERTS, CHOSEN, BLOCKS, WORDS = 64, 64, 8, 2, 1, 256
ROUTED = BLOCKS * EXPERTS * 3 * HIDDEN * INNER
OTHERS = BLOCKS * (2 * HIDDEN * HIDDEN + 2 * HIDDEN * 32 + EXPERTS * HIDDEN + 2 * HIDDEN + 2 * 16) + HIDDEN
OTHERS += 2 * WORDS * HIDDEN
TOKENS = 2 * 16

Trace = Callable[..., FakeRankReport]


def save_model(folder: str) -> None:
    """Write a small mixture with random weights."""
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    config = Qwen3MoeConfig(
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        moe_intermediate_size=INNER,
        vocab_size=WORDS,
        num_hidden_layers=BLOCKS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=EXPERTS,
        num_experts_per_tok=CHOSEN,
        max_position_embeddings=64,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


@pytest.fixture
def trace(ranks: RankHarness, tmp_path: Path) -> Trace:
    """Return what traces a rank of a Trainer on a small mixture, under the sizes of a `DistributedConfig`."""
    ranks.run_alone(save_model, str(tmp_path / "model"))
    (tmp_path / "train.py").write_text(SCRIPT, encoding="utf-8")

    def trace_rank(*sizes: str) -> FakeRankReport:
        words = ("--fake", "8", "--json", "train.py", str(tmp_path / "model"), *sizes)
        done = launch_forked(ranks, tmp_path, *words, environment={"CUDA_VISIBLE_DEVICES": ""})
        assert done.returncode == 0, done.stderr
        (rank,) = FakeLaunchReport.model_validate(json.loads(done.stdout)).ranks
        return rank

    return trace_rank


@pytest.mark.with_all  # experts over both axes have such shards, and those over one what is beside them
def test_a_model_that_transformers_shards_is_followed(trace: Trace) -> None:
    rank = trace("fsdp_size=8")
    assert rank.num_parameters == ROUTED + OTHERS
    share = (ROUTED + OTHERS) / 8
    assert rank.optimizer_state_bytes == pytest.approx(8 * share, rel=0.15)  # small tensors take whole units
    assert rank.parameter_bytes >= 4 * share
    sent = {(one.operation, one.group): one.total_bytes for one in rank.collectives}
    # Blocks are gathered for both passes and reduced once; the embedding too, the head stays.
    assert sent["reduce-scatter", "fsdp/efsdp"] == pytest.approx(4 * (ROUTED + OTHERS), rel=0.02)
    assert sent["all-gather", "fsdp/efsdp"] == pytest.approx(8 * (ROUTED + OTHERS), rel=0.15)


@pytest.mark.with_all  # replicas are below too, beside tp
def test_replicas_of_shards_average_their_gradients(trace: Trace) -> None:
    rank = trace("fsdp_size=4", "dp_replicate_size=2")
    assert rank.optimizer_state_bytes == pytest.approx(8 * (ROUTED + OTHERS) / 4, rel=0.1)
    sent = {(one.operation, one.group): one.total_bytes for one in rank.collectives}
    assert sent["all-reduce", "dp_replicate"] == pytest.approx(4 * (ROUTED + OTHERS) / 4, rel=0.05)


@pytest.mark.with_all  # below experts stand over more axes
def test_experts_over_ranks_are_sent_an_even_share_of_all_rows(trace: Trace) -> None:
    rank = trace("fsdp_size=8", "ep_size=8")
    assert rank.optimizer_state_bytes == pytest.approx(8 * (ROUTED + OTHERS) / 8, rel=0.15)
    sent = {(one.operation, one.group): (one.count, one.total_bytes) for one in rank.collectives}
    # Rows go to experts and back in both passes, and the numbers of rows once.
    count, num_bytes = sent["all-to-all", "fsdp/ep"]
    assert count == BLOCKS * 5
    assert num_bytes == BLOCKS * (4 * TOKENS * CHOSEN * HIDDEN * 4 + EXPERTS * 8)
    # Experts stand on one rank each: only what is beside them is gathered and reduced.
    assert sent["reduce-scatter", "fsdp/ep"][1] == pytest.approx(4 * OTHERS, rel=0.05)


def test_experts_over_ranks_of_both_axes_share_the_rows_of_tensor_parallelism(trace: Trace) -> None:
    rank = trace("fsdp_size=2", "tp_size=2", "dp_replicate_size=2", "ep_size=2")
    sent = {(one.operation, one.group): (one.count, one.total_bytes) for one in rank.collectives}
    assert sent["all-to-all", "tp/ep"][1] == BLOCKS * (4 * TOKENS * CHOSEN // 2 * HIDDEN * 4 + EXPERTS * 8)
    assert ("all-reduce", "dp_replicate") in sent
    assert sent["reduce-scatter", "fsdp/efsdp"][1] > 4 * ROUTED / 2
