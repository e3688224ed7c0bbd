"""Parameters that several pipeline stages hold: a head tied to the embedding, a table that all blocks read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from paraplan.runtime.anatomy import Anatomy
from paraplan.runtime.mesh import Mesh


@dataclass(frozen=True)
class Tie:
    """A parameter of the whole model with the pipeline stages that use it, two or more."""

    name: str
    stages: tuple[int, ...]


def find_ties(anatomy: Anatomy, bounds: Sequence[tuple[int, int]]) -> list[Tie]:
    """Return the parameters that more than one of the stages with these `bounds` uses, in order of their names."""
    users: dict[str, list[int]] = {}
    for stage, (start, end) in enumerate(bounds):
        for name in anatomy.used_by(start, end):
            users.setdefault(name, []).append(stage)
    return [Tie(name=name, stages=tuple(stages)) for name, stages in sorted(users.items()) if len(stages) > 1]


class TiedGradients:
    """Sums the gradients of tied parameters over the stages that hold them, so that their copies stay equal.

    `parameters` are this rank's, by the name of the tie. Every rank makes the groups of every tie, in one order.
    """

    def __init__(self, ties: Sequence[Tie], parameters: dict[str, nn.Parameter], mesh: Mesh) -> None:
        self._held: list[tuple[nn.Parameter, dist.ProcessGroup]] = []
        groups = {stages: _stage_group(stages, mesh) for stages in sorted({tie.stages for tie in ties})}
        for tie in ties:
            group = groups[tie.stages]
            if group is not None:
                self._held.append((parameters[tie.name], group))

    def sum_gradients(self) -> None:
        """Add up the gradients of every tied parameter of this rank over its holders; a missing one counts as 0."""
        for parameter, group in self._held:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradient = parameter.grad
            dist.all_reduce(gradient.to_local() if isinstance(gradient, DTensor) else gradient, group=group)


def _stage_group(stages: tuple[int, ...], mesh: Mesh) -> dist.ProcessGroup | None:
    """Return the group of these stages of this rank's own pipeline; None if it is no such stage."""
    mine = None
    for pipeline in mesh.grid.groups("pp"):
        ranks = [pipeline[stage] for stage in stages]
        group = dist.new_group(ranks)
        if mesh.world.rank in ranks:
            mine = group
    return mine
