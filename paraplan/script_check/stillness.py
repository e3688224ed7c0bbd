"""Switches for dropout and batch statistics, which make a batch's parts unlike its whole."""

from __future__ import annotations

from typing import Any

from torch import nn

from paraplan.script_check.torch_private import is_batch_norm, is_dropout

NO_DROPOUT = "dropout is switched off"
_NO_STATISTICS = "batch statistics are those of the start: with them, a batch in parts is another training"
_DROPOUTS = (
    "dropout",
    "dropout1d",
    "dropout2d",
    "dropout3d",
    "alpha_dropout",
    "feature_alpha_dropout",
    "scaled_dot_product_attention",
)


def without_dropout(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any], bool]:
    """Return the arguments of a call in a model with a rate of dropout of 0, and whether it had another."""
    if name not in _DROPOUTS:
        return args, kwargs, False
    key, place = ("dropout_p", 4) if name == "scaled_dot_product_attention" else ("p", 1)
    rate = args[place] if len(args) > place else kwargs.get(key, 0.0)
    if not rate:
        return args, kwargs, False
    if len(args) > place:
        return (*args[:place], 0.0, *args[place + 1 :]), kwargs, True
    return args, kwargs | {key: 0.0}, True


def held_still(model: nn.Module) -> list[str]:
    """Switch off dropout and batch statistics of a model; return notes of what was switched off."""
    notes = []
    for module in model.modules():
        if is_batch_norm(module):
            module.eval()
            module.train = lambda *_, module=module: module  # type: ignore[method-assign]
            notes.append(_NO_STATISTICS)
        for name, value in list(vars(module).items()):
            if isinstance(value, float) and value > 0 and ("drop" in name or (name == "p" and is_dropout(module))):
                setattr(module, name, 0.0)
                notes.append(NO_DROPOUT)
    return notes
