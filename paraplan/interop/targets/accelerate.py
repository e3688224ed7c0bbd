"""Accelerate: the YAML of `accelerate launch --config_file`.

Keys as in accelerate 1.15: `ClusterConfig` (commands/config/config_args.py), the options of commands/launch.py behind
`fsdp_config`, `parallelism_config` and `deepspeed_config`, and what `ParallelismConfig` admits.
"""

from __future__ import annotations

from paraplan.interop.exported import (
    Exported,
    Gap,
    Subject,
    expert_gap,
    field_gap,
    hybrid_gap,
    order_gap,
    remarks,
    shard_degrees,
    shared_notes,
)
from paraplan.interop.quoting import comment, to_yaml
from paraplan.interop.targets.adapters import storage_notes
from paraplan.interop.targets.deepspeed import deepspeed_gaps
from paraplan.plan.parallel import ParallelPlan

_NO_PIPELINE = "accelerate's configuration has no pipeline for training"


def to_accelerate(subject: Subject) -> Exported:
    """Return the configuration: DDP, FSDP2 for ZeRO-2 and 3 (with its parallelism_config for tp and cp), or DeepSpeed.

    Plans for DeepSpeed have a deepspeed_config, and those that FSDP2 cannot run: ZeRO-1, an offloaded optimizer, and
    one process that gathers.
    """
    plan = subject.plan
    layout = subject.layout
    config: dict[str, object] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": _distributed_type(subject),
        "mixed_precision": _precision(subject),
        "num_machines": layout.num_nodes,
        "num_processes": plan.world_size,
        "machine_rank": 0,
    }
    notes = [
        f"in the script: DataLoader(batch_size={plan.micro_batch_size}) and "
        f"Accelerator(gradient_accumulation_steps={plan.num_microbatches})"
    ]
    if layout.num_nodes > 1:
        config |= {"rdzv_backend": "c10d", "same_network": False}
        config |= {"main_process_ip": "FIRST_NODE", "main_process_port": 29500}
        notes.append("main_process_ip: the address of one node; machine_rank: the number of the node that reads this")
    if uses_deepspeed(subject):
        config["deepspeed_config"] = _deepspeed_config(plan)
        notes.append(deepspeed_note(subject))
    gaps = accelerate_gaps(subject)
    if plan.zero_stage >= 2 and not uses_deepspeed(subject):
        config["fsdp_config"] = _fsdp_config(plan)
        if plan.tp > 1 or plan.cp > 1 or shard_degrees(plan)[0] > 1:
            config["parallelism_config"] = _parallelism_config(plan)
        if plan.tp > 1:
            notes.append("tensor parallelism: load the model with a tp_plan, as accelerate's nd_parallel example does")
    elif plan.recompute == "full":
        notes.append("recompute=full: in the script, model.gradient_checkpointing_enable()")
    if subject.training is not None and subject.training.compiled:
        config["dynamo_config"] = {"dynamo_backend": "INDUCTOR", "dynamo_use_regional_compilation": True}
    narrow = _narrow_products(subject)
    config |= narrow
    notes += shared_notes(subject, {"compiled", *({"linear_precision"} if narrow else ())})
    notes += [] if uses_deepspeed(subject) else storage_notes(subject)
    text = comment(remarks(subject, gaps, notes)) + to_yaml(config)
    return Exported(target="accelerate", text=text, gaps=tuple(gaps), notes=tuple(notes))


def deepspeed_note(subject: Subject) -> str:
    """Return why DeepSpeed has to be installed for a plan that `uses_deepspeed`."""
    if subject.made_for == "deepspeed":
        return "deepspeed has to be installed: the plan was made for it"
    return "deepspeed has to be installed: FSDP2 has no ZeRO-1 and no offloaded optimizer, and not one process"


def uses_deepspeed(subject: Subject) -> bool:
    """Return whether DeepSpeed runs the plan: made for it, or sharded or offloaded in a way that FSDP2 has not.

    In one process accelerate and the Trainer start DeepSpeed, and no FSDP.
    """
    plan = subject.plan
    beyond_fsdp = plan.zero_stage == 1 or (plan.offload == "optimizer" and plan.zero_stage >= 2) or plan.gathers_alone
    return beyond_fsdp or subject.made_for == "deepspeed"


def _distributed_type(subject: Subject) -> str:
    plan = subject.plan
    if uses_deepspeed(subject):
        return "DEEPSPEED"
    if plan.zero_stage >= 2:
        return "FSDP"
    return "MULTI_GPU" if plan.world_size > 1 else "NO"


def _precision(subject: Subject) -> str:
    precision = subject.training.precision if subject.training is not None else "fp32"
    return "no" if precision in ("fp32", "bf16-pure") else precision


def _narrow_products(subject: Subject) -> dict[str, object]:
    """Return the keys of products in 8 bits, nothing where there are none or accelerate has no such recipe."""
    training = subject.training
    if training is None:
        return {}
    backends: dict[tuple[str, str | None], dict[str, object]] = {
        ("fp8", "tensorwise"): {"backend": "AO", "enable_fsdp_float8_all_gather": training.fp8_gather},
        ("fp8", "delayed"): {"backend": "TE"},
        ("mxfp8", None): {"backend": "TE", "use_mxfp8_block_scaling": True},
    }
    found = backends.get((training.linear_precision, training.fp8_recipe))
    return {} if found is None else {"mixed_precision": "fp8", "fp8_config": found}


def accelerate_gaps(subject: Subject) -> list[Gap]:
    """Return what accelerate's configuration has no words for."""
    plan = subject.plan
    if uses_deepspeed(subject):
        gaps = expert_gap(plan, "accelerate")
        gaps += field_gap(plan, "tp", (1,), "accelerate's deepspeed_config has no AutoTP")
        named = {gap.part for gap in gaps}
        return gaps + [gap for gap in deepspeed_gaps(subject, has_ulysses=False) if gap.part not in named]
    return _torch_gaps(plan)


def _torch_gaps(plan: ParallelPlan) -> list[Gap]:
    """Return what accelerate cannot say of a plan under DDP or FSDP2."""
    gaps = field_gap(plan, "pp", (1,), _NO_PIPELINE) + expert_gap(plan, "accelerate") + hybrid_gap(plan, "accelerate")
    if plan.zero_stage == 0:
        for axis in ("tp", "cp"):
            gaps += field_gap(plan, axis, (1,), "accelerate's parallelism_config goes with FSDP2, ZeRO stages 2 and 3")
        gaps += field_gap(plan, "offload", ("none",), "accelerate offloads under FSDP2 and DeepSpeed, not under DDP")
    gaps += field_gap(plan, "sequence_parallel", (False,), "accelerate leaves norms to the model's own tp_plan")
    gaps += field_gap(plan, "recompute", ("none", "full"), "FSDP2's activation checkpointing is of whole blocks")
    return gaps + order_gap(plan, "accelerate", ("dp", "cp", "tp"))


def _fsdp_config(plan: ParallelPlan) -> dict[str, object]:
    return {
        "fsdp_version": 2,
        "fsdp_reshard_after_forward": plan.zero_stage == 3,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_activation_checkpointing": plan.recompute == "full",
        "fsdp_offload_params": plan.offload == "parameters",
        "fsdp_cpu_ram_efficient_loading": True,
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    }


def _parallelism_config(plan: ParallelPlan) -> dict[str, object]:
    replicas, shards = shard_degrees(plan)
    return {
        "parallelism_config_dp_replicate_size": replicas,
        "parallelism_config_dp_shard_size": shards,
        "parallelism_config_cp_size": plan.cp,
        "parallelism_config_tp_size": plan.tp,
    }


def _deepspeed_config(plan: ParallelPlan) -> dict[str, object]:
    config: dict[str, object] = {
        "zero_stage": plan.zero_stage,
        "gradient_accumulation_steps": plan.num_microbatches,
        "offload_optimizer_device": "none" if plan.offload == "none" else "cpu",
        "offload_param_device": "cpu" if plan.offload == "parameters" and plan.zero_stage == 3 else "none",
        "zero3_init_flag": plan.zero_stage == 3,
    }
    if plan.world_size > 1:
        config["deepspeed_multinode_launcher"] = "standard"
    return config
