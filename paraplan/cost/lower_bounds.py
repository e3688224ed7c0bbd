"""Plans of which only a bound is predicted: what they do beside products and transfers is not priced."""

from __future__ import annotations

from paraplan.cost.workload import Workload
from paraplan.plan.parallel import ParallelPlan

_EXPERTS_BY_MODULES = (
    "a step takes at least this long, and may take 5 to 40 times as long: DeepSpeed's ZeRO-3 gathers experts in hooks "
    "of each module, which transformers 4 runs one by one, and that is not priced (Qwen3-30B-A3B on 16 A100: 91.2 s an "
    "iteration, 9.6 s with Megatron-LM's expert parallelism; on 8 H100 166 s a step). Megatron-Bridge or another "
    "framework with --ep, or FSDP, gathers or sends them at once"
)


def lower_bound_reason(workload: Workload, plan: ParallelPlan) -> str | None:
    """Return why a step takes at least as long as predicted, and how much longer is known of; None where it is priced.

    DeepSpeed's ZeRO-3 gathers the parameters of each module in hooks (deepspeed/runtime/zero/parameter_offload.py),
    experts' one by one where they are modules of their own. The Trainer has no other ZeRO-3.
    """
    framework = workload.framework
    is_deepspeed = framework.data_parallel.sharding.gathers_each_weight or framework.loss.implementation.in_model
    shards_experts = plan.zero_stage == 3 and plan.ep == 1 and plan.dp * plan.cp > 1
    by_modules = is_deepspeed and not framework.data_parallel.sharding.is_fsdp
    return _EXPERTS_BY_MODULES if by_modules and shards_experts and workload.model.num_experts > 1 else None
