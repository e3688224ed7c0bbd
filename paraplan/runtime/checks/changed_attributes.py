"""Attributes that a script sets on modules of a model, brought to copies: stages of a pipeline, a check's model."""

from __future__ import annotations

import copy
from collections import deque
from typing import Any

import torch
from torch import nn

from paraplan.runtime.structure.snapshots import LARGEST_STATE, MODULE_FIELDS


class ChangedAttributes:
    """Numbers, texts and small tensors that a script sets on the modules of `source`, and on their configurations.

    They are told from those that a plan has set before (sizes of split layers): what is another one than now.
    """

    def __init__(self, source: nn.Module) -> None:
        self._source = source
        self._before = {name: _values_of(module) for name, module in source.named_modules()}

    def bring(self, target: nn.Module) -> None:
        """Set on the modules of `target`, a copy of `source`, what was set on those of `source` since."""
        copies = dict(target.named_modules())
        for name, module in self._source.named_modules():
            before = self._before.get(name)
            if name not in copies or before is None:
                continue
            for path, value in _values_of(module).items():
                if path not in before or not _is_equal(value, before[path]):
                    _set_at(copies[name], path, copy.deepcopy(value))


def _values_of(holder: Any, *, depth: int = 2) -> dict[tuple[str, ...], Any]:
    """Return the plain values among the attributes of an object, and those of configurations that it holds."""
    found: dict[tuple[str, ...], Any] = {}
    for key, value in holder.__dict__.items():
        if key in MODULE_FIELDS or key in ("training", "forward"):  # what a plan puts in front of code is its own
            continue
        if _is_plain(value):
            found[key,] = copy.deepcopy(value)
        elif depth and _is_configuration(value):
            found |= {(key, *path): one for path, one in _values_of(value, depth=depth - 1).items()}
    return found


def _set_at(holder: Any, path: tuple[str, ...], value: Any) -> None:
    """Set an attribute that an object or its class has; a stage has others in the place of what it lacks."""
    *holders, key = path
    for name in holders:
        holder = holder.__dict__.get(name)
    if holder is not None and (key in holder.__dict__ or hasattr(type(holder), key)):
        holder.__dict__[key] = value


def _is_equal(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(map(_is_equal, one.values(), other.values()))
    if isinstance(one, list | tuple | deque):
        return len(one) == len(other) and all(map(_is_equal, one, other))
    return bool(one == other)


def _is_configuration(value: Any) -> bool:
    return isinstance(getattr(value, "__dict__", None), dict) and not isinstance(value, nn.Module | torch.Tensor)


def _is_plain(value: Any) -> bool:
    """Whether a value is a small tensor, or a list or table of numbers, texts and small tensors."""
    if isinstance(value, list | tuple | deque | dict):
        return all(map(_is_plain, value.values() if isinstance(value, dict) else value))
    if type(value) is torch.Tensor:
        return value.numel() <= LARGEST_STATE and not value.requires_grad and not value.is_inference()
    return isinstance(value, bool | int | float | str | None)
