"""The Trainer of transformers: the JSON that `HfArgumentParser.parse_json_file` reads into `TrainingArguments`.

Fields as in transformers 5.23 (training_args.py). ZeRO-2 and 3 become FSDP2, ZeRO-1 and offloaded optimizers DeepSpeed.
"""

from __future__ import annotations

import json

from paraplan.interop.exported import (
    Exported,
    Gap,
    Subject,
    checkpointed_offload_gap,
    expert_gap,
    field_gap,
    hybrid_gap,
    shared_notes,
    training_gap,
)
from paraplan.interop.targets.accelerate import uses_deepspeed
from paraplan.interop.targets.adapters import storage_notes
from paraplan.interop.targets.deepspeed import BATCH_KEYS, batch_and_zero, deepspeed_gaps
from paraplan.interop.targets.liger import told_kernels, trainers_liger

OPTIMIZERS = {
    "adamw": "adamw_torch_fused",
    "adamw_foreach": "adamw_torch",
    "adamw_8bit": "adamw_bnb_8bit",
    "adamw_4bit": "adamw_torch_4bit",
    "paged_adamw": "paged_adamw_32bit",
    "paged_adamw_8bit": "paged_adamw_8bit",
    "lion": "lion_32bit",
    "lion_8bit": "lion_8bit",
    "adafactor": "adafactor",
    "sgd": "sgd",
    "sgd_momentum": "sgd",
    "schedule_free_adamw": "schedule_free_adamw",
    "schedule_free_sgd": "schedule_free_sgd",
    "galore_adamw": "galore_adamw",
}
"""Names of `--optim` (`OptimizerNames` in training_args.py)."""
PROJECTED = "all-linear"
"""`--optim_target_modules` of GaLore, which the Trainer does not start without (trainer_optimizer.py)."""
MOMENTUM = "momentum=0.9"
"""`--optim_args` of SGD with momentum."""
MOMENTUM_NOTE = "momentum 0.9 is written; the plan file says no value"

_IN_THE_SCRIPT = "TrainingArguments take it as a ParallelismConfig, made in the script"


def to_hf_trainer(subject: Subject) -> Exported:
    """Return the arguments. The parser refuses keys that it does not know, so remarks stand on stderr alone."""
    plan, training = subject.plan, subject.training
    arguments: dict[str, object] = {
        "output_dir": "output",
        "per_device_train_batch_size": plan.micro_batch_size,
        "gradient_accumulation_steps": plan.num_microbatches,
    }
    notes = shared_notes(subject, {"compiled", "optimizer"}, losses=("liger",), tells=told_kernels(training))
    if training is not None:
        arguments |= trainers_liger(training)
        arguments |= {"bf16": training.precision == "bf16", "fp16": training.precision == "fp16"}
        if training.compiled:
            arguments["torch_compile"] = True
        if training.optimizer in OPTIMIZERS:
            arguments["optim"] = OPTIMIZERS[training.optimizer]
        if training.optimizer == "sgd_momentum":
            arguments["optim_args"] = MOMENTUM
            notes.append(MOMENTUM_NOTE)
        if training.optimizer == "galore_adamw":
            arguments["optim_target_modules"] = PROJECTED
    if uses_deepspeed(subject):
        # The Trainer fills in "auto" from the arguments beside it.
        config = batch_and_zero(subject)
        config |= dict.fromkeys(BATCH_KEYS, "auto")
        config |= {"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}}
        arguments["deepspeed"] = config
        notes.append("deepspeed has to be installed")
    offloads = training is not None and training.offloads_activations
    has_fsdp = plan.zero_stage >= 2 and not uses_deepspeed(subject)
    by_trainer = plan.recompute == "full" and (offloads or not has_fsdp)  # which refuses FSDP's beside its own
    if has_fsdp:
        arguments |= {"fsdp": True, "fsdp_config": _fsdp(subject, recomputes=not by_trainer)}
        notes += storage_notes(subject)
    if by_trainer:
        arguments["gradient_checkpointing"] = True
    if offloads:
        arguments["gradient_checkpointing_kwargs"] = {"offload": True}
        notes.append("gradient_checkpointing_kwargs.offload: transformers after 5.16.1")
    gaps = hf_trainer_gaps(subject)
    return Exported(
        target="hf-trainer", text=json.dumps(arguments, indent=2) + "\n", gaps=tuple(gaps), notes=tuple(notes)
    )


def _fsdp(subject: Subject, *, recomputes: bool) -> dict[str, object]:
    plan = subject.plan
    return {
        "version": 2,
        "reshard_after_forward": plan.zero_stage == 3,
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "activation_checkpointing": recomputes and plan.recompute == "full",
        "cpu_offload": plan.offload == "parameters",
        "state_dict_type": "SHARDED_STATE_DICT",
    }


def hf_trainer_gaps(subject: Subject) -> list[Gap]:
    """Return what its configuration has no words for."""
    plan = subject.plan
    gaps = field_gap(plan, "pp", (1,), "the Trainer has no pipeline")
    for axis in ("tp", "cp"):
        gaps += field_gap(plan, axis, (1,), _IN_THE_SCRIPT)
    gaps += expert_gap(plan, "the Trainer")
    if uses_deepspeed(subject):
        named = {gap.part for gap in gaps}
        gaps += [gap for gap in deepspeed_gaps(subject, has_ulysses=False) if gap.part not in named]
    else:
        gaps += hybrid_gap(plan, "the Trainer", lacking=_IN_THE_SCRIPT)
        gaps += field_gap(plan, "recompute", ("none", "full"), "the Trainer checkpoints whole blocks")
        if plan.zero_stage == 0:
            gaps += field_gap(plan, "offload", ("none",), "the Trainer offloads under FSDP2 and DeepSpeed")
    gaps += checkpointed_offload_gap(subject, "the Trainer")
    gaps += training_gap(subject.training, "optimizer", tuple(OPTIMIZERS), "the Trainer has no such optimizer")
    return gaps
