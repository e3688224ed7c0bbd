"""What forward passes write into modules beside buffers: means, counters, lists of what was seen, hooks, submodules."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable, Iterator, MutableMapping
from typing import Any

import torch
from torch import nn

from paraplan.runtime.checks.closures import FunctionState
from paraplan.runtime.torch_private import buffer_table, forward_hooks, submodules, version_of

LARGEST_STATE = 2**20
"""Elements: what is larger is not written, such as weights that were frozen for being large."""
_FIELDS = frozenset(vars(nn.Module()))
"""What every module has: parameters, buffers, modules and hooks."""


class Attributes:
    """Plain attributes of the modules of some models as they are now: tensors, numbers, lists and tables of them.

    Those of modules that torch and paraplan define themselves are left out. `largest` is of tensors, in elements: what
    is larger is not copied, and stays as it is written.

    So is what functions of the script keep: `functions`, the forward passes of its modules, and their hooks.

    Forward hooks and submodules of all modules are put back too. Often an attribute says that they are there, and
    without it the next pass makes them again: transformers' hooks would record every layer once more.
    """

    def __init__(self, *models: nn.Module, largest: int, functions: Iterable[Any] = ()) -> None:
        state = FunctionState([*functions, *(one for model in models for one in _functions_of(model))])
        held = {module for model in models for module in model.modules()}
        beside = [one for one in state.modules if one not in held]
        models = (*models, *beside)
        named = [(name, module) for model in models for name, module in model.named_modules()]
        self._kept = [_Kept(name, vars(module), largest) for name, module in named if _is_of_users(module)]
        self._kept += [_Kept(name, table, largest) for name, table in state.tables]
        of_beside = [(type(one).__name__, part) for one in beside for part in one.modules()]
        self._kept += [_Kept(name, buffer_table(part), largest) for name, part in of_beside]
        self._hooks = [(hooks, set(hooks)) for _, module in named for hooks in forward_hooks(module)]
        self._modules = [(table, dict(table)) for table in (submodules(module) for _, module in named)]

    def written(self) -> list[str]:
        """Return the names of those that were set or written in since."""
        return [name for one in self._kept for name in one.written()]

    def put_back(self) -> None:
        """Make them what they were."""
        for one in self._kept:
            one.put_back()
        for hooks, before in self._hooks:
            for number in hooks.keys() - before:  # what a pass took away stays so, as torch's lazy modules do
                del hooks[number]
        for table, content in self._modules:
            _put_back_table(table, content)


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
        if key in _FIELDS or key == "training":
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


def _is_of_users(module: nn.Module) -> bool:
    """Whether code outside of torch and paraplan has a part in the class of a module; FSDP derives classes."""
    return any(base.__module__.split(".")[0] not in ("torch", "paraplan", "builtins") for base in type(module).__mro__)


def _functions_of(model: nn.Module) -> Iterator[Any]:
    """Yield what a forward pass of `model` calls that a script may have written."""
    for module in model.modules():
        yield vars(module).get("forward", type(module).forward)
        for hooks in forward_hooks(module):
            yield from hooks.values()


class _Kept:
    """The attributes of one object, or what a function reads from around it."""

    def __init__(self, name: str, table: MutableMapping[str, Any], largest: int) -> None:
        self._name = name
        self._table = table
        self._held = {key: value for key, value in table.items() if key not in _FIELDS}
        self._tensors = [
            (key, one, version_of(one), one.detach().clone())
            for key, held in self._held.items()
            for one in _small_tensors(held, largest)
        ]
        self._lists = {key: (one, list(one)) for key, one in self._held.items() if isinstance(one, list | deque)}
        self._tables = {key: (one, dict(one)) for key, one in self._held.items() if isinstance(one, dict)}

    def written(self) -> list[str]:
        now = {key: value for key, value in self._table.items() if key not in _FIELDS}
        keys = [key for key, value in now.items() if key not in self._held or not _same(value, self._held[key])]
        keys += [key for key, one, version, value in self._tensors if _is_written(one, version, value)]
        keys += [key for key, (one, entries) in self._lists.items() if not _same_all(one, entries)]
        keys += [key for key, (one, content) in self._tables.items() if not _same_table(one, content)]
        return [f"{self._name}.{key}".lstrip(".") for key in keys]

    def put_back(self) -> None:
        for key in self._table.keys() - self._held.keys() - _FIELDS:
            del self._table[key]
        for key, value in self._held.items():
            if self._table.get(key, self) is not value:
                self._table[key] = value
        for _, tensor, version, value in self._tensors:
            if _is_written(tensor, version, value):
                tensor.data.copy_(value)
        for one, entries in self._lists.values():
            if not _same_all(one, entries):
                one.clear()
                one.extend(entries)
        for table, content in self._tables.values():
            _put_back_table(table, content)


def _small_tensors(held: Any, largest: int) -> list[torch.Tensor]:
    """Return the tensor that an attribute is, or those of its list or table; none of more elements than `largest`."""
    entries = held.values() if isinstance(held, dict) else held if isinstance(held, list | deque) else (held,)
    found = [one for one in entries if isinstance(one, torch.Tensor) and not one.is_inference()]
    return found if sum(one.numel() for one in found) <= largest else []


def _is_written(tensor: torch.Tensor, version: int, value: torch.Tensor) -> bool:
    """Whether a tensor was written in since; torch does not count writes to `tensor.data`."""
    if version_of(tensor) != version:
        return True
    has_values = type(tensor) is torch.Tensor and tensor.layout is torch.strided and not tensor.is_meta
    return has_values and not torch.equal(tensor, value)


def _same(one: Any, other: Any) -> bool:
    """Whether two values are one, or equal numbers or text."""
    return one is other or (isinstance(one, int | float | str) and type(one) is type(other) and one == other)


def _same_all(some: Iterable[Any], others: Iterable[Any]) -> bool:
    some, others = list(some), list(others)
    return len(some) == len(others) and all(map(_same, some, others))


def _same_table(one: dict[Any, Any], other: dict[Any, Any]) -> bool:
    return list(one) == list(other) and _same_all(one.values(), other.values())


def _put_back_table(table: dict[Any, Any], content: dict[Any, Any]) -> None:
    if not _same_table(table, content):  # tables may refuse to be written, as diffusers' configurations do
        table.clear()
        table.update(content)
