"""What one rank holds of a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from paraplan.runtime.data_parallel import ReplicaReduction
from paraplan.runtime.split.cut import Cut
from paraplan.runtime.step.execution import Execution


@dataclass(frozen=True)
class RankPart:
    """What one rank holds of the model: the module, its parameters and buffers by their names in the whole model.

    `buffers` are those that belong to the model's state. `repeated` names the parameters that an earlier pipeline stage
    holds too, and counts in the norm of the gradient. `cuts` names those of which the ranks of a `tp` group hold parts.
    `reductions` are those of DDP, which sums the gradients once every one of them is there.
    """

    module: nn.Module
    parameters: dict[str, nn.Parameter]
    buffers: dict[str, torch.Tensor]
    execution: Execution
    repeated: frozenset[str] = frozenset()
    cuts: Mapping[str, Cut] = field(default_factory=dict)
    reductions: tuple[ReplicaReduction, ...] = ()
    model: nn.Module | None = None

    def optimized(self) -> list[nn.Parameter]:
        """Return the parameters that an optimizer is made for.

        A rank that trains none of them (a stage of frozen blocks) has one without elements too, since optimizers refuse
        an empty list, and scripts give them those that need a gradient.
        """
        held = list(self.parameters.values())
        if not any(parameter.requires_grad for parameter in held):
            held.append(nn.Parameter(torch.empty(0)))
        return held
