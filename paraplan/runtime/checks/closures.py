"""What functions of a script keep from one call for the next: in closures, globals, and objects that they belong to."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Iterable, Iterator, MutableMapping
from typing import Any

from torch import nn

_LIBRARIES = frozenset({"torch", "paraplan", "numpy", "transformers", "accelerate", "peft", "diffusers", "timm"})
_DEEPEST = 4


def is_of_script(module: str | None) -> bool:
    """Whether what a module of this name defines is a script's own."""
    root = (module or "builtins").split(".")[0]
    return root == "__main__" or (root not in _LIBRARIES and root not in sys.stdlib_module_names)


class Around(MutableMapping[str, Any]):
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
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        yield from (name for name, cell in self._cells.items() if _is_filled(cell))
        yield from (name for name in self._names if name in self._globals)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _is_filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for one in code.co_consts:
        if isinstance(one, types.CodeType):
            yield from _names(one)


class FunctionState:
    """What `functions`, and what they call, keep between calls: `tables` by the names of their owners, and `modules`.

    Objects of libraries are left out.
    """

    def __init__(self, functions: Iterable[Any]) -> None:
        self.tables: list[tuple[str, MutableMapping[str, Any]]] = []
        self.modules: list[nn.Module] = []
        self._seen: set[int] = set()
        for one in functions:
            self._look(one, 0)

    def _look(self, value: Any, depth: int) -> None:
        if depth > _DEEPEST or id(value) in self._seen:
            return
        if isinstance(value, nn.Module):
            self.modules.append(value)
        elif isinstance(value, functools.partial):
            for one in (value.func, *value.args, *value.keywords.values()):
                self._look(one, depth)
        elif isinstance(value, types.MethodType):
            self._look(value.__self__, depth)
            self._look(value.__func__, depth)
        elif isinstance(value, types.FunctionType):
            self._look_around(value, depth)
        elif isinstance(value, types.SimpleNamespace) or (
            is_of_script(type(value).__module__) and not isinstance(value, type) and hasattr(value, "__dict__")
        ):
            self._seen.add(id(value))
            self.tables.append((type(value).__qualname__, vars(value)))
            self._look(vars(type(value)).get("__call__"), depth)

    def _look_around(self, function: types.FunctionType, depth: int) -> None:
        self._seen.add(id(function))
        around, is_own = Around(function), is_of_script(function.__module__)
        if is_own:
            self.tables.append((function.__qualname__, around))
        for one in around.values():
            if is_own or callable(one):  # a wrapper of ours around what is a script's
                self._look(one, depth + 1)
