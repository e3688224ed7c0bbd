"""Recompute under a backward pass in two halves: run once more, the same gradients, nothing kept longer than needed."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from paraplan.runtime.recompute.blocks import recompute_blocks
from paraplan.runtime.recompute.policy import RecomputedBlocks
from paraplan.runtime.recompute.split_backward import checkpoint_for_split_backward


class Block(nn.Module):
    """Attention, dropout and a layer that counts how often it runs, and what it made."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.down = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8)
        self.num_runs = 0
        self.made: list[weakref.ref[torch.Tensor]] = []

    def forward(self, hidden: torch.Tensor, *, scale: torch.Tensor) -> torch.Tensor:
        self.num_runs += 1
        query, key, value = self.qkv(self.norm(hidden)).view(2, 4, 3, 2, 4).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        inner = F.dropout(torch.tanh(attended.transpose(1, 2).flatten(2)), 0.5, self.training)
        self.made.append(weakref.ref(inner))
        return hidden + self.down(inner) * scale


def in_halves(recompute: Any) -> tuple[list[torch.Tensor], list[Block]]:
    """Return the gradients of the input and of all parameters of three blocks, and the blocks."""
    torch.manual_seed(0)
    blocks = [Block() for _ in range(3)]
    hidden = torch.randn(2, 4, 8, requires_grad=True)
    scale = nn.Parameter(torch.randn(8))
    recompute_blocks(blocks, RecomputedBlocks(recompute, frozenset(range(3))), in_halves=True)
    torch.manual_seed(1)
    output = hidden
    for block in blocks:
        output = block(output, scale=scale)
    weights = [scale, *(held for block in blocks for held in block.parameters())]
    drawn = torch.get_rng_state()
    (of_hidden,), groups = stage_backward_input([output * 1.0], [torch.ones_like(output)], [hidden], iter(weights))
    assert torch.equal(torch.get_rng_state(), drawn)  # what is run again leaves the numbers of later steps alone
    stage_backward_weight(iter(weights), groups, retain_graph=True)
    assert of_hidden is not None
    return [of_hidden, *(held.grad for held in weights if held.grad is not None)], blocks


def test_both_halves_give_the_gradients_of_what_was_kept_and_blocks_run_once_more() -> None:
    expected, _ = in_halves("none")
    for recompute, num_runs in (("full", 2), ("selective", 1)):
        found, blocks = in_halves(recompute)
        assert len(found) == len(expected) == 1 + 1 + 3 * 6
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other)
        assert [block.num_runs for block in blocks] == [num_runs] * 3


def test_what_a_block_makes_is_let_go_after_the_forward_pass_and_after_the_backward_pass() -> None:
    _, blocks = in_halves("full")
    gc.collect()
    assert [made() for block in blocks for made in block.made] == [None] * 6


def test_a_whole_backward_pass_under_autocast_is_that_of_what_was_kept() -> None:
    def gradients(*, again: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 8))
        given = torch.randn(4, 8, requires_grad=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = checkpoint_for_split_backward(layers, given) if again else layers(given)
        assert output.dtype == torch.bfloat16
        output.float().square().sum().backward()
        return [held.grad for held in (given, *layers.parameters()) if held.grad is not None]

    for one, other in zip(gradients(again=True), gradients(again=False), strict=True):
        assert torch.equal(one, other)
