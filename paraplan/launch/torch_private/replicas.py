"""Which ranks hold the same values as this one, as DDP, both of torch's FSDP and DTensors say it.

It runs in ranks, without this package where their interpreters have none.
"""

from __future__ import annotations

from typing import Any

Groups = list[list[int]] | None
"""Groups of global ranks that hold the same, this one among them; [] for no other rank, None where nothing says it."""


def groups_of_dtensor(tensor: Any) -> Groups:
    """Return the ranks with the same shard: those along the axes of the mesh over which it is replicated."""
    mesh, place = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    if place is None or any(how.is_partial() for how in tensor.placements):
        return []
    index = tuple(slice(None) if how.is_replicate() else at for how, at in zip(tensor.placements, place, strict=True))
    ranks = mesh.mesh[index].flatten().tolist()
    return [sorted(ranks)] if len(ranks) > 1 else []


def ranks_of_group(group: Any) -> list[int]:
    """Return the global ranks of a process group."""
    import torch.distributed as dist

    return sorted(dist.get_process_group_ranks(group))


def flat_parameters(module: Any) -> tuple[Any, list[Any], Groups] | None:
    """Return the vector of a module of the first FSDP, the parameters that are views of it, and who holds the same."""
    handle = getattr(module, "_handle", None)
    if handle is None:
        return None
    groups = [] if handle.uses_sharded_strategy else [ranks_of_group(handle.process_group)]
    if getattr(module, "_inter_node_pg", None) is not None:
        groups.append(ranks_of_group(module._inter_node_pg))
    return handle.flat_param, list(handle.flat_param._params or ()), groups


def data_groups(module: Any) -> list[list[int]]:
    """Return the groups of ranks among which a wrapper divides batches: DDP, or a module of an FSDP; [] for others."""
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
    from torch.nn.parallel import DistributedDataParallel

    if isinstance(module, DistributedDataParallel):
        return [ranks_of_group(module.process_group)]
    if isinstance(module, FullyShardedDataParallel):
        outer = getattr(module, "_inter_node_pg", None)
        return [ranks_of_group(module.process_group)] + ([] if outer is None else [ranks_of_group(outer)])
    if not isinstance(module, FSDPModule):
        return []
    found = []
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    for group in [state._fsdp_param_group] if groups is None else groups:  # the one of torch 2.11
        info = getattr(group, "mesh_info", None)
        both = (getattr(info, name, None) for name in ("shard_process_group", "replicate_process_group"))
        found += [ranks_of_group(group) for group in both if group is not None]
    return found
