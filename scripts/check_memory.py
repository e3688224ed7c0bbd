#!/usr/bin/env python3
"""Compare the predicted peak memory of plans with that of the runtime, run without a GPU and without values.

One rank of each plan runs two steps in a world of fake ranks; every storage is followed, so the peak and its parts are
exact for torch's allocator. Peaks must agree within 3 %, and parts within 5 % where they differ by more than 1 % of the
peak. Models are transformers' classes, where it is installed, and this project's own plain transformer.
Ends with status 1 if a peak differs, 2 if nothing could be compared.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from train_lm import build_model

from paraplan.cost.estimate import MemoryEstimate, estimate_plan
from paraplan.cost.workload import Workload
from paraplan.hardware.catalogue.profile_files import cluster_from_profile
from paraplan.hardware.link_speed import load_link_speeds
from paraplan.model.reader import find_config, read_config
from paraplan.model.spec import ModelSpec
from paraplan.plan.memory_record import MEMORY_PARTS
from paraplan.plan.parallel import ParallelPlan
from paraplan.plan.support import unsupported_reason
from paraplan.plan.training import TrainingPrecision, TrainingSpec
from paraplan.runtime.fake.run import TracedMemory, first_rank_of_stage, trace_memory
from paraplan.runtime.world import silence_known_noise
from paraplan.units import format_bytes

PEAK_TOLERANCE, PART_TOLERANCE, PART_FLOOR = 0.03, 0.05, 0.01
PLAIN = "plain transformer"
# Configurations that are not bundled: an encoder, and two small mixtures of experts, one with a shared expert.
OWN_CONFIGS: dict[str, dict[str, Any]] = {
    "bert-large": {
        "model_type": "bert",
        "architectures": ["BertForMaskedLM"],
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "vocab_size": 30522,
        "max_position_embeddings": 512,
    },
    "small-moe": {
        "model_type": "qwen2_moe",
        "architectures": ["Qwen2MoeForCausalLM"],
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "moe_intermediate_size": 704,
        "shared_expert_intermediate_size": 2816,
        "num_hidden_layers": 8,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "decoder_sparse_step": 1,
        "vocab_size": 65536,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    },
    "small-mixtral": {
        "model_type": "mixtral",
        "architectures": ["MixtralForCausalLM"],
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "num_hidden_layers": 8,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "vocab_size": 32000,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    },
}


@dataclass(frozen=True)
class Case:
    """A model under a plan; `stages` are the pipeline stages to compare."""

    model: str
    seq_length: int
    plan: dict[str, Any] = field(default_factory=dict)
    precision: TrainingPrecision = "bf16"
    stages: tuple[int, ...] = (0,)
    attention: Literal["sdpa", "eager"] = "sdpa"


def pipeline(pp: int, microbatches: int, schedule: str = "1f1b", **plan: Any) -> dict[str, Any]:
    """Return the fields of a plan with a pipeline."""
    return {"pp": pp, "pipeline_schedule": schedule, "num_microbatches": microbatches} | plan


CASES = (
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
    Case("bert-large", 512, {"dp": 8, "micro_batch_size": 8}),
    Case("bert-large", 512, {"dp": 8, "micro_batch_size": 8, "zero_stage": 3}),
    Case("bert-large", 512, {"dp": 8, "micro_batch_size": 8, "num_microbatches": 2}, "fp32"),
)


def spec_and_factory(case: Case) -> tuple[ModelSpec, Callable[[], Any]]:
    """Return the model as the estimate sees it, and what builds it for the runtime."""
    if case.model == PLAIN:
        from paraplan.model.trace import trace_module

        return trace_module(build_model, seq_length=case.seq_length, source=PLAIN), build_model
    import transformers

    if case.model in OWN_CONFIGS:
        fields = dict(OWN_CONFIGS[case.model])
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "config.json"
            path.write_text(json.dumps(fields), encoding="utf-8")
            spec = read_config(path, source=case.model, seq_length=case.seq_length)
    else:
        path = find_config(case.model)
        fields = json.loads(path.read_text(encoding="utf-8"))
        spec = read_config(path, source=case.model, seq_length=case.seq_length)
    model_class = getattr(transformers, fields["architectures"][0])
    kind = fields.pop("model_type")

    def build() -> Any:
        config = transformers.AutoConfig.for_model(kind, **fields)
        config._attn_implementation = case.attention
        if "use_cache" in config.to_dict():
            config.use_cache = False
        return model_class(config)

    return spec, build


def compare(case: Case, stage: int) -> tuple[MemoryEstimate, TracedMemory]:
    """Return the predicted and the traced memory of one stage."""
    plan = ParallelPlan.model_validate(case.plan)
    training = TrainingSpec(
        global_batch_size=plan.global_batch_size,
        seq_length=case.seq_length,
        precision=case.precision,
        attention=case.attention,
    )
    spec, factory = spec_and_factory(case)
    cluster = cluster_from_profile("dgx-h100", num_nodes=max(1, plan.world_size // 8))
    workload = Workload.of(spec, training, cluster, load_link_speeds())
    # No library runs, so what cuBLAS keeps for itself is left out.
    workload = replace(workload, constants=workload.constants.replace(counts_matmul_workspaces=False))
    predicted = estimate_plan(workload, plan).memory[stage]
    rank = first_rank_of_stage(plan, stage)
    return predicted, trace_memory(factory, plan=plan, training=training, rank=rank, source=case.model)


def print_row(case: Case, stage: int) -> bool:
    """Print the comparison of one stage; return whether the peaks agree."""
    began = time.perf_counter()
    predicted, traced = compare(case, stage)
    error = predicted.total_bytes / traced.total_bytes - 1
    agrees = abs(error) <= PEAK_TOLERANCE
    plan = ParallelPlan.model_validate(case.plan).describe()
    print(
        f"{case.model:<18}{plan:<56}{case.precision:<5}{stage:>5}  {format_bytes(predicted.total_bytes):>9} "
        f"{format_bytes(traced.total_bytes):>9} {error:>+7.2%}  {'agrees' if agrees else 'DIFFERS'}"
        f"  ({traced.phase}, {time.perf_counter() - began:.0f} s)",
        flush=True,
    )
    for part in MEMORY_PARTS:
        ours, theirs = getattr(predicted, part), getattr(traced, part)
        if abs(ours - theirs) > max(PART_TOLERANCE * theirs, PART_FLOOR * traced.total_bytes):
            print(f"    {part}: {format_bytes(ours)} predicted, {format_bytes(theirs)} traced")
    return agrees


def main() -> int:
    """Compare all cases, or those of one model, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", help="compare only the plans of this model")
    chosen: str | None = parser.parse_args().model
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)
    silence_known_noise()
    warnings.filterwarnings("ignore")
    has_transformers = importlib.util.find_spec("transformers") is not None
    if not has_transformers:
        print("transformers is not installed, so only the plain transformer is compared", file=sys.stderr)
    results = []
    header = f"{'model':<18}{'plan':<56}{'':<5}{'stage':>5}  {'predicted':>9} {'traced':>9} {'error':>7}"
    print(header)
    for case in CASES:
        if (chosen and case.model != chosen) or (case.model != PLAIN and not has_transformers):
            continue
        reason = unsupported_reason(ParallelPlan.model_validate(case.plan), precision=case.precision)
        if reason is not None:
            print(f"{case.model:<18}left out: {reason}")
            continue
        results += [print_row(case, stage) for stage in case.stages]
    if not results:
        print(f"no plans of {chosen}", file=sys.stderr)
        return 2
    print(f"{sum(results)} of {len(results)} peaks agree within {PEAK_TOLERANCE:.0%}")
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
