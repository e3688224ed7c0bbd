"""Plans of which only a bound is predicted: what they do beside products and transfers is not priced."""

from __future__ import annotations

from paraplan.cost.workload import Workload
from paraplan.model.quantizers import quantizer_of
from paraplan.plan.parallel import ParallelPlan

_RUNS = (
    "Qwen3-30B-A3B on 16 A100: 91.2 s an iteration, 9.6 s with Megatron-LM's expert parallelism; on 8 H100 166 s a step"
)
_EXPERTS_BY_MODULES = (
    "a step takes at least this long, and may take 5 to 40 times as long: DeepSpeed's ZeRO-3 gathers experts in hooks "
    f"of each module, which transformers 4 runs one by one, and that is not priced ({_RUNS}). Megatron-Bridge or "
    "another framework with --ep, or FSDP, gathers or sends them at once; so does transformers 5: --stack whole_experts"
)
_EXPERTS_OF_THE_TRAINER = (
    "a step takes at least this long: the Trainer's FSDP, which paraplan export writes, gathers a block at once, as "
    "is priced; with DeepSpeed's ZeRO-3 it may take 5 to 40 times as long, as that gathers experts in hooks of each "
    f"module, which transformers 4 runs one by one ({_RUNS}). Frameworks with --ep send tokens to experts; "
    "transformers 5 has these in whole tensors: --stack whole_experts"
)


def lower_bound_reason(workload: Workload, plan: ParallelPlan) -> str | None:
    """Return why a step takes at least as long as predicted, and how much longer is known of; None where it is priced.

    DeepSpeed's ZeRO-3 gathers the parameters of each module in hooks (deepspeed/runtime/zero/parameter_offload.py),
    experts' one by one where they are modules of their own: in transformers 4, but for a few families. The Trainer runs
    that or FSDP.
    """
    sharding = workload.framework.data_parallel.sharding
    shards_experts = plan.zero_stage == 3 and plan.ep == 1 and plan.dp * plan.cp > 1
    if not shards_experts or workload.model.num_experts <= 1:
        return None
    if _has_whole_experts(workload):
        return None
    if sharding.gathers_each_weight:
        return _EXPERTS_BY_MODULES
    return _EXPERTS_OF_THE_TRAINER if sharding.or_deepspeed else None


def _has_whole_experts(workload: Workload) -> bool:
    """Return whether experts are whole tensors: a setting says so, or every release of transformers has them so."""
    told = workload.training.stack.whole_experts
    before = quantizer_of("transformers-4")
    return told is True or (
        told is None and workload.model.model_type in (*before.fused_families, *before.lacking_families)
    )
