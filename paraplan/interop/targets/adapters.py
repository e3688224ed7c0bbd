"""Trained parts of a model in the words that TRL and axolotl pass on to peft, and parts that have none."""

from __future__ import annotations

from paraplan.interop.exported import Gap, Subject
from paraplan.model.expert_adapters import EXPERTS
from paraplan.model.trainable import ALL_LINEAR, AdapterSpec, Trainable, module_name
from paraplan.model.weight_formats import is_linear_4bit

_ALPHA = 2
"""lora_alpha over the rank: the plan does not say it, and it costs nothing; twice the rank is usual."""
_MODULES = {"head": "lm_head", "embeddings": "embed_tokens"}


def trainable_of(subject: Subject) -> Trainable:
    """Return what a plan file's training trains: everything where it does not say."""
    return subject.training.trainable if subject.training is not None else Trainable()


def alpha_of(adapter: AdapterSpec) -> int:
    """Return the alpha that is written for an adapter."""
    return _ALPHA * adapter.rank


def alpha_note(adapter: AdapterSpec) -> str:
    """Return the note that says so."""
    return f"lora_alpha {alpha_of(adapter)} is written, twice the rank; the plan says no value"


def modules_of(adapter: AdapterSpec) -> list[str]:
    """Return the names of the layers with adapters, as Llama and its kin in transformers call them."""
    return [name if name == ALL_LINEAR else module_name(name) for name in adapter.targets]


def whole_modules(trainable: Trainable) -> list[str]:
    """Return the modules outside of blocks that train beside adapters."""
    return [module for name, module in _MODULES.items() if getattr(trainable, name)]


def base_gap(subject: Subject, tool: str, known: tuple[str, ...]) -> list[Gap]:
    """Return the gap of frozen weights in a format that a tool does not load."""
    training = subject.training
    if training is None or training.base_weights is None or training.base_weights in known:
        return []
    return [Gap(part=f"base_weights={training.base_weights}", reason=f"{tool} loads {', '.join(known)}")]


def storage_notes(subject: Subject) -> list[str]:
    """Return with what 4-bit weights are loaded that FSDP2 is to shard.

    accelerate leaves integers out of the shards (utils/fsdp_utils.py of 1.15, `fsdp2_prepare_model`).
    """
    training, plan = subject.training, subject.plan
    if training is None or plan.zero_stage != 3 or not is_linear_4bit(training.base_weights):
        return []
    kept = "float32" if training.precision == "fp32" else "bfloat16"
    return [
        f"in the script, BitsAndBytesConfig(bnb_4bit_quant_storage=torch.{kept}): FSDP2 shards no other 4-bit weights, "
        "and each rank would have all of them"
    ]


def quantizer_gap(subject: Subject, tool: str, known: tuple[str, ...]) -> list[Gap]:
    """Return the gap of frozen weights that a tool does not store as the training says."""
    training = subject.training
    if training is None or training.quantizer in (None, *known):
        return []
    return [Gap(part=f"quantizer={training.quantizer}", reason=f"{tool} stores weights by {' or '.join(known)}")]


def adapter_gap(trainable: Trainable, tool: str, kinds: tuple[str, ...] = ("lora", "dora")) -> list[Gap]:
    """Return the gaps of adapters that a tool does not have, and of norms that train beside them."""
    adapter = trainable.adapter
    if adapter is None:
        return []
    gaps = []
    if adapter.kind not in kinds:
        gaps.append(Gap(part=f"train={trainable.text}", reason=f"{tool} has {' and '.join(kinds)}"))
    if EXPERTS in adapter.targets:
        reason = f"{tool} names experts by their layers: plan with --train lora:targets=...|gate|up|down"
        gaps.append(Gap(part=f"train={trainable.text}", reason=reason))
    if trainable.projector or trainable.tower:
        reason = f"paraplan writes adapters of the language model for {tool}, not beside a tower that trains"
        gaps.append(Gap(part=f"train={trainable.text}", reason=reason))
    if trainable.norms or trainable.last_layers is not None:
        gaps.append(Gap(part=f"train={trainable.text}", reason=f"{tool} trains adapters, head and embeddings beside"))
    return gaps
