"""Counting what a rank sends: every collective and transfer of torch.distributed, by group and bytes."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.distributed.tensor import DTensor

from paraplan.plan.fake import CountedCollective
from paraplan.plan.parallel import Axis
from paraplan.runtime.fake.storage_tracking import DEVICE_OF
from paraplan.runtime.fake.torch_private import FUNCTIONAL_COLLECTIVES, group_named, is_boxed_group
from paraplan.runtime.mesh import Mesh
from paraplan.runtime.torch_private import FakeTensor, TorchDispatchMode, tensors_in

# torch's names of operators in words (torch/csrc/distributed/c10d/Ops.cpp, and its functional collectives).
_OPERATIONS = {
    "allreduce": "all-reduce",
    "all_reduce": "all-reduce",
    "allgather": "all-gather",
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "alltoall": "all-to-all",
    "all_to_all": "all-to-all",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "scatter": "scatter",
    "gather": "gather",
    "send": "send",
    "recv": "receive",
}
_NAMESPACES = ("c10d", *FUNCTIONAL_COLLECTIVES)


class CollectiveCount(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """Counts collectives while this mode is on; `mesh` tells which axis of the plan a group is, None where none is."""

    def __init__(self, mesh: Mesh | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self._axes = {} if mesh is None else _axes_by_ranks(mesh)
        self._counts: Counter[tuple[str, str, int]] = Counter()
        self._bytes: Counter[tuple[str, str, int]] = Counter()
        self._is_paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is DEVICE_OF and type(args[0]) is FakeTensor:
            return args[0].fake_device
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        if func.namespace in _NAMESPACES and not self._is_paused:
            self._count(func, args)
        return func(*args, **(kwargs or {}))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Count nothing in this context."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def name(self, ranks: Sequence[int], words: str) -> None:
        """Call the group of `ranks` by `words`, after a name that it has: fsdp/ep. Further names are left out."""
        known = self._axes.get(tuple(ranks), "").split("/")
        self._axes[tuple(ranks)] = "/".join(list(dict.fromkeys([*filter(None, known), words]))[:2])

    def forget(self) -> None:
        """Begin anew."""
        self._counts.clear()
        self._bytes.clear()

    def go_on(self, before: CollectiveCount | None, times: int) -> None:
        """Count the difference to `before` as often as `times` says: what each further micro-batch sends."""
        if before is None:
            return
        for counter, earlier in ((self._counts, before._counts), (self._bytes, before._bytes)):
            for key in list(counter):
                counter[key] += times * max(0, counter[key] - earlier[key])

    def copy(self) -> CollectiveCount:
        """Return what was counted until now."""
        other = copy.copy(self)
        other._counts, other._bytes = self._counts.copy(), self._bytes.copy()
        return other

    def counted(self) -> tuple[CountedCollective, ...]:
        """Return what was counted, the most bytes first."""
        rows = [
            CountedCollective(
                operation=operation,
                group=group,
                num_ranks=num_ranks,
                count=count,
                total_bytes=self._bytes[operation, group, num_ranks],
            )
            for (operation, group, num_ranks), count in self._counts.items()
        ]
        return tuple(sorted(rows, key=lambda row: (-row.total_bytes, row.operation, row.group)))

    def _count(self, func: Any, args: tuple[Any, ...]) -> None:
        name = func.name().partition("::")[2].partition(".")[0].lstrip("_")
        operation = next((words for start, words in _OPERATIONS.items() if name.startswith(start)), None)
        group = _group(args)
        if operation is None or group is None:  # waits and barriers
            return
        ranks = tuple(dist.get_process_group_ranks(group))
        key = (operation, self._axes.get(ranks) or _described(ranks))
        message = max((_size_bytes(argument) for argument in args), default=0)
        self._counts[*key, len(ranks)] += 1
        self._bytes[*key, len(ranks)] += message


def _axes_by_ranks(mesh: Mesh) -> dict[tuple[int, ...], str]:
    axes: tuple[Axis, ...] = ("tp", "pp", "cp", "dp")
    rank = mesh.world.rank
    found: dict[tuple[int, ...], str] = {}
    if mesh.replica_group is not None:
        found[tuple(dist.get_process_group_ranks(mesh.replica_group))] = "dp x cp"
    if mesh.hybrid_mesh is not None:
        for name, words in (("shard", "dp, shards"), ("replicas", "dp, replicas")):
            found[tuple(dist.get_process_group_ranks(mesh.hybrid_mesh.get_group(name)))] = words
    return found | {tuple(sorted(mesh.grid.group(axis, rank))): axis for axis in axes if mesh.size(axis) > 1}


def _described(ranks: tuple[int, ...]) -> str:
    if len(ranks) == dist.get_world_size():
        return "all ranks"
    return f"ranks {', '.join(map(str, ranks))}" if len(ranks) <= 4 else f"ranks {ranks[0]}, {ranks[1]}..{ranks[-1]}"


def _group(args: tuple[Any, ...]) -> dist.ProcessGroup | None:
    """Return the process group among the arguments of an operator: an object, or its name."""
    for argument in args:
        if isinstance(argument, dist.ProcessGroup):
            return argument
        if is_boxed_group(argument):
            return dist.ProcessGroup.unbox(argument)
    names = [argument for argument in args if isinstance(argument, str)]
    for name in reversed(names):  # the kind of a reduction comes first
        try:
            return group_named(name)
        except (LookupError, RuntimeError, ValueError):
            continue
    return None


def _size_bytes(argument: Any) -> int:
    return sum(leaf.numel() * leaf.element_size() for leaf in tensors_in(argument))
