"""`CostModel`: a workload with the costs that were computed for it."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Self

from paraplan.cost.cache import BlockCostCache, CostCache
from paraplan.cost.workload import Workload
from paraplan.plan.training import TrainingSpec


@dataclass(eq=False)
class RelatedCosts:
    """Costs of blocks of workloads that were made of one another: the number of machines does not change them."""

    _known: list[tuple[Workload, BlockCostCache]] = field(default_factory=list)

    def of(self, workload: Workload) -> BlockCostCache:
        """Return the costs that a workload shares with those before it that differ in GPUs or batch alone."""
        for other, costs in self._known:
            if _blocks_cost_alike(workload, other):
                return costs
        self._known.append((workload, BlockCostCache()))
        return self._known[-1][1]


def _blocks_cost_alike(one: Workload, other: Workload) -> bool:
    """Return whether blocks cost the same, by all that their costs are made of: few of these are compared by value."""
    return (
        one.model is other.model
        and one.cluster.gpu is other.cluster.gpu
        and one.framework is other.framework
        and one.constants is other.constants
        and (one.training is other.training or _of_one_sequence(one.training) == _of_one_sequence(other.training))
    )


def _of_one_sequence(training: TrainingSpec) -> TrainingSpec:
    return training.model_copy(update={"global_batch_size": 1})


@dataclass(frozen=True, eq=False)
class CostModel(Workload):
    """A workload with the costs that were computed for it: what asks for many plans makes one and passes it on.

    Where a plain `Workload` stands, every call computes its costs anew. A replaced one keeps the costs of blocks where
    these are the same.
    """

    related: RelatedCosts = field(default_factory=RelatedCosts, repr=False)
    """Costs of blocks of this and of those that it was made of, and that are made of it."""

    @cached_property
    def cache(self) -> CostCache:
        """Costs that were computed before."""
        return CostCache(blocks=self.related.of(self))

    @classmethod
    def of_workload(cls, workload: Workload) -> CostModel:
        """Return the cost model of a workload; one that is a cost model already stays as it is."""
        if isinstance(workload, CostModel):
            return workload
        return cls(**{each.name: getattr(workload, each.name) for each in fields(workload)})

    def trained_as(self, training: TrainingSpec) -> Self:
        """Return the cost model of another training on the same machines, whose links it knows. Raises `PlanError`."""
        other = super().trained_as(training)
        other.cache.group_speeds = self.cache.group_speeds
        return other


def cache_of(workload: Workload) -> CostCache:
    """Return the cache of a cost model, an empty one for a plain workload."""
    return workload.cache if isinstance(workload, CostModel) else CostCache()
