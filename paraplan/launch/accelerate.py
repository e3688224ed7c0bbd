"""A plan in the variables that accelerate reads, for scripts of accelerate and the Hugging Face Trainer as they are.

Names and meanings are those of accelerate 1.15: `FullyShardedDataParallelPlugin.__post_init__` (FSDP_*),
`ParallelismConfig.__post_init__` (PARALLELISM_CONFIG_*), `Accelerator.__init__` (ACCELERATE_USE_*).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from paraplan.launch.script import read_traits

if TYPE_CHECKING:  # pydantic costs a tenth of a second, which a launch without a plan need not pay
    from paraplan.launch.request import LaunchRequest
    from paraplan.plan.files import PlanFile

_OWN_CHOICE = ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_MEGATRON_LM")


def accelerate_variables(file: PlanFile, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables under which accelerate trains as the plan says; none for what accelerate cannot do.

    That is a plan with pipeline stages or context parallelism, and tensor parallelism beside plain data parallelism.
    Tensor parallelism needs a model that the script has loaded with its `tp_plan`. ZeRO-1 and ZeRO-2 become FSDP2
    that keeps parameters after the forward pass: its shards hold the optimizer states and gradients. Batch sizes stay
    the script's. What `environment` sets is left out, and where it chooses a backend of accelerate's so is all that
    concerns one.
    """
    plan = file.plan
    chosen: dict[str, str] = {}
    is_plain_dp = plan.dp > 1 and plan.zero_stage == 0
    if plan.pp > 1 or plan.cp > 1 or plan.world_size == 1 or (plan.tp > 1 and is_plain_dp):
        return chosen
    if file.training is not None:
        chosen["ACCELERATE_MIXED_PRECISION"] = file.training.precision.replace("fp32", "no").replace("bf16-pure", "no")
    if not any(name in environment for name in _OWN_CHOICE):
        if plan.zero_stage > 0 and plan.dp > 1:
            chosen |= {
                "ACCELERATE_USE_FSDP": "true",
                "FSDP_VERSION": "2",
                "FSDP_RESHARD_AFTER_FORWARD": str(plan.zero_stage == 3).lower(),
                "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
                "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
                "FSDP_ACTIVATION_CHECKPOINTING": str(plan.recompute == "full").lower(),
                "FSDP_OFFLOAD_PARAMS": str(plan.offload != "none").lower(),
            }
        if plan.tp > 1:
            chosen |= {
                "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
                "PARALLELISM_CONFIG_TP_SIZE": str(plan.tp),
                "PARALLELISM_CONFIG_DP_SHARD_SIZE": str(plan.dp),
                "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "1",
            }
    return {name: value for name, value in chosen.items() if name not in environment}


def drives_accelerate(request: LaunchRequest) -> bool:
    """Whether the plan goes into the variables of accelerate: not for a script that runs it by paraplan.runtime."""
    return bool(request.spec.module) or not read_traits(Path(request.spec.training_script)).uses_runtime
