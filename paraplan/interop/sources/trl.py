"""TRL's configuration (`trl sft --config FILE`), read back.

Keys and defaults as in TRL 1.16: `ModelConfig` (trainer/model_config.py), `SFTConfig` and its kin, and the launcher's
`accelerate_config` and `num_processes`.
"""

from __future__ import annotations

from paraplan.interop.setup import Fields, Given, Setup
from paraplan.interop.sources.adapters import trainable_of
from paraplan.interop.sources.documents import load_document
from paraplan.interop.sources.trainer import (
    Batches,
    ReadFile,
    attention_of,
    quantized_weights,
    sharded_setup,
    trainer_optimizer,
)
from paraplan.model.trainable import AdapterKind
from paraplan.plan.training import LossKernel, TrainingPrecision

_LENGTH, _RANK, _DROPOUT, _MICRO_BATCH = 1024, 16, 0.05, 8
_LOSSES: dict[str, LossKernel] = {"chunked_nll": "cut"}


def read_trl(text: str, *, source: str, given: Given, read_file: ReadFile) -> Setup:
    """Return the training that a configuration of TRL describes; `read_file` reads those of accelerate and DeepSpeed.

    Raises `PlanError` naming the file and key for what is broken.
    """
    fields = Fields(load_document(text, source, hint="the keys are those of trl sft --help"), source=source)
    checkpoints = fields.flag("gradient_checkpointing")
    batches = Batches(
        micro_batch=fields.count("per_device_train_batch_size") or _MICRO_BATCH,
        steps=fields.count("gradient_accumulation_steps") or 1,
        recompute=checkpoints is None or checkpoints,
    )
    setup = sharded_setup(fields, given, batches, tool="TRL", target="trl", read_file=read_file)
    notes = list(setup.notes)
    train = None
    has_adapters = fields.flag("use_peft")
    if has_adapters:
        kind: AdapterKind = "dora" if fields.flag("use_dora") else "lora"
        dropout = fields.values.get("lora_dropout")
        train, found = trainable_of(
            fields,
            kind=kind,
            rank=fields.count("lora_r") or _RANK,
            targets=fields.values.get("lora_target_modules"),
            dropout=_DROPOUT if dropout is None else dropout,
            by_root=bool(fields.flag("use_rslora")),
            saved=fields.values.get("lora_modules_to_save"),
        )
        notes += found
    loads_half = (fields.text("dtype") or "float32") in ("bfloat16", "float16", "auto")
    weights = quantized_weights(fields)
    if weights is None and has_adapters:
        weights = "bf16" if loads_half else "fp32"
    optimizer, found = trainer_optimizer(fields, "optim")
    loss = _LOSSES.get(fields.text("loss_type") or "nll", "plain")
    return setup.replace(
        precision=_precision(fields, is_pure=loads_half and not has_adapters and not setup.plan.zero_stage),
        optimizer=optimizer,
        attention=attention_of(fields.text("attn_implementation")) or "sdpa",
        train=train,
        base_weights=weights if has_adapters else None,
        loss="liger" if fields.flag("use_liger_kernel") else loss,
        compiled=fields.flag("torch_compile"),
        offloads_activations=fields.flag("activation_offloading"),
        seq_length=fields.count("max_length") or _LENGTH,
        model_name=fields.text("model_name_or_path"),
        notes=tuple(notes + found),
    )


def _precision(fields: Fields, *, is_pure: bool) -> TrainingPrecision:
    """Return the type of the arithmetic; TRL trains in bf16 unless told otherwise, over weights as they were loaded."""
    if fields.flag("fp16"):
        return "fp16"
    if fields.flag("bf16") is False:
        return "bf16-pure" if is_pure else "fp32"
    return "bf16-pure" if is_pure else "bf16"
