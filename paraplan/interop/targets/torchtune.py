"""torchtune: the YAML of its fine-tuning recipes. Keys and builders as in torchtune 0.6.1 (recipes, models)."""

from __future__ import annotations

from typing import NamedTuple

from paraplan.interop.exported import (
    TOLD_FIELDS,
    Exported,
    Gap,
    Subject,
    checkpointed_offload_gap,
    expert_gap,
    field_gap,
    hybrid_gap,
    remarks,
    shared_notes,
    training_gap,
)
from paraplan.interop.quoting import comment, to_yaml
from paraplan.interop.targets.adapters import adapter_gap, alpha_note, alpha_of, base_gap, quantizer_gap, trainable_of
from paraplan.model.trainable import ALL_LINEAR, AdapterSpec, module_name
from paraplan.plan.training import TrainingSpec


class Builder(NamedTuple):
    """A model in torchtune's words: module of its builders, their name, and the kind of its checkpoints."""

    module: str
    name: str
    checkpoint: str
    tokenizer: str


_BUILDERS = {
    "llama-2-7b": Builder("llama2", "llama2_7b", "LLAMA2", "llama2_tokenizer"),
    "llama-2-13b": Builder("llama2", "llama2_13b", "LLAMA2", "llama2_tokenizer"),
    "llama-2-70b": Builder("llama2", "llama2_70b", "LLAMA2", "llama2_tokenizer"),
    "llama-3-8b": Builder("llama3", "llama3_8b", "LLAMA3", "llama3_tokenizer"),
    "llama-3-70b": Builder("llama3", "llama3_70b", "LLAMA3", "llama3_tokenizer"),
    "llama-3-405b": Builder("llama3_1", "llama3_1_405b", "LLAMA3", "llama3_tokenizer"),
    "llama-3.2-1b": Builder("llama3_2", "llama3_2_1b", "LLAMA3_2", "llama3_tokenizer"),
    "mistral-7b": Builder("mistral", "mistral_7b", "MISTRAL", "mistral_tokenizer"),
    "qwen2.5-0.5b": Builder("qwen2_5", "qwen2_5_0_5b", "QWEN2", "qwen2_5_tokenizer"),
    "qwen2.5-7b": Builder("qwen2_5", "qwen2_5_7b_base", "QWEN2", "qwen2_5_tokenizer"),
}
"""Bundled models that torchtune has builders for."""
_TOKENIZER_OF = {"llama3": "torchtune.models.llama3", "llama3_1": "torchtune.models.llama3"}
_OPTIMIZERS: dict[str, dict[str, object]] = {
    "adamw": {"_component_": "torch.optim.AdamW", "fused": True},
    "adamw_foreach": {"_component_": "torch.optim.AdamW", "fused": False},
    "adamw_8bit": {"_component_": "bitsandbytes.optim.AdamW8bit"},
    "adamw_4bit": {"_component_": "torchao.optim.AdamW4bit"},
    "paged_adamw": {"_component_": "bitsandbytes.optim.PagedAdamW"},
    "paged_adamw_8bit": {"_component_": "bitsandbytes.optim.PagedAdamW8bit"},
    "sgd": {"_component_": "torch.optim.SGD"},
    "sgd_momentum": {"_component_": "torch.optim.SGD", "momentum": 0.9},
}
_LOSSES = {"plain": "torch.nn.CrossEntropyLoss", "chunked": "torchtune.modules.loss.CEWithChunkedOutputLoss"}
_ATTENTION_MODULES = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "output_proj"}
_MLP = frozenset({"gate_proj", "up_proj", "down_proj"})
_RATE = 3e-4


def to_torchtune(subject: Subject) -> Exported:
    """Return the YAML for `tune run RECIPE --config FILE`; the recipe's name stands in the first lines."""
    plan, training, gaps = subject.plan, subject.training, torchtune_gaps(subject)
    trainable = trainable_of(subject)
    where = "single_device" if plan.world_size == 1 else "distributed"
    recipe = f"{'lora' if trainable.adapter is not None else 'full'}_finetune_{where}"
    processes = "" if plan.world_size == 1 else f" --nproc_per_node {subject.layout.gpus_per_node}"
    notes = [f"start it with: tune run{processes} {recipe} --config FILE"]
    notes.append("MODEL_FOLDER, MODEL_FILES and DATASET in the file, and the learning rate: the plan says none of them")
    builder = _builder(subject)
    config: dict[str, object] = {"output_dir": "output"}
    if builder is not None:
        config |= _model(builder, trainable.adapter, training, notes)
    config |= {
        "dataset": {
            "_component_": "torchtune.datasets.alpaca_cleaned_dataset",
            "packed": training is not None and training.packs_samples,
        },
        "seed": None,
        "shuffle": True,
        "batch_size": plan.micro_batch_size,
        "gradient_accumulation_steps": plan.num_microbatches,
        "epochs": 1,
        "max_steps_per_epoch": None,
        "clip_grad_norm": None,
        "resume_from_checkpoint": False,
        "device": "cuda",
        "enable_activation_checkpointing": plan.recompute == "full",
        "enable_activation_offloading": training is not None and training.offloads_activations,
        "optimizer": {"_component_": "torch.optim.AdamW", "lr": _RATE},
    }
    if training is not None:
        config |= _training(training)
    if trainable.adapter is not None:
        config["save_adapter_weights_only"] = False
        config["lr_scheduler"] = {
            "_component_": "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup",
            "num_warmup_steps": 100,
        }
    if plan.world_size > 1:
        config |= {
            "fsdp_reshard_after_forward": plan.zero_stage == 3,
            "fsdp_cpu_offload": plan.offload == "parameters",
        }
    config["metric_logger"] = {"_component_": "torchtune.training.metric_logging.DiskLogger", "log_dir": "output/logs"}
    config |= {"log_every_n_steps": 1, "log_peak_memory_stats": True}
    notes += shared_notes(subject, TOLD_FIELDS - {"linear_precision", "attention"}, losses=tuple(_LOSSES))
    text = comment(remarks(subject, gaps, notes)) + to_yaml(config)
    return Exported(target="torchtune", text=text, gaps=tuple(gaps), notes=tuple(notes))


def _builder(subject: Subject) -> Builder | None:
    model = subject.file.model
    return _BUILDERS.get(model.name) if model is not None else None


def _model(
    builder: Builder, adapter: AdapterSpec | None, training: TrainingSpec | None, notes: list[str]
) -> dict[str, object]:
    package = f"torchtune.models.{builder.module}"
    tokenizer = _TOKENIZER_OF.get(
        builder.module, package if builder.module != "llama3_2" else "torchtune.models.llama3"
    )
    length = training.seq_length if training is not None else None
    model: dict[str, object] = {"_component_": f"{package}.{builder.name}"}
    if adapter is not None:
        is_quantized = training is not None and (training.base_weights or "bf16").startswith("nf4")
        layers = _layers(adapter)
        model = {
            "_component_": f"{package}.{'qlora' if is_quantized else 'lora'}_{builder.name}",
            "lora_attn_modules": [name for name in layers if name not in _MLP],
            "apply_lora_to_mlp": set(layers) >= _MLP,
            "apply_lora_to_output": False,
            "lora_rank": adapter.rank,
            "lora_alpha": alpha_of(adapter),
            "lora_dropout": adapter.dropout,
        }
        if adapter.kind == "dora":
            model["use_dora"] = True
        notes.append(alpha_note(adapter))
    return {
        "model": model,
        "tokenizer": {
            "_component_": f"{tokenizer}.{builder.tokenizer}",
            "path": "MODEL_FOLDER/tokenizer.model",
            "max_seq_len": length,
            **({"merges_file": "MODEL_FOLDER/merges.txt"} if builder.module == "qwen2_5" else {}),
        },
        "checkpointer": {
            "_component_": "torchtune.training.FullModelHFCheckpointer",
            "checkpoint_dir": "MODEL_FOLDER",
            "checkpoint_files": ["MODEL_FILES"],
            "recipe_checkpoint": None,
            "output_dir": "output",
            "model_type": builder.checkpoint,
        },
    }


def _layers(adapter: AdapterSpec) -> list[str]:
    if adapter.targets == (ALL_LINEAR,):
        return [*_ATTENTION_MODULES.values(), *sorted(_MLP)]
    found = [_ATTENTION_MODULES.get(name, module_name(name)) for name in adapter.targets]
    return ["output_proj" if name == "o_proj" else name for name in found]


def _training(training: TrainingSpec) -> dict[str, object]:
    found: dict[str, object] = {
        "dtype": "fp32" if training.precision == "fp32" else "bf16",
        "compile": training.compiled,
    }
    if training.optimizer in _OPTIMIZERS:
        found["optimizer"] = _OPTIMIZERS[training.optimizer] | {"lr": _RATE}
    if training.loss in _LOSSES:
        found["loss"] = {"_component_": _LOSSES[training.loss]}
    return found


def torchtune_gaps(subject: Subject) -> list[Gap]:
    """Return what the configuration of torchtune's recipes has no words for."""
    plan, training, trainable = subject.plan, subject.training, trainable_of(subject)
    gaps: list[Gap] = []
    model = subject.file.model
    if model is not None and model.name not in _BUILDERS and model.name != "model":
        gaps.append(Gap(part=f"model {model.name}", reason=f"paraplan knows builders of {', '.join(_BUILDERS)}"))
    for axis, words in (("pp", "pipeline"), ("cp", "context parallelism")):
        gaps += field_gap(plan, axis, (1,), f"torchtune 0.6 has no {words}")
    gaps += field_gap(plan, "tp", (1,), "a tensor_parallel_plan is written in Python for each model")
    gaps += expert_gap(plan, "torchtune") + hybrid_gap(plan, "torchtune", lacking="torchtune shards over all ranks")
    if plan.world_size > 1:
        gaps += field_gap(plan, "zero_stage", (2, 3), "its distributed recipes shard by FSDP2, ZeRO stages 2 and 3")
    gaps += field_gap(plan, "recompute", ("none", "full"), "torchtune checkpoints whole blocks")
    gaps += checkpointed_offload_gap(subject, "torchtune")
    gaps += field_gap(plan, "offload", ("none", "parameters"), "torchtune offloads parameters with the optimizer")
    if training is not None and trainable.is_full and training.precision == "bf16":
        reason = "torchtune keeps no fp32 weights: plan with --precision bf16-pure or fp32"
        gaps.append(Gap(part="precision=bf16", reason=reason))
    gaps += training_gap(training, "precision", ("bf16", "bf16-pure", "fp32"), "torchtune trains in bf16 or fp32")
    gaps += training_gap(training, "optimizer", tuple(_OPTIMIZERS), "paraplan writes none for torchtune")
    gaps += training_gap(training, "loss", tuple(_LOSSES), "torchtune has plain and chunked losses")
    gaps += training_gap(training, "attention", ("flash", "sdpa"), "torchtune computes attention by torch's sdpa")
    gaps += adapter_gap(trainable, "torchtune") + base_gap(subject, "torchtune", ("bf16", "fp32", "nf4:double"))
    gaps += quantizer_gap(subject, "torchtune", ("torchao",))
    return gaps + _adapter_gaps(subject)


def _adapter_gaps(subject: Subject) -> list[Gap]:
    trainable = trainable_of(subject)
    adapter, part = trainable.adapter, f"train={trainable.text}"
    if adapter is None:
        why = "its full recipes train all parameters"
        return [] if trainable.is_full else [Gap(part=part, reason=why)]
    gaps = []
    if adapter.is_scaled_by_root:
        gaps.append(Gap(part=part, reason="torchtune scales by alpha over rank alone"))
    if trainable.head or trainable.embeddings:
        gaps.append(Gap(part=part, reason="torchtune trains adapters alone"))
    if _MLP & set(_layers(adapter)) and not set(_layers(adapter)) >= _MLP:
        gaps.append(Gap(part=part, reason="apply_lora_to_mlp means all three layers of the MLP"))
    unknown = set(_layers(adapter)) - {*_ATTENTION_MODULES.values(), *_MLP}
    if unknown:
        gaps.append(Gap(part=part, reason=f"torchtune has no layer called {', '.join(sorted(unknown))}"))
    return gaps
