"""Snapshots of all that forward passes and losses may write, and of modules' modes, put back after a trial."""

from __future__ import annotations

import functools
import sys
import types
from collections import deque
from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from paraplan.runtime.seeds import kept_python_numbers, kept_random_numbers
from paraplan.runtime.structure.weights import is_quantized
from paraplan.runtime.torch_private import BatchNorm, buffer_table, forward_hooks, submodules, version_of

LARGEST_STATE = 2**20
"""Elements: what is larger is not written, such as weights that were frozen for being large."""
MODULE_FIELDS = frozenset(vars(nn.Module()))
"""Fields of every module: parameters, buffers, modules and hooks."""
_LIBRARIES = frozenset({"torch", "paraplan", "numpy", "transformers", "accelerate", "peft", "diffusers", "timm"})
_DEEPEST = 4


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return what a forward pass of `model` may write, by name: buffers, and frozen parameters but large ones.

    Under ZeRO those are left out: their storage comes and goes. So are quantized ones, which code only reads: torchao
    makes a copy of one by quantizing it anew, and what is put back would be another.
    """
    found = dict(model.named_buffers())
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        return found
    frozen = {name: one for name, one in model.named_parameters() if not one.requires_grad}
    return found | {name: one for name, one in frozen.items() if one.numel() <= LARGEST_STATE and not is_quantized(one)}


@contextmanager
def modes(*models: nn.Module, training: bool | None, batch_norm_training: bool = True) -> Iterator[None]:
    """Put all modules of `models` into training or evaluation, in this context; None leaves them as they are.

    Without `batch_norm_training` layers that need more than one entry go by their running statistics; those that have
    none scale and shift alone.
    """
    before = {module: module.training for model in models for module in model.modules()}
    bare = [one for one in before if isinstance(one, BatchNorm) and one.running_mean is None]
    for module in before:
        if training is not None:
            module.training = training
        if isinstance(module, BatchNorm) and not batch_norm_training:
            module.training = False
    if not batch_norm_training:
        for module in bare:
            like = next((one.detach() for one in module.parameters()), torch.zeros(module.num_features))
            module.running_mean, module.running_var = torch.zeros_like(like), torch.ones_like(like)
    try:
        yield
    finally:
        for module, was_training in before.items():
            module.training = was_training
        for module in bare:
            module.running_mean = module.running_var = None


@contextmanager
def nothing_changed(*models: nn.Module, functions: Sequence[Any] = ()) -> Iterator[None]:
    """Put what a forward pass and `functions` write, and random numbers, back at the end of this context."""
    snapshot = Snapshot(*models, functions=functions)
    try:
        yield
    finally:
        snapshot.put_back()


class Snapshot:
    """The state of some models, of what functions of the script keep, and of the generators of random numbers.

    Of models these are buffers, small frozen parameters, submodules, forward hooks, and plain attributes: tensors,
    numbers, lists and tables, but for modules that torch and paraplan define themselves. Of functions (`functions`, the
    forward passes and the hooks of modules, and what they call) closures, globals, and objects that they belong to.
    """

    def __init__(self, *models: nn.Module, functions: Iterable[Any] = ()) -> None:
        self._tables: list[_Table] = []
        self._seen: set[int] = set()
        self._beside: list[nn.Module] = []  # modules that functions hold
        self._hooks: list[tuple[dict[int, Any], set[int]]] = []
        self._state = [(one, one.detach().clone()) for model in models for one in state_of(model).values()]
        for model in models:
            self._add_modules(model, "")
        for function in functions:
            self._follow(function, 0)
        for one in self._beside:
            if id(one) not in self._seen:
                self._add_modules(one, type(one).__name__)
                self._state += [(held, held.detach().clone()) for held in one.buffers()]
        devices = {one.device for model in models for one in model.parameters()}
        self._put_random_numbers_back = kept_random_numbers(devices)
        self._put_python_numbers_back = kept_python_numbers()

    def written(self) -> list[str]:
        """Return the names of attributes that were set or written in since."""
        return [name for one in self._tables for name in one.written()]

    def put_back(self) -> None:
        """Make everything what it was."""
        self.put_attributes_back()
        for held, value in self._state:
            held.data.copy_(value)
        self._put_random_numbers_back()
        self._put_python_numbers_back()

    def put_attributes_back(self) -> None:
        """Make attributes, hooks and submodules what they were, and what functions keep."""
        for one in self._tables:
            one.put_back()
        for hooks, before in self._hooks:
            for number in hooks.keys() - before:  # what a pass took away stays so, as torch's lazy modules do
                del hooks[number]

    def _add_modules(self, model: nn.Module, prefix: str) -> None:
        for name, module in model.named_modules():
            if id(module) in self._seen:
                continue
            self._seen.add(id(module))
            kind: type = type(module)
            if _is_of_users(kind):
                self._tables.append(_Table(f"{prefix}.{name}", vars(module), MODULE_FIELDS))
            buffers = f"{prefix}.{name}" if prefix else None  # those of models are looked at for themselves
            self._tables += [_Table(buffers, buffer_table(module)), _Table(None, submodules(module))]
            for hooks in forward_hooks(module):  # without these an attribute that says they are there is put back
                self._hooks.append((hooks, set(hooks)))
                for hook in hooks.values():
                    self._follow(hook, 0)
            self._follow(vars(module).get("forward", type(module).forward), 0)

    def _follow(self, value: Any, depth: int) -> None:
        """Add what a function, or an object that is called, keeps, and what it calls; libraries are left out."""
        if depth > _DEEPEST or id(value) in self._seen:
            return
        if isinstance(value, nn.Module):
            self._beside.append(value)
        elif isinstance(value, functools.partial):
            for one in (value.func, *value.args, *value.keywords.values()):
                self._follow(one, depth)
        elif isinstance(value, types.MethodType):
            self._follow(value.__self__, depth)
            self._follow(value.__func__, depth)
        elif isinstance(value, types.FunctionType):
            self._seen.add(id(value))
            around, is_own = _Around(value), _is_of_script(value.__module__)
            if is_own:
                self._tables.append(_Table(value.__qualname__, around))
            for one in around.values():
                if is_own or callable(one):  # a wrapper of ours around what is a script's
                    self._follow(one, depth + 1)
        elif isinstance(value, types.SimpleNamespace) or (
            _is_of_script(type(value).__module__) and not isinstance(value, type) and hasattr(value, "__dict__")
        ):
            self._seen.add(id(value))
            self._tables.append(_Table(type(value).__qualname__, vars(value)))
            self._follow(vars(type(value)).get("__call__"), depth)


@functools.cache
def _is_of_script(module: str | None) -> bool:
    root = (module or "builtins").split(".")[0]
    return root == "__main__" or (root not in _LIBRARIES and root not in sys.stdlib_module_names)


@functools.lru_cache
def _is_of_users(kind: type) -> bool:
    """Whether code outside of torch and paraplan has a part in the class of a module; FSDP derives classes."""
    return any(base.__module__.split(".")[0] not in ("torch", "paraplan", "builtins") for base in kind.__mro__)


class _Around(MutableMapping[str, Any]):
    """The values that a function reads from around it, by their names: cells of its closure, and globals."""

    def __init__(self, function: types.FunctionType) -> None:
        self._cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        self._globals = function.__globals__
        self._names = [name for name in _names(function.__code__) if name in self._globals]

    def __getitem__(self, name: str) -> Any:
        return self._cells[name].cell_contents if name in self._cells else self._globals[name]

    def __setitem__(self, name: str, value: Any) -> None:
        if name in self._cells:
            self._cells[name].cell_contents = value
        else:
            self._globals[name] = value

    def __delitem__(self, name: str) -> None:
        del self._cells[name].cell_contents

    def __iter__(self) -> Iterator[str]:
        yield from (name for name, cell in self._cells.items() if cell != types.CellType())  # those that are filled
        yield from (name for name in self._names if name in self._globals)

    def __len__(self) -> int:
        return sum(1 for _ in self)


@functools.lru_cache(1024)
def _names(code: types.CodeType) -> tuple[str, ...]:
    within = [name for one in code.co_consts if isinstance(one, types.CodeType) for name in _names(one)]
    return (*code.co_names, *within)


class _Table:
    """The values behind the names of one object, or around one function, and the contents of lists and tables of these.

    Without a `name` nothing is told of it. `fields` are left out.
    """

    def __init__(self, name: str | None, table: MutableMapping[str, Any], fields: frozenset[str] = frozenset()) -> None:
        self._name = name
        self._table = table
        self._fields = fields
        self._held = self._now()
        self._inner = {key: (one, _entries(one)) for key, one in self._held.items() if isinstance(one, _CONTAINERS)}
        self._tensors = [
            (key, one, version_of(one), one.detach().clone())
            for key, held in (self._held.items() if name is not None else ())
            for one in _small_tensors(held)
        ]

    def _now(self) -> dict[str, Any]:
        return {key: value for key, value in self._table.items() if key not in self._fields}

    def written(self) -> list[str]:
        if self._name is None:
            return []
        keys = [key for key, value in self._now().items() if not _same([value], [self._held.get(key, self)])]
        keys += [key for key, (one, entries) in self._inner.items() if not _same(_entries(one), entries)]
        keys += [key for key, one, version, value in self._tensors if _is_written(one, version, value)]
        return [".".join(filter(None, [*self._name.split("."), key])) for key in keys]

    def put_back(self) -> None:
        now = self._now()
        for key in now.keys() - self._held.keys():
            del self._table[key]
        for key, value in self._held.items():
            if now.get(key, self) is not value:
                self._table[key] = value
        if self._name is None and list(self._table) != list(self._held):  # modules run in their order
            self._table.clear()
            self._table.update(self._held)
        for one, entries in self._inner.values():
            if not _same(_entries(one), entries):  # tables may refuse to be written, as diffusers' configurations do
                one.clear()
                one.update(entries) if isinstance(one, dict) else one.extend(entries)
        for _, tensor, version, value in self._tensors:
            if _is_written(tensor, version, value):
                tensor.data.copy_(value)


_CONTAINERS = (list, deque, dict)


def _entries(container: Any) -> list[Any]:
    return list(container.items() if isinstance(container, dict) else container)


def _small_tensors(held: Any) -> list[torch.Tensor]:
    """Return the tensor that an attribute is, or those of its list or table; none of more elements than are kept."""
    entries = held.values() if isinstance(held, dict) else held if isinstance(held, list | deque) else (held,)
    found = [one for one in entries if isinstance(one, torch.Tensor) and not one.is_inference()]
    return found if sum(one.numel() for one in found) <= LARGEST_STATE else []


def _is_written(tensor: torch.Tensor, version: int, value: torch.Tensor) -> bool:
    """Whether a tensor was written in since; torch does not count writes to `tensor.data`."""
    if version_of(tensor) != version:
        return True
    has_values = type(tensor) is torch.Tensor and tensor.layout is torch.strided and not tensor.is_meta
    return has_values and not torch.equal(tensor, value)


def _same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether two lists have the same entries, equal numbers or text, or pairs of these."""

    def are_one(one: Any, other: Any) -> bool:
        if isinstance(one, tuple) and isinstance(other, tuple):
            return one is other or _same(one, other)
        return one is other or (isinstance(one, int | float | str) and type(one) is type(other) and one == other)

    return len(some) == len(others) and all(map(are_one, some, others))
