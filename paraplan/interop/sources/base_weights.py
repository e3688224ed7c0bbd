"""Formats that store the base of adapters in fewer bits, in the words of tools that train over transformers' models."""

from __future__ import annotations

import re

from paraplan.interop.fields import Fields
from paraplan.model.weight_formats import WeightFormat

_RELEASED: dict[str, WeightFormat] = {
    r"(bnb|unsloth)-4bit|bnb-nf4": "nf4:double",
    r"awq|gptq|w4a16|[-_]int4": "int4",
}
_UNPRICED = r"int8|w8a8|[234]bit|aqlm|hqq|eetq|fp8|nvfp4|compressed"


def released_format(model_name: str | None, notes: list[str]) -> WeightFormat | None:
    """Return the format that a model is released in, by its name; add a note of one that is not priced.

    Tools load such a release as it is, and adapters train beside it.
    """
    name = (model_name or "").rstrip("/").rpartition("/")[2].lower()
    for pattern, stored in _RELEASED.items():
        if re.search(pattern, name) and not re.search("int8|8bit", name):
            return stored
    if re.search(_UNPRICED, name):
        notes.append(f"{model_name}: weights that are quantized in the release are priced in 16 bits")
    return None


def quantizer_asked(fields: Fields) -> str | None:
    """Return the quantizer that a tool's keys ask for, None where they leave it to transformers.

    axolotl's `quantize_moe_experts` and `llama4_linearized_experts`, and LLaMA-Factory's `use_unsloth`, have experts
    stored as linear layers are.
    """
    if True in [fields.flag(key) for key in ("quantize_moe_experts", "llama4_linearized_experts")]:
        return "axolotl"
    return "unsloth" if fields.flag("use_unsloth") else None
