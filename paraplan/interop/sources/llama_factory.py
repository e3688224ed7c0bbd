"""LLaMA-Factory's YAML (`llamafactory-cli train FILE`), read back. Keys and defaults as in 0.9.5 (hparams/*.py)."""

from __future__ import annotations

from paraplan.errors import PlanError
from paraplan.interop.fields import Fields
from paraplan.interop.known_keys import key_table
from paraplan.interop.setup import Given, Setup
from paraplan.interop.sources import trainer
from paraplan.interop.sources.adapters import trainable_of
from paraplan.interop.sources.base_weights import quantizer_asked, released_format
from paraplan.interop.sources.launches import content_of
from paraplan.interop.sources.liger import with_trainers_liger
from paraplan.interop.sources.megatron_lm import megatron_setup
from paraplan.interop.sources.narrow_products import llama_factorys_fp8
from paraplan.interop.sources.objectives import objective_of
from paraplan.interop.sources.towers import adapters_of_towers, full_but_towers
from paraplan.model.trainable import AdapterKind
from paraplan.model.weight_formats import WeightFormat
from paraplan.plan.training import OptimizerName, TrainingPrecision

_LENGTH, _RANK, _MICRO_BATCH, _LAST_LAYERS = 2048, 8, 8, 2


def read_llama_factory(text: str, *, source: str, given: Given, read_file: trainer.ReadFile) -> Setup:
    """Return the training that a configuration of LLaMA-Factory describes.

    Raises `PlanError` naming the file and key for what is broken and for adapters that are not modelled.
    """
    hint = "examples/train_lora of LLaMA-Factory has working ones"
    command = content_of(text, source, read_file, hint=hint)
    fields = Fields(command.values, source=source)
    refuse_untrained(fields)
    train, notes = _trainable(fields)
    objective = objective_of(
        fields.text("pref_loss")
        if fields.text("stage") == "dpo" and _is_without_reference(fields)
        else fields.text("stage"),
        key="stage",
    )
    batches = trainer.Batches(
        micro_batch=(fields.count("per_device_train_batch_size") or _MICRO_BATCH) * objective.group,
        steps=fields.count("gradient_accumulation_steps") or 1,
        recompute=not fields.flag("disable_gradient_checkpointing"),
    )
    is_megatron = _has_megatron(fields)
    if is_megatron:
        setup = _megatron(fields, given, batches)
    else:
        setup = trainer.sharded_setup(
            fields, given, batches, tool="LLaMA-Factory", target="hf-trainer", read_file=read_file
        )
    notes = [*setup.notes, *command.notes, *notes, *objective.notes]
    optimizer, found = _optimizer(fields)
    notes += found
    setup = setup.replace(
        precision=_precision(fields, has_adapters=(fields.text("finetuning_type") or "lora") == "lora"),
        optimizer=optimizer,
        attention=setup.attention if is_megatron else trainer.attention_of(fields.text("flash_attn"), notes),
        packs_samples=bool(fields.flag("neat_packing")),  # without which samples attend to one another
        train=train,
        quantizer=quantizer_asked(fields),
        base_weights=_weights(fields, notes) if train is not None else None,
        loss="plain",
        compiled=fields.flag("torch_compile"),
        offloads_activations=fields.flag("use_unsloth_gc"),
        seq_length=fields.count("cutoff_len") or _LENGTH,
        model_name=fields.text("model_name_or_path"),
        task=objective.task,
    )
    # Where its trainers read logits, it leaves Liger's loss out (model/model_utils/liger_kernel.py, require_logits).
    has_loss = objective.task in (None, "sft")
    setup = llama_factorys_fp8(setup.replace(notes=tuple(notes)), fields)
    for key in ("enable_liger_kernel", "use_liger_kernel"):
        setup = with_trainers_liger(setup, fields, key=key, has_loss=has_loss)
    return setup.replace(
        notes=(*setup.notes, *trainer.tf32_note(fields, setup.precision), *key_table("llama-factory").notes(fields))
    )


def refuse_untrained(fields: Fields) -> None:
    """Raise `PlanError` for a file that LLaMA-Factory infers, exports or predicts with."""
    what = "exports a model" if "export_dir" in fields else None
    if what is None and not any(key in fields for key in ("stage", "do_train", "finetuning_type", "cutoff_len")):
        what = "is for inference" if {"infer_backend", "template"} & set(fields) else None
    trains = fields.flag("do_train")
    if what is None and fields.flag("do_predict") and not trains:
        what = "predicts"
    if what is None and "infer_backend" in fields and "per_device_train_batch_size" not in fields:
        what = "is for inference"
    if what is not None:
        raise PlanError(
            f"{fields.source}: LLaMA-Factory's file {what}, and trains nothing",
            hint="give one that trains, as those of its examples/train_lora",
        )


def _is_without_reference(fields: Fields) -> bool:
    return fields.text("pref_loss") in ("orpo", "simpo")


def _has_megatron(fields: Fields) -> bool:
    keys = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size")
    flags = [bool(fields.flag(key)) for key in ("use_mca", "use_megatron_bridge")]
    return any(flags) or any(key in fields for key in keys)


def _megatron(fields: Fields, given: Given, batches: trainer.Batches) -> Setup:
    """Return the plan of its Megatron backends, whose degrees have Megatron-LM's names; sizes are the Trainer's."""
    table = key_table("llama-factory-bridge" if fields.flag("use_megatron_bridge") else "llama-factory-mcore")
    keys = (*key_table("megatron-lm").read, *key_table("megatron-lm").not_priced_keys)
    values: dict[str, object] = {**table.defaults, **{key: fields.value(key) for key in keys if key in fields}}
    values |= {"micro_batch_size": batches.micro_batch, "bf16": fields.value("bf16"), "fp16": fields.value("fp16")}
    options = Fields(values, source=fields.source)
    setup = megatron_setup(options, given, steps=batches.steps)
    assumed = (
        [] if given.num_gpus else ["no GPUs are named: as many as its degrees multiply to, --profile says otherwise"]
    )
    return setup.replace(
        tool="LLaMA-Factory, Megatron-Core",
        says_gpus=False,
        notes=(*assumed, *setup.notes, *key_table("megatron-lm").notes(options)),
        linear_precision=None,
    )


def _optimizer(fields: Fields) -> tuple[OptimizerName | None, list[str]]:
    optimizer, notes = trainer.trainer_optimizer(fields, "optim")
    if fields.flag("use_galore"):
        return "galore_adamw", trainer.galore_note(fields.count("galore_rank") or 16)
    if fields.flag("use_muon"):
        return "muon", []
    if fields.flag("use_adam_mini"):
        return optimizer, [f"use_adam_mini: priced as {optimizer}, with a second moment for each parameter"]
    for key in ("use_badam", "use_apollo"):
        if fields.flag(key):
            return optimizer, [f"{key}: priced as {optimizer} on all parameters, which takes more memory"]
    return optimizer, notes


def _trainable(fields: Fields) -> tuple[str | None, list[str]]:
    words = fields.text("finetuning_type") or "lora"
    fields.value("quantization_method")
    keys = {
        "tower": "freeze_vision_tower",
        "projector": "freeze_multi_modal_projector",
        "language": "freeze_language_model",
    }
    if words == "full":
        return full_but_towers(fields, **keys)
    if words == "freeze":
        count = fields.value("freeze_trainable_layers")
        count = _LAST_LAYERS if count is None else count
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise fields.error("freeze_trainable_layers", "the number of last layers that train, above 0")
        return f"layers:last{count}", []
    if words != "lora":
        raise fields.error("finetuning_type", "lora, freeze or full")
    kind: AdapterKind = "dora" if fields.flag("use_dora") else "lora"
    train, notes = trainable_of(
        fields,
        kind=kind,
        rank=fields.count("lora_rank") or _RANK,
        targets=fields.value("lora_target") or "all",
        dropout=fields.value("lora_dropout") or 0.0,
        by_root=bool(fields.flag("use_rslora")),
        saved=fields.value("additional_target"),
    )
    return train, adapters_of_towers(fields, **keys) + notes


def _weights(fields: Fields, notes: list[str]) -> WeightFormat:
    bits = fields.choice("quantization_bit", (2, 3, 4, 5, 6, 8), 16)
    if bits == 8:
        return "int8"
    if bits == 4:
        is_double = fields.flag("double_quantization")
        return trainer.four_bits(is_fp4=fields.text("quantization_type") == "fp4", is_double=is_double is not False)
    if bits != 16:
        raise fields.error("quantization_bit", "4 or 8, the widths that are priced")
    return released_format(fields.text("model_name_or_path"), notes) or "bf16"


def _precision(fields: Fields, *, has_adapters: bool) -> TrainingPrecision:
    """Return the type of the arithmetic: trainable weights are made fp32, frozen ones are as they were released."""
    if fields.flag("pure_bf16") or fields.flag("use_badam"):
        return "bf16-pure"
    if fields.flag("fp16"):
        return "fp16"
    return "bf16" if fields.flag("bf16") or has_adapters else "fp32"
