"""LLaMA-Factory's YAML (`llamafactory-cli train FILE`), read back. Keys and defaults as in 0.9.5 (hparams/*.py)."""

from __future__ import annotations

from paraplan.interop.setup import Fields, Given, Setup
from paraplan.interop.sources.adapters import trainable_of
from paraplan.interop.sources.base_weights import quantizer_asked
from paraplan.interop.sources.documents import load_document
from paraplan.interop.sources.trainer import (
    Batches,
    ReadFile,
    attention_of,
    four_bits,
    sharded_setup,
    trainer_optimizer,
)
from paraplan.model.trainable import AdapterKind
from paraplan.model.weight_formats import WeightFormat
from paraplan.plan.training import TrainingPrecision

_LENGTH, _RANK, _MICRO_BATCH, _LAST_LAYERS = 2048, 8, 8, 2


def read_llama_factory(text: str, *, source: str, given: Given, read_file: ReadFile) -> Setup:
    """Return the training that a configuration of LLaMA-Factory describes.

    Raises `PlanError` naming the file and key for what is broken and for adapters that are not modelled.
    """
    hint = "examples/train_lora of LLaMA-Factory has working ones"
    fields = Fields(load_document(text, source, hint=hint), source=source)
    batches = Batches(
        micro_batch=fields.count("per_device_train_batch_size") or _MICRO_BATCH,
        steps=fields.count("gradient_accumulation_steps") or 1,
        recompute=not fields.flag("disable_gradient_checkpointing"),
    )
    setup = sharded_setup(fields, given, batches, tool="LLaMA-Factory", target="hf-trainer", read_file=read_file)
    notes = list(setup.notes)
    train, found = _trainable(fields)
    notes += found
    is_partial = train is not None
    is_galore = fields.flag("use_galore")
    optimizer, found = trainer_optimizer(fields, "optim")
    if is_galore:
        optimizer = "galore_adamw"
        notes.append("use_galore: priced at rank 128")
    return setup.replace(
        precision=_precision(fields),
        optimizer=optimizer,
        attention=attention_of(fields.text("flash_attn")) or "sdpa",
        train=train,
        base_weights=_weights(fields) if is_partial else None,
        quantizer=quantizer_asked(fields),
        loss="liger" if fields.flag("enable_liger_kernel") else "plain",
        seq_length=fields.count("cutoff_len") or _LENGTH,
        model_name=fields.text("model_name_or_path"),
        notes=tuple(notes + found),
    )


def _trainable(fields: Fields) -> tuple[str | None, list[str]]:
    words = fields.text("finetuning_type") or "lora"
    if words == "full":
        return None, []
    if words == "freeze":
        count = fields.values.get("freeze_trainable_layers", _LAST_LAYERS)
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise fields.error("freeze_trainable_layers", "the number of last layers that train, above 0")
        return f"layers:last{count}", []
    if words != "lora":
        raise fields.error("finetuning_type", "lora, freeze or full")
    kind: AdapterKind = "dora" if fields.flag("use_dora") else "lora"
    return trainable_of(
        fields,
        kind=kind,
        rank=fields.count("lora_rank") or _RANK,
        targets=fields.values.get("lora_target") or "all",
        dropout=fields.values.get("lora_dropout") or 0.0,
        by_root=bool(fields.flag("use_rslora")),
        saved=fields.values.get("additional_target"),
    )


def _weights(fields: Fields) -> WeightFormat:
    bits = fields.choice("quantization_bit", (2, 3, 4, 5, 6, 8), 16)
    if bits == 8:
        return "int8"
    if bits == 4:
        is_double = fields.flag("double_quantization")
        return four_bits(is_fp4=fields.text("quantization_type") == "fp4", is_double=is_double is not False)
    if bits != 16:
        raise fields.error("quantization_bit", "4 or 8, the widths that are priced")
    return "bf16"


def _precision(fields: Fields) -> TrainingPrecision:
    if fields.flag("pure_bf16"):
        return "bf16-pure"
    return "bf16" if fields.flag("bf16") else "fp16" if fields.flag("fp16") else "fp32"
