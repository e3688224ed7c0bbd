"""The tensors that a block returns, numbered: alone, in tuples, lists and dicts, and in the fields of dataclasses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from itertools import count
from typing import Any

import torch

from paraplan.runtime.torch_private import pytree


def map_outputs(change: Callable[[int, torch.Tensor], Any], output: Any) -> Any:
    """Return what a block returns with `change(number, tensor)` in the place of each tensor.

    Number 0 is the hidden state of blocks that return it first. Dataclasses are changed in place; other objects, such
    as caches that blocks fill, are left alone.
    """
    if isinstance(output, torch.Tensor):
        return change(0, output)
    numbers = count()

    def changed(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return change(next(numbers), leaf)
        if is_dataclass(leaf) and not isinstance(leaf, type):
            for one in fields(leaf):
                object.__setattr__(leaf, one.name, pytree.tree_map(changed, getattr(leaf, one.name)))
        return leaf

    return pytree.tree_map(changed, output)


def numbered_outputs(output: Any) -> dict[int, torch.Tensor]:
    """Return the tensors that a block returns by their numbers."""
    found: dict[int, torch.Tensor] = {}

    def note(number: int, tensor: torch.Tensor) -> torch.Tensor:
        found[number] = tensor
        return tensor

    map_outputs(note, output)
    return found
