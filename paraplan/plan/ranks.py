"""`RankGrid`: which rank stands where on the axes of a plan. Planner, launcher and runtime share this one layout."""

from __future__ import annotations

from math import prod

from paraplan.errors import PlanError
from paraplan.plan.parallel import Axis, ParallelPlan
from paraplan.records import Record


class RankGrid(Record):
    """The ranks of a plan as a grid: `axes` from outermost to innermost, `sizes` beside them.

    The last axis varies fastest: with axes (pp, dp, cp, tp), ranks 0..tp-1 form the first tensor-parallel group.
    """

    axes: tuple[Axis, ...]
    sizes: tuple[int, ...]

    @classmethod
    def of_plan(cls, plan: ParallelPlan) -> RankGrid:
        """Return the grid of `plan`, in its `rank_order`."""
        return cls(axes=plan.rank_order, sizes=tuple(getattr(plan, axis) for axis in plan.rank_order))

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return prod(self.sizes)

    def size(self, axis: Axis) -> int:
        """Return the number of ranks of each group of `axis`."""
        return self.sizes[self.axes.index(axis)]

    def stride(self, axis: Axis) -> int:
        """Return the distance between neighbours in a group of `axis`."""
        return prod(self.sizes[self.axes.index(axis) + 1 :])

    def coordinates(self, rank: int) -> dict[Axis, int]:
        """Return the coordinate of `rank` on every axis."""
        if not 0 <= rank < self.world_size:
            raise PlanError(f"rank {rank} is outside a world of {self.world_size} ranks")
        found, rest = dict.fromkeys(self.axes, 0), rank
        for axis, size in zip(reversed(self.axes), reversed(self.sizes), strict=True):
            rest, found[axis] = divmod(rest, size)
        return found

    def rank(self, **coordinates: int) -> int:
        """Return the rank at `coordinates`; an axis that is not named counts as 0."""
        return sum(coordinates.get(axis, 0) * self.stride(axis) for axis in self.axes)

    def group(self, axis: Axis, rank: int) -> list[int]:
        """Return the ranks of the group of `axis` that holds `rank`, in the order of their coordinate."""
        stride = self.stride(axis)
        first = rank - self.coordinates(rank)[axis] * stride
        return [first + step * stride for step in range(self.size(axis))]

    def groups(self, axis: Axis) -> list[list[int]]:
        """Return all groups of `axis`. Every rank is in exactly one of them."""
        firsts = [rank for rank in range(self.world_size) if self.coordinates(rank)[axis] == 0]
        return [self.group(axis, rank) for rank in firsts]
