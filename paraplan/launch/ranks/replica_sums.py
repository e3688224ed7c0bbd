"""Sums over what ranks may hold alike, which a rank writes every so many optimizer steps; the launcher compares them.

The bits of every parameter, buffer and tensor of an optimizer's state are added up as integers: one flipped bit is
another sum. Nothing is sent, and no rank waits for another. What is known of replicas (DDP, FSDP, DTensors) stands
beside the names; of other tensors the launcher learns which ranks hold them alike.

Standard library only at its top, and importable alone: see `bootstrap`. Between two looks a step costs one call.
"""

from __future__ import annotations

import gc
import json
import os
import struct
import sys
import weakref
from array import array
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, NamedTuple

LAYOUT_FILE = "sums-{layout}.json"
"""Name of a file beside the error file that says what is summed."""

SUMS_FILE = "sums.{slot}"
"""Name of a file beside the error file with the sums of one look: the last `NUM_SLOTS` are kept."""

NUM_SLOTS = 8
HEADER = struct.Struct("=qqqqq")
"""The look's number, its optimizer, the step, the layout's number, and the number of sums, which follow."""

_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "module")


class _Entry(NamedTuple):
    """Something that is summed.

    `kind` is parameter, buffer, renewed (a buffer that DDP makes alike before it is used), state, or batch; `groups`
    are the ranks that hold the same, None where that is to be learned.
    """

    name: str
    kind: str
    groups: list[list[int]] | None
    tensor: Any = None


class _Watched:
    """One optimizer, as far as it is known."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.num_steps = 0
        self.entries: list[_Entry] | None = None
        self.layout = -1
        self.ids: tuple[int, ...] = ()


class ReplicaSums:
    """Writes the sums of this process into `folder` every `every` steps of each optimizer, and of the first two.

    `replicas` is the module `torch_private.replicas`.
    """

    def __init__(self, folder: str, every: int, replicas: Any) -> None:
        self.folder, self.every, self.replicas = folder, every, replicas
        self._watched: weakref.WeakKeyDictionary[Any, _Watched] = weakref.WeakKeyDictionary()
        self._num_looks = self._num_layouts = self._num_optimizers = 0
        self._batch: list[Any] = []
        self._handles: list[Any] = []
        self._wrappers: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self._running: list[int] = []
        self._pid = os.getpid()
        self._is_on = True

    def start(self) -> None:
        """Have torch, which is imported, call this around each step of an optimizer."""
        from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)

    def _before_step(self, optimizer: Any, *_: Any) -> None:
        if id(optimizer) in self._running:  # its last step raised
            del self._running[self._running.index(id(optimizer)) :]
        self._running.append(id(optimizer))
        if optimizer not in self._watched and self._is_on and len(self._running) == 1:
            self._watched[optimizer] = _Watched(self._num_optimizers)
            self._num_optimizers += 1
            self._look(optimizer, self._watched[optimizer])

    def _after_step(self, optimizer: Any, *_: Any) -> None:
        if id(optimizer) in self._running:
            del self._running[self._running.index(id(optimizer)) :]
        watched = self._watched.get(optimizer)
        if watched is None or not self._is_on or self._running:  # within another's step, as a shard's of ZeRO-1
            return
        watched.num_steps += 1
        if watched.num_steps % self.every == 0 or watched.num_steps <= 2:
            self._look(optimizer, watched)
        if (watched.num_steps + 1) % self.every == 0 or watched.num_steps == 1:
            self._follow_batches()

    def _look(self, optimizer: Any, watched: _Watched) -> None:
        import torch

        if os.getpid() != self._pid or torch.compiler.is_compiling():
            return
        try:
            with torch.no_grad():
                self._write(optimizer, watched)
        except Exception as error:  # a full disk, a tensor of another kind: the training goes on without
            self._is_on = False
            sys.stderr.write(f"paraplan: --guard ends in this rank: {type(error).__name__}: {error}\n")

    def _write(self, optimizer: Any, watched: _Watched) -> None:
        import torch

        parameters = [one for group in optimizer.param_groups for one in group["params"]]
        ids = (*map(id, parameters), len(optimizer.state))
        if watched.entries is None or ids != watched.ids:
            watched.entries, watched.ids = self._entries_of(optimizer, parameters), ids
            watched.layout = self._write_layout(watched.entries)
        sums = [sum_of_bits(entry.tensor) for entry in watched.entries]
        batch = torch.stack(self._batch).sum() if self._batch else torch.zeros((), dtype=torch.int64)
        self._batch = []
        for handle in self._handles:
            handle.remove()
        self._handles = []
        by_device: dict[Any, list[int]] = {}
        for place, one in enumerate(sums):
            by_device.setdefault(one.device, []).append(place)
        numbers = array("q", bytes(8 * len(sums)))
        for places in by_device.values():  # one copy from each device
            for place, number in zip(places, torch.stack([sums[at] for at in places]).tolist(), strict=True):
                numbers[place] = number
        numbers.append(int(batch))
        head = HEADER.pack(self._num_looks, watched.number, watched.num_steps, watched.layout, len(numbers))
        path = os.path.join(self.folder, SUMS_FILE.format(slot=self._num_looks % NUM_SLOTS))  # noqa: PTH118
        with open(f"{path}.new", "wb") as file:  # noqa: PTH123 (pathlib costs every rank an import)
            file.write(head + numbers.tobytes())
        os.replace(f"{path}.new", path)  # noqa: PTH105
        self._num_looks += 1

    def _write_layout(self, entries: list[_Entry]) -> int:
        groups = [group for wrapper in self._wrappers.values() for group in self.replicas.data_groups(wrapper)]
        named = [*entries, _Entry("", "batch", [list(one) for one in dict.fromkeys(map(tuple, groups))])]
        path = os.path.join(self.folder, LAYOUT_FILE.format(layout=self._num_layouts))  # noqa: PTH118
        with open(path, "w") as file:  # noqa: PTH123
            json.dump([entry[:3] for entry in named], file)
        self._num_layouts += 1
        return self._num_layouts - 1

    def _entries_of(self, optimizer: Any, parameters: list[Any]) -> list[_Entry]:
        """Return what is summed of an optimizer: the modules that hold its parameters, and its state."""
        entries: dict[int, _Entry] = {}
        for root in _roots_of(parameters):
            prefix = "" if len(entries) == 0 else f"{type(root).__name__}{len(entries)}."
            self._add_module(root, prefix, entries)
        for number, parameter in enumerate(parameters):
            if id(parameter) not in entries:
                entries[id(parameter)] = self._entry(f"parameter {number}", "parameter", parameter, None)
        state = []
        for parameter in parameters:
            owner = entries[id(parameter)]
            for key, value in sorted(optimizer.state.get(parameter, {}).items()):
                if hasattr(value, "numel") and value.numel() > 1:
                    name = f"{key} of {owner.name}"
                    state.append(self._entry(name, "state", value, owner.groups))
        return [one for one in (*entries.values(), *state) if one.tensor is not None and sum_is_known(one.tensor)]

    def _add_module(self, root: Any, prefix: str, entries: dict[int, _Entry]) -> None:
        """Add the parameters and buffers of one model."""
        import torch

        claims: dict[int, list[list[int]] | None] = {}
        renewed: set[int] = set()
        inside: set[int] = set()
        for name, module in root.named_modules():
            divided = self.replicas.data_groups(module)
            if divided and id(module) not in inside:
                self._wrappers[id(module)] = module
                inside |= set(map(id, module.modules()))
            flat = self.replicas.flat_parameters(module)
            if flat is not None:
                vector, views, groups = flat
                entries[id(vector)] = _Entry(_name_of(prefix + name) or "model", "parameter", groups, vector)
                for view in views:
                    entries[id(view)] = _Entry(_name_of(prefix + name), "parameter", groups)
            if isinstance(module, torch.nn.parallel.DistributedDataParallel):
                ignored = {f"module.{one}" for one in module.parameters_to_ignore}
                for key, one in module.named_parameters():
                    if key not in ignored:
                        claims[id(one)] = divided
                if module.broadcast_buffers:
                    renewed |= {id(one) for key, one in module.named_buffers() if key not in ignored}
        for name, one in root.named_parameters():
            if id(one) not in entries:
                entries[id(one)] = self._entry(_name_of(prefix + name), "parameter", one, claims.get(id(one)))
        for name, one in root.named_buffers():
            kind = "renewed" if id(one) in renewed else "buffer"
            entries.setdefault(id(one), self._entry(_name_of(prefix + name), kind, one, None))

    def _entry(self, name: str, kind: str, tensor: Any, groups: list[list[int]] | None) -> _Entry:
        if hasattr(tensor, "device_mesh"):
            groups = [*self.replicas.groups_of_dtensor(tensor), *(groups or [])]
        return _Entry(name, kind, groups, tensor)

    def _follow_batches(self) -> None:
        """Sum what models that divide batches are given until the next look."""
        if self._handles or not self._is_on:
            return

        def take(_: Any, args: Any, kwargs: Any) -> None:
            import torch

            if not torch.compiler.is_compiling():
                with torch.no_grad(), suppress(Exception):  # what has no bits to add up is no batch
                    self._batch += [sum_of_bits(one).cpu() for one in _tensors_in((args, kwargs))]

        for module in self._wrappers.values():
            self._handles.append(module.register_forward_pre_hook(take, with_kwargs=True))


def sum_is_known(tensor: Any) -> bool:
    """Whether a tensor has bits in memory that can be added up: not those of a kind of its own."""
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    has_own_memory = not hasattr(type(local), "__tensor_flatten__") and not local.is_meta
    return has_own_memory and str(local.layout) == "torch.strided"


def sum_of_bits(tensor: Any) -> Any:
    """Return the sum of a tensor's bits as integers, as a tensor on its device."""
    import torch

    local = (tensor.to_local() if hasattr(tensor, "to_local") else tensor).detach()
    if local.numel() == 0:
        return torch.zeros((), dtype=torch.int64, device=local.device)
    if local.is_complex():
        local = torch.view_as_real(local)
    order = sorted(range(local.ndim), key=local.stride, reverse=True)  # as it lies in memory: channels last, say
    flat, size = local.permute(order).reshape(-1), local.element_size()
    is_wide = flat.numel() * size % 8 == 0 and flat.storage_offset() * size % 8 == 0
    kind = torch.int64 if is_wide else {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size]
    bits = flat.view(kind)
    total = bits.sum(dtype=kind)
    return total if kind is torch.int64 else total.long()


def _tensors_in(value: Any) -> Iterator[Any]:
    if hasattr(value, "element_size"):
        yield value
    elif isinstance(value, dict):
        for one in value.values():
            yield from _tensors_in(one)
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _tensors_in(one)


def _roots_of(parameters: list[Any]) -> list[Any]:
    """Return the outermost modules that hold some of `parameters`, in the order of these."""
    import torch

    wanted = {id(one): number for number, one in enumerate(parameters)}
    holders: dict[int, tuple[int, Any]] = {}
    for one in gc.get_objects():
        if issubclass(type(one), torch.nn.Module):
            with suppress(AttributeError):  # one whose __init__ has not run
                numbers = [wanted[id(parameter)] for parameter in one.parameters() if id(parameter) in wanted]
                if numbers:
                    holders[id(one)] = (min(numbers), one)
    inner = {id(child) for _, one in holders.values() for child in one.modules() if child is not one}
    outer = [(number, type(one).__name__, one) for key, (number, one) in holders.items() if key not in inner]
    return [one for _, _, one in sorted(outer, key=lambda found: found[:2])]


def _name_of(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)
