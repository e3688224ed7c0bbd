"""Axolotl: its YAML. Keys as in axolotl 0.19 (utils/schemas), types of weights as in its loaders/model.py."""

from __future__ import annotations

from paraplan.interop.exported import (
    TOLD_FIELDS,
    Exported,
    Gap,
    Subject,
    checkpointed_offload_gap,
    field_gap,
    hybrid_gap,
    remarks,
    shard_degrees,
    shared_notes,
    training_gap,
)
from paraplan.interop.quoting import comment, to_yaml
from paraplan.interop.targets.accelerate import deepspeed_note, uses_deepspeed
from paraplan.interop.targets.adapters import (
    adapter_gap,
    alpha_note,
    alpha_of,
    base_gap,
    modules_of,
    quantizer_gap,
    trainable_of,
    whole_modules,
)
from paraplan.interop.targets.deepspeed import batch_and_zero, deepspeed_gaps
from paraplan.interop.targets.hf_trainer import MOMENTUM, MOMENTUM_NOTE, OPTIMIZERS, PROJECTED
from paraplan.interop.targets.liger import axolotls_liger, told_kernels
from paraplan.model.quantizers import quantizer_of
from paraplan.model.trainable import ALL_LINEAR, Trainable
from paraplan.model.weight_formats import is_linear_4bit
from paraplan.plan.training import TORCHAO_RECIPES, TrainingSpec

_ATTENTION = {"flash": "flash_attention_2", "sdpa": "sdpa", "eager": "eager"}
_BASES = ("bf16", "int8", "nf4", "nf4:double", "fp4", "fp4:double")
_OPTIMIZERS = {**OPTIMIZERS, "muon": "muon", "adamw_4bit": "ao_adamw_4bit"}
_DEFAULT_QUANTIZATION = "nf4:double"
_RATE = 2e-4


def to_axolotl(subject: Subject) -> Exported:
    """Return the YAML for `axolotl train FILE`: DDP, FSDP2 or DeepSpeed, with adapters or whole models."""
    plan, training, gaps = subject.plan, subject.training, axolotl_gaps(subject)
    model = subject.file.model
    notes = ["datasets: DATASET in the alpaca format is written; learning_rate 2e-4 too: the plan says neither"]
    notes.append("base_model: the hub id or the folder of the model")
    config: dict[str, object] = {
        "base_model": (model.source or model.name) if model is not None else "MODEL",
        "datasets": [{"path": "DATASET", "type": "alpaca"}],
        "output_dir": "output",
        "learning_rate": _RATE,
        "num_epochs": 1,
        "micro_batch_size": plan.micro_batch_size,
        "gradient_accumulation_steps": plan.num_microbatches,
    }
    is_fsdp = plan.zero_stage >= 2 and not uses_deepspeed(subject)
    if plan.recompute == "full" and not is_fsdp:
        config["gradient_checkpointing"] = True
        config["gradient_checkpointing_kwargs"] = {"use_reentrant": False}
    if training is not None:
        config |= _training(subject, training, notes)
    if uses_deepspeed(subject):
        zero = batch_and_zero(subject)["zero_optimization"]
        config["deepspeed"] = {
            "zero_optimization": zero,
            "bf16": {"enabled": "auto"},
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": "auto",
            "train_batch_size": "auto",
        }
        notes.append(deepspeed_note(subject))
    if is_fsdp:
        config |= _fsdp(subject)
        if training is not None and training.precision == "bf16" and training.trainable.is_full:
            notes.append(
                "axolotl keeps 16-bit weights, gradients and states under FSDP2: --precision bf16-pure is that"
            )
    if plan.ep > 1:
        plugins = config.get("plugins", [])
        assert isinstance(plugins, list)
        config["plugins"] = [*plugins, "axolotl.integrations.expert_parallel.ExpertParallelPlugin"]
        config["expert_parallel_size"] = plan.ep
        notes.append("DeepEP has to be installed: it sends the rows of experts")
    count = f" --num-processes {plan.world_size}" if plan.world_size > 1 else ""
    notes.append(f"start it with: axolotl train FILE{count}")
    tells = told_kernels(training) | {"expandable_segments", "mlp_tile"}
    narrows = training is not None and training.fp8_recipe in TORCHAO_RECIPES
    losses = ("liger", "cut", "chunked")
    notes += shared_notes(
        subject, TOLD_FIELDS if narrows else TOLD_FIELDS - {"linear_precision"}, losses=losses, tells=tells
    )
    text = comment(remarks(subject, gaps, notes)) + to_yaml(config)
    return Exported(target="axolotl", text=text, gaps=tuple(gaps), notes=tuple(notes))


def _training(subject: Subject, training: TrainingSpec, notes: list[str]) -> dict[str, object]:
    found: dict[str, object] = {
        "sequence_len": training.seq_length,
        "attn_implementation": _ATTENTION[training.attention],
        "bf16": training.precision in ("bf16", "bf16-pure"),
    }
    if training.precision == "fp16":
        found["fp16"] = True
    elif training.precision == "fp32":
        found["float32"] = True
    if training.optimizer in _OPTIMIZERS:
        found["optimizer"] = _OPTIMIZERS[training.optimizer]
    if training.optimizer == "galore_adamw":
        found["optim_target_modules"] = PROJECTED
    if training.optimizer == "sgd_momentum":
        found["optim_args"] = MOMENTUM
        notes.append(MOMENTUM_NOTE)
    if training.compiled:
        found["torch_compile"] = True
    if training.offloads_activations:
        found["activation_offloading"] = True
    if training.stack.mlp_tile is not None:
        tiles = -(-training.seq_length // training.stack.mlp_tile)
        found |= {"tiled_mlp": True, "tiled_mlp_num_shards": tiles}
    if training.packs_samples:
        found |= {"sample_packing": True, "pad_to_sequence_len": True}
    return found | _kernels(training) | _trained(subject, training, notes)


def _kernels(training: TrainingSpec) -> dict[str, object]:
    """Return the keys of losses, fused kernels and products in 8 bits."""
    found: dict[str, object] = {}
    plugins = []
    if liger := axolotls_liger(training):
        plugins.append("axolotl.integrations.liger.LigerPlugin")
        found |= liger
    if training.loss == "cut":
        plugins.append("axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin")
        found["cut_cross_entropy"] = True
    found |= {"plugins": plugins} if plugins else {}
    if training.linear_precision == "fp8" and training.fp8_recipe in TORCHAO_RECIPES:
        found |= {"fp8": True, "fp8_enable_fsdp_float8_all_gather": training.fp8_gather}
        found |= {} if training.fp8_recipe == "tensorwise" else {"fp8_config": {"recipe": training.fp8_recipe}}
    if training.loss == "chunked":
        found["chunked_cross_entropy"] = True
    return found


def _trained(subject: Subject, training: TrainingSpec, notes: list[str]) -> dict[str, object]:
    trainable = trainable_of(subject)
    adapter = trainable.adapter
    if adapter is None:
        return {} if trainable.is_full else {"unfrozen_parameters": _unfrozen(subject, trainable)}
    base = training.base_weights or "bf16"
    is_4bit = is_linear_4bit(base)
    found: dict[str, object] = {
        "adapter": "qlora" if is_4bit else "lora",
        "load_in_4bit": is_4bit,
        "load_in_8bit": base == "int8",
        "lora_r": adapter.rank,
        "lora_alpha": alpha_of(adapter),
        "lora_dropout": adapter.dropout,
    }
    notes.append(alpha_note(adapter))
    if training.quantizer == "axolotl":
        found["quantize_moe_experts"] = True
    if adapter.targets == (ALL_LINEAR,):
        found["lora_target_linear"] = True
    else:
        found["lora_target_modules"] = modules_of(adapter)
    if adapter.kind == "dora":
        found["peft_use_dora"] = True
    if adapter.is_scaled_by_root:
        found["peft_use_rslora"] = True
    saved = whole_modules(trainable)
    if saved:
        found["lora_modules_to_save"] = saved
    if is_4bit and base != _DEFAULT_QUANTIZATION:
        kind, _, double = base.partition(":")
        found["bnb_config_kwargs"] = {"bnb_4bit_quant_type": kind, "bnb_4bit_use_double_quant": bool(double)}
    return found


def _unfrozen(subject: Subject, trainable: Trainable) -> list[str]:
    """Return regular expressions of what trains, for models whose modules are named as Llama's in transformers."""
    patterns = ["^lm_head.weight$"] if trainable.head else []
    patterns += ["^model.embed_tokens.weight$"] if trainable.embeddings else []
    patterns += ["norm"] if trainable.norms else []
    blocks = subject.file.model.num_blocks if subject.file.model is not None else None
    if trainable.last_layers is not None and blocks is not None:
        patterns += [f"^model.layers.{place}." for place in range(blocks - trainable.last_layers, blocks)]
    return patterns


def _fsdp(subject: Subject) -> dict[str, object]:
    plan, training = subject.plan, subject.training
    replicas, shards = shard_degrees(plan)
    found: dict[str, object] = {
        "fsdp_version": 2,
        "fsdp_config": {
            "reshard_after_forward": plan.zero_stage == 3,
            "activation_checkpointing": plan.recompute == "full",
            "offload_params": plan.offload == "parameters",
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "state_dict_type": "SHARDED_STATE_DICT",
        },
    }
    if plan.tp > 1 or plan.cp > 1 or replicas > 1 or plan.ep > 1:
        found |= {"dp_shard_size": shards // plan.ep, "dp_replicate_size": replicas}
        found["tensor_parallel_size"] = plan.tp
        if training is None or training.attention == "flash":
            found["context_parallel_size"] = plan.cp
    return found


def _expert_gaps(subject: Subject) -> list[Gap]:
    """Return what axolotl's plugin for experts does not do (axolotl/integrations/expert_parallel/README.md)."""
    plan = subject.plan
    if plan.ep == 1:
        return []
    reasons = {
        "axolotl spreads experts beside DDP and FSDP2": uses_deepspeed(subject),
        "axolotl spreads experts beside dp and cp, not beside tp": plan.tp > 1,
        "axolotl's ranks of experts have batches of their own: ep has to divide dp": plan.dp % plan.ep > 0,
        "without FSDP2 axolotl spreads experts over all ranks": plan.zero_stage == 0 and plan.ep < plan.dp,
    }
    found = next((reason for reason, holds in reasons.items() if holds), None)
    return [] if found is None else [Gap(part=f"ep={plan.ep}", reason=found)]


def axolotl_gaps(subject: Subject) -> list[Gap]:
    """Return what axolotl's configuration has no words for."""
    plan, training, trainable = subject.plan, subject.training, trainable_of(subject)
    gaps = field_gap(plan, "pp", (1,), "axolotl has no pipeline") + _expert_gaps(subject)
    gaps += field_gap(plan, "sequence_parallel", (False,), "axolotl leaves norms to the model's own tp_plan")
    gaps += field_gap(plan, "recompute", ("none", "full"), "the Trainer checkpoints whole blocks")
    gaps += checkpointed_offload_gap(subject, "axolotl")
    if uses_deepspeed(subject):
        named = {gap.part for gap in gaps}
        gaps += [gap for gap in deepspeed_gaps(subject, has_ulysses=False) if gap.part not in named]
        gaps += field_gap(plan, "tp", (1,), "axolotl has tensor parallelism beside FSDP2")
    else:
        gaps += hybrid_gap(plan, "axolotl")
        if plan.zero_stage == 0:
            for axis in ("tp", "cp"):
                gaps += field_gap(plan, axis, (1,), "axolotl has it beside FSDP2, ZeRO stages 2 and 3")
            gaps += field_gap(plan, "offload", ("none",), "axolotl offloads under FSDP2 and DeepSpeed")
    is_ddp = plan.zero_stage == 0 and not uses_deepspeed(subject)
    if training is not None and training.precision == "bf16" and trainable.is_full and is_ddp:
        reason = "axolotl keeps no fp32 weights under DDP: plan with --precision bf16-pure"
        gaps.append(Gap(part="precision=bf16", reason=reason))
    if plan.cp > 1 and training is not None:
        gaps += field_gap(
            plan, "cp", (1,) if training.attention != "flash" else (plan.cp,), "axolotl's ring attention is flash alone"
        )
    gaps += adapter_gap(trainable, "axolotl") + base_gap(subject, "axolotl", _BASES)
    gaps += quantizer_gap(subject, "axolotl", ("axolotl", "transformers", "transformers-4"))
    adapter = trainable.adapter
    tool = None if training is None else training.quantizer
    if tool and quantizer_of(tool).names_layers and adapter and adapter.targets == (ALL_LINEAR,):
        reason = "axolotl's quantize_moe_experts wants its layers named: plan with --train lora:targets=q|k|v|o"
        gaps.append(Gap(part=f"train={trainable.text}", reason=reason))
    return gaps + training_gap(training, "optimizer", tuple(_OPTIMIZERS), "axolotl has no such optimizer")
