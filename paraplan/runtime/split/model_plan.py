"""A model's own tensor-parallel plan: transformers' table of styles by layer, read as data."""

from __future__ import annotations

import re
from typing import Any

from torch import nn

_SPLIT_STYLES = (
    "colwise",
    "rowwise",
    "packed_colwise",
    "packed_rowwise",
    "local_colwise",
    "local_rowwise",
    "moe_tp_experts",
)


def own_plan(model: nn.Module) -> dict[str, str] | None:
    """Return the styles that a transformers config names for layers, by patterns of their names; None without any."""
    config: Any = getattr(model, "config", None)
    plan = getattr(config, "base_model_tp_plan", None)
    if not isinstance(plan, dict) or not plan:
        return None
    return {str(pattern): str(style) for pattern, style in plan.items()}


def style_of(plan: dict[str, str], name: str) -> str | None:
    """Return the style that `plan` names for the layer `name` of a model, None where it names none.

    Patterns begin at the base model, inside of what may be a model with a head; `*` stands for a number.
    """
    for pattern, style in plan.items():
        expression = re.escape(pattern).replace(r"\*", r"\d+")
        if re.search(rf"(^|\.){expression}$", name):
            return style
    return None


def splits(style: str | None) -> bool:
    """Whether a layer of this style is split."""
    return style is not None and style.startswith(_SPLIT_STYLES)
