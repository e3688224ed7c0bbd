"""Which layers tensor parallelism divides by a model's own plan: transformers' styles, by patterns of names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal

DividedBy = Literal["column", "row"]

_SPLIT_STYLES = (
    "colwise",
    "rowwise",
    "packed_colwise",
    "packed_rowwise",
    "local_colwise",
    "local_rowwise",
    "moe_tp_experts",
)
_GATHERED = ("_gather_output", "_rep")


def style_of(plan: Mapping[str, str], name: str) -> str | None:
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


def divided_by(style: str | None) -> DividedBy | None:
    """Return whether a style divides the outputs or the inputs of a weight, None where it stays whole."""
    if style is None or not splits(style):
        return None
    return "row" if "rowwise" in style else "column" if "colwise" in style else None


def gathers(style: str | None) -> bool:
    """Whether the ranks gather what a divided layer returns, so that what follows is whole."""
    return style is not None and style.endswith(_GATHERED)
