"""Fine-tuning runs: what a row's columns say of adapters, base weights, kernels and optimizers."""

from __future__ import annotations

import re
from typing import Any

from paraplan.accuracy.measured_runs import MeasuredRun
from paraplan.cost.framework import FrameworkProfile
from paraplan.errors import PlanError
from paraplan.model.quantizers import DEFAULT_QUANTIZER
from paraplan.model.spec import ModelSpec
from paraplan.model.trainable import ALL_LINEAR, AdapterKind, AdapterSpec, Trainable, layer_matches
from paraplan.model.weight_formats import WeightFormat
from paraplan.plan.training import LossKernel, OptimizerName, TrainingSpec

_ADAPTERS: dict[str, AdapterKind] = {"lora": "lora", "qlora": "lora", "rslora": "lora", "dora": "dora", "ia3": "ia3"}
_DEFAULT_RANK = 8  # peft's LoraConfig
_NVIDIA_RANK, _NVIDIA_TARGETS = 16, ("q", "k", "v")
"""Rank and targets of NVIDIA's published times of LoRA: `peft.target_modules = ["linear_qkv"]` in NeMo's
`performance_mode` (nemo/collections/llm/recipes/llama3_70b.py) and in Megatron-Bridge's llama3_70b_peft performance
recipes."""
_FORMATS: tuple[tuple[str, WeightFormat], ...] = (
    ("nf4.*(double|torchao)", "nf4:double"),
    ("nf4", "nf4"),
    ("fp4", "fp4"),
    ("(int4|gptq|awq)", "int4"),
    ("int8", "int8"),
    ("fp8", "fp8"),
    ("fp32", "fp32"),
)
_LOSSES: tuple[tuple[str, LossKernel], ...] = (("liger", "liger"), ("cut cross", "cut"), ("chunked cross", "chunked"))
_FUSED_KERNELS = ("foak", "unsloth")
"""Kernels of unsloth, which fms-acceleration has too: norms, rotations, MLPs and adapters are one operation each."""
_OFFLOADED = r"activation offload|checkpointed activations offloaded to host memory"
_MODELLED = (
    r"lora.*",
    r"\S+ base.*",
    r"4-bit gptq base.*",
    r"pure bf16.*",
    r"fused kernels.*",
    r"liger.*",
    r"hf prepare_model_for_kbit_training.*",
    r"8-bit adamw",
    r"unsloth kernels",
    r"(cut|chunked) cross-entropy",
    _OFFLOADED,
    r"peft (ia3|ln_tuning).*",
    r"embedding and head train too",
    r"bitsandbytes before 0\.43\.2",
    r"ring attention of torch's context parallelism",
)
"""Features of fine-tuning rows that predictions take in."""


def is_fine_tuning(run: MeasuredRun) -> bool:
    """Return whether a row says how it was fine-tuned."""
    return bool(_method(run))


def _method(run: MeasuredRun) -> str:
    """Return the method; a table without the column notes LoRA among what is unusual."""
    return run.method.lower() or ("lora" if re.search(r"(^|; )lora\b", run.nonstandard_features.lower()) else "")


def has_only_modelled_features(run: MeasuredRun) -> bool:
    """Return whether a row says how it was fine-tuned, and all that it notes as unusual is taken in."""
    parts = re.sub(r"\(.*?\)", "", run.nonstandard_features.lower()).split(";")
    return bool(run.method) and all(
        any(re.fullmatch(known, part.strip()) for known in _MODELLED) for part in parts if part.strip()
    )


def fine_tuning_fields(run: MeasuredRun, framework: FrameworkProfile) -> dict[str, Any]:
    """Return the fields of a `TrainingSpec` that a fine-tuning row states.

    Raises `PlanError` for methods that are not modelled.
    """
    features, fields = run.nonstandard_features.lower(), dict[str, Any]()
    trainable = _trainable(run)
    fields["train"] = trainable.text
    is_pure = "pure bf16" in features or (trainable.is_full and run.base_weight_dtype.lower() == "bf16")
    fields |= {"precision": "bf16-pure"} if is_pure and run.precision == "bf16" else {}
    if not trainable.is_full:
        fields["base_weights"] = _weight_format(run.base_weight_dtype)
        fields["upcasts_frozen"] = _upcasts(run)
        fields["quantizer"] = _quantizer(run, framework)
    loss = stated_loss(f"{run.kernels} {features}")
    # TRL's goes over chunks of tokens and of the vocabulary, and keeps no logits (trl/kernels/chunked_logprob.py).
    fields["loss"] = "cut" if loss == "chunked" and "trl" in run.framework.lower() else loss
    fields["offloads_activations"] = re.search(_OFFLOADED, features) is not None
    fields["optimizer"] = fine_tuning_optimizer(run.optimizer.lower())
    return {name: value for name, value in fields.items() if value is not None}


def _quantizer(run: MeasuredRun, framework: FrameworkProfile) -> str | None:
    """Return what stored the base, None for what the framework has: rows that name no release are of transformers 4."""
    words = f"{run.kernels} {run.nonstandard_features} {run.framework}".lower()
    if "unsloth" in words:
        return "unsloth"
    if "quantize_moe_experts" in words:
        return "axolotl"
    is_newer = framework.storage.quantizer != DEFAULT_QUANTIZER or "transformers 5" in words
    return None if is_newer else "transformers-4"


def stated_loss(kernels: str) -> LossKernel:
    """Return the loss that words about kernels name, plain where they name none."""
    return next((loss for words, loss in _LOSSES if words in kernels.lower()), "plain")


def _upcasts(run: MeasuredRun) -> bool:
    """Return whether frozen weights that are not quantized are in fp32.

    TRL's SFTTrainer and peft's examples call `prepare_model_for_kbit_training` for models that bitsandbytes quantized;
    it leaves those of GPTQ, AQLM, EETQ, HQQ and torchao as they are (peft/utils/other.py);
    unsloth and its kernels do not need it, axolotl casts all back to 16 bits for FlashAttention, and FSDP brings all
    that it flattens to one type again.
    """
    if re.search("gptq|aqlm|eetq|hqq|torchao", run.base_weight_dtype.lower()):
        return False
    if "prepare_model_for_kbit_training" in run.nonstandard_features.lower():
        return not run.zero_stage
    words = f"{run.kernels} {run.nonstandard_features} {run.framework}".lower()
    is_of_bitsandbytes = re.search("nf4|fp4|int8", run.base_weight_dtype.lower()) is not None
    is_plain = re.search(r"\b(hf|trl|peft)\b", words) is not None and "axolotl" not in words
    return is_of_bitsandbytes and is_plain and not run.zero_stage and not any(name in words for name in _FUSED_KERNELS)


def fine_tuning_optimizer(words: str) -> OptimizerName:
    """Return the optimizer that a row of fine-tuning names; torch's AdamW goes over lists unless it says fused."""
    is_paged, is_8bit = "paged" in words, "8bit" in words or "8-bit" in words
    if "adam" in words:
        if is_paged:
            return "paged_adamw_8bit" if is_8bit else "paged_adamw"
        return "adamw_8bit" if is_8bit else "adamw_foreach" if "torch" in words and "fused" not in words else "adamw"
    names: tuple[OptimizerName, ...] = ("adafactor", "muon", "lion", "sgd")
    return next((name for name in names if name in words), "adamw")


def fine_tuning_stack(run: MeasuredRun) -> dict[str, Any]:
    """Return the `StackSettings` that a fine-tuning row states: its kernels, and what its optimizer keeps."""
    words, settings = f"{run.kernels} {run.nonstandard_features}".lower(), dict[str, Any]()
    if any(name in words for name in _FUSED_KERNELS):
        settings["fused_kernels"] = "unsloth" if "unsloth" in words else "foak"
    elif re.search(r"\b(hf|trl|transformers)\b", run.framework.lower()):
        settings["model_loss"] = True
    if "liger" in words and not settings.get("fused_kernels"):
        settings["fused_kernels"] = "liger"
    if "bitsandbytes before 0.43.2" in words:
        settings["keeps_quantized_inputs"] = True
    # Shards of flat parameters are plain tensors, which torch's optimizers go over as lists.
    settings["flat_shards"] = "fsdp1" in run.framework.lower()
    # Each gradient is used and freed as it comes.
    settings["steps_in_backward"] = "optimizer in backward" in run.optimizer.lower() or (
        "optimizer-in-backward" in words
    )
    return settings


def stated_kernels(run: MeasuredRun) -> dict[str, Any]:
    """Return the `StackSettings` of fused kernels that a run states which trains all parameters."""
    words = run.kernels.lower()
    if "cross-entropy of transformer engine" in words:
        return {"engine_loss": True}
    if any(name in words for name in _FUSED_KERNELS):
        return {"fused_kernels": "all"}
    return {"fused_kernels": "liger"} if "liger" in words else {}


_FUSED_PROJECTIONS = {"c_attn": ("q", "k", "v"), "query_key_value": ("q", "k", "v"), "linear_qkv": ("q", "k", "v")}


def with_named_targets(training: TrainingSpec, model: ModelSpec) -> TrainingSpec:
    """Return the training with targets that the model has: shapes of a table do not say whether q, k and v are one."""
    trainable = training.trainable
    adapter = trainable.adapter
    if adapter is None:
        return training
    names = tuple({one.name for run in model.runs for one in run.block.matmuls if one.num_experts == 1})
    targets: list[str] = []
    for target in adapter.targets:
        spellings = (target, *_FUSED_PROJECTIONS.get(target, ()), *("qkv",) * (target in ("q", "k", "v")))
        targets += [one for one in spellings if any(layer_matches(one, name) for name in names)]
    found = tuple(dict.fromkeys(targets)) or adapter.targets
    return training.replace(train=trainable.replace(adapter=adapter.replace(targets=found)).text)


def _trainable(run: MeasuredRun) -> Trainable:
    method = _method(run)
    if method == "full":
        return Trainable()
    if method == "ln_tuning":
        return Trainable(norms=True)
    if method not in _ADAPTERS:
        raise PlanError(f"the method {run.method} is not modelled", hint="lora, qlora, dora, ia3 and full are")
    kind = _ADAPTERS[method]
    words = re.sub(r"\(.*?\)|,.*", " ", run.lora_targets.lower()).replace("+", " ").split()
    usual = _NVIDIA_TARGETS if _is_of_nvidia(run) else (ALL_LINEAR,)
    targets = tuple(words) or usual if "all" not in words else (ALL_LINEAR,)
    if "mlp" in targets:
        targets = (*(word for word in targets if word != "mlp"), "gate", "up", "down")
    rank, dropout = run.lora_rank or _usual_rank(run), run.lora_dropout or 0.0
    ends = "embedding and head train too" in run.nonstandard_features.lower()
    adapter = AdapterSpec(kind=kind, rank=rank, targets=targets, dropout=dropout if kind != "ia3" else 0.0)
    return Trainable(adapter=adapter, head=ends, embeddings=ends)


def _usual_rank(run: MeasuredRun) -> int:
    return _NVIDIA_RANK if _is_of_nvidia(run) else _DEFAULT_RANK


def _is_of_nvidia(run: MeasuredRun) -> bool:
    return re.search("megatron|nemo(?! automodel)", run.framework.lower()) is not None


def _weight_format(text: str) -> WeightFormat | None:
    words = text.lower()
    return next((known for pattern, known in _FORMATS if re.search(pattern, words)), None)
