"""What stores the base of adapters in fewer bits, in the words of tools that train over transformers' models."""

from __future__ import annotations

from paraplan.interop.fields import Fields


def quantizer_asked(fields: Fields) -> str | None:
    """Return the quantizer that a tool's keys ask for, None where they leave it to transformers.

    axolotl's `quantize_moe_experts` and LLaMA-Factory's `use_unsloth` have experts stored as linear layers are.
    """
    if fields.flag("quantize_moe_experts"):
        return "axolotl"
    return "unsloth" if fields.flag("use_unsloth") else None
