"""TRL's configuration (`trl sft --config FILE`), read back.

Keys and defaults as in TRL 1.16: `ModelConfig` (trainer/model_config.py), `SFTConfig` and its kin, and the launcher's
`accelerate_config` and `num_processes`.
"""

from __future__ import annotations

import re

from paraplan.interop.fields import Fields
from paraplan.interop.known_keys import key_table
from paraplan.interop.setup import Given, Setup
from paraplan.interop.sources import trainer
from paraplan.interop.sources.adapters import trainable_of
from paraplan.interop.sources.base_weights import released_format
from paraplan.interop.sources.launches import content_of
from paraplan.interop.sources.liger import with_trainers_liger
from paraplan.interop.sources.objectives import Objective, objective_of, reserve_of
from paraplan.model.trainable import AdapterKind
from paraplan.plan.task import TRL_RESERVE
from paraplan.plan.training import LossKernel, TrainingPrecision

_LENGTH, _RANK, _DROPOUT, _MICRO_BATCH = 1024, 16, 0.05, 8
_PROMPT, _COMPLETION = 512, 512
_PAIRS = ("sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "apo_zero", "apo_down", "sppo_hard")


def read_trl(text: str, *, source: str, given: Given, read_file: trainer.ReadFile) -> Setup:
    """Return the training that a configuration of TRL describes; `read_file` reads those of accelerate and DeepSpeed.

    Raises `PlanError` naming the file and key for what is broken.
    """
    command = content_of(text, source, read_file, hint="the keys are those of trl sft --help")
    fields = Fields(command.values, source=source)
    checkpoints = trainer.recomputes(fields)
    objective = _objective(fields, command.objective)
    batches = trainer.Batches(
        micro_batch=(fields.count("per_device_train_batch_size") or _MICRO_BATCH) * objective.group,
        steps=fields.count("gradient_accumulation_steps") or 1,
        recompute=checkpoints is None or checkpoints,
    )
    setup = trainer.sharded_setup(fields, given, batches, tool="TRL", target="trl", read_file=read_file)
    notes = [*setup.notes, *command.notes, *objective.notes]
    train = None
    has_adapters = fields.flag("use_peft")
    if has_adapters:
        kind: AdapterKind = "dora" if fields.flag("use_dora") else "lora"
        dropout = fields.value("lora_dropout")
        train, found = trainable_of(
            fields,
            kind=kind,
            rank=fields.count("lora_r") or _RANK,
            targets=fields.value("lora_target_modules"),
            dropout=_DROPOUT if dropout is None else dropout,
            by_root=bool(fields.flag("use_rslora")),
            saved=fields.value("lora_modules_to_save"),
            parameters=fields.value("lora_target_parameters"),
        )
        notes += found
    loads_half = (fields.text("dtype") or fields.text("torch_dtype") or "float32") in ("bfloat16", "float16", "auto")
    weights = trainer.quantized_weights(fields)
    if weights is None and has_adapters:
        weights = released_format(fields.text("model_name_or_path"), notes) or ("bf16" if loads_half else "fp32")
    optimizer, found = trainer.trainer_optimizer(fields, "optim")
    setup = setup.replace(
        precision=_precision(fields, is_pure=loads_half and not has_adapters and not setup.keeps_fp32),
        optimizer=optimizer,
        attention=trainer.attention_of(fields.text("attn_implementation"), notes),
        packs_samples=bool(fields.flag("packing")) and fields.text("packing_strategy") != "wrapped",
        train=train,
        base_weights=weights if has_adapters else None,
        loss=_loss(fields, objective, notes),
        task=objective.task,
        compiled=fields.flag("torch_compile"),
        offloads_activations=fields.flag("activation_offloading") or trainer.offloads_checkpoints(fields),
        seq_length=_length(fields, objective, notes),
        model_name=fields.text("model_name_or_path"),
    )
    setup = with_trainers_liger(setup.replace(notes=(*notes, *found)), fields)
    return setup.replace(
        notes=(
            *setup.notes,
            *trainer.tf32_note(fields, setup.precision),
            *trainer.unsharded_note(fields, setup),
            *key_table("trl").notes(fields),
        )
    )


def _loss(fields: Fields, objective: Objective, notes: list[str]) -> LossKernel:
    """Return the kernel of the loss, without Liger's; on given sequences TRL's own is in chunks since 1.8."""
    named = fields.value("loss_type")
    if named is None and objective.task is None and not fields.flag("use_liger_kernel"):
        notes.append("loss_type: chunked_nll, as it is left out; before TRL 1.8 that was nll, which keeps all logits")
        return "cut"
    return "cut" if named == "chunked_nll" else "plain"


def _length(fields: Fields, objective: Objective, notes: list[str]) -> int:
    """Return the tokens of a sequence: of a prompt and its answer where answers are generated."""
    if objective.task is None or not objective.task.startswith("grpo"):
        return fields.count("max_length") or fields.count("max_seq_length") or _LENGTH
    prompt = fields.count("max_prompt_length")
    if prompt is None:
        notes.append(f"prompts of {_PROMPT} tokens assumed, --seq-len says how long they are with their answers")
    return (prompt or _PROMPT) + (fields.count("max_completion_length") or _COMPLETION)


_SIGNS = {
    "distillation": ("teacher_model_name_or_path",),
    "kto": ("desirable_weight", "undesirable_weight"),
    "ppo": ("num_ppo_epochs", "reward_model_path", "reward_model_name_or_path"),
    "grpo": (
        *("num_generations", "reward_funcs", "reward_weights", "steps_per_generation", "generation_batch_size"),
        *("num_iterations", "scale_rewards", "epsilon_high", "importance_sampling_level", "log_completions"),
        *("mask_truncated_completions", "use_vllm", "temperature"),
    ),
    "reward": ("center_rewards_coefficient",),
    "cpo": ("cpo_alpha", "simpo_gamma"),
    "dpo": (
        *("precompute_ref_log_probs", "precompute_ref_batch_size", "f_divergence_type", "ld_alpha", "use_weighting"),
        *("rpo_alpha", "discopop_tau", "loss_weights"),
    ),
}
"""Keys by the objective that alone has them, those that several have after those that one has."""
_OF_PREFERENCES = (
    *("beta", "max_prompt_length", "max_completion_length", "label_smoothing", "disable_dropout", "truncation_mode"),
    *("sync_ref_model", "ref_model_mixup_alpha", "ref_model_sync_steps", "reference_free", "generate_during_eval"),
)
"""Keys that dpo, orpo, cpo and kto have in some release, and training on given sequences has not."""
_NAMES = re.compile(r"(?<![a-z])(dpo|ipo|orpo|simpo|cpo|kto|bco|grpo)(?![a-z])")


def _objective(fields: Fields, command: str | None) -> Objective:
    """Return what a file is for: it does not name the `command`.

    By keys that one of TRL's commands has alone; where preferences of several kinds have them, by what the file and its
    outputs are called.
    """
    loss, given = fields.value("loss_type"), {key for key, value in fields.values.items() if value is not None}
    if loss in _PAIRS or (isinstance(loss, list) and loss):
        found: str | None = "dpo"
    else:
        found = next((task for task, keys in _SIGNS.items() if not given.isdisjoint(keys)), None)
    name, key = command or found, "trl" if command else "its keys are those of" if found else "loss_type"
    if name is None and not given.isdisjoint(_OF_PREFERENCES):
        called = [
            fields.source,
            *(str(fields.values.get(each, "")) for each in ("output_dir", "hub_model_id", "run_name")),
        ]
        named = _NAMES.search(" ".join(called).lower())
        name = named[1] if named is not None else "dpo"
        how = "its name says" if named is not None else "taken for"
        key = f"its keys are those of preferences, {how}"
    for each in (*_SIGNS.get(name or "", ()), *_OF_PREFERENCES):
        if name is not None and each in key_table("trl").read:
            fields.value(each)  # it has said what it is there for
    completion = (fields.count("max_completion_length") or _COMPLETION) if name == "grpo" else None
    beta = fields.value("beta") if name == "grpo" else None
    reserve = reserve_of(fields, usual=TRL_RESERVE) if name == "grpo" else None
    precomputed = bool(fields.flag("precompute_ref_log_probs"))
    return objective_of(name, key=key, precomputed=precomputed, completion=completion, beta=beta, reserve=reserve)


def _precision(fields: Fields, *, is_pure: bool) -> TrainingPrecision:
    """Return the type of the arithmetic; TRL trains in bf16 unless told otherwise, over weights as they were loaded."""
    launched = fields.text("mixed_precision")  # of accelerate launch; TRL's own bf16 comes before it
    if fields.flag("fp16") or (launched == "fp16" and fields.flag("bf16") is False):
        return "fp16"
    if fields.flag("bf16") is False:
        return "bf16-pure" if is_pure else "fp32"
    return "bf16-pure" if is_pure else "bf16"
