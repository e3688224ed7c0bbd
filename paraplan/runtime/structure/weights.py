"""The weights before the first step: counted, compared between ranks, and made equal to those of rank 0."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from itertools import chain, pairwise
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from paraplan.errors import ModelError
from paraplan.runtime.exchange import gathered_numbers
from paraplan.runtime.torch_private import local_shape_and_offset, storage_key
from paraplan.runtime.world import World

_BUCKET_BYTES = 64 * 2**20
_Tensor = TypeVar("_Tensor", bound=torch.Tensor)


def count_parameters(model: nn.Module) -> int:
    """Return the number of elements of all parameters, tied ones once; raise `ModelError` where one has no shape."""
    for name, parameter in model.named_parameters():
        if isinstance(parameter, nn.UninitializedParameter):
            raise ModelError(
                f"{name} has no shape yet: a lazy module gets it in its first forward pass",
                hint="call the model once, on inputs of any values, before job.prepare",
            )
    return sum(parameter.numel() for parameter in model.parameters())


def check_materialised(model: nn.Module, *, reads_weights: bool = False) -> None:
    """Raise `ModelError` where a parameter has no values and gets none, or is split over ranks already."""
    for name, parameter in model.named_parameters():
        if parameter.is_meta and not reads_weights:
            raise ModelError(
                f"parameter {name} is on the meta device and has no values",
                hint="build the model on the CPU, or give job.prepare its weights=",
            )
        if isinstance(parameter, DTensor):
            raise ModelError(
                f"parameter {name} is split over ranks already", hint="give job.prepare a model that nothing has split"
            )


def check_own_memory(model: nn.Module, plan_words: str) -> None:
    """Raise `ModelError` where two parameters lie over the same memory: a plan that moves them would part them."""
    held: dict[object, list[tuple[int, int, str]]] = {}
    for name, parameter in model.named_parameters():
        if parameter.is_meta or is_quantized(parameter) or not parameter.numel():
            continue
        start = int(parameter.storage_offset())
        last = sum((size - 1) * int(stride) for size, stride in zip(parameter.shape, parameter.stride(), strict=True))
        held.setdefault(storage_key(parameter), []).append((start, start + last + 1, name))
    for places in held.values():
        for (_, end, first), (start, _, second) in pairwise(sorted(places)):
            if start < end:
                raise ModelError(
                    f"{first} and {second} are two parameters over the same memory, which '{plan_words}' would part",
                    hint="tie them as one parameter: second.weight = first.weight, in place of its data",
                )


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank holds of a tensor, without a graph: its shard where ranks have one each."""
    detached = tensor.detach()
    return detached.to_local() if isinstance(detached, DTensor) else detached


def own_part(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of `values`, which every rank has, or shards of which ranks have, as of `like`."""
    if not isinstance(like, DTensor):
        return values
    if isinstance(values, DTensor):
        return local_shard(values.redistribute(like.device_mesh, like.placements))
    shape, offsets = local_shape_and_offset(like.shape, like.device_mesh, like.placements)
    return values[tuple(slice(start, start + size) for start, size in zip(offsets, shape, strict=True))]


def free_gathered(module: nn.Module) -> None:
    """Let go the whole parameters that ZeRO has gathered in `module`: those that change are gathered anew."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def lasting_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers that a state dict of `model` holds."""
    lasting = model.state_dict().keys()
    return {name: buffer for name, buffer in model.named_buffers() if name in lasting}


def is_quantized(tensor: torch.Tensor) -> bool:
    """Return whether a tensor holds others, as quantized weights of torchao do: a copy of it is quantized anew."""
    return hasattr(tensor, "__tensor_flatten__") and not isinstance(tensor, DTensor)


def plain_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the tensors that a quantized one holds, or the tensor itself."""
    if is_quantized(tensor):
        names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        for name in names:
            yield from plain_tensors(getattr(tensor, name))
    else:
        yield tensor


def can_be_sharded(tensor: torch.Tensor, num_shards: int) -> bool:
    """Return whether FSDP can divide a quantized tensor so that its parts are quantized like it."""
    try:
        return all(is_quantized(part) for part in torch.chunk(tensor.detach(), num_shards))
    except (NotImplementedError, RuntimeError, AssertionError, ValueError, TypeError):  # whatever its type says of it
        return False


def share_weights(model: nn.Module, world: World) -> None:
    """Give every rank the parameters and buffers of rank 0, so that all start from the same model.

    Tensors travel in buckets of one type and stay on the device where they are. Raises `ModelError` on every rank
    where the ranks have built models of different names, shapes or types.
    """
    if not world.is_distributed:
        return
    _check_same_model(model, world)
    tensors = chain.from_iterable(map(plain_tensors, [*model.parameters(), *model.buffers()]))
    for bucket in buckets((one for one in tensors if not one.is_meta), _BUCKET_BYTES):  # else it comes from a file
        flat = torch.cat([tensor.detach().reshape(-1).to(world.device) for tensor in bucket])
        dist.broadcast(flat.view(torch.uint8), src=0)  # bytes: backends do not know all types, as gloo not float8
        if world.rank == 0:
            continue
        for tensor, part in zip(bucket, torch.split(flat, [tensor.numel() for tensor in bucket]), strict=True):
            tensor.detach().copy_(part.view_as(tensor))


def _check_same_model(model: nn.Module, world: World) -> None:
    described = [f"{name} {tuple(tensor.shape)} {tensor.dtype}" for name, tensor in model.state_dict().items()]
    mine = [float(count_parameters(model)), float(zlib.crc32("\n".join(described).encode()))]
    gathered = gathered_numbers(mine, world)
    odd = [rank for rank, other in enumerate(gathered) if other != gathered[0]]
    if odd:
        raise ModelError(
            f"ranks {odd} have built another model than rank 0 ({int(gathered[odd[0]][0]):,} parameters against "
            f"{int(gathered[0][0]):,}, or other names or types)",
            hint="build the same model on every rank",
        )


def buckets(tensors: Iterable[_Tensor], least_bytes: int) -> Iterator[list[_Tensor]]:
    """Yield `tensors` in lists of one type, to be sent together: each of `least_bytes` or more, but the last ones."""
    by_type: dict[torch.dtype, list[_Tensor]] = {}
    for tensor in tensors:
        by_type.setdefault(tensor.dtype, []).append(tensor)
    for same in by_type.values():
        bucket: list[_Tensor] = []
        size_bytes = 0
        for tensor in same:
            bucket.append(tensor)
            size_bytes += tensor.numel() * tensor.element_size()
            if size_bytes >= least_bytes:
                yield bucket
                bucket, size_bytes = [], 0
        if bucket:
            yield bucket
