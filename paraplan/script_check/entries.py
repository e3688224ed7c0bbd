"""Data that enters a script, noted or replaced: from its data loaders, and as arrays of NumPy in its models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from paraplan.script_check.sources import Sources, is_random_kind, place_of_caller
from paraplan.script_check.torch_private import around_arrays, around_loaders


def follow_loaders(sources: Sources) -> None:
    """Make every data loader of this process one that tells what it gives, and where it ends."""
    around_loaders(lambda plain: lambda loader: _Followed(plain(loader), sources))


def follow_arrays(sources: Sources) -> None:
    """Follow numbers that models have from NumPy, as masks: these are drawn as those are that torch draws."""

    def make(plain: Callable[..., Any]) -> Callable[..., Any]:
        def from_numpy(array: Any) -> torch.Tensor:
            result: torch.Tensor = plain(array)
            is_drawn = sources.is_of_model and is_random_kind(result)
            return sources.draw(f"{place_of_caller()} from_numpy", result) if is_drawn else result

        return from_numpy

    around_arrays(make)


class _Followed:
    """An iterator of a data loader, as torch's own beside that."""

    def __init__(self, batches: Any, sources: Sources) -> None:
        self._batches, self._sources = batches, sources

    def __iter__(self) -> _Followed:
        return self

    def __next__(self) -> Any:
        sources = self._sources
        is_watching = sources.is_watching
        name = f"{place_of_caller()} next"
        place = (name, len(sources.readings[name]))
        if is_watching and sources.replay is not None and sources.replay.ends(place):
            sources.read(name, None, is_end=True)
            raise StopIteration
        try:
            with sources.inside():
                batch = next(self._batches)
        except StopIteration:
            if is_watching:
                sources.read(name, None, is_end=True)
            raise
        return sources.read(name, batch) if is_watching else batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)

    def __len__(self) -> int:
        return len(self._batches)
