"""Records of ranks and of one process whose gradients are given, as a check of a script sees them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from paraplan.script_check.evidence import Process, Sight
from paraplan.script_check.records import ProcessRecord, StepRecord


def with_record(one: Process, **changes: Any) -> Process:
    return Process(one.record.replace(**changes), one.tensors)


NAMES = ("embedding.weight", "layer.weight", "head.bias")
Change = Callable[[str, torch.Tensor, int], torch.Tensor | None]


def process_of(rank: int, num_ranks: int, tensors: dict[str, torch.Tensor], norm: float | None = 1.0) -> Process:
    record = ProcessRecord(
        rank=rank,
        num_ranks=num_ranks,
        names=NAMES,
        split=(),
        num_replicas=None,
        axes={},
        steps=(StepRecord(optimizer=0, losses=(1.0,), norm=norm, rates=({"lr": 0.1},)),),
        sources=(),
        notes=(),
        given=(str(rank),),
        outputs={},
        rounding=1.2e-7,
        is_whole=True,
    )
    return Process(record, tensors)


def sight(num_ranks: int, change: Change, *, seed: int = 0, norm: float | None = 1.0) -> Sight:
    """What is seen of ranks whose gradients are `change(name, gradient of all batches, rank)`."""
    random = torch.Generator().manual_seed(seed)
    shares = [{name: torch.randn(4, 3, generator=random) for name in NAMES} for _ in range(num_ranks)]
    whole = {name: torch.stack([share[name] for share in shares]).mean(0) for name in NAMES}
    start = {f"start/{name}": torch.ones(4, 3) for name in NAMES}
    noise = {name: 1 + 1e-7 * torch.randn(4, 3, generator=random) for name in NAMES}

    def of(gradients: dict[str, torch.Tensor | None]) -> dict[str, torch.Tensor]:
        made = {f"gradient/1/{name}": value for name, value in gradients.items() if value is not None}
        after = {f"parameter/1/{name}": 1 - 0.1 * value for name, value in gradients.items() if value is not None}
        return start | made | after

    ranks = [
        process_of(rank, num_ranks, of({name: change(name, whole[name], rank) for name in NAMES}), norm)
        for rank in range(num_ranks)
    ]
    alone = process_of(0, 1, of(dict(whole)))
    shaken = process_of(0, 1, of({name: whole[name] * noise[name] for name in NAMES}))
    alones = [process_of(0, 1, of(dict(share))) for share in shares]
    return Sight(ranks, alone, shaken, alones, [[rank] for rank in range(num_ranks)])
