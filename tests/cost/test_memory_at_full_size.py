"""The estimate against the runtime itself at full size, run without a GPU and without values: with `--all`.

One rank of each plan runs two steps in a world of fake ranks; every storage is followed, so that the peak is exact for
torch's allocator.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import pytest
from script_module import load_script
from test_memory_traced import BERT, MIXTRAL, of_config, peaks

from paraplan.model.config_file import load_config
from paraplan.model.reader import find_config, read_model
from paraplan.model.trace import trace_module
from paraplan.model.transformers_model import library_factory
from paraplan.plan.parallel import ParallelPlan
from paraplan.plan.training import TrainingPrecision

pytestmark = [pytest.mark.with_all, pytest.mark.filterwarnings("ignore")]

PLAIN = "plain transformer"
_MOE = {"hidden_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 16, "max_position_embeddings": 4096}
UNBUNDLED: dict[str, dict[str, Any]] = {
    "bert-large": BERT
    | {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16}
    | {"vocab_size": 30522},
    "small-moe": _MOE  # with a shared expert
    | {"model_type": "qwen2_moe", "architectures": ["Qwen2MoeForCausalLM"], "num_key_value_heads": 16}
    | {"intermediate_size": 2816, "moe_intermediate_size": 704, "shared_expert_intermediate_size": 2816}
    | {"num_experts": 32, "num_experts_per_tok": 4, "decoder_sparse_step": 1, "vocab_size": 65536}
    | {"tie_word_embeddings": False},
    "small-mixtral": MIXTRAL | _MOE | {"intermediate_size": 3584, "num_key_value_heads": 8, "vocab_size": 32000},
}


class Case(NamedTuple):
    """A model under a plan; `stages` are the pipeline stages that are compared."""

    model: str
    seq_length: int
    plan: dict[str, Any]
    precision: TrainingPrecision = "bf16"
    stages: tuple[int, ...] = (0,)
    attention: Literal["sdpa", "eager"] = "sdpa"


def pipeline(pp: int, microbatches: int, schedule: str = "1f1b", **plan: Any) -> dict[str, Any]:
    return {"pp": pp, "pipeline_schedule": schedule, "num_microbatches": microbatches} | plan


CASES: tuple[Case, ...] = (
    Case(PLAIN, 128, {"micro_batch_size": 8, "num_microbatches": 2}, "fp32"),
    Case(PLAIN, 128, {"dp": 4, "zero_stage": 3, "micro_batch_size": 8}, "fp32"),
    Case(PLAIN, 128, pipeline(2, 4, micro_batch_size=8), "fp32", stages=(0, 1)),
    Case("gpt2", 1024, {}, "fp32"),
    Case("gpt2", 1024, {"micro_batch_size": 4, "num_microbatches": 4}),
    Case("gpt2", 1024, {"dp": 8, "micro_batch_size": 4}),
    Case("gpt2", 1024, {"dp": 8, "zero_stage": 1, "micro_batch_size": 4, "num_microbatches": 2}),
    Case("gpt2", 1024, {"dp": 8, "zero_stage": 2, "micro_batch_size": 4, "num_microbatches": 2}),
    Case("gpt2", 1024, {"dp": 8, "zero_stage": 3, "micro_batch_size": 4, "recompute": "full"}),
    Case("gpt2", 1024, pipeline(4, 8), stages=(0, 1, 3)),
    Case("gpt2", 1024, pipeline(4, 8, "gpipe"), stages=(0, 1, 3)),
    Case("gpt2", 1024, pipeline(2, 8, "interleaved_1f1b", virtual_pipeline_size=2), stages=(0, 1)),
    Case("gpt2", 1024, pipeline(2, 8, "zero_bubble"), stages=(0, 1)),
    Case("gpt2", 1024, pipeline(4, 8, "zero_bubble"), stages=(1, 3)),
    Case("gpt2", 1024, pipeline(4, 4, "zero_bubble"), "fp32", stages=(0, 1, 3)),
    Case("gpt2", 1024, pipeline(4, 8, "zero_bubble", dp=2, zero_stage=1), stages=(1, 3)),
    Case("gpt2", 1024, pipeline(2, 8, "zero_bubble", tp=2), stages=(0, 1)),
    Case("gpt2", 1024, pipeline(2, 8, tp=2), stages=(0, 1)),
    Case("gpt2", 256, pipeline(4, 4), stages=(0, 3)),
    Case("gpt2", 1024, {"micro_batch_size": 4, "num_microbatches": 2, "recompute": "selective"}),
    Case("gpt2", 1024, {"micro_batch_size": 4, "num_microbatches": 2, "recompute": "selective_ops"}),
    Case("gpt2", 1024, {"dp": 8, "zero_stage": 3, "micro_batch_size": 4, "recompute": "selective_ops"}, "fp32"),
    Case("gpt2", 1024, pipeline(4, 8, recompute="selective_ops"), stages=(0, 3)),
    Case("gpt2", 1024, {"micro_batch_size": 2}, attention="eager"),
    Case("gpt2", 1024, {"tp": 2, "dp": 2, "micro_batch_size": 2}),
    Case("gpt2", 1024, {"tp": 2, "dp": 2, "micro_batch_size": 2, "sequence_parallel": True}),
    Case("gpt2", 1024, pipeline(4, 8, "zero_bubble", recompute="full", micro_batch_size=2), stages=(0, 1, 3)),
    Case("gpt2", 1024, pipeline(2, 8, "zero_bubble", recompute="selective"), stages=(0, 1)),
    Case("gpt2", 1024, {"cp": 2, "dp": 2, "micro_batch_size": 4}),
    Case("gpt2", 1024, {"cp": 2, "tp": 2, "micro_batch_size": 4}),
    Case("gpt2", 1024, {"cp": 2, "tp": 2, "micro_batch_size": 4, "sequence_parallel": True}),
    Case("gpt2", 1024, pipeline(2, 4, cp=2, zero_stage=1, micro_batch_size=2), stages=(0, 1)),
    Case("gpt2", 1024, pipeline(2, 4, cp=2, tp=2, micro_batch_size=2, sequence_parallel=True), stages=(0, 1)),
    Case("qwen2.5-0.5b", 2048, {"dp": 8, "micro_batch_size": 2}),
    Case("qwen2.5-0.5b", 2048, {"dp": 8, "zero_stage": 1, "micro_batch_size": 2}),
    Case("qwen2.5-0.5b", 2048, {"micro_batch_size": 2, "num_microbatches": 2, "recompute": "full"}),
    Case("qwen2.5-0.5b", 2044, {"cp": 14, "micro_batch_size": 4}),
    Case("qwen2.5-0.5b", 8064, {"cp": 7, "tp": 2}),
    Case("qwen2.5-0.5b", 2048, pipeline(4, 8, "zero_bubble"), stages=(1, 3)),
    Case("llama-2-7b", 4096, {"dp": 1024, "zero_stage": 3}),
    Case("llama-2-7b", 4096, pipeline(8, 16, dp=8, zero_stage=1), stages=(0, 1, 7)),
    Case("llama-2-7b", 4096, pipeline(8, 16, dp=128, recompute="full"), stages=(0, 1, 7)),
    Case("llama-3-8b", 4096, {"dp": 64, "zero_stage": 3}),
    Case("llama-3-8b", 4096, {"dp": 64, "zero_stage": 3, "num_microbatches": 2, "recompute": "full"}),
    Case("llama-3-8b", 4096, {"dp": 64, "zero_stage": 3, "micro_batch_size": 2, "recompute": "selective_ops"}),
    Case("llama-3-8b", 4096, {"dp": 64, "zero_stage": 2, "num_microbatches": 2}),
    Case("llama-3-8b", 4096, pipeline(4, 8, dp=8), stages=(0, 1, 3)),
    Case("llama-3-8b", 4096, pipeline(4, 8, "zero_bubble", dp=8), stages=(0, 1, 3)),
    Case("llama-3-8b", 4096, pipeline(2, 8, "interleaved_1f1b", dp=4, virtual_pipeline_size=2), stages=(0, 1)),
    Case("llama-3-8b", 4096, {"tp": 4, "dp": 2}),
    Case("llama-3-8b", 4096, {"tp": 4, "dp": 2, "recompute": "selective_ops", "micro_batch_size": 4}),
    Case("llama-3-8b", 4096, {"tp": 4, "dp": 2, "sequence_parallel": True}),
    Case("llama-3-8b", 4096, pipeline(2, 4, tp=4), stages=(0, 1)),
    Case("llama-3-8b", 4096, {"cp": 2, "tp": 4, "sequence_parallel": True}),
    Case("small-moe", 2048, {"dp": 16, "zero_stage": 3}),
    Case("small-moe", 2048, {"dp": 16, "zero_stage": 2, "num_microbatches": 2}),
    Case("small-moe", 2048, {"dp": 16, "zero_stage": 3, "recompute": "selective_ops"}),
    Case("small-moe", 2048, {"dp": 4}),
    Case("small-moe", 2048, {"dp": 4, "zero_stage": 1, "num_microbatches": 2}),
    Case("small-moe", 2048, pipeline(2, 4), stages=(0, 1)),
    Case("small-moe", 2048, pipeline(2, 4, dp=2), "fp32", stages=(0, 1)),
    Case("small-moe", 2048, pipeline(4, 8, "zero_bubble"), stages=(0, 1, 3)),
    Case("small-moe", 2048, {"tp": 4}),
    Case("small-mixtral", 2048, {"dp": 4, "num_microbatches": 2}),
    Case("small-mixtral", 2048, {"dp": 4, "recompute": "full"}),
    Case("small-mixtral", 2048, {"dp": 8, "zero_stage": 3}),
    Case("small-mixtral", 2048, {"tp": 2, "dp": 2}),
    Case("small-mixtral", 2048, {"tp": 2, "dp": 2, "sequence_parallel": True}),
    Case("small-mixtral", 2048, pipeline(2, 4, tp=2), stages=(0, 1)),
    Case("small-mixtral", 2048, {"dp": 4, "ep": 4, "num_microbatches": 2}),
    Case("small-mixtral", 2048, {"dp": 4, "ep": 4, "recompute": "full"}),
    Case("small-mixtral", 2048, {"dp": 4, "ep": 4, "recompute": "selective_ops"}),
    Case("small-mixtral", 2048, {"dp": 8, "ep": 4, "zero_stage": 2, "num_microbatches": 2}),
    Case("small-mixtral", 2048, {"dp": 8, "ep": 8, "zero_stage": 3}),
    Case("small-mixtral", 2048, {"dp": 2, "cp": 2, "ep": 4}),
    Case("small-mixtral", 2048, pipeline(2, 4, dp=4, ep=4), stages=(0, 1)),
    Case("small-mixtral", 2048, pipeline(2, 4, "zero_bubble", dp=4, ep=4, zero_stage=1), stages=(0, 1)),
    Case("small-moe", 2048, {"dp": 8, "ep": 8, "micro_batch_size": 4}),
    Case("small-moe", 2048, {"dp": 16, "ep": 8, "zero_stage": 3}),
    Case("small-moe", 2048, {"dp": 8, "ep": 8, "zero_stage": 3, "recompute": "full"}),
    Case("small-moe", 2048, {"dp": 2, "tp": 2, "ep": 2, "sequence_parallel": True}),
    Case("bert-large", 512, {"dp": 8, "micro_batch_size": 8}),
    Case("bert-large", 512, {"dp": 8, "micro_batch_size": 8, "zero_stage": 3}),
    Case("bert-large", 512, {"dp": 8, "micro_batch_size": 8, "num_microbatches": 2}, "fp32"),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.model} {ParallelPlan(**case.plan).describe()}")
def test_peaks_at_full_size_are_within_3_percent(case: Case) -> None:
    if case.model == PLAIN:
        build = load_script("train_lm").build_model
        spec = trace_module(build, seq_length=case.seq_length, source=PLAIN)
    elif case.model in UNBUNDLED:
        spec, build = of_config(UNBUNDLED[case.model])
    else:
        spec = read_model(case.model, seq_length=case.seq_length)
        build = library_factory(load_config(find_config(case.model)), attention=case.attention)
    plan = ParallelPlan(**case.plan)
    for stage in case.stages:
        predicted, traced = peaks(
            spec, build, plan, case.precision, stage, seq_length=case.seq_length, attention=case.attention
        )
        assert predicted.total_bytes == pytest.approx(traced.total_bytes, rel=0.03), stage
