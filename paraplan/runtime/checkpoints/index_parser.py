"""The index of a checkpoint as plain data: its pickle is read opcode by opcode, and nothing that it names is called.

torch.distributed.checkpoint pickles the index. Python's own unpickler imports and calls what a pickle names, so here
the few opcodes that such an index is made of are carried out by hand: names stay names, and objects become records of
the name, the arguments and the state that the pickle gives.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


class IndexSyntaxError(Exception):
    """A pickle that cannot be the index of a checkpoint; the text says why."""


@dataclass(frozen=True)
class Name:
    """A class or another global that the pickle names."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(eq=False)
class Made:
    """An object that the pickle makes: of `name`, called with `arguments`, then given `state`."""

    name: Name
    arguments: tuple[Any, ...]
    state: Any = None


_Push = Callable[[Any], Any]
_CONSTANTS: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_DICT": dict,
    "EMPTY_LIST": list,
    "EMPTY_TUPLE": tuple,
}
_LITERALS = {"BININT", "BININT1", "BININT2", "LONG1", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_STORES, _LOADS = {"BINPUT", "LONG_BINPUT"}, {"BINGET", "LONG_BINGET"}
_MARK: Any = object()


class _Machine:
    """The stack and the memo of one pickle. `knows` says which names an index may have."""

    def __init__(self, knows: Callable[[Name], bool]) -> None:
        self.stack: list[Any] = []
        self._memo: dict[int, Any] = {}
        self._knows = knows
        self._actions: dict[str, Callable[[], None]] = {
            "SETITEM": lambda: self._set_items([self.stack.pop(-2), self.stack.pop()]),
            "SETITEMS": lambda: self._set_items(self._marked()),
            "APPEND": lambda: self._extend([self.stack.pop()]),
            "APPENDS": lambda: self._extend(self._marked()),
            "TUPLE": lambda: self.stack.append(tuple(self._marked())),
            "STACK_GLOBAL": lambda: self._name(self.stack.pop(-2), self.stack.pop()),
            "NEWOBJ": self._make,
            "REDUCE": self._make,
            "BUILD": self._build,
        }

    def run(self, opcode: str, argument: Any) -> None:
        """Carry out one opcode."""
        if opcode in _LITERALS:
            self.stack.append(argument)
        elif opcode in _CONSTANTS:
            self.stack.append(_CONSTANTS[opcode]())
        elif opcode in _TUPLES:
            count = _TUPLES[opcode]
            if len(self.stack) < count:
                raise IndexSyntaxError("its stack is empty")
            self.stack[-count:] = [tuple(self.stack[-count:])]
        elif opcode == "MARK":
            self.stack.append(_MARK)
        elif opcode == "MEMOIZE":
            self._memo[len(self._memo)] = self.stack[-1]
        elif opcode in _STORES:
            self._memo[argument] = self.stack[-1]
        elif opcode in _LOADS:
            self.stack.append(self._memo[argument])
        elif opcode == "GLOBAL":
            self._name(*argument.split(" ", 1))
        elif opcode in self._actions:
            self._actions[opcode]()
        elif opcode not in ("PROTO", "FRAME"):
            raise IndexSyntaxError(f"it has the opcode {opcode}, which no index of a checkpoint needs")

    def _marked(self) -> list[Any]:
        """Take what lies above the last mark."""
        start = len(self.stack) - 1
        while start >= 0 and self.stack[start] is not _MARK:
            start -= 1
        if start < 0:
            raise IndexSyntaxError("a mark is missing")
        items = self.stack[start + 1 :]
        del self.stack[start:]
        return items

    def _set_items(self, items: list[Any]) -> None:
        held, keys, values = self.stack[-1], items[::2], items[1::2]
        # Only these are hashed: a nest of tuples could be too deep for that.
        if type(held) is not dict or len(keys) != len(values) or any(type(key) not in (str, Made) for key in keys):
            raise IndexSyntaxError("a dictionary has keys that are no texts")
        held.update(zip(keys, values, strict=True))

    def _extend(self, items: list[Any]) -> None:
        if type(self.stack[-1]) is not list:
            raise IndexSyntaxError("items are appended to what is no list")
        self.stack[-1].extend(items)

    def _name(self, module: Any, name: Any) -> None:
        found = Name(module, name) if type(module) is str and type(name) is str else None
        if found is None or not self._knows(found):
            raise IndexSyntaxError(f"it names {str(found)[:200]}, which no index of a checkpoint needs")
        self.stack.append(found)

    def _make(self) -> None:
        arguments, name = self.stack.pop(), self.stack.pop()
        if type(name) is not Name or type(arguments) is not tuple:
            raise IndexSyntaxError("it calls what is no class")
        is_dictionary = name.name == "OrderedDict" and not arguments
        self.stack.append({} if is_dictionary else Made(name, arguments))

    def _build(self) -> None:
        state, made = self.stack.pop(), self.stack[-1]
        if type(made) is not Made or made.state is not None:
            raise IndexSyntaxError("it gives a state to what takes none")
        made.state = state


def parse_index(data: bytes, *, knows: Callable[[Name], bool]) -> Any:
    """Return what the pickle `data` holds: dicts, lists, tuples, texts, numbers, `Name` and `Made`.

    Raises `IndexSyntaxError` for a pickle that is cut off, or has opcodes or names that no index needs.
    """
    machine = _Machine(knows)
    try:
        for opcode, argument, _ in pickletools.genops(data):
            if opcode.name == "STOP":
                break
            machine.run(opcode.name, argument)
        (found,) = machine.stack
    except (ValueError, IndexError, KeyError, TypeError, OverflowError) as error:
        raise IndexSyntaxError(f"it is damaged: {str(error)[:200]}") from error
    return found
