"""The tallies of all ranks brought together: the loss of the global batch, its metrics, and what gradients lack."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from paraplan.errors import UnsupportedPlanError, UsageError
from paraplan.runtime.mesh import Mesh
from paraplan.runtime.step.loss import HINT, LossRule, Tally

_PROPORTION = 1e-5  # what ratios of counts, which are whole numbers, may differ by in fp32


@dataclass(frozen=True)
class StepTotals:
    """The loss of a global batch, the same on every rank, and its metrics by name.

    `factor` is what gradients are still to be multiplied by, None where they are complete.
    """

    loss: torch.Tensor
    factor: torch.Tensor | None = None
    metrics: dict[str, torch.Tensor] = field(default_factory=dict)


class TotalsOverRanks:
    """Sums tallies over the ranks. The names of metrics are agreed on at first, by every kind of call."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._names: dict[str, list[str]] = {}

    def sum(self, call: str, tally: Tally, rule: LossRule, *, has_values: bool = True) -> StepTotals:
        """Return the totals of `tally`; every rank calls it after each run of its execution.

        Raises `UnsupportedPlanError` on every rank where means were added whose counts are in no proportion.
        """
        names = self._agreed_names(call, tally) if has_values else []
        pairs = [tally.metrics.get(name, torch.zeros(2, device=tally.loss.device)) for name in names]
        flat = torch.cat([torch.stack([tally.loss, tally.count]), *pairs])
        if self._mesh.world.is_distributed:
            dist.all_reduce(flat)
        # Ranks of `tp` and `cp` bring the same each.
        loss, count, *metrics = (flat / (self._mesh.size("tp") * self._mesh.size("cp"))).unbind(0)
        factor = None
        if rule.kind == "counted":
            factor = rule.provisional / count.clamp(min=torch.finfo(count.dtype).tiny)
            factor = torch.where(count > 0, factor, 0.0)
            loss = loss * factor
            if rule.num_others and has_values:
                self._check_proportions(tally)
        means = {
            name: metrics[2 * place] / metrics[2 * place + 1].clamp(min=torch.finfo(flat.dtype).tiny)
            for place, name in enumerate(names)
        }
        return StepTotals(loss=loss, factor=factor, metrics=means)

    def _check_proportions(self, tally: Tally) -> None:
        bounds = tally.spread.clone()
        if self._mesh.world.is_distributed:
            dist.all_reduce(bounds, op=dist.ReduceOp.MAX)
        largest = bounds[:, 1]
        apart = (largest + bounds[:, 0]) > _PROPORTION * largest.abs()
        if bool((apart & largest.isfinite()).any()):
            raise UnsupportedPlanError(
                "loss_fn adds means over different numbers of targets, and the micro-batches of this step have them in "
                "different proportions: no weight of a micro-batch is right for both",
                hint=HINT,
            )

    def _agreed_names(self, call: str, tally: Tally) -> list[str]:
        mine = list(tally.metrics)
        if call not in self._names:
            self._names[call] = self._names_of_the_end(mine)
        unknown = [name for name in mine if name not in self._names[call]]
        if unknown:
            raise UsageError(
                f"loss_fn returned the metric {unknown[0]!r}, which it did not return at first",
                hint="return the same metrics for every micro-batch",
            )
        return self._names[call]

    def _names_of_the_end(self, names: list[str]) -> list[str]:
        """Return the names that the first rank with the end of the model has."""
        world, grid = self._mesh.world, self._mesh.grid
        if not world.is_distributed or self._mesh.size("pp") == 1:
            return names
        source = next(rank for rank in range(world.size) if grid.coordinates(rank)["pp"] == grid.size("pp") - 1)
        text = torch.frombuffer(bytearray(json.dumps(names).encode()), dtype=torch.uint8).to(world.device)
        length = torch.tensor(len(text), device=world.device)
        dist.broadcast(length, src=source)
        if world.rank != source:
            text = torch.empty(int(length), dtype=torch.uint8, device=world.device)
        dist.broadcast(text, src=source)
        agreed: list[str] = json.loads(bytes(text.tolist()).decode())
        return agreed
