"""Messages between ranks as numbers, bytes and JSON, none of which is code when it is read."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from paraplan.runtime.world import World


def has_cpu_backend(group: dist.ProcessGroup | None = None) -> bool:
    """Whether the ranks of `group`, by default all, reach each other from the CPU, without waiting for their GPUs."""
    return "gloo" in str(dist.get_backend_config(group))


def gathered_numbers(numbers: Sequence[float], world: World) -> list[list[float]]:
    """Return the numbers that every rank gives, as many of each, in the order of the ranks."""
    mine = torch.tensor(numbers, dtype=torch.float64, device=world.device)
    rows = [mine]
    if world.is_distributed:
        rows = [torch.empty_like(mine) for _ in range(world.size)]
        dist.all_gather(rows, mine)
    gathered: list[list[float]] = torch.stack(rows).tolist()
    return gathered


def gather_bytes(
    data: bytes, group: dist.ProcessGroup | None = None, *, only_first: bool = False
) -> list[bytes] | None:
    """Return what each rank of `group` brings, in order of the ranks. Every rank calls it; one process has its own.

    With `only_first` the others than rank 0 get None.
    """
    if not dist.is_initialized():
        return [data]
    device = torch.device("cpu") if has_cpu_backend(group) else torch.device("cuda", torch.cuda.current_device())
    length = torch.tensor([len(data)], device=device)
    lengths = [torch.empty_like(length) for _ in range(dist.get_world_size(group))]
    dist.all_gather(lengths, length, group=group)
    counts = [int(each) for each in torch.cat(lengths).tolist()]
    sent = torch.zeros(max(1, *counts), dtype=torch.uint8, device=device)
    if data:
        sent[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    is_first = dist.get_rank() == 0
    come = [torch.empty_like(sent) for _ in counts] if is_first or not only_first else None
    if only_first:
        dist.gather(sent, come, dst=0, group=group)
    else:
        dist.all_gather(come, sent, group=group)
    if come is None:
        return None
    return [each[:count].cpu().numpy().tobytes() for each, count in zip(come, counts, strict=True)]


def gather_json(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return the JSON values that the ranks of `group` bring, in order of the ranks. Every rank calls it."""
    found = gather_bytes(json.dumps(value).encode(), group)
    assert found is not None
    return [json.loads(each) for each in found]
