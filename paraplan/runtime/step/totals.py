"""The tallies of all ranks brought together: the loss of the global batch, its metrics, and what gradients lack."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from paraplan.errors import UsageError
from paraplan.runtime.mesh import Mesh
from paraplan.runtime.step.loss import LossRule, Tally

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
        """Return the totals of `tally`; every rank calls it after each run of its execution."""
        names = self._agreed_names(call, tally) if has_values else []
        pairs = [tally.metrics.get(name, torch.zeros(2, device=tally.loss.device)) for name in names]
        flat = torch.cat([torch.stack([tally.loss, tally.count]), *pairs, tally.parts.flatten()])
        if self._mesh.world.is_distributed:
            dist.all_reduce(flat)
        # Ranks of `tp` and `cp` bring the same each.
        flat = flat / (self._mesh.size("tp") * self._mesh.size("cp"))
        loss, count, *metrics = flat.unbind(0)
        factor = None
        if rule.kind == "counted" and rule.counts is None:
            factor = rule.provisional / count.clamp(min=torch.finfo(count.dtype).tiny)
            factor = torch.where(count > 0, factor, 0.0)
            parts = flat[-tally.parts.numel() :].reshape(tally.parts.shape)
            loss = _sum_of_means(parts) if rule.num_others else loss * factor
        means = {
            name: metrics[2 * place] / metrics[2 * place + 1].clamp(min=torch.finfo(flat.dtype).tiny)
            for place, name in enumerate(names)
        }
        return StepTotals(loss=loss, factor=factor, metrics=means)

    def counts(self, tally: Tally) -> torch.Tensor:
        """Return over how many targets each of the means goes that were added, in the global batch."""
        counts = tally.parts[:, 1].clone()
        if self._mesh.world.is_distributed:
            dist.all_reduce(counts)
        return counts / (self._mesh.size("tp") * self._mesh.size("cp"))

    def is_in_proportion(self, tally: Tally) -> bool:
        """Whether the means that were added have their counts in one proportion in all micro-batches of all ranks."""
        bounds = tally.spread.clone()
        if self._mesh.world.is_distributed:
            dist.all_reduce(bounds, op=dist.ReduceOp.MAX)
        largest = bounds[:, 1]
        apart = ~((largest + bounds[:, 0]) <= _PROPORTION * largest.abs())
        return not bool(((apart & (largest > -torch.inf)) | largest.isposinf()).any())

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


def _sum_of_means(parts: torch.Tensor) -> torch.Tensor:
    """Return the sum of means of which `parts` [means, 2] has sums and counts; one without targets is 0."""
    sums, counts = parts.unbind(1)
    return torch.where(counts > 0, sums / counts.clamp(min=torch.finfo(counts.dtype).tiny), 0.0).sum()
