"""The tallies of all ranks brought together: the loss of the global batch, its metrics, and what gradients lack."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from paraplan.errors import UsageError
from paraplan.runtime.exchange import gather_json
from paraplan.runtime.mesh import Mesh
from paraplan.runtime.step.loss import StepLoss, Tally, metric_value

_EXTREMES = ("max ", "min ")
_SUMS = ""  # stands among the names of metrics where loss_fn returns sums with their counts


@dataclass(frozen=True)
class StepTotals:
    """The loss of a global batch, the same on every rank, and its metrics by name.

    `count` is the number of targets that it is the mean of, None where these were not counted. `factor` is what
    gradients are still to be multiplied by, None where they are complete.
    """

    loss: torch.Tensor
    count: torch.Tensor | None = None
    factor: torch.Tensor | None = None
    metrics: dict[str, torch.Tensor] = field(default_factory=dict)


class TotalsOverRanks:
    """Sums tallies over the ranks. The names of metrics are agreed on at first, by every kind of call."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._copies = mesh.size("tp") * mesh.size("cp")  # ranks that bring the same each
        self._names: dict[str, list[str]] = {}

    def sum(self, call: str, loss: StepLoss, *, has_values: bool = True) -> StepTotals:
        """Return the totals of the tallies of `loss`; every rank calls it after each run of its execution."""
        tally = loss.tally
        names = self._agreed_names(call, tally) if has_values else []
        keys = [key for key in names if key != _SUMS]
        added = [key for key in keys if not key.startswith(_EXTREMES)]
        nothing = torch.zeros(2, device=tally.loss.device)
        flat = torch.cat([torch.stack([tally.loss, tally.count]), *(tally.metrics.get(key, nothing) for key in added)])
        if self._mesh.world.is_distributed:
            dist.all_reduce(flat)
        flat = flat / self._copies
        mean, count = flat[0], flat[1]
        factor, counted = None, loss.total if isinstance(loss.total, torch.Tensor) else None
        if _SUMS in names:
            counted = count
        if _SUMS in names and loss.total is not None:
            # Sums were divided by what was counted before, which may be another number.
            factor = torch.where(count > 0, loss.total / count.clamp(min=torch.finfo(count.dtype).tiny), 0.0)
            mean = mean * factor
        found = self._extremes(tally, [key for key in keys if key.startswith(_EXTREMES)])
        found |= {key: metric_value(key, pair) for key, pair in zip(added, flat[2:].view(-1, 2), strict=True)}
        metrics = {key.split(" ", 1)[1]: found[key] for key in keys}
        return StepTotals(loss=mean, count=counted, factor=factor, metrics=metrics)

    def _extremes(self, tally: Tally, keys: list[str]) -> dict[str, torch.Tensor]:
        """Return the largest and the smallest values over the ranks."""
        if not keys:
            return {}
        nothing = torch.full((2,), -torch.inf, device=tally.loss.device)
        pairs = torch.stack([tally.metrics.get(key, nothing) for key in keys])
        if self._mesh.world.is_distributed:
            dist.all_reduce(pairs, op=dist.ReduceOp.MAX)
        return {key: metric_value(key, pair) for key, pair in zip(keys, pairs, strict=True)}

    def _agreed_names(self, call: str, tally: Tally) -> list[str]:
        mine = [*([_SUMS] if tally.returns_sums else []), *tally.metrics]
        if call not in self._names:
            self._names[call] = self._names_of_the_end(mine)
        unknown = [name for name in mine if name not in self._names[call]]
        if _SUMS in unknown or (tally.has_terms and tally.returns_sums != (_SUMS in self._names[call])):
            raise UsageError(
                "loss_fn returned a mean for some micro-batches, and (loss_sum, count) for others",
                hint="return the same form for every micro-batch",
            )
        if unknown:
            raise UsageError(
                f"loss_fn returned the metric {unknown[0].split(' ', 1)[1]!r}, which it did not return at first",
                hint="return the same metrics for every micro-batch",
            )
        return self._names[call]

    def _names_of_the_end(self, names: list[str]) -> list[str]:
        """Return the names that the first rank with the end of the model has."""
        world, grid = self._mesh.world, self._mesh.grid
        if not world.is_distributed or self._mesh.size("pp") == 1:
            return names
        source = next(rank for rank in range(world.size) if grid.coordinates(rank)["pp"] == grid.size("pp") - 1)
        agreed: list[str] = gather_json(names)[source]
        return agreed
