"""Plans of which only a bound is predicted: what they do beside products and transfers is not priced."""

from __future__ import annotations

from paraplan.cost.workload import Workload
from paraplan.plan.parallel import ParallelPlan


def lower_bound_reason(workload: Workload, plan: ParallelPlan) -> str | None:
    """Return why a step takes at least as long as predicted, and how much longer is known of; None where it is priced.

    DeepSpeed's ZeRO-3 gathers the parameters of each module in hooks (deepspeed/runtime/zero/parameter_offload.py),
    experts' one by one where they are modules of their own.
    """
    reason = workload.framework.experts.unpriced_under_zero_3
    shards_experts = plan.zero_stage == 3 and plan.ep == 1 and plan.dp * plan.cp > 1
    return reason if reason and shards_experts and workload.model.num_experts > 1 else None
