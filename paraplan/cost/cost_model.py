"""`CostModel`: a workload with the costs that were computed for it."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Self

from paraplan.cost.cache import CostCache
from paraplan.cost.workload import Workload
from paraplan.plan.training import TrainingSpec


@dataclass(frozen=True, eq=False)
class CostModel(Workload):
    """A workload with the costs that were computed for it: what asks for many plans makes one and passes it on.

    Where a plain `Workload` stands, every call computes its costs anew. A replaced one starts with an empty cache.
    """

    cache: CostCache = field(default_factory=CostCache, init=False, repr=False)
    """Costs that were computed before."""

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
