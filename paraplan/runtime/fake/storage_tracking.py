"""The bytes of every live storage, by what it is for, and what was live when most bytes were."""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Literal

import torch
from torch.distributed.tensor import DTensor

from paraplan.plan.memory_record import MEMORY_PARTS, MemoryParts
from paraplan.runtime.fake.torch_private import (
    COPY_TO,
    SHAPES_FILE,
    SHARDING_FOLDER,
    in_backward,
    local_tensor,
    replaced,
)
from paraplan.runtime.torch_private import (
    FakeTensor,
    TorchDispatchMode,
    pytree,
    storage_key,
)

StorageUse = Literal["parameter", "gradient", "optimizer_state", "activation", "workspace"]
Phase = Literal["building", "setup", "forward", "backward", "optimizer"]
ALLOCATOR_UNIT_BYTES = 512  # torch's CUDA allocator hands out multiples of it (c10/cuda, kMinBlockSize)
_FIRST_USE: dict[Phase, StorageUse] = {
    "building": "workspace",  # besides parameters
    "setup": "gradient",  # besides parameters, DDP's buckets
    "forward": "activation",
    "backward": "workspace",
    "optimizer": "workspace",
}
DEVICE_OF = torch.ops.prim.device.default
"""The operator by which autograd asks a fake tensor for its device, twice as often as anything is computed: a mode that
answers saves the others."""


@dataclass(eq=False)
class _Live:
    """One live storage. `use` is what it was made as; what it became is asked for at a peak."""

    size_bytes: int
    use: StorageUse


@dataclass
class Peak:
    """Bytes by use at the moment when most were live."""

    bytes_by_use: Counter[StorageUse] = field(default_factory=Counter)
    phase: Phase = "setup"

    @property
    def total_bytes(self) -> int:
        """Sum over all uses."""
        return sum(self.bytes_by_use.values())

    def parts(self) -> MemoryParts:
        """Return the bytes by the names of a memory record."""
        sizes = {f"{use}_bytes": size_bytes for use, size_bytes in self.bytes_by_use.items()}
        return MemoryParts(**{name: sizes.get(name, 0) for name in MEMORY_PARTS}, total_bytes=self.total_bytes)


def storage_of(tensor: torch.Tensor) -> int:
    """Return what tells the storage of a tensor from others, of a DTensor that of its local part."""
    local = local_tensor(tensor) if isinstance(tensor, DTensor) else tensor  # `to_local` runs operators
    return storage_key(local)


def uses_of(
    parameters: Iterable[torch.Tensor], buffers: Iterable[torch.Tensor], optimizers: Iterable[torch.optim.Optimizer]
) -> dict[int, StorageUse]:
    """Return what the storages of a training are for: parameters with their gradients, buffers, states."""
    uses: dict[int, StorageUse] = {}
    for parameter in parameters:
        uses[storage_of(parameter)] = "parameter"
        if parameter.grad is not None:
            uses[storage_of(parameter.grad)] = "gradient"
    uses |= {storage_of(buffer): "parameter" for buffer in buffers}
    for optimizer in optimizers:
        for value in (value for state in optimizer.state.values() for value in state.values()):
            if isinstance(value, torch.Tensor):
                uses[storage_of(value)] = "optimizer_state"
    return uses


class StorageTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """Follows storages from the operator that makes them to their end, while this mode is on.

    `uses_now` returns the storages, by `_cdata`, of tensors whose use the caller knows at that moment: parameters,
    gradients, optimizer state. Others have the use of the phase in which they were made: activations are what the
    forward pass makes, workspace what later phases make, and FSDP's own code makes parameters and gradients.
    A copy in another type of a parameter is a parameter. Sizes are rounded as torch's CUDA allocator rounds them.
    """

    def __init__(self, uses_now: Callable[[], dict[int, StorageUse]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self._phase: Phase = "setup"
        self.peak = Peak()
        self._uses_now = uses_now
        self._live: dict[int, _Live] = {}
        self._bytes = 0
        self._peak_bytes = 0
        self._is_stale = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is DEVICE_OF and type(args[0]) is FakeTensor:
            return args[0].fake_device
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # a DTensor or its like takes over, and comes back with its local tensors
        out = func(*args, **(kwargs or {}))
        with torch.DisableTorchFunction():
            for leaf in pytree.tree_leaves(out):
                if isinstance(leaf, torch.Tensor):
                    self._add(leaf, func, args)
        return out

    @property
    def phase(self) -> Phase:
        """The phase of the step: backward passes are known by autograd's own sign."""
        return "backward" if self._phase == "forward" and in_backward() else self._phase

    def enter(self, phase: Phase) -> None:
        """Say what is done from now on; "forward" stands for whole passes."""
        self.settle()
        self._phase = phase

    def forget_peak(self) -> None:
        """Begin anew with what is live now."""
        self.peak, self._peak_bytes, self._is_stale = Peak(), self._bytes, True

    def watch(self, tensor: torch.Tensor) -> None:
        """Count a tensor that was made before this mode was on; of a DTensor its local part."""
        self._add(tensor.to_local() if isinstance(tensor, DTensor) else tensor, None, ())

    @contextmanager
    def following_resizes(self) -> Iterator[None]:
        """Count storages that FSDP empties and fills again, which no operator shows."""
        plain = torch.UntypedStorage.resize_

        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            result = plain(storage, size)
            live = self._live.get(storage_key(storage))
            if live is not None:
                self._change(live, _rounded(storage.nbytes()))
            return result

        with replaced((torch.UntypedStorage, "resize_", resize)):
            yield

    def held(self) -> Counter[StorageUse]:
        """Return the bytes that are live now, by use."""
        with torch.DisableTorchFunction():  # this class asks on its own behalf, not on the model's
            now = self._uses_now()
        found: Counter[StorageUse] = Counter()
        for key, live in self._live.items():
            found[now.get(key, live.use)] += live.size_bytes
        return found

    def add(self, sizes: Mapping[StorageUse, int]) -> Callable[[], None]:
        """Count so many bytes more of each use, which have no storage; return what ends that."""
        keys = [-1 - len(self._live) - index for index in range(len(sizes))]  # others are addresses
        for key, (use, size_bytes) in zip(keys, sizes.items(), strict=True):
            live = self._live[key] = _Live(0, use)
            self._change(live, size_bytes)

        def end() -> None:
            for key in keys:
                self._end(key)

        return end

    def mark(self, uses: dict[int, StorageUse]) -> None:
        """Fix the use of storages that are live; copies of parameters are known by it."""
        for key, use in uses.items():
            if key in self._live:
                self._live[key].use = use

    def _add(self, tensor: torch.Tensor, func: Any, args: tuple[Any, ...]) -> None:
        if tensor.device.type == "meta" or isinstance(tensor, DTensor):
            return
        storage = tensor.untyped_storage()
        key = storage_key(storage)
        if key in self._live:
            return
        use = self._use_of_new(func, args)
        if use == "nothing":
            return
        live = _Live(0, use)
        self._live[key] = live
        weakref.finalize(storage, _end, weakref.ref(self), key)
        self._change(live, _rounded(storage.nbytes()))

    def _use_of_new(self, func: Any, args: tuple[Any, ...]) -> StorageUse | Literal["nothing"]:
        if func is COPY_TO and isinstance(args[0], torch.Tensor):
            source = self._live.get(storage_key(args[0]))
            if source is not None and source.use == "parameter" and self.phase != "optimizer":
                return "parameter"
        return _maker() or _FIRST_USE[self.phase]

    def _change(self, live: _Live, size_bytes: int) -> None:
        self._bytes += size_bytes - live.size_bytes
        live.size_bytes = size_bytes
        if self._bytes > self._peak_bytes:
            self._peak_bytes = self._bytes
            self._is_stale = True

    def _end(self, key: int) -> None:
        if self._is_stale:
            self.settle()
        live = self._live.pop(key, None)
        if live is not None:
            self._bytes -= live.size_bytes

    def settle(self) -> None:
        """Write down what is live now if it is the most there was. Called before anything is freed, and at the end."""
        if not self._is_stale:
            return
        self._is_stale = False
        self.peak = Peak(self.held(), self.phase)


def _end(tracker: weakref.ref[StorageTracker], key: int) -> None:
    """Have a tracker take note of a storage's end. One that was held here would stay, with all that it knows."""
    alive = tracker()
    if alive is not None:
        alive._end(key)


def _rounded(num_bytes: int) -> int:
    return -(-num_bytes // ALLOCATOR_UNIT_BYTES) * ALLOCATOR_UNIT_BYTES


def _maker() -> StorageUse | Literal["nothing"] | None:
    """Return the use of what torch's own distributed code makes, by the nearest of its functions; None for all else.

    FSDP makes gathered parameters, and gradients on their way to their shards. DTensor asks for the shapes of results
    with tensors without values, which are nothing on a GPU.
    """
    frame: FrameType | None = sys._getframe(3)
    while frame is not None:
        where, name = frame.f_code.co_filename, frame.f_code.co_name
        if where.endswith(SHAPES_FILE):
            return "nothing"
        if SHARDING_FOLDER in where and ("reduce" in name or "_grad" in name):
            return "gradient"
        if SHARDING_FOLDER in where and ("gather" in name or "unshard" in name or "init_sharded" in name):
            return "parameter"
        frame = frame.f_back
    return None
