"""The tensors that a block returns, numbered: alone, in tuples, lists and dicts, and in the fields of dataclasses."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from itertools import count
from typing import Any

import torch

from paraplan.errors import UsageError
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


def described_outputs(output: Any, tensors: list[torch.Tensor]) -> Any:
    """Return in JSON what a model returns, with the forms of its tensors, which are added to `tensors` in this order.

    Objects that are no tensors, numbers, texts, or nests of them are None. Raises `UsageError` for a class that is
    not found by its name.
    """
    if isinstance(output, torch.Tensor):
        tensors.append(output)
        return {"shape": [*output.shape], "dtype": str(output.dtype).removeprefix("torch.")}
    if isinstance(output, str | bool | int | float):
        return {"value": output}
    if isinstance(output, dict):
        parts: Any = [[described_outputs(key, tensors), described_outputs(one, tensors)] for key, one in output.items()]
    elif isinstance(output, list | tuple):
        parts = [described_outputs(one, tensors) for one in output]
    elif is_dataclass(output) and not isinstance(output, type):
        parts = {one.name: described_outputs(getattr(output, one.name), tensors) for one in fields(output)}
    else:
        return {"value": None}
    name = f"{type(output).__module__}:{type(output).__qualname__}"
    if _class_named(name) is not type(output):
        raise UsageError(
            f"the model returns a {name}, which other stages of a pipeline do not find by its name",
            hint="define the class in a module, outside of functions",
        )
    return {"class": name, "parts": parts}


def outputs_of(form: Any, receive: Callable[[list[int], torch.dtype], torch.Tensor]) -> Any:
    """Return what `described_outputs` has described, with `receive(shape, dtype)` for each tensor in its order."""
    if "shape" in form:
        return receive(form["shape"], getattr(torch, form["dtype"]))
    if "value" in form:
        return form["value"]
    kind: Any = _class_named(form["class"])
    parts, has_fields = form["parts"], is_dataclass(kind)
    if issubclass(kind, dict):
        entries = {outputs_of(key, receive): outputs_of(one, receive) for key, one in parts}
        if has_fields:  # a model output of transformers
            return kind(**entries)
        made = kind.__new__(kind)
        made.update(entries)
        return made
    if issubclass(kind, list | tuple):
        items = [outputs_of(one, receive) for one in parts]
        return kind(*items) if hasattr(kind, "_fields") else kind(items)
    assert has_fields
    made = object.__new__(kind)
    for name, one in parts.items():
        object.__setattr__(made, name, outputs_of(one, receive))
    return made


def _class_named(name: str) -> type | None:
    """Return a class of a module that is there, None where there is none."""
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    return found if isinstance(found, type) else None
