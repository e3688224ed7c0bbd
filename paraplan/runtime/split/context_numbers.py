"""Whole numbers of tokens under context parallelism (positions, token ids), brought together where code compares them.

Masks of attention are of all tokens on every rank, and are made from positions where a row holds several documents.
Numbers have no gradients, and what all ranks compute from all of them is the same on each.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

from paraplan.runtime.split.group import join_parts
from paraplan.runtime.split.size_rules import SIZE_RULES
from paraplan.runtime.split.split_tensor import CONTEXT, SplitError, SplitTensor


def split_index(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return `tensor[index]`: of all tokens where numbers are looked up by tensors, or some tokens are taken out."""
    tensor, index = args
    if not _is_of_numbers(tensor):
        return SIZE_RULES["__getitem__"](name, args, kwargs)
    entries = index if isinstance(index, tuple) else (index,)
    if not any(isinstance(entry, torch.Tensor) for entry in entries):
        try:
            return SIZE_RULES["__getitem__"](name, args, kwargs)
        except SplitError:
            pass
    return _whole(tensor)[_whole(index)]


def split_difference(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the differences between neighbouring numbers, of all tokens; None for other tensors."""
    if not _is_of_numbers(args[0] if args else kwargs["input"]):
        return None
    return torch.diff(*_whole(args), **_whole(kwargs))


def _is_of_numbers(value: Any) -> bool:
    if not isinstance(value, SplitTensor) or value.source != CONTEXT or isinstance(value.local, SplitTensor):
        return False
    return not value.dtype.is_floating_point and not value.dtype.is_complex and value.dtype != torch.bool


def _whole(tree: Any) -> Any:
    def whole(leaf: Any) -> Any:
        return join_parts(leaf.local, leaf.cut, leaf.group) if isinstance(leaf, SplitTensor) else leaf

    return pytree.tree_map(whole, tree)
