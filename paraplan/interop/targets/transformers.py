"""transformers' own parallelism: a Python file with a `DistributedConfig`, for the Trainer and as a plain loop.

Fields as in transformers 5.24 (distributed/configuration_utils.py), which shards a model while it loads it: FSDP2 or
replicas of it, tensor parallelism by the model's own plan, and experts over the ranks of both.
"""

from __future__ import annotations

from paraplan.interop.exported import (
    Exported,
    Gap,
    Subject,
    expert_ranks,
    field_gap,
    order_gap,
    remarks,
    shared_notes,
    training_gap,
)
from paraplan.interop.quoting import comment
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
from paraplan.model.trainable import ALL_LINEAR
from paraplan.plan.parallel import MEGATRON_RANK_ORDER, ParallelPlan
from paraplan.plan.training import TrainingSpec

_ATTENTION = {"flash": "flash_attention_2", "sdpa": "sdpa", "eager": "eager"}
_OPTIMIZERS = {
    "adamw": ("adamw_torch_fused", "AdamW(groups, lr=LEARNING_RATE, fused=True)"),
    "adamw_foreach": ("adamw_torch", "AdamW(groups, lr=LEARNING_RATE)"),
    "sgd": ("sgd", "SGD(groups, lr=LEARNING_RATE)"),
}
"""Names of `--optim`, and the optimizer of torch in a loop. bitsandbytes' and others go over plain tensors."""

_QUANTIZED = ("nf4", "nf4:double")
"""Formats of bitsandbytes that are written for models that are not sharded."""

_LOAD = '''
{system}import sys
from collections import defaultdict

import torch
{distributed}from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, {quantized}Trainer, TrainingArguments
{imported}
MODEL = {model!r}
LEARNING_RATE = 1e-5
{configured}

def load_model(model=MODEL):
    """Load the model; every rank reads its own shard."""
    {loaded}


def training_arguments(output_dir="output", **others):
    """Return the arguments of the Trainer; `others` come after them."""
    values = {{
        "output_dir": output_dir,
        "learning_rate": LEARNING_RATE,
{arguments}
    }}
    return TrainingArguments(**values | others)


def train(dataset, model=None, **others):
    """Train with the Trainer, which clips and averages over all meshes of the model; return it."""
    trainer = Trainer(model=model or load_model(), args=training_arguments(**others), train_dataset=dataset)
    trainer.train()
    return trainer

'''

_LOOP = '''
def gradient_norm(model, max_norm):
    """Return the norm of all gradients, and clip them to `max_norm`: experts stand on a mesh of their own."""
    by_mesh = defaultdict(list)
    for parameter in model.parameters():
        if parameter.grad is not None:
            gradient = parameter.grad
            by_mesh[gradient.device_mesh if isinstance(gradient, DTensor) else None].append(parameter)
    norms = [torch.nn.utils.get_total_norm([one.grad for one in each]) for each in by_mesh.values()]
    norms = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    total = torch.linalg.vector_norm(torch.stack(norms))
    for each in by_mesh.values():
        torch.nn.utils.clip_grads_with_norm_(each, max_norm, total)
    return total


def train_in_a_loop(batches, model=None, max_norm=1.0):
    """Train without the Trainer; yield the loss, of this rank's sequences, and the norm of each step.

    `batches` are lists of {steps} micro-batches, each the inputs and labels of {micro} sequences:{shared}
    sequences of their own. Each micro-batch is taken to have as many labels as the others.
    """
    model = model or load_model()
    model.train()
{recompute}    by_mesh = defaultdict(list)
    for parameter in model.parameters():
        if parameter.requires_grad:
            by_mesh[parameter.device_mesh if isinstance(parameter, DTensor) else None].append(parameter)
    groups = [{{"params": parameters}} for parameters in by_mesh.values()]
{shared_start}    optimizer = torch.optim.{optimizer}
    for micro_batches in batches:
        total = 0.0
        for number, inputs in enumerate(micro_batches):
{synchronized}            loss = model(**inputs).loss / len(micro_batches)
            loss.backward()
            total += loss.detach()
{shared_end}        norm = gradient_norm(model, max_norm)
        optimizer.step()
        optimizer.zero_grad()
        yield total, norm

'''

_SHARED_START = """\
    for parameter in by_mesh[None]:  # adapters, which FSDP2 does not know, are equal on all ranks
        dist.broadcast(parameter.data, 0)
"""
_SHARED_END = """\
        for parameter in by_mesh[None]:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
"""
_SYNCHRONIZED = "            model.set_requires_gradient_sync(number == len(micro_batches) - 1)\n"

_MAIN = """
if __name__ == "__main__":
    from datasets import load_dataset

    train(load_dataset(sys.argv[1], split="train"))
"""


def to_transformers(subject: Subject) -> Exported:
    """Return the Python file: a model that is sharded as it is loaded, the Trainer, and a loop without it."""
    plan, training, gaps = subject.plan, subject.training, transformers_gaps(subject)
    trainable = trainable_of(subject)
    notes = ["the data set, tokenized, and LEARNING_RATE: the plan says neither"]
    notes.append(f"start it with: torchrun --nproc-per-node {subject.layout.gpus_per_node} FILE DATASET")
    if trainable.adapter is not None:
        notes.append(alpha_note(trainable.adapter))
    notes += shared_notes(subject, {"train", "optimizer", "attention"})
    model = subject.file.model
    arguments = "\n".join(f'        "{name}": {value!r},' for name, value in _arguments(plan, training).items())
    optimizer = _OPTIMIZERS.get(training.optimizer if training is not None else "adamw", _OPTIMIZERS["adamw"])[1]
    config = distributed_config(subject)
    imported = ["from peft import LoraConfig, get_peft_model"] if trainable.adapter is not None else []
    imported += ["from transformers.distributed import DistributedConfig"] if config else []
    shards = plan.dp > 1 and bool(config)
    filled = _LOAD.format(
        distributed="import torch.distributed as dist\n" if shards and trainable.adapter is not None else "",
        system="import os\n" if _quantized(subject) else "",
        quantized="BitsAndBytesConfig, " if _quantized(subject) else "",
        imported="".join(f"{line}\n" for line in imported),
        model=(model.source or model.name) if model is not None else "MODEL",
        configured=_configured(config) + _quantized(subject) + _adapters(subject),
        loaded=_loaded(subject, bool(config)),
        arguments=arguments,
    )
    loop = _LOOP.format(
        steps=plan.num_microbatches,
        micro=plan.micro_batch_size,
        shared=f" {plan.tp} neighboring ranks share theirs, others have" if plan.tp > 1 else " all ranks have",
        optimizer=optimizer,
        recompute="    model.gradient_checkpointing_enable()\n" if plan.recompute == "full" else "",
        synchronized=_SYNCHRONIZED if shards else "",
        shared_start=_SHARED_START if shards and trainable.adapter is not None else "",
        shared_end=_SHARED_END if shards and trainable.adapter is not None else "",
    )
    if plan.zero_stage == 0 and plan.dp > 1 and not config:
        loop = ""
        notes.append("a loop of your own wraps the model in DistributedDataParallel")
    text = comment(remarks(subject, gaps, notes)) + filled.lstrip("\n") + loop + _MAIN
    return Exported(target="transformers", text=text, gaps=tuple(gaps), notes=tuple(notes))


def distributed_config(subject: Subject) -> dict[str, object]:
    """Return the arguments of `DistributedConfig`; none for plain DDP and for one process."""
    plan, training = subject.plan, subject.training
    if plan.tp == 1 and plan.zero_stage == 0:
        return {}
    shards = (plan.zero_shards or plan.dp) if plan.zero_stage else 1
    sizes = {
        "fsdp_size": shards,
        "dp_replicate_size": plan.dp // shards,
        "tp_size": plan.tp,
        "ep_size": expert_ranks(subject),
    }
    config: dict[str, object] = {name: size for name, size in sizes.items() if size > 1}
    if plan.dp > 1 and (training is None or training.precision == "bf16"):
        config["fsdp_mixed_precision"] = True
    if plan.offload == "parameters":
        config["fsdp_cpu_offload"] = True
    return config


def _configured(config: dict[str, object]) -> str:
    if not config:
        return ""
    lines = "".join(f"    {name}={value!r},\n" for name, value in config.items())
    return f"DISTRIBUTED = DistributedConfig(\n{lines})\n"


def _adapters(subject: Subject) -> str:
    adapter, saved = trainable_of(subject).adapter, whole_modules(trainable_of(subject))
    if adapter is None:
        return ""
    every = adapter.targets == (ALL_LINEAR,)
    values: dict[str, object] = {
        "r": adapter.rank,
        "lora_alpha": alpha_of(adapter),
        "lora_dropout": adapter.dropout,
        "target_modules": ALL_LINEAR if every else modules_of(adapter),
    }
    values |= {"use_dora": True} if adapter.kind == "dora" else {}
    values |= {"use_rslora": True} if adapter.is_scaled_by_root else {}
    values |= {"modules_to_save": saved} if saved else {}
    lines = "".join(f"    {name}={value!r},\n" for name, value in values.items())
    return f"ADAPTERS = LoraConfig(\n{lines})\n"


def _quantized(subject: Subject) -> str:
    """Return how bitsandbytes stores the base of adapters, nothing for weights in 16 and 32 bits."""
    weights = subject.training.frozen_weights if subject.training is not None else "bf16"
    if trainable_of(subject).is_full or weights not in _QUANTIZED:
        return ""
    values = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": weights == "nf4:double"}
    lines = "".join(f"    {name}={value!r},\n" for name, value in values.items())
    return f"QUANTIZED = BitsAndBytesConfig(\n{lines}    bnb_4bit_compute_dtype=torch.bfloat16,\n)\n"


def _loaded(subject: Subject, is_sharded: bool) -> str:
    training = subject.training
    narrow = training is not None and training.precision == "bf16-pure"
    if training is not None and not training.trainable.is_full:
        narrow = training.precision != "fp32" and training.frozen_weights != "fp32"
    words = ["model", f"dtype=torch.{'bfloat16' if narrow else 'float32'}"]
    words += ["distributed_config=DISTRIBUTED"] if is_sharded else []
    if _quantized(subject):  # on the rank's own GPU: bitsandbytes takes the current one, which nobody has set yet
        words += ["quantization_config=QUANTIZED", 'device_map={"": int(os.environ.get("LOCAL_RANK", 0))}']
    words += [f"attn_implementation={_ATTENTION[training.attention]!r}"] if training is not None else []
    call = "AutoModelForCausalLM.from_pretrained(\n" + "".join(f"        {word},\n" for word in words) + "    )"
    return f"return {call}" if trainable_of(subject).adapter is None else f"return get_peft_model({call}, ADAPTERS)"


def _arguments(plan: ParallelPlan, training: TrainingSpec | None) -> dict[str, object]:
    arguments: dict[str, object] = {
        "per_device_train_batch_size": plan.micro_batch_size,
        "gradient_accumulation_steps": plan.num_microbatches,
        "gradient_checkpointing": plan.recompute == "full",
    }
    if training is None:
        return arguments
    arguments["optim"] = _OPTIMIZERS.get(training.optimizer, _OPTIMIZERS["adamw"])[0]
    # Where FSDP2 casts, autocast does not have to.
    casts = plan.dp > 1 and (plan.zero_stage == 3 or plan.tp > 1)
    arguments["bf16"] = training.precision == "bf16" and not casts
    return arguments


def transformers_gaps(subject: Subject) -> list[Gap]:
    """Return what `DistributedConfig` and the Trainer have no words for."""
    plan, training, trainable = subject.plan, subject.training, trainable_of(subject)
    gaps = field_gap(plan, "pp", (1,), "transformers' pp_size generates text, without FSDP and experts")
    gaps += field_gap(plan, "cp", (1,), "DistributedConfig has no context parallelism")
    gaps += field_gap(plan, "zero_stage", (0, 3), "DistributedConfig shards parameters too (3), or none")
    if plan.zero_stage == 0:
        gaps += field_gap(plan, "ep", (1,), "experts go over the ranks of fsdp_size and tp_size: plan with ZeRO-3")
    gaps += field_gap(plan, "sequence_parallel", (False,), "transformers 5.24 has no sequence parallelism yet")
    gaps += field_gap(plan, "recompute", ("none", "full"), "transformers checkpoints whole blocks")
    offloads = ("none", "parameters") if plan.zero_stage == 3 else ("none",)
    gaps += field_gap(plan, "offload", offloads, "fsdp_cpu_offload moves all that FSDP2 shards, or nothing")
    gaps += order_gap(plan, "transformers", MEGATRON_RANK_ORDER)
    if trainable.adapter is not None:
        gaps += field_gap(plan, "tp", (1,), "peft adds adapters after the layers are split, and sees whole ones")
    gaps += adapter_gap(trainable, "peft") + quantizer_gap(subject, "transformers", ("transformers",))
    if plan.zero_stage == 0 and plan.tp == 1:
        gaps += base_gap(subject, "the Trainer that paraplan writes", ("bf16", "fp32", *_QUANTIZED))
    elif training is not None and training.base_weights not in (None, "bf16", "fp32"):
        reason = "FSDP2 shards a model before its weights are quantized: --zero 0 (DDP), or --framework fsdp"
        gaps.append(Gap(part=f"base_weights={training.base_weights}", reason=reason))
    if trainable.adapter is None and not trainable.is_full:
        gaps.append(Gap(part=f"train={trainable.text}", reason="adapters or all of a model are written"))
    if training is not None and training.compiled:
        gaps.append(Gap(part="compiled", reason="paraplan writes no torch.compile for transformers' own FSDP2"))
    gaps += training_gap(training, "precision", ("fp32", "bf16", "bf16-pure"), "fsdp_mixed_precision is bfloat16")
    gaps += training_gap(training, "loss", ("plain",), "the model's own loss runs; TRL has others")
    return gaps + training_gap(
        training, "optimizer", tuple(_OPTIMIZERS), "torch's AdamW and SGD go over tensors of several meshes"
    )
