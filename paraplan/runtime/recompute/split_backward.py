"""Running a function again for a backward pass that is taken in halves (the zero-bubble schedule).

Torch's checkpoint keeps what it has computed again for one call of autograd, and gives out each tensor once. The first
half of a backward pass is one such call, and the second half is one for each group of parameters; both read the same
tensors. Here what was computed again stays until the graph that reads it has gone, as it would without recompute.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch

from paraplan.runtime.seeds import kept_random_numbers
from paraplan.runtime.torch_private import pytree, tensors_in


class _CompleteError(Exception):
    """Ends a second run at the last tensor that the first one saved."""


class _Place:
    """Stands in the graph for a tensor that an operation saved, and holds it once it was computed again."""

    def __init__(self, again: _Again) -> None:
        self.again = again
        self.value: torch.Tensor | None = None


class _Again:
    """A function that is to run again where a tensor that it saved is read first."""

    def __init__(self, run: Callable[[], object]) -> None:
        self._run: Callable[[], object] | None = run
        self._places: list[weakref.ref[_Place]] = []

    def keep_place(self, _: torch.Tensor) -> _Place:
        """Return what stands for a saved tensor, which is let go."""
        place = _Place(self)
        self._places.append(weakref.ref(place))
        return place

    def value_of(self, place: _Place) -> torch.Tensor:
        """Return the tensor of `place`."""
        if place.value is None:
            self._fill()
        assert place.value is not None, "a second run saved fewer tensors than the first"
        return place.value

    def _fill(self) -> None:
        number = 0

        def fill(saved: torch.Tensor) -> None:
            nonlocal number
            place = self._places[number]()
            number += 1
            if place is not None:
                place.value = saved.detach()
            if number == len(self._places):
                raise _CompleteError

        run, self._run = self._run, None
        assert run is not None
        try:
            with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(fill, _read_never):
                run()
        except _CompleteError:
            pass


def _read_never(_: object) -> torch.Tensor:
    raise AssertionError("the graph of a second run is not used")


def checkpoint_for_split_backward(
    function: Callable[..., Any],
    *args: Any,
    first: AbstractContextManager[Any] | None = None,
    around: Callable[[], AbstractContextManager[None]] | None = None,
) -> Any:
    """Return `function(*args)`, of which the backward pass keeps `args` and computes the rest again, once.

    The first run is in the context `first`. The second has its random numbers and its autocast, and runs in the context
    that `around` makes.
    """
    if not torch.is_grad_enabled():
        return function(*args)
    devices = {leaf.device for leaf in tensors_in(args)}
    gpus = sorted({device.index for device in devices if device.type == "cuda"})
    put_back = kept_random_numbers(devices)
    autocasts = [_autocast(kind) for kind in sorted({device.type for device in devices})]
    kept = pytree.tree_map_only(torch.Tensor, lambda one: one.detach().requires_grad_(one.requires_grad), args)

    def run() -> None:
        with ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(devices=gpus))
            put_back()
            for enter in autocasts:
                enter(stack)
            if around is not None:
                stack.enter_context(around())
            function(*kept)

    again = _Again(run)
    hooks = torch.autograd.graph.saved_tensors_hooks(again.keep_place, lambda place: place.again.value_of(place))
    with hooks, first or nullcontext():
        return function(*args)


def _autocast(device: str) -> Callable[[ExitStack], None]:
    if not torch.amp.is_autocast_available(device):
        return lambda _: None
    enabled, dtype = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    is_cached = torch.is_autocast_cache_enabled()

    def enter(stack: ExitStack) -> None:
        stack.enter_context(torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=is_cached))

    return enter
