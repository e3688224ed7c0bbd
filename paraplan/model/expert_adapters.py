"""LoRA on fused experts, as peft puts it there (`target_parameters`): which it reaches, and what it takes.

Experts are one tensor of three dimensions, and so is what two matrices for each expert make: peft adds it to the
weights in every pass, and multiplies by the sum, which stays for the backward pass (peft/tuners/lora/layer.py,
ParamWrapper).
"""

from __future__ import annotations

import json
from functools import cache

from pydantic import Field

from paraplan.errors import PlanError
from paraplan.model.part import Part
from paraplan.model.spec import Matmul, Parameter, SavedTensor
from paraplan.model.trainable import AdapterSpec
from paraplan.records import Record, Source
from paraplan.resources import profiles_folder

EXPERTS = "experts"
"""The target that stands for all routed experts, of any family."""
_GATES = {"gate": "gate", "gate_proj": "gate", "w1": "gate", "up": "up", "up_proj": "up", "w3": "up"}
_DOWN = ("down", "down_proj", "w2")
SUM_TRAFFIC = 6.0
"""Bytes that a pass moves for each element to add adapters to 16-bit weights, beside writing the sum: it reads the
weight, and writes and reads what the adapters make."""


class _Peft(Record):
    """Peft's answer to the names of experts' layers (`profiles/peft.json`)."""

    version: str
    """The release that was read."""
    converted_families: tuple[str, ...]
    """Types of models for which it takes these names for the experts' tensors."""
    sources: tuple[Source, ...] = Field(min_length=1)
    """Where the values come from."""


@cache
def peft() -> _Peft:
    """Return what is known of peft."""
    return _Peft.model_validate(json.loads((profiles_folder() / "peft.json").read_text(encoding="utf-8")))


def converts(model_type: str) -> bool:
    """Return whether peft takes names of experts' layers, and all-linear, for the experts of such a model too."""
    return model_type in peft().converted_families


def expert_words(targets: tuple[str, ...]) -> frozenset[str]:
    """Return those targets that may mean experts."""
    return frozenset(word for word in targets if word in _GATES or word in _DOWN or word == EXPERTS)


def targeted_experts(adapter: AdapterSpec, model_type: str) -> frozenset[str]:
    """Return which products of experts have adapters: gate_up_proj, down_proj.

    Raises `PlanError` for one of gate and up alone, which peft refuses: both are one tensor.
    """
    words = expert_words(adapter.targets) if adapter.kind == "lora" else frozenset()
    if EXPERTS in words:
        return frozenset({"gate_up_proj", "down_proj"})
    if not converts(model_type):
        return frozenset()
    halves = {_GATES[word] for word in words if word in _GATES}
    if len(halves) == 1:
        (half,) = halves
        raise PlanError(
            f"experts have gate and up in one tensor, and {half} alone is targeted",
            hint="target both, gate|up, or neither",
        )
    found = {"gate_up_proj"} if halves else set()
    return frozenset(found | ({"down_proj"} if words.intersection(_DOWN) else set()))


def expert_adapter(matmul: Matmul, adapter: AdapterSpec) -> Part:
    """Return the adapters of one tensor of experts: their matrices, and the sum that is kept."""
    rank = adapter.rank * (2 if matmul.name == "gate_up_proj" else 1) * matmul.num_experts
    name = f"experts.{matmul.name}"
    return Part(
        parameters=(
            Parameter(name=f"{name}.lora_A.weight", shape=(rank, matmul.k)),
            Parameter(name=f"{name}.lora_B.weight", shape=(matmul.n, rank)),
        )
    ) + copied_experts(matmul)


def copied_experts(matmul: Matmul) -> Part:
    """Return what is kept where experts are multiplied by a copy in 16 bits that a pass makes."""
    elements = float(matmul.k * matmul.n * matmul.num_experts)
    copy = SavedTensor(role="copied_weights", elements_of_copy=elements)
    return Part(saved=(copy,), saved_fused=(copy,))
