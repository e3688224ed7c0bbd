"""What makes a batch's parts unlike its whole, switched off: random numbers of dropout, batch statistics."""

from __future__ import annotations

from torch import nn

from paraplan.script_check.torch_private import is_batch_norm, is_dropout

NO_DROPOUT = "dropout is switched off"
_NO_STATISTICS = "batch statistics are those of the start: with them, a batch in parts is another training"


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
