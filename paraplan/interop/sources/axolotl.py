"""Axolotl's YAML, read back. Keys and defaults as in axolotl 0.19 (utils/schemas, utils/config, loaders/model.py)."""

from __future__ import annotations

import re

from paraplan.interop.fields import Fields
from paraplan.interop.known_keys import key_table
from paraplan.interop.setup import Given, Setup
from paraplan.interop.sources import trainer
from paraplan.interop.sources.adapters import trainable_of
from paraplan.interop.sources.base_weights import quantizer_asked, released_format
from paraplan.interop.sources.experts import axolotl_ep, with_ep
from paraplan.interop.sources.launches import content_of
from paraplan.interop.sources.liger import with_axolotls_liger
from paraplan.interop.sources.narrow_products import axolotls_fp8
from paraplan.interop.sources.objectives import Objective, objective_of
from paraplan.model.trainable import ALL_LINEAR, AdapterKind
from paraplan.model.weight_formats import WeightFormat
from paraplan.plan.training import LossKernel, TrainingPrecision

_PLUGINS = ("cut_cross_entropy", "liger", "expert_parallel", "kernels", "swanlab", "lm_eval", "kd")
"""Plugins that are read, or whose keys are."""
_LENGTH, _RANK = 512, 8
_TILE = 32768
"""Tokens of a tile of an MLP where no number of tiles is given (src/axolotl/monkeypatch/tiled_mlp/patch.py)."""
_LANGUAGE_MODEL = re.compile(r"(model\.)?(language_model|lm_head|embed_tokens)")
"""Patterns of `unfrozen_parameters` that leave the towers of a model frozen."""
_SWITCHES = tuple(f"{kind}_attention" for kind in ("xformers", "sage", "flex", "flash", "sdp", "eager"))
_CHECKPOINTS = (True, "true", "offload", "offload_disk", "unsloth")


def read_axolotl(text: str, *, source: str, given: Given, read_file: trainer.ReadFile) -> Setup:
    """Return the training that a configuration of axolotl describes.

    Raises `PlanError` naming the file and key for what is broken and for adapters that are not modelled.
    """
    command = content_of(text, source, read_file, hint="examples of axolotl has working ones")
    fields = Fields(command.values, source=source)
    train, found = _trainable(fields)
    objective = _objective(fields)
    micro = (fields.count("micro_batch_size") or 1) * objective.group
    steps = fields.count("gradient_accumulation_steps") or 1
    config = fields.taken("fsdp_config")
    sharding = Fields({"fsdp_version": fields.value("fsdp_version"), **config}, source=source)
    checkpoints = (fields.value("gradient_checkpointing") in _CHECKPOINTS) or bool(
        config.get("activation_checkpointing")
    )
    ep, beside, notes = axolotl_ep(fields, given)
    axes = _axes(fields) if ep == 1 else _axes(fields)._replace(dp_shard=None)  # ranks of experts shard too
    setup = trainer.sharded_setup(
        fields,
        beside,
        trainer.Batches(micro, steps, checkpoints),
        tool="axolotl",
        target="axolotl",
        read_file=read_file,
        axes=axes,
    )
    notes = [*setup.notes, *command.notes, *notes, *found, *objective.notes]
    optimizer, found = trainer.trainer_optimizer(fields, "optimizer")
    notes += found
    setup = setup.replace(
        plan=with_ep(fields, setup.plan, ep),
        says_gpus=setup.says_gpus or ep > 1,
        precision=_precision(fields, is_pure="adapter" not in fields and (not setup.keeps_fp32 or _is_fsdp2(sharding))),
        optimizer=optimizer,
        attention=trainer.attention_of(_attention(fields), notes),
        packs_samples=fields.is_on("sample_packing"),
        train=train,
        base_weights=_weights(fields, notes) if train is not None else None,
        quantizer=quantizer_asked(fields),
        loss=_loss(fields),
        compiled=fields.is_on("torch_compile") or None,
        offloads_activations=_offloads_activations(fields) or None,
        seq_length=fields.count("sequence_len") or _LENGTH,
        model_name=fields.text("base_model"),
        task=objective.task,
    )
    notes += [*trainer.tf32_note(fields, setup.precision), *_plugins(fields)]
    setup = trainer.with_whole_experts(setup.replace(notes=tuple(notes)), fields, key="experts_implementation")
    tiled = trainer.with_tiled_mlp(setup, fields, key="tiled_mlp", tile=_TILE)
    setup = axolotls_fp8(with_axolotls_liger(tiled, fields), fields)
    return setup.replace(notes=(*setup.notes, *key_table("axolotl").notes(fields)))


def _plugins(fields: Fields) -> list[str]:
    """Return a note of plugins that change a step otherwise than by keys of their own."""
    value = fields.value("plugins")
    names = [str(name) for name in value] if isinstance(value, list) else []
    unknown = [name for name in names if not any(f".{known}." in name for known in _PLUGINS)]
    return [f"plugins {', '.join(unknown)}: not priced"] if unknown else []


def _axes(fields: Fields) -> trainer.Axes:
    cp = fields.count("context_parallel_size") or fields.count("sequence_parallel_degree") or 1
    return trainer.Axes(
        tp=fields.count("tensor_parallel_size") or 1,
        cp=cp,
        dp_replicate=fields.count("dp_replicate_size"),
        dp_shard=fields.count("dp_shard_size"),
    )


def _objective(fields: Fields) -> Objective:
    for key, name in (
        ("reward_model", "reward"),
        ("process_reward_model", "process_reward_model"),
        ("kd_trainer", "kd"),
    ):
        if fields.flag(key):
            return objective_of(name, key=key)
    if fields.is_on("diffusion"):
        return objective_of("diffusion", key="diffusion")
    trl = fields.section("trl") if fields.text("rl") in ("grpo", "gdpo") else Fields({}, source=fields.source)
    return objective_of(
        fields.text("rl"),
        key="rl",
        precomputed=bool(fields.flag("precompute_ref_log_probs")),
        completion=trl.count("max_completion_length"),
        beta=trl.value("beta"),
    )


def _is_fsdp2(section: Fields) -> bool:
    """Return whether FSDP2 shards, for which axolotl has a preparation of its own that upcasts nothing.

    (axolotl/monkeypatch/accelerate/fsdp2.py in place of accelerate's `fsdp2_prepare_model`, which upcasts to fp32.)
    """
    return 2 in (section.count("fsdp_version"), section.count("version"))


def _offloads_activations(fields: Fields) -> bool:
    """Return whether activations wait on the host, also by the words that axolotl had for it first."""
    by_trainer = trainer.offloads_checkpoints(fields) or False
    return by_trainer or fields.is_on("activation_offloading") or fields.value("gradient_checkpointing") == "offload"


def _trainable(fields: Fields) -> tuple[str | None, list[str]]:
    adapter = fields.text("adapter")
    if adapter is None:
        return _unfrozen(fields)
    if adapter not in ("lora", "qlora"):
        raise fields.error("adapter", "lora or qlora, the adapters that are priced")
    kind: AdapterKind = "dora" if fields.flag("peft_use_dora") else "lora"
    named, is_every = fields.value("lora_target_modules"), fields.flag("lora_target_linear")
    return trainable_of(
        fields,
        kind=kind,
        rank=fields.count("lora_r") or _RANK,
        targets=ALL_LINEAR if is_every else named,
        dropout=fields.value("lora_dropout") or 0.0,
        by_root=bool(fields.flag("peft_use_rslora")),
        saved=fields.value("lora_modules_to_save"),
        parameters=fields.value("lora_target_parameters"),
    )


def _unfrozen(fields: Fields) -> tuple[str | None, list[str]]:
    """Return what trains without adapters: all, or the language model where patterns leave towers frozen."""
    value = fields.value("unfrozen_parameters")
    patterns = [str(pattern).lstrip("^") for pattern in value] if isinstance(value, list) else []
    if any("language_model" in pattern for pattern in patterns) and all(map(_LANGUAGE_MODEL.match, patterns)):
        return "text", []
    return None, ["unfrozen_parameters: all parameters are taken to train, --train says otherwise"] if value else []


def _weights(fields: Fields, notes: list[str]) -> WeightFormat:
    """Return the format of the base: axolotl quantizes the scales of 4-bit weights too, unless told otherwise."""
    if fields.flag("load_in_8bit"):
        return "int8"
    if fields.flag("load_in_4bit") or fields.text("adapter") == "qlora":
        kwargs = fields.section("bnb_config_kwargs")
        is_fp4 = kwargs.text("bnb_4bit_quant_type") == "fp4"
        return trainer.four_bits(is_fp4=is_fp4, is_double=kwargs.flag("bnb_4bit_use_double_quant") is not False)
    released = released_format(fields.text("base_model"), notes)
    if fields.flag("gptq") and released is None:
        released = "int4"
    return released or ("bf16" if _half(fields) else "fp32")


def _half(fields: Fields) -> TrainingPrecision | None:
    """Return the 16-bit type that a configuration asks for; bf16 is "auto", which is on, where fp16 is not."""
    if fields.flag("fp16") or fields.flag("float16"):
        return "fp16"
    is_off = fields.value("bf16") in (False, "false", "no")
    return None if is_off and not fields.flag("bfloat16") else "bf16"


def _precision(fields: Fields, *, is_pure: bool) -> TrainingPrecision:
    """Return the type of the arithmetic; a model is loaded in it, and FSDP1 and DeepSpeed keep fp32 beside it."""
    half = _half(fields)
    return "fp32" if half is None else "bf16-pure" if half == "bf16" and is_pure else half


def _attention(fields: Fields) -> object:
    """Return the attention kernel's name, or the first of the older switches that is on, in the order that counts."""
    on = [switch.removesuffix("_attention") for switch in _SWITCHES if fields.flag(switch)]
    return fields.text("attn_implementation") or next(iter(on), None)


def _loss(fields: Fields) -> LossKernel:
    if fields.flag("liger_fused_linear_cross_entropy"):
        return "liger"
    plugins = str(fields.value("plugins"))
    if "cut_cross_entropy" in plugins and fields.flag("cut_cross_entropy") is not False:
        return "cut"
    return "chunked" if fields.flag("chunked_cross_entropy") else "plain"
