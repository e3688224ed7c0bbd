"""LLaMA-Factory v1's YAML (its examples/v1), read back. Keys as in src/llamafactory/v1/config of August 2026."""

from __future__ import annotations

from paraplan.errors import PlanError
from paraplan.interop.fields import Fields
from paraplan.interop.known_keys import key_table
from paraplan.interop.setup import Given, Setup, make_plan, optimizer_of
from paraplan.interop.sources import trainer
from paraplan.interop.sources.adapters import trainable_of
from paraplan.interop.sources.base_weights import released_format
from paraplan.interop.sources.documents import load_document
from paraplan.interop.sources.objectives import objective_of
from paraplan.model.weight_formats import WeightFormat

_LENGTH, _RANK = 2048, 8
_BACKENDS = ("fsdp2", "deepspeed", "fsdpturbo")


def read_llama_factory_v1(text: str, *, source: str, given: Given, read_file: trainer.ReadFile) -> Setup:
    """Return the training that a configuration of LLaMA-Factory v1 describes.

    Raises `PlanError` naming the file and key for what is broken, and for a file that trains nothing.
    """
    hint = "examples/v1 of LLaMA-Factory has working ones"
    fields = Fields(load_document(text, source, hint=hint), source=source)
    if "export_dir" in fields.section("peft_config") or "train_dataset" not in fields:
        raise PlanError(
            f"{source}: LLaMA-Factory v1's file exports or samples, and trains nothing",
            hint="give one with train_dataset",
        )
    train, notes = _trainable(fields)
    is_preference = "dpo" in str(fields.value("train_dataset"))
    objective = objective_of("dpo" if is_preference else None, key="train_dataset")
    backend = fields.section("dist_config")
    sharding = _sharding(backend)
    checkpoints = fields.flag("enable_activation_checkpointing")
    micro, cp = (fields.count("micro_batch_size") or 1) * objective.group, fields.count("cp_size") or 1
    total = fields.count("global_batch_size")
    setup = trainer.sharded_setup(
        Fields(sharding, source=source),
        given if total is None or given.global_batch_size else given.replace(global_batch_size=total * objective.group),
        trainer.Batches(micro, 1, checkpoints is None or checkpoints),
        tool="LLaMA-Factory v1",
        target="hf-trainer",
        read_file=read_file,
        axes=trainer.Axes(cp=cp, dp_replicate=fields.count("mp_replicate_size")),
        deepspeed=backend.text("config_file") if backend.text("name") == "deepspeed" else None,
    )
    ep = backend.count("ep_size") or 1
    plan = setup.plan if ep == 1 else make_plan(source, **setup.plan.model_dump() | {"ep": ep})
    for key, size in (("dp_size", plan.dp), ("mp_shard_size", plan.zero_shards or plan.dp * plan.cp)):
        if fields.count(key) not in (None, size):
            raise fields.error(key, f"{size}, what the other sizes leave of {plan.world_size} GPUs")
    optimizer, found = optimizer_of(fields.section("optim_config").text("name") or "adamw")
    is_half = fields.flag("bf16") is not False
    kernels = fields.section("kernel_config").text("name") or ""
    setup = setup.replace(
        plan=plan,
        precision=("bf16-pure" if train is None and backend.text("name") != "deepspeed" else "bf16")
        if is_half
        else "fp32",
        optimizer=optimizer,
        attention=trainer.attention_of(fields.text("flash_attn"), notes),
        train=train,
        base_weights=_weights(fields, notes) if train is not None else None,
        loss="liger" if "liger" in kernels else "plain",
        stack=setup.stack.replace(fused_kernels="liger" if "liger" in kernels else None),
        seq_length=fields.count("cutoff_len") or _LENGTH,
        model_name=fields.text("model"),
        task=objective.task,
    )
    notes = [*setup.notes, *objective.notes, *notes, *found, *key_table("llama-factory-v1").notes(fields)]
    return setup.replace(notes=tuple(notes))


def _sharding(backend: Fields) -> dict[str, object]:
    """Return the Trainer's keys of FSDP that stand for a backend; none for the others."""
    name = backend.text("name")
    if name not in (None, *_BACKENDS):
        raise backend.error("name", ", ".join(_BACKENDS))
    if name not in ("fsdp2", "fsdpturbo"):
        return {}
    reshards, offloads = backend.flag("reshard_after_forward") is not False, bool(backend.flag("offload_params"))
    return {"fsdp_config": {"fsdp_version": 2, "reshard_after_forward": reshards, "offload_params": offloads}}


def _trainable(fields: Fields) -> tuple[str | None, list[str]]:
    section = fields.section("peft_config")
    words = section.text("name")
    if words is None:
        return None, []
    if words == "freeze":
        return f"layers:last{section.count('freeze_trainable_layers') or 2}", []
    if words != "lora":
        raise section.error("name", "lora or freeze")
    return trainable_of(
        section,
        kind="dora" if section.flag("use_dora") else "lora",
        rank=section.count("r") or _RANK,
        targets=section.value("target_modules") or "all",
        dropout=section.value("lora_dropout") or 0.0,
        by_root=bool(section.flag("use_rslora")),
        saved=section.value("modules_to_save"),
    )


def _weights(fields: Fields, notes: list[str]) -> WeightFormat:
    section = fields.section("quant_config")
    section.value("name")
    bits = section.number("quantization_bit")
    if bits not in (4, 8):
        return released_format(fields.text("model"), notes) or "bf16"
    if bits == 8:
        return "int8"
    is_double = section.flag("double_quantization")
    return trainer.four_bits(is_fp4=section.text("quantization_type") == "fp4", is_double=is_double is not False)
