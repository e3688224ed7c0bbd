"""The ranks of a plan as torch's process groups, in the layout of `RankGrid`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from paraplan.plan.parallel import Axis, ParallelPlan
from paraplan.plan.ranks import RankGrid
from paraplan.runtime.timeouts import default_timeout
from paraplan.runtime.torch_private import group_options
from paraplan.runtime.world import World, backend_of, made_once

_SHARED: tuple[Axis, ...] = ("dp", "cp")
"""The axes whose ranks hold the same parameters."""


@dataclass(frozen=True)
class Mesh:
    """Where this rank stands on the axes of `plan`. `device_mesh` has the axes longer than 1, None without any.

    `replica_mesh` has the ranks of `dp` and `cp` in one axis: those that hold the same parameters. None for one rank.
    `hybrid_mesh` has the ranks of `dp` in two axes, replicas and shards, for hybrid sharding. `expert_mesh` has
    those of `dp` and `cp` in two axes, `copies` of each expert and `ep`, for expert parallelism. `lone_mesh` has this
    rank alone, where one process gathers its parameters from the host.
    """

    plan: ParallelPlan
    world: World
    device_mesh: DeviceMesh | None
    replica_mesh: DeviceMesh | None = None
    hybrid_mesh: DeviceMesh | None = None
    expert_mesh: DeviceMesh | None = None
    lone_mesh: DeviceMesh | None = None

    @cached_property
    def grid(self) -> RankGrid:
        """All ranks of the plan, in its order."""
        return RankGrid.of_plan(self.plan)

    def size(self, axis: Axis) -> int:
        """Return the number of ranks along `axis`."""
        return self.grid.size(axis)

    def coordinate(self, axis: Axis) -> int:
        """Return this rank's place along `axis`."""
        return self._place[axis]

    @cached_property
    def _place(self) -> dict[Axis, int]:
        return self.grid.coordinates(self.world.rank)

    def group(self, axis: Axis) -> dist.ProcessGroup | None:
        """Return the process group of `axis` that holds this rank, None where the axis has one rank."""
        if self.device_mesh is None or self.size(axis) == 1:
            return None
        return self.device_mesh.get_group(axis)

    @property
    def replica_group(self) -> dist.ProcessGroup | None:
        """The process group of the ranks that hold the same parameters, None for one rank."""
        return None if self.replica_mesh is None else self.replica_mesh.get_group()

    @property
    def ep(self) -> int:
        """The number of ranks that share out the experts."""
        return 1 if self.expert_mesh is None else self.expert_mesh.size(1)

    @property
    def expert_group(self) -> dist.ProcessGroup | None:
        """The process group of the ranks that share out one copy of the experts, None without expert parallelism."""
        return None if self.expert_mesh is None else self.expert_mesh.get_group("ep")

    @property
    def expert_copies_group(self) -> dist.ProcessGroup | None:
        """The process group of the ranks that hold the same experts, None where no other rank does."""
        if self.expert_mesh is None or self.expert_mesh.size(0) == 1:
            return None
        return self.expert_mesh.get_group("copies")

    def expert_place(self, rank: int) -> int:
        """Return which share of the experts `rank` holds, from 0."""
        return next(group.index(rank) for group in _replicas(self.grid) if rank in group) % self.ep

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank holds the end of the model and its loss."""
        return self.coordinate("pp") == self.size("pp") - 1

    @property
    def place_of_draws(self) -> int:
        """The place of this rank among those that draw different random numbers; ranks of tp and cp draw the same."""
        return self.coordinate("dp") + self.coordinate("pp") * self.size("dp")

    @property
    def shard_mesh(self) -> DeviceMesh | None:
        """The mesh that ZeRO shards over, with an axis of replicas before it under hybrid sharding."""
        if self.lone_mesh is not None:
            return self.lone_mesh
        return self.replica_mesh if self.hybrid_mesh is None else self.hybrid_mesh

    @property
    def shard_group(self) -> dist.ProcessGroup | None:
        """The process group of the ranks that hold the shards of one copy of the parameters, None for one rank."""
        return self.replica_group if self.hybrid_mesh is None else self.hybrid_mesh.get_group("shard")


def build_mesh(plan: ParallelPlan, world: World) -> Mesh:
    """Return the mesh of `plan`, which has as many ranks as `world`. Makes the groups of every axis on every rank."""
    grid = RankGrid.of_plan(plan)
    axes = [axis for axis in grid.axes if grid.size(axis) > 1]
    if not axes:
        lone_mesh = _made(world, torch.zeros(1, dtype=torch.int64), ("shard",)) if plan.gathers_alone else None
        return Mesh(plan, world, device_mesh=None, lone_mesh=lone_mesh)
    ranks = torch.arange(grid.world_size).reshape([grid.size(axis) for axis in axes])
    device_mesh = _made(world, ranks, tuple(axes))
    hybrid_mesh = None
    if plan.zero_shards is not None:
        copies = torch.tensor(grid.group("dp", 0)).reshape(-1, plan.zero_shards)
        hybrid_mesh = _made(world, copies, ("replicas", "shard"))
    expert_mesh = None
    if plan.ep > 1:
        groups = torch.tensor(_replicas(grid)).reshape(-1, grid.size("dp") * grid.size("cp") // plan.ep, plan.ep)
        expert_mesh = _made(world, groups, ("rest", "copies", "ep"))["copies", "ep"]
    return Mesh(plan, world, device_mesh, _replica_mesh(grid, device_mesh, world), hybrid_mesh, expert_mesh)


def _replicas(grid: RankGrid) -> list[list[int]]:
    """Return the groups of the ranks of `dp` and `cp`, each in ascending order, which is torch's order in a group."""
    firsts = [rank for rank in range(grid.world_size) if not any(grid.coordinates(rank)[one] for one in _SHARED)]
    return [sorted(copy for start in grid.group("dp", first) for copy in grid.group("cp", start)) for first in firsts]


def _replica_mesh(grid: RankGrid, device_mesh: DeviceMesh, world: World) -> DeviceMesh | None:
    shared = [axis for axis in _SHARED if grid.size(axis) > 1]
    if len(shared) < 2:
        return device_mesh[shared[0]] if shared else None
    # The places of ranks in the mesh are then those in the group.
    return _made(world, torch.tensor(_replicas(grid)), ("rest", "replicas"))["replicas"]


def _made(world: World, ranks: torch.Tensor, names: tuple[str, ...]) -> DeviceMesh:
    """Return the mesh of `ranks`. Its groups have the timeout of the default group, which torch gives to that alone."""
    options: list[Any] = [(None, None)] * ranks.ndim
    timeout = default_timeout(world.device)
    for axis, size in enumerate(ranks.shape):
        if size < world.size and timeout is not None:  # an axis of all ranks is the default group
            backend = backend_of(world.device)
            options[axis] = (backend, group_options(backend, timeout=timeout))
    return made_once(
        (world.device.type, names, timeout, str(ranks.tolist())),
        lambda: DeviceMesh(world.device.type, ranks, mesh_dim_names=names, backend_override=tuple(options)),
    )
