"""Parameters that several ranks of a pipeline hold: a head tied to the embedding, a table that all blocks read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from paraplan.runtime.anatomy import Anatomy
from paraplan.runtime.mesh import Mesh
from paraplan.runtime.pipeline.replica_gradients import has_some


@dataclass(frozen=True)
class Tie:
    """A parameter of the whole model with the ranks of a pipeline whose stages use it, two or more."""

    name: str
    ranks: tuple[int, ...]


def find_ties(anatomy: Anatomy, bounds: Sequence[tuple[int, int]], *, num_ranks: int) -> list[Tie]:
    """Return the parameters that more than one rank of a pipeline uses, in order of their names.

    Of the stages with these `bounds`, rank i of `num_ranks` holds i, i + num_ranks and so on.
    """
    users: dict[str, set[int]] = {}
    for stage, (start, end) in enumerate(bounds):
        for name in anatomy.used_by(start, end):
            users.setdefault(name, set()).add(stage % num_ranks)
    return [Tie(name=name, ranks=tuple(sorted(ranks))) for name, ranks in sorted(users.items()) if len(ranks) > 1]


class TiedGradients:
    """Sums the gradients of tied parameters over the ranks that hold them, so that their copies stay equal.

    `parameters` are this rank's, by the name of the tie. Every rank makes the groups of every tie, in one order. Those
    that are not trained stay without a gradient: an optimizer would decay them.
    """

    def __init__(self, ties: Sequence[Tie], parameters: dict[str, nn.Parameter], mesh: Mesh) -> None:
        self._held: list[tuple[nn.Parameter, dist.ProcessGroup]] = []
        groups = {ranks: _rank_group(ranks, mesh) for ranks in sorted({tie.ranks for tie in ties})}
        for tie in ties:
            group = groups[tie.ranks]
            if group is not None and parameters[tie.name].requires_grad:
                self._held.append((parameters[tie.name], group))

    def sum_gradients(self) -> None:
        """Add up the gradients of every tied parameter of this rank over its holders.

        A missing one counts as 0; one that no holder has stays away, as in one process.
        """
        for parameter, group in self._held:
            missing = parameter.grad is None
            holders = torch.tensor(float(not missing), device=_local(parameter).device)
            dist.all_reduce(holders, group=group)
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            dist.all_reduce(_local(gradient), group=group)
            if missing and has_some(holders):
                parameter.grad = gradient


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _rank_group(places: tuple[int, ...], mesh: Mesh) -> dist.ProcessGroup | None:
    """Return the group of the ranks at these places of this rank's own pipeline; None if it is none of them."""
    mine = None
    for pipeline in mesh.grid.groups("pp"):
        ranks = [pipeline[place] for place in places]
        group = dist.new_group(ranks)
        if mesh.world.rank in ranks:
            mine = group
    return mine
