"""TRL: a script that writes accelerate's configuration and starts `trl sft`, `dpo`, `reward` or `grpo` with it.

Arguments as in TRL 1.16 (`ModelConfig`, `SFTConfig` and its like); the launcher reads `--accelerate_config`.
"""

from __future__ import annotations

import shlex

from paraplan.interop.exported import (
    TOLD_FIELDS,
    Exported,
    Gap,
    Subject,
    field_gap,
    remarks,
    shared_notes,
    training_gap,
)
from paraplan.interop.quoting import comment, to_yaml
from paraplan.interop.targets.accelerate import accelerate_gaps, to_accelerate
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
from paraplan.interop.targets.hf_trainer import MOMENTUM, MOMENTUM_NOTE, OPTIMIZERS, PROJECTED
from paraplan.interop.targets.liger import told_kernels, trainers_liger
from paraplan.plan.task import Task
from paraplan.plan.training import TrainingSpec

_ATTENTION = {"flash": "flash_attention_2", "sdpa": "sdpa", "eager": "eager"}
_BASES = ("bf16", "fp32", "int8", "nf4", "nf4:double", "fp4", "fp4:double")
_LOSS_TYPES = {"plain": "nll", "cut": "chunked_nll"}
"""Values of `loss_type` for given sequences: the first was TRL's own before 1.8, the second is since."""
_LOSSES = (*_LOSS_TYPES, "liger")
_FILE, _KEYS = "accelerate.yaml", "liger.yaml"


def to_trl(subject: Subject) -> Exported:
    """Return the script. TRL trains LoRA, DoRA and whole models, on plans that accelerate can express."""
    plan, gaps = subject.plan, trl_gaps(subject)
    notes = ["--dataset_name DATASET and the learning rate: the plan says neither"]
    task = subject.training.learns_from if subject.training is not None else Task()
    words = ["trl", task.kind]
    text, told = "", trainers_liger(subject.training) if subject.training is not None else {}
    if plan.world_size > 1 or plan.gathers_alone:
        configured = to_accelerate(subject.model_copy(update={"script": "train.py"}))
        lines = [line for line in configured.text.splitlines() if not line.startswith("#")]
        text = f"cat > {_FILE} <<'END'\n" + "\n".join(lines) + "\nEND\n"
        words += ["--accelerate_config", _FILE]
        notes += [note for note in configured.notes if note.startswith(("deepspeed", "main_process_ip", "tensor"))]
    if "liger_kernel_config" in told:  # TRL reads objects from files alone
        text += f"cat > {_KEYS} <<'END'\n{to_yaml(told)}END\n"
        words += ["--config", _KEYS]
    elif told:
        words += ["--use_liger_kernel", "true"]
    model = subject.file.model
    words += ["--model_name_or_path", (model.source or model.name) if model is not None else "MODEL"]
    notes.append("--model_name_or_path: the hub id or the folder of the model")
    words += ["--dataset_name", "DATASET", "--output_dir", "output"]
    words += ["--per_device_train_batch_size", str(plan.micro_batch_size // task.group)]
    words += ["--gradient_accumulation_steps", str(plan.num_microbatches)]
    # FSDP's own checkpointing stands in accelerate's file, and the Trainer refuses both.
    by_trainer = plan.recompute == "full" and "fsdp_config" not in text
    words += ["--gradient_checkpointing", str(by_trainer).lower()]
    if subject.training is not None:
        words += _training_words(subject, subject.training, notes)
    tells = told_kernels(subject.training)
    notes += shared_notes(subject, TOLD_FIELDS - {"linear_precision"}, losses=_LOSSES, tells=tells)
    head = "#!/bin/sh\n" + comment(remarks(subject, gaps, notes))
    return Exported(target="trl", text=head + text + shlex.join(words) + "\n", gaps=tuple(gaps), notes=tuple(notes))


def _training_words(subject: Subject, training: TrainingSpec, notes: list[str]) -> list[str]:
    trainable = trainable_of(subject)
    words = [*_task_words(training, notes), "--attn_implementation", _ATTENTION[training.attention]]
    if training.optimizer in OPTIMIZERS:
        words += ["--optim", OPTIMIZERS[training.optimizer]]
    if training.optimizer == "sgd_momentum":
        words += ["--optim_args", MOMENTUM]
        notes.append(MOMENTUM_NOTE)
    words += ["--optim_target_modules", PROJECTED] if training.optimizer == "galore_adamw" else []
    loads = "float32" if training.precision == "fp32" or training.frozen_weights == "fp32" else "bfloat16"
    if trainable.is_full:
        loads = "bfloat16" if training.precision == "bf16-pure" else "float32"
    mixed = training.precision in ("bf16", "fp16")
    words += ["--dtype", loads, "--bf16", str(training.precision == "bf16").lower()]
    words += ["--fp16", "true"] if training.precision == "fp16" else []
    if training.compiled:
        words += ["--torch_compile", "true"]
    if training.offloads_activations:
        words += ["--activation_offloading", "true"]
    if training.task == "sft" and training.loss in _LOSS_TYPES:
        words += ["--loss_type", _LOSS_TYPES[training.loss]]
    adapter = trainable.adapter
    if adapter is None:
        return words
    words += ["--use_peft", "true", "--lora_r", str(adapter.rank), "--lora_alpha", str(alpha_of(adapter))]
    words += ["--lora_dropout", f"{adapter.dropout:g}", "--lora_target_modules", *modules_of(adapter)]
    notes.append(alpha_note(adapter))
    words += ["--use_dora", "true"] if adapter.kind == "dora" else []
    words += ["--use_rslora", "true"] if adapter.is_scaled_by_root else []
    saved = whole_modules(trainable)
    words += ["--lora_modules_to_save", *saved] if saved else []
    base, _, double = (training.base_weights or "").partition(":")
    if base == "int8":
        words += ["--load_in_8bit", "true"]
    elif base in ("nf4", "fp4"):
        words += ["--load_in_4bit", "true", "--bnb_4bit_quant_type", base]
        words += ["--use_bnb_nested_quant", "true"] if double else []
        if subject.plan.zero_stage == 3:  # FSDP shards numbers of one type
            words += ["--bnb_4bit_quant_storage", "bfloat16" if mixed else "float32"]
    return words


def _task_words(training: TrainingSpec, notes: list[str]) -> list[str]:
    """Return the length of sequences, and what the task has beyond it."""
    task, length = training.learns_from, training.seq_length
    if task.kind != "grpo":
        words = ["--max_length", str(length)]
        words += ["--precompute_ref_log_probs", "true"] if task.is_precomputed else []
        return words + (["--packing", "true"] if training.packs_samples and task.kind == "sft" else [])
    completion = task.completion_tokens(length)
    notes.append(f"prompts of at most {length - completion} tokens, --reward_funcs, --num_generations")
    notes.append("--vllm_tensor_parallel_size where one GPU does not hold the model to generate: see paraplan estimate")
    words = ["--max_completion_length", str(completion), "--beta", f"{task.beta:g}", "--use_vllm", "true"]
    if task.reserve is not None and not task.generator_gpus:
        asleep = ["--vllm_enable_sleep_mode", "true"]
        words += ["--vllm_gpu_memory_utilization", f"{task.reserve:g}"] if task.reserve else asleep
    if task.generator_gpus:
        notes.append(f"trl vllm-serve --model MODEL on {task.generator_gpus} further GPUs, started before")
        return [*words, "--vllm_mode", "server"]
    return [*words, "--vllm_mode", "colocate"]


def trl_gaps(subject: Subject) -> list[Gap]:
    """Return what TRL's command and accelerate's configuration have no words for."""
    trainable, training = trainable_of(subject), subject.training
    gaps = [*accelerate_gaps(subject), *adapter_gap(trainable, "TRL"), *base_gap(subject, "TRL", _BASES)]
    gaps += quantizer_gap(subject, "TRL", ("transformers", "transformers-4"))
    if trainable.adapter is None and not trainable.is_full:
        gaps.append(Gap(part=f"train={trainable.text}", reason="trl sft trains adapters or all of a model"))
    named = {gap.part for gap in gaps}
    gaps += [
        gap
        for gap in field_gap(subject.plan, "recompute", ("none", "full"), "the Trainer checkpoints whole blocks")
        if gap.part not in named
    ]
    gaps += training_gap(training, "optimizer", tuple(OPTIMIZERS), "the Trainer has no such optimizer")
    if training is not None and training.packs_samples and (training.task, training.attention) != ("sft", "flash"):
        reason = "trl sft packs samples, and keeps them apart under flash attention alone"
        gaps.append(Gap(part="packs_samples", reason=reason))
    losses = _LOSSES if training is None or training.task == "sft" else tuple(one for one in _LOSSES if one != "cut")
    return gaps + training_gap(training, "loss", losses, f"{' and '.join(losses)} are TRL's losses for this task")
