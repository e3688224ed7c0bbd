"""Gradients of weights are made while those of inputs travel, and are the same as without."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_harness import RankHarness
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.pytorch_utils import Conv1D

from paraplan.runtime.shards.group import TensorGroup
from paraplan.runtime.shards.sharding import Sharding
from paraplan.runtime.split.layers import BlockSplit, LayerRole, SequenceEnds
from paraplan.runtime.split.regions import split_block

WIDTH, TOKENS = 8, 6
COLLECTIVES = ("allreduce_", "_reduce_scatter_base_")
COLUMN = LayerRole(kind="column", segments=(WIDTH,))
ROW = LayerRole(kind="row", segments=(WIDTH,))
SPLIT = BlockSplit(roles={"gate": COLUMN, "up": COLUMN, "down": ROW}, whole={})


class Operations(TorchDispatchMode):
    """Writes down products and collectives, in the order in which they are started."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in ("mm", *COLLECTIVES):
            self.names.append(name)
        return func(*args, **kwargs or {})


class Layers(nn.Module):
    """Two column layers that read one tensor, and a row layer behind them."""

    def __init__(self, linear: Callable[[], nn.Module], group: TensorGroup, *, sequence_parallel: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.gate, self.up, self.down = linear(), linear(), linear()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        ends = SequenceEnds(0, is_first=False, is_last=False) if sequence_parallel else None
        split_block(self, SPLIT, group, ends)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden * self.scale
        return self.down(torch.sigmoid(self.gate(hidden)) * self.up(hidden))


def _trained(linear: Callable[[], nn.Module], *, overlaps: bool, sequence_parallel: bool, autocast: bool) -> Any:
    world = dist.group.WORLD
    assert world is not None
    group = TensorGroup(size=2, index=dist.get_rank(), handle=world, overlaps=overlaps)
    layers = Layers(linear, group, sequence_parallel=sequence_parallel)
    torch.manual_seed(2)
    given = torch.randn(3, TOKENS, WIDTH)
    if sequence_parallel:
        given = Sharding(dim=1, segments=(TOKENS,), size=2).part(given, group.index)
    operations = Operations()
    for _ in range(2):  # the second pass adds to what the first has left
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            output = layers(given)
        operations.names.clear()
        with operations:
            output.float().square().sum().backward()
    return {name: parameter.grad for name, parameter in layers.named_parameters()}, operations.names


def _linear() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


def _transposed() -> nn.Module:
    return Conv1D(WIDTH, WIDTH)


def _compared() -> list[tuple[bool, list[str], list[str]]]:
    dist.init_process_group("gloo")
    rows = []
    for linear in (_linear, _transposed):
        for sequence_parallel in (False, True):
            for autocast in (False, True):
                options = {"sequence_parallel": sequence_parallel, "autocast": autocast}
                late, late_names = _trained(linear, overlaps=True, **options)
                plain, plain_names = _trained(linear, overlaps=False, **options)
                assert plain.keys() == late.keys()
                same = all(torch.equal(late[name], plain[name]) for name in plain)
                rows.append((same, late_names, plain_names))
    return rows


@pytest.mark.ranks
def test_the_weight_of_the_first_layer_that_reads_an_input_waits_for_the_sum_to_start(ranks: RankHarness) -> None:
    for rows in ranks.run(_compared, size=2):
        for same, late, plain in rows:
            assert same
            assert sorted(late) == sorted(plain)
            assert plain[_last_product(plain) - 1] == "mm"
            assert late[_last_product(late) - 1] in COLLECTIVES


def _last_product(names: list[str]) -> int:
    return max(index for index, name in enumerate(names) if name == "mm")
