"""Values in a store, signed with the job's token, and logs of them that nodes append to."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

from torch.distributed import DistNetworkError, Store  # type: ignore[attr-defined]  # re-exported from C++ unmarked

from paraplan.launch.nodes.endpoint import run_interruptibly
from paraplan.launch.nodes.job_token import Seal

ResultT = TypeVar("ResultT")

_PREFIX = "paraplan"
_SILENCE_S = 60.0  # how long the machine with the store may say nothing before it is taken for lost
_MOST_READ = 4096  # at once: who knows no token can write a number, if nothing else


class SealedValues:
    """Values under names in a store, signed with the job's token."""

    def __init__(self, store: Store, seal: Seal) -> None:
        self._store, self._seal = store, seal

    def set(self, name: str, value: object) -> None:
        """Write a value."""
        text = self._seal.close(name, value)
        self._run(lambda: self._store.set(f"{_PREFIX}/{name}", text))

    def get(self, names: Sequence[str]) -> list[Any]:
        """Return the values of these names; waits for those that are not there."""
        keys = [f"{_PREFIX}/{name}" for name in names]
        if self._store.has_extended_api():  # type: ignore[attr-defined]  # torch's text of types lacks it
            texts = self._run(lambda: self._store.multi_get(keys)) if keys else []
        else:  # etcd's store
            texts = [self._run(partial(self._store.get, key)) for key in keys]
        return [self._seal.open(name, text) for name, text in zip(names, texts, strict=True)]

    def has(self, *names: str) -> bool:
        """Whether all of these are there."""
        return bool(self._run(lambda: self._store.check([f"{_PREFIX}/{name}" for name in names])))

    def claim(self, name: str, value: object) -> Any:
        """Write a value where there is none; return what is then there."""
        text = self._seal.close(name, value)
        return self._seal.open(name, self._run(lambda: self._store.compare_set(f"{_PREFIX}/{name}", "", text)))

    def add(self, name: str, number: int) -> int:
        """Add to a number, which is not signed; return it."""
        return int(self._run(lambda: self._store.add(f"{_PREFIX}/{name}", number)))

    def wait(self, name: str, patience: timedelta) -> bool:
        """Whether a value is there within this time."""
        try:
            self._run(lambda: self._store.wait([f"{_PREFIX}/{name}"], patience))
        except (RuntimeError, LookupError):  # LookupError: etcd's store
            return self.has(name)
        return True

    def delete(self, name: str) -> None:
        """Delete a value, where the store can."""
        with contextlib.suppress(RuntimeError, NotImplementedError):  # etcd's store deletes nothing
            self._run(lambda: self._store.delete_key(f"{_PREFIX}/{name}"))

    def _run(self, call: Callable[[], ResultT]) -> ResultT:
        try:
            return run_interruptibly(call, timeout_s=_SILENCE_S)
        except TimeoutError as error:
            raise DistNetworkError(f"the store says nothing: {error}") from error


class ValueLog:
    """Values that nodes append under one name. To see that there is nothing new is one call of the store."""

    def __init__(self, values: SealedValues, name: str) -> None:
        self._values, self._name = values, name
        self._num_seen = 0
        self._unwritten: list[int] = []

    def append(self, value: object) -> int:
        """Return the number of what was appended."""
        number = self._values.add(self._name, 1)
        self._values.set(f"{self._name}/{number}", value)
        return number

    def read(self) -> list[tuple[int, Any]]:
        """Return what is new, with its number. What a node is still writing comes later."""
        last = min(self._values.add(self._name, 0), self._num_seen + _MOST_READ)
        numbers = [*self._unwritten, *range(self._num_seen + 1, last + 1)]
        self._num_seen = max(self._num_seen, last)
        names = {number: f"{self._name}/{number}" for number in numbers}
        if names and not self._values.has(*names.values()):
            names = {number: name for number, name in names.items() if self._values.has(name)}
        self._unwritten = [number for number in numbers if number not in names][:_MOST_READ]
        return [*zip(names, self._values.get([*names.values()]), strict=True)]
