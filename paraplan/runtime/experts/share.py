"""The experts of a model shared out over `ep`: each rank keeps some of every layer, and its own code runs on them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from paraplan.runtime.experts.dispatch import SharedExperts, set_number
from paraplan.runtime.experts.layers import ExpertLayer, ExpertLoad, RankExperts, expert_parameters, listed_experts
from paraplan.runtime.experts.lists import ListedExperts
from paraplan.runtime.mesh import Mesh
from paraplan.runtime.shards.group import expert_ranks
from paraplan.runtime.shards.sharding import Sharding
from paraplan.runtime.split.layers import take_parts
from paraplan.runtime.structure.forwards import set_forward


def share_experts(
    model: nn.Module, layers: Mapping[str, ExpertLayer], mesh: Mesh, *, are_gathered: bool
) -> RankExperts:
    """Leave this rank's experts of `layers` in `model`, or in a stage of it that has some of them.

    `are_gathered` says that ranks which hold the same experts are to run them together, with rows or without.
    """
    group = expert_ranks(mesh)
    load = ExpertLoad()
    held = dict(model.named_modules())
    modules: list[nn.Module] = []
    absent: set[nn.Parameter] = set()
    shardings: dict[str, Sharding] = {}
    for name, layer in layers.items():
        if name not in held or not any(True for _ in held[name].parameters()):
            continue  # of another stage
        cuts = _cuts(model, layer, group.size)
        for parameter, sharding in cuts.items():
            path, _, own = parameter.rpartition(".")
            take_parts(held[path], {own: sharding}, group)
        shardings |= cuts
        load.num_experts[name] = layer.num_experts
        holder, forward = held[name], held[name].forward
        if layer.is_list:
            local = range(
                group.index * layer.num_experts // group.size, (group.index + 1) * layer.num_experts // group.size
            )
            for number, expert in enumerate(listed_experts(held[name]).values()):
                if number in local:
                    modules.append(expert)
                else:
                    absent.update(expert.parameters())
            if type(holder) in (nn.ModuleList, nn.ModuleDict):  # without code of its own
                holder = held[name.rpartition(".")[0]]
            forward = ListedExperts(name, holder, held[name], group, load, runs_all=are_gathered)
        else:
            modules.append(holder)
            set_number(holder, layer.num_experts, layer.num_experts // group.size)
            forward = SharedExperts(name, forward, layer.num_experts, group, load)
        set_forward(holder, torch.compiler.disable(forward))  # type: ignore[no-untyped-call]
    return RankExperts(tuple(modules), shardings, frozenset(absent), load)


def _cuts(model: nn.Module, layer: ExpertLayer, size: int) -> dict[str, Sharding]:
    """Return how the parameters of a layer are cut: along the experts, or each with the rank that holds its expert."""
    if not layer.is_list:
        stacked = Sharding(dim=0, segments=(layer.num_experts,), size=size)
        return {name: stacked for name, _ in expert_parameters(model, layer)}
    each = layer.num_experts // size
    return {
        f"{layer.name}.{key}.{name}": Sharding(dim=0, segments=(len(one),), size=size, owner=number // each)
        for number, (key, expert) in enumerate(listed_experts(model.get_submodule(layer.name)).items())
        for name, one in expert.named_parameters()
    }
