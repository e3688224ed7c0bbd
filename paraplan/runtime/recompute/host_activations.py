"""Activations that wait in the host's memory between the forward and the backward pass of a block.

What autograd keeps of a block is copied to pinned memory beside compute, and comes back while the block behind it is in
its backward pass, as in torchtune's and TRL's activation offloading. At most two blocks' activations are on the GPU: of
the block at work, and of the one whose copies are on their way.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor

from paraplan.runtime.structure.forwards import set_forward
from paraplan.runtime.torch_private import FakeTensor, pytree, storage_key, version_of

_LEAST_BYTES = 1024
"""The least size of a tensor that moves: for a smaller one a copy takes longer than it is worth."""


def offload_activations(blocks: Sequence[nn.Module], device: torch.device) -> None:
    """Have what autograd keeps of `blocks`, but for their parameters, wait in the host's memory.

    Under recompute that is what their forward passes are run again from.
    """
    copies = _Copies(device)
    for block in blocks:
        _offload(block, copies)


def _offload(block: nn.Module, copies: _Copies) -> None:
    inner = block.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return inner(*args, **kwargs)
        # What blocks are given beside their hidden state (positions, masks) is there once for all of them.
        shared = [one for one in pytree.tree_leaves((args, kwargs)) if _is_plain(one) and not one.requires_grad]
        group = _Group(copies, block, {storage_key(one) for one in shared})
        with saved_tensors_hooks(group.pack, _fetched):
            output = inner(*args, **kwargs)
        copies.end(group)
        return output

    set_forward(block, forward)


class _Copies:
    """The copies of one device: a stream of their own, and the block that was the last in a forward pass."""

    def __init__(self, device: torch.device) -> None:
        self.is_on_gpu = device.type == "cuda"
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        self._last: _Group | None = None

    def beside_compute(self) -> AbstractContextManager[Any]:
        """Return a context in which what runs follows what compute has begun, and waits for nothing later."""
        if not self.is_on_gpu:
            return nullcontext()
        self._stream = self._stream or torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        return torch.cuda.stream(self._stream)

    def event(self) -> torch.cuda.Event | None:
        """Return that all copies so far are made; compute waits for it by `wait`."""
        if self._stream is None:
            return None
        made = torch.cuda.Event()  # type: ignore[no-untyped-call]
        made.record(self._stream)
        return made

    def wait(self, event: torch.cuda.Event | None) -> None:
        """Have compute go on once `event` has been."""
        if event is not None:
            torch.cuda.current_stream(self._device).wait_event(event)

    def end(self, group: _Group) -> None:
        """Take note that a block's forward pass is over: what the one before it has kept is no longer on the GPU."""
        before, self._last = self._last, group
        group.finish(self.event())
        if before is not None:
            group.before = weakref.ref(before)
            before.let_go()


class _Group:
    """The tensors that autograd keeps of one forward pass of a block; `before` is that of the block before it."""

    def __init__(self, copies: _Copies, block: nn.Module, stays: set[int]) -> None:
        self.copies = copies
        self.before: weakref.ref[_Group] | None = None
        self.copied: torch.cuda.Event | None = None
        parameters = list(block.parameters())
        self._stays = stays | {storage_key(one) for one in parameters if not isinstance(one, DTensor)}
        # Shards, in whose place a part of the block has the whole once it runs.
        self._gathered = [
            (module, name)
            for module in (block.modules() if any(isinstance(one, DTensor) for one in parameters) else ())
            for name, one in module.named_parameters(recurse=False)
            if isinstance(one, DTensor)
        ]
        self._kept: weakref.WeakSet[_Kept] = weakref.WeakSet()
        self._known: dict[Any, _Kept] = {}  # in the forward pass

    def pack(self, tensor: torch.Tensor) -> torch.Tensor | _Kept:
        """Return what autograd keeps in the place of `tensor`."""
        if not _is_plain(tensor) or tensor.is_cuda is not self.copies.is_on_gpu or tensor.nbytes < _LEAST_BYTES:
            return tensor
        storage = storage_key(tensor)
        is_expanded = tensor.untyped_storage().nbytes() < tensor.nbytes
        if is_expanded or storage in self._stays or storage in self._gathered_now():
            return tensor
        key = storage, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, version_of(tensor)
        if key not in self._known:
            self._known[key] = kept = _Kept(self, tensor.detach())
            self._kept.add(kept)
        return self._known[key]

    def finish(self, copied: torch.cuda.Event | None) -> None:
        """Take note that the forward pass is over; what it has kept is on the host once `copied` has been."""
        self.copied = copied
        self._known.clear()
        self._gathered.clear()

    def _gathered_now(self) -> set[int]:
        now = [module.get_parameter(name) for module, name in self._gathered]
        return {storage_key(one) for one in now if not isinstance(one, DTensor)}

    def let_go(self) -> None:
        """Have the host's copies alone be there."""
        self.copies.wait(self.copied)
        for kept in self._kept:
            kept.settle()  # a copy that comes back too early
            kept.on_device = None

    def fetch(self) -> None:
        """Begin to bring back what is not there."""
        for kept in self._kept:
            kept.fetch()


class _Kept:
    """A tensor that waits in the host's memory; `on_device` while it is on the GPU too."""

    def __init__(self, group: _Group, tensor: torch.Tensor) -> None:
        self.group = group
        self.on_device: torch.Tensor | None = tensor
        self._is_fetched: torch.cuda.Event | None = None
        self._host = torch.empty_like(tensor, device="cpu", pin_memory=group.copies.is_on_gpu)
        self._device = tensor.device
        with group.copies.beside_compute():
            self._host.copy_(tensor, non_blocking=True)

    def fetch(self) -> None:
        if self.on_device is None:
            # In the memory of compute, which waits for the copy before anything reads or frees it.
            self.on_device = torch.empty_like(self._host, device=self._device, pin_memory=False)
            with self.group.copies.beside_compute():
                self.on_device.copy_(self._host, non_blocking=True)
            self._is_fetched = self.group.copies.event()

    def settle(self) -> None:
        """Have compute wait until the tensor is there."""
        self.group.copies.wait(self._is_fetched)
        self._is_fetched = None

    def __del__(self) -> None:
        if self._is_fetched is not None:  # in a pass that nobody takes backward
            self.settle()


def _fetched(packed: torch.Tensor | _Kept) -> torch.Tensor:
    """Return what autograd kept, and begin to bring back what the block before it needs next."""
    if isinstance(packed, torch.Tensor):
        return packed
    group = packed.group
    packed.fetch()
    packed.settle()
    tensor = packed.on_device
    assert tensor is not None
    before = None if group.before is None else group.before()
    group.before = None
    if before is not None:
        before.fetch()
    return tensor


def _is_plain(one: Any) -> bool:
    return type(one) in (torch.Tensor, FakeTensor) and one.layout is torch.strided
