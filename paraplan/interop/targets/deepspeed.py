"""DeepSpeed: the JSON configuration. Keys as in DeepSpeed 0.19 (runtime/config.py, runtime/zero/config.py)."""

from __future__ import annotations

import json

from paraplan.interop.exported import (
    Exported,
    Gap,
    Subject,
    checkpointed_offload_gap,
    expert_ranks,
    field_gap,
    hybrid_gap,
    order_gap,
    remarks,
    shared_notes,
    training_gap,
)
from paraplan.plan.parallel import ParallelPlan

_ULYSSES = (
    "sequences over ranks (Ulysses): the script registers UlyssesSPAttentionHF before the model is made, and wraps the "
    "loader in UlyssesSPDataLoaderAdapter"
)
_CHECKPOINTS = (
    "activations on the host: the script checkpoints blocks by deepspeed.checkpointing.checkpoint, and calls "
    "deepspeed.checkpointing.configure before; torch's own checkpoints do not read cpu_checkpointing"
)
BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
"""Keys whose values multiply: the first is the product of the others and of the data-parallel ranks."""
_PRESETS = (
    "AutoEP knows Mixtral, Qwen2-, Qwen3- and Qwen3.5-MoE, DeepSeek-V2 and V3; of others name moe_layer_pattern, "
    "router_pattern and expert_pattern"
)

_NO_GROUPS = "DeepSpeed 0.19 has no MiCS any more, and hpZ (zero_hpz_partition_size) keeps a second copy of parameters"


def to_deepspeed(subject: Subject) -> Exported:
    """Return the configuration for `deepspeed.initialize(config=...)`: batch sizes, ZeRO, offload, precision, AutoTP.

    JSON has no comments: what is not expressed stands in the value of "paraplan", which DeepSpeed does not read.
    """
    plan, training = subject.plan, subject.training
    gaps = deepspeed_gaps(subject)
    notes = ["the optimizer and its learning rate: pass it to deepspeed.initialize, or add an optimizer section"]
    if plan.recompute == "full":
        notes.append("recompute=full: the script checkpoints the blocks (deepspeed.checkpointing or torch.utils)")
    if plan.offload != "none" and stage_of(plan) >= 1:
        notes.append("with offload DeepSpeed takes its own DeepSpeedCPUAdam, and refuses torch's AdamW")
    if plan.dp < plan.world_size:
        notes.append("train_batch_size: left out, since DeepSpeed multiplies it by all ranks, those of tp too")
    notes += shared_notes(subject)
    config: dict[str, object] = {"paraplan": remarks(subject, gaps, notes)}
    config |= batch_and_zero(subject)
    if training is not None:
        config["bf16"] = {"enabled": training.precision == "bf16"}
        config["fp16"] = {"enabled": training.precision == "fp16"}
        if stage_of(plan) >= 1 and training.optimizer != "adamw":
            config["zero_allow_untested_optimizer"] = True  # refused without, all but Adam's kin
    if training is not None and training.offloads_activations:
        config["activation_checkpointing"] = {"cpu_checkpointing": True}
        notes.append(_CHECKPOINTS)
        config["paraplan"] = remarks(subject, gaps, notes)
    if plan.tp > 1:
        config["tensor_parallel"] = {"autotp_size": plan.tp}
    if plan.cp > 1:
        config |= {"sequence_parallel_size": plan.cp, "data_parallel_size": plan.dp}
        notes.append(_ULYSSES)
        config["paraplan"] = remarks(subject, gaps, notes)
    experts = expert_ranks(subject)
    if experts > 1 and (plan.tp == 1 or (plan.zero_stage < 3 and plan.offload == "none")):
        config["expert_parallel"] = {"enabled": True, "autoep_size": experts}
        notes.append(_PRESETS)
        config["paraplan"] = remarks(subject, gaps, notes)
    return Exported(target="deepspeed", text=json.dumps(config, indent=2) + "\n", gaps=tuple(gaps), notes=tuple(notes))


def stage_of(plan: ParallelPlan) -> int:
    """Return DeepSpeed's stage of a plan: with one data-parallel rank, of which none is sharded, what is offloaded.

    One process that offloads parameters says itself that it has stage 3.
    """
    if plan.dp * plan.cp > 1 or (plan.world_size == 1 and plan.offload == "parameters"):
        return plan.zero_stage
    return {"none": 0, "optimizer": 2, "parameters": 3}[plan.offload]


def batch_and_zero(subject: Subject) -> dict[str, object]:
    """Return the keys that the Trainer of transformers and DeepSpeed itself have in common: batch sizes and ZeRO."""
    plan = subject.plan
    stage = stage_of(plan)
    zero: dict[str, object] = {"stage": stage}
    if plan.offload != "none" and stage >= 1:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    if plan.offload == "parameters" and stage == 3:
        zero["offload_param"] = {"device": "cpu", "pin_memory": True}
    sizes = (plan.global_batch_size, plan.micro_batch_size, plan.num_microbatches)
    batch = dict(zip(BATCH_KEYS, sizes, strict=True))
    if plan.dp < plan.world_size:
        del batch["train_batch_size"]
    return batch | {"zero_optimization": zero}


def deepspeed_gaps(subject: Subject, *, has_ulysses: bool = True) -> list[Gap]:
    """Return what DeepSpeed's configuration has no words for."""
    plan = subject.plan
    gaps = field_gap(plan, "pp", (1,), "DeepSpeed's pipeline is built in the script (PipelineModule), not configured")
    if plan.tp > 1 and (plan.zero_stage == 3 or plan.offload != "none"):
        gaps += field_gap(plan, "ep", (1,), "beside tp AutoEP has ZeRO stages 0 to 2 without offload")
    elif plan.cp > 1:
        gaps += field_gap(plan, "ep", (1,), "AutoEP counts data-parallel ranks, beside which Ulysses has its own")
    gaps += hybrid_gap(plan, "DeepSpeed", lacking=_NO_GROUPS)
    if not has_ulysses:
        gaps += field_gap(
            plan, "cp", (1,), "sequences over ranks are in DeepSpeed's own configuration, not in this one"
        )
    elif plan.tp > 1:
        gaps += field_gap(plan, "cp", (1,), "AutoTP goes over ranks that Ulysses would take")
    elif plan.zero_stage == 0:
        gaps += field_gap(plan, "cp", (1,), "beside Ulysses ZeRO shards over the ranks of a sequence too")
    gaps += field_gap(plan, "sequence_parallel", (False,), "AutoTP does not split norms and dropout")
    gaps += field_gap(plan, "recompute", ("none", "full"), "DeepSpeed checkpoints what the script names, whole blocks")
    if plan.offload != "none" and stage_of(plan) == 0:
        gaps += field_gap(plan, "offload", ("none",), "DeepSpeed offloads what ZeRO shards; the plan has stage 0")
    elif plan.offload == "parameters" and stage_of(plan) < 3:
        gaps += field_gap(plan, "offload", ("none",), "DeepSpeed offloads parameters in ZeRO-3 alone")
    gaps += checkpointed_offload_gap(subject, "DeepSpeed")
    gaps += training_gap(subject.training, "precision", ("fp32", "bf16", "fp16"), "unknown")
    return gaps + order_gap(plan, "DeepSpeed", ("dp", "cp", "tp"))
