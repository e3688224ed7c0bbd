"""Normalisation layers: their parameters, and what each implementation keeps for its backward pass."""

from __future__ import annotations

from typing import Literal

from paraplan.model.part import KeptBy, Part, kept, weight
from paraplan.model.saved_role import SavedRole
from paraplan.model.spec import ActivationSplit, ElementType, NormOutput

NormKind = Literal[
    "layer",
    "layer_without_bias",
    "layer_without_weights",
    "layer_in_fp32",
    "rms",
    "rms_in_fp32",
    "rms_without_weights",
    "rms_t5",
]
"""layer: torch's LayerNorm. layer_in_fp32: Cohere's, written out in fp32, without bias. rms: Llama's, normalised in
fp32, scaled in the activations' type. rms_in_fp32: scaled in fp32 too (OLMo 2, gpt-oss; Gemma, by 1 + weight).
rms_without_weights: as that, not scaled (Gemma 4). rms_t5: T5's, the mean square in fp32, the rest in the activations'
type."""

# What transformers' code keeps of the norms that torch has no kernel for, each of the input's size:
# in fp32, and in the activations' type.
_KEPT_IN_FP32: dict[NormKind, tuple[SavedRole, ...]] = {
    "layer_in_fp32": ("centred_squares", "centred", "normalised"),
    "rms": ("norm_input_in_fp32",),
    "rms_in_fp32": ("norm_input_in_fp32", "normalised"),
    "rms_without_weights": ("norm_input_in_fp32",),
    "rms_t5": ("norm_input_in_fp32",),
}
_SCALED_AS_ACTIVATION = ("rms", "rms_t5")

_OUTPUTS: dict[NormKind, NormOutput] = {
    "layer_in_fp32": "residual",
    "rms": "weights",
    "rms_in_fp32": "residual",
    "rms_without_weights": "residual",
    "rms_t5": "weights",
}


def norm_output(kind: NormKind) -> NormOutput:
    """Return the type of a norm's output under autocast, `BlockSpec.norm_output`."""
    return _OUTPUTS.get(kind, "promoted")


def norm(
    name: str,
    kind: NormKind,
    size: int,
    *,
    groups: int = 1,
    shape: tuple[int, ...] | None = None,
    keeps_input: bool = True,
    is_residual: bool = True,
    split: ActivationSplit = "sequence",
) -> Part:
    """Return a norm over `size` features, `groups` of them per token; its output is kept by whoever reads it.

    `shape` is that of the weight where it is not (size,). `keeps_input` is False where another norm keeps the same,
    `is_residual` False where the input is no residual stream (queries and keys).
    Fused kernels keep the input and one or two statistics.
    """
    part = Part()
    if not kind.endswith("_without_weights"):
        part += weight(f"{name}.weight", *(shape or (size,)))
    if kind == "layer":
        part += weight(f"{name}.bias", *(shape or (size,)))
    stream: ElementType = "residual" if is_residual else "activation"
    return part + _saved(kind, size * groups, groups, split, keeps_input=keeps_input, stream=stream)


def _saved(
    kind: NormKind,
    elements: int,
    groups: int,
    split: ActivationSplit,
    *,
    keeps_input: bool,
    stream: ElementType,
) -> Part:
    has_kernel = kind not in _KEPT_IN_FP32
    by: KeptBy = "both" if has_kernel else "fused"
    statistics = 2 if kind.startswith("layer") else 1
    part = kept("norm_input", elements, element_type="promoted", split=split, by=by) if keeps_input else Part()
    part += kept("norm_statistics", groups * statistics, element_type="fp32", split=split, by=by)
    if has_kernel:
        return part
    for role in _KEPT_IN_FP32[kind]:
        is_powered = role == "norm_input_in_fp32"
        part += kept(role, elements, element_type="fp32", split=split, is_powered=is_powered, by="modules")
    if kind in _SCALED_AS_ACTIVATION:
        part += kept("normalised", elements, element_type=stream, split=split, by="modules")
    if kind == "rms_t5":
        part += kept("norm_input", elements, split=split, absent_in_fp32=True, by="modules")
    return part + kept("norm_statistics", groups, element_type="fp32", split=split, by="modules")
