"""The estimate against the runtime itself, run without a GPU: small models (test_memory_at_full_size: larger ones)."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  # the name that all of PyTorch uses
from case_selection import with_all
from torch import nn

from paraplan.cost.estimate import MemoryEstimate, estimate_plan
from paraplan.cost.workload import Workload
from paraplan.hardware.catalogue.profile_files import cluster_from_profile
from paraplan.hardware.link_speed import load_link_speeds
from paraplan.model.config_file import ModelConfig
from paraplan.model.reader import read_fields
from paraplan.model.spec import ModelSpec
from paraplan.model.trace import trace_module
from paraplan.plan.parallel import ParallelPlan
from paraplan.plan.training import TrainingPrecision, TrainingSpec
from paraplan.runtime.fake.run import TracedMemory, first_rank_of_stage, trace_memory

PARTS = ("parameter_bytes", "gradient_bytes", "optimizer_state_bytes", "activation_bytes", "workspace_bytes")
TOKENS = 512
PIPELINE = {"pp": 2, "pipeline_schedule": "1f1b", "num_microbatches": 3}

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 4096,
    "max_position_embeddings": TOKENS,
    "tie_word_embeddings": False,
}
GPT2 = {
    "model_type": "gpt2",
    "architectures": ["GPT2LMHeadModel"],
    "n_embd": 512,
    "n_layer": 2,
    "n_head": 8,
    "n_positions": TOKENS,
    "vocab_size": 4096,
}
BERT = {
    "model_type": "bert",
    "architectures": ["BertForMaskedLM"],
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "vocab_size": 4096,
    "max_position_embeddings": TOKENS,
}
MIXTRAL = {
    "model_type": "mixtral",
    "architectures": ["MixtralForCausalLM"],
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 4096,
    "max_position_embeddings": TOKENS,
    "tie_word_embeddings": False,
}


GPT_OSS = {
    "model_type": "gpt_oss",
    "architectures": ["GptOssForCausalLM"],
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "vocab_size": 8192,
    "max_position_embeddings": TOKENS,
    "tie_word_embeddings": False,
}


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = hidden.shape
        heads = self.qkv(self.norm(hidden)).view(batch, tokens, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
        hidden = hidden + self.out(attended.transpose(1, 2).reshape(batch, tokens, width))
        change: torch.Tensor = self.down(F.gelu(self.up(self.mlp_norm(hidden))))
        return hidden + change


class Plain(nn.Module):
    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.embedding = nn.Embedding(500, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 500, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        logits: torch.Tensor = self.head(self.norm(hidden))
        return logits


def of_config(
    fields: dict[str, Any], attention: Literal["sdpa", "eager"] = "sdpa"
) -> tuple[ModelSpec, Callable[[], Any]]:
    transformers = pytest.importorskip("transformers", reason="compares with transformers' classes")

    def build() -> Any:
        own = json.loads(json.dumps(fields))
        model_class = getattr(transformers, own["architectures"][0])
        config = transformers.AutoConfig.for_model(own.pop("model_type"), **own)
        config._attn_implementation = attention
        if hasattr(config, "use_cache"):
            config.use_cache = False
        return model_class(config)

    return read_fields(ModelConfig("config", fields)), build


def peaks(
    spec: ModelSpec,
    build: Callable[[], Any],
    plan: ParallelPlan,
    precision: TrainingPrecision,
    stage: int = 0,
    *,
    seq_length: int = TOKENS,
    attention: Literal["sdpa", "eager"] = "sdpa",
    **options: Any,
) -> tuple[MemoryEstimate, TracedMemory]:
    """Return the predicted and the traced memory of one stage; experts have an even load, where there are no values."""
    options |= {"expert_load": 1.0} if plan.ep > 1 else {}
    batch = {"global_batch_size": plan.global_batch_size, "seq_length": seq_length}
    training = TrainingSpec(**batch, precision=precision, attention=attention, **options)
    cluster = cluster_from_profile("dgx-h100", num_nodes=-(-plan.world_size // 8))
    workload = Workload.of(spec, training, cluster, load_link_speeds())
    # No library runs in a trace, so what cuBLAS keeps for itself is left out.
    workload = replace(workload, constants=workload.constants.replace(counts_matmul_workspaces=False))
    predicted = estimate_plan(workload, plan).memory[stage]
    return predicted, trace_memory(build, plan=plan, training=training, rank=first_rank_of_stage(plan, stage))


def compare(*arguments: Any, **options: Any) -> None:
    predicted, traced = peaks(*arguments, **options)
    assert predicted.total_bytes == pytest.approx(traced.total_bytes, rel=0.03)
    for part in PARTS:
        # What a block's backward pass holds for a moment is known roughly, and is little beside the rest.
        difference = abs(getattr(predicted, part) - getattr(traced, part))
        assert difference <= max(0.05 * getattr(traced, part), 0.03 * traced.total_bytes), part


@pytest.mark.parametrize(
    "plan",
    [
        {"micro_batch_size": 16, "num_microbatches": 2},
        {"dp": 4, "zero_stage": 3, "micro_batch_size": 16},
        # Replicas are below.
        pytest.param({"dp": 4, "micro_batch_size": 16}, marks=pytest.mark.with_all),
    ],
)
def test_the_estimate_of_a_traced_model_is_what_the_runtime_holds(plan: dict[str, Any]) -> None:
    compare(trace_module(Plain, seq_length=TOKENS), Plain, ParallelPlan.model_validate(plan), "fp32")


FAMILIES = {fields["model_type"]: fields for fields in (LLAMA, GPT2, BERT)}
PLANS: dict[str, dict[str, Any]] = {
    "accumulating": {"micro_batch_size": 8, "num_microbatches": 2},
    "DDP": {"dp": 8, "micro_batch_size": 8},
    "ZeRO-3": {"dp": 64, "zero_stage": 3, "micro_batch_size": 8, "num_microbatches": 2},
    "ZeRO-1": {"dp": 8, "zero_stage": 1, "micro_batch_size": 8, "num_microbatches": 2},
}
# What a family keeps is under every plan the same, and what a plan keeps is of every family: each is met once at least;
# accumulating alone is above, of a traced model.
ALWAYS = {("gpt2", "DDP"), ("bert", "ZeRO-3"), ("llama", "ZeRO-1")}


@pytest.mark.parametrize(
    ("fields", "plan"),
    [
        pytest.param(fields, plan, id=f"{plan_name}-{name}", marks=[] if is_run else pytest.mark.with_all)
        for name, fields in FAMILIES.items()
        for plan_name, plan in PLANS.items()
        for is_run in [(name, plan_name) in ALWAYS]
    ],
)
def test_the_estimate_is_what_the_runtime_holds(fields: dict[str, Any], plan: dict[str, Any]) -> None:
    spec, build = of_config(fields)
    compare(spec, build, ParallelPlan.model_validate(plan), "bf16")


def test_the_estimate_of_layers_in_float8_is_what_the_runtime_holds() -> None:
    spec, build = of_config(LLAMA | {"num_hidden_layers": 8})
    for plan in ({"dp": 8, "micro_batch_size": 2}, {"dp": 64, "zero_stage": 3, "micro_batch_size": 8}):
        narrow = peaks(spec, build, ParallelPlan.model_validate(plan), "bf16", linear_precision="fp8")
        wide = peaks(spec, build, ParallelPlan.model_validate(plan), "bf16")
        assert narrow[0].total_bytes == pytest.approx(narrow[1].total_bytes, rel=0.03)
        assert (narrow[1].total_bytes < wide[1].total_bytes) == (
            "zero_stage" not in plan
        )  # no 16-bit copies of weights


# The last one keeps a micro-batch and the head; it is met with halves of backward passes, below.
@pytest.mark.parametrize("stage", [0, pytest.param(1, marks=pytest.mark.with_all)])
def test_the_estimate_of_each_stage_is_what_the_runtime_holds(stage: int) -> None:
    # Of fewer layers what is there for a moment is a larger share.
    spec, build = of_config(LLAMA | {"num_hidden_layers": 4, "vocab_size": 8192})
    compare(spec, build, ParallelPlan.model_validate({**PIPELINE, "micro_batch_size": 8}), "bf16", stage)


@pytest.mark.parametrize(
    "plan",
    [
        {"tp": 2},  # blocks that run again on parts let go of them one by one
        {"cp": 2, "tp": 2, "sequence_parallel": True, "recompute": "none"},
        # Micro-batches and shards of ZeRO-3 are above, and blocks that run again beside whole layers too.
        *with_all([{"num_microbatches": 2}, {"cp": 4, "zero_stage": 3, "micro_batch_size": 32}]),
    ],
)
def test_the_estimate_with_recompute_is_what_the_runtime_holds(plan: dict[str, Any]) -> None:
    spec, build = of_config(LLAMA)
    compare(spec, build, ParallelPlan.model_validate({"micro_batch_size": 8, "recompute": "full"} | plan), "bf16")


ZERO_BUBBLE = {"pp": 2, "pipeline_schedule": "zero_bubble", "num_microbatches": 4, "micro_batch_size": 4}


@pytest.mark.parametrize(
    ("fields", "plan", "precision"),
    [
        pytest.param(LLAMA, {"tp": 2}, "bf16", id="Llama, tensor parallel"),
        pytest.param(
            GPT2, {"num_microbatches": 2}, "fp32", id="as many micro-batches as stages", marks=pytest.mark.with_all
        ),
        # Shards of the optimizer are what they are under other schedules.
        pytest.param(GPT2, {"dp": 2, "zero_stage": 1}, "bf16", id="ZeRO-1", marks=pytest.mark.with_all),
        # Tensor parallelism and Llama are met together.
        pytest.param(LLAMA, {}, "bf16", id="Llama", marks=pytest.mark.with_all),
        pytest.param(GPT2, {"tp": 2}, "bf16", id="tensor parallel", marks=pytest.mark.with_all),
    ],
)
def test_halves_of_backward_passes_keep_what_the_runtime_keeps(
    fields: dict[str, Any], plan: dict[str, Any], precision: TrainingPrecision
) -> None:
    spec, build = of_config(fields)
    compare(spec, build, ParallelPlan.model_validate(ZERO_BUBBLE | plan), precision, stage=1)


@pytest.mark.parametrize("plan", [{}, {"dp": 2, "zero_stage": 2}], ids=["weights in fp32", "weights in 16 bits"])
def test_probabilities_beside_sinks_have_the_weights_type(plan: dict[str, Any]) -> None:
    spec, build = of_config(GPT_OSS | {"num_hidden_layers": 1}, "eager")
    compare(spec, build, ParallelPlan.model_validate({"micro_batch_size": 2} | plan), "bf16", attention="eager")


def test_probabilities_that_are_not_dropped_are_kept_in_both_types() -> None:
    spec, build = of_config(GPT2 | {"attn_pdrop": 0.0}, "eager")
    compare(spec, build, ParallelPlan(micro_batch_size=2), "bf16", attention="eager")


@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp32", marks=pytest.mark.with_all)])
def test_experts_are_in_fp32_where_autocast_does_not_know_their_products(precision: TrainingPrecision) -> None:
    spec, build = of_config(MIXTRAL)
    compare(spec, build, ParallelPlan(dp=4, micro_batch_size=4), precision)


def test_a_mixture_under_sequence_parallelism_is_split_as_ranks_split_it() -> None:
    spec, build = of_config(MIXTRAL)
    compare(spec, build, ParallelPlan(tp=2, sequence_parallel=True, micro_batch_size=8), "bf16")


@pytest.mark.parametrize(
    "plan",
    [
        {"dp": 4, "ep": 4, "recompute": "full"},  # their gradients are in no buckets
        {"dp": 4, "ep": 2, "zero_stage": 3},  # their part of a block is gathered apart
        *with_all([{"dp": 4, "ep": 4}, {"dp": 2, "tp": 2, "ep": 2, "sequence_parallel": True}]),
    ],
)
def test_the_estimate_of_experts_over_ranks_is_what_the_runtime_holds(plan: dict[str, Any]) -> None:
    spec, build = of_config(MIXTRAL | {"num_hidden_layers": 4})
    compare(spec, build, ParallelPlan.model_validate({"micro_batch_size": 8} | plan), "bf16")


@pytest.mark.with_all  # a first stage and experts are above
def test_the_first_stage_of_a_mixture_of_experts_is_what_the_runtime_holds() -> None:
    spec, build = of_config(MIXTRAL)
    compare(spec, build, ParallelPlan.model_validate({**PIPELINE, "micro_batch_size": 8}), "bf16")


@pytest.mark.parametrize(
    "plan", [pytest.param({"cp": 2}, marks=pytest.mark.with_all), {"dp": 8, "zero_stage": 3, "recompute": "full"}]
)
def test_losses_in_chunks_hold_what_is_estimated(plan: dict[str, Any]) -> None:
    spec, build = of_config(LLAMA | {"vocab_size": 32768})
    compare(spec, build, ParallelPlan.model_validate({"micro_batch_size": 32} | plan), "bf16", loss="chunked")
