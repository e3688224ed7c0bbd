"""Layers of a model outside of its blocks: its embedding and its head, and who computes with their weights."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from paraplan.errors import UsageError
from paraplan.runtime.data.batches import call_model
from paraplan.runtime.structure.blocks import modules_around
from paraplan.runtime.structure.model_structure import ModelStructure
from paraplan.runtime.torch_private import FakeTensor, TorchDispatchMode, pytree, storage_key


def large_ends(structure: ModelStructure, experts: Collection[nn.Parameter] = (), *, ep: int = 1) -> tuple[str, ...]:
    """Return the names of embeddings and linear layers around the blocks, each no smaller than a rank's block.

    A rank has 1 / `ep` of the `experts` of a block, and all else of it. Only layers are taken whose weights nothing
    else computes with, so that they can be gathered for their own passes alone. None where the model does not run
    without values.
    """
    model = structure.model
    blocks = structure.blocks_of(model)
    if not blocks:
        return ()
    around = {id(module) for module in modules_around(model, blocks)}
    shared = {id(parameter) for parameter in experts}
    size = min(sum(one.numel() // (ep if id(one) in shared else 1) for one in block.parameters()) for block in blocks)
    holders: dict[int, int] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            holders[id(parameter)] = holders.get(id(parameter), 0) + 1
    found = [
        name
        for name, module in model.named_modules()
        if id(module) in around and isinstance(module, (nn.Embedding, nn.Linear)) and module.weight.numel() >= size > 0
        if all(holders[id(parameter)] == 1 for parameter in module.parameters())
    ]
    try:
        elsewhere = layers_read_elsewhere(structure, found) if found else frozenset()
    except UsageError:
        return ()
    return tuple(name for name in found if name not in elsewhere)


def layers_read_elsewhere(structure: ModelStructure, names: Sequence[str]) -> frozenset[str]:
    """Return those of the layers `names` with whose parameters code computes outside of their own forward passes."""
    meta_model = structure.meta_model
    layers = {name: meta_model.get_submodule(name) for name in names}

    def attempt(tried: object, _: object) -> frozenset[str]:
        held = [(name, one) for name, layer in layers.items() for one in layer.parameters()]
        found = set[str]()
        mode = ParameterReads(held, found)
        with ExitStack() as undo:
            for layer in layers.values():
                undo.callback(layer.register_forward_pre_hook(mode.enter, prepend=True).remove)
                undo.callback(layer.register_forward_hook(mode.leave, always_call=True).remove)
            with torch.no_grad(), mode:
                call_model(meta_model, tried)
        return frozenset(found)

    return structure.run(attempt)


class ParameterReads(TorchDispatchMode):
    """Notes in `found` the names of parameters, or views of them, that are computed with while no layer is entered."""

    def __init__(self, parameters: Iterable[tuple[str, nn.Parameter]], found: set[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._found = found
        self._num_inside = 0
        self._names: dict[Any, set[str]] = {}
        for name, parameter in parameters:
            if not isinstance(parameter, DTensor):
                self._names.setdefault(storage_key(parameter), set()).add(name)

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run `func`; look for the parameters among its operands."""
        for leaf in () if self._num_inside else pytree.tree_leaves((args, kwargs)):
            if isinstance(leaf, DTensor):
                self._found.add("a sharded weight")
            elif type(leaf) in (torch.Tensor, nn.Parameter, FakeTensor):
                self._found |= self._names.get(storage_key(leaf), set())
        return func(*args, **(kwargs or {}))

    def enter(self, *_: object) -> None:
        """Take note of a layer that begins."""
        self._num_inside += 1

    def leave(self, *_: object) -> None:
        """Take note of a layer that ends."""
        self._num_inside -= 1
