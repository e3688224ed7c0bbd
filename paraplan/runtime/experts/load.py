"""How evenly tokens choose experts: metrics of a step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from paraplan.runtime.experts.layers import ExpertLoad
from paraplan.runtime.mesh import Mesh


def load_metrics(loads: Sequence[ExpertLoad], mesh: Mesh) -> dict[str, torch.Tensor]:
    """Return what the busiest had in a step over the mean: `expert_load` of ranks, `expert_imbalance` of experts.

    Both are means over the layers, the same on every rank. Rows of the step are forgotten. Every rank calls it.
    """
    layers = [(load, name, count) for load in loads for name, count in load.num_experts.items()]
    ratios = torch.zeros(3, device=mesh.world.device)
    if layers:
        sent = [
            load.rows.get(name, torch.zeros(count, device=mesh.world.device)).float() for load, name, count in layers
        ]
        flat = torch.cat(sent)
        dist.all_reduce(flat, group=mesh.replica_group)
        for rows in torch.split(flat, [count for _, _, count in layers]):
            mean = rows.mean()
            by_rank = rows.view(mesh.ep, -1).mean(1)
            found = torch.stack([by_rank.max() / mean, rows.max() / mean, torch.ones_like(mean)])
            ratios += torch.where(mean > 0, found, 0.0)
    if mesh.group("pp") is not None:
        dist.all_reduce(ratios, group=mesh.group("pp"))
    forget_load(loads)
    load, imbalance, count = ratios.unbind()
    return {"expert_load": load / count, "expert_imbalance": imbalance / count}


def forget_load(loads: Sequence[ExpertLoad]) -> None:
    """Forget what was sent so far: in trials, and in evaluation."""
    for load in loads:
        load.rows.clear()
