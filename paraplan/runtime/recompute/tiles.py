"""Feed-forward layers over tiles of a sequence: each tile is computed again in the backward pass, which holds one.

What DeepSpeed's TiledMLP does (runtime/sequence_parallel/ulysses_sp.py; Bekman et al. 2025, Arctic Long Sequence
Training, section 3.1.2), by torch's checkpoint of each tile.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from paraplan.errors import UnsupportedPlanError
from paraplan.runtime.data.batches import call_model
from paraplan.runtime.shards.group import TensorGroup
from paraplan.runtime.split.context_tail import TokensApart
from paraplan.runtime.structure.forwards import set_forward
from paraplan.runtime.structure.model_structure import ModelStructure

_TOKENS = 1  # their dimension, in [batch, tokens, hidden]


def find_feed_forward(structure: ModelStructure, tile: int) -> tuple[str, ...]:
    """Return the names of the feed-forward layers of a model: parts of blocks that work token by token.

    Such a part has two matrices at least, no experts, and takes and returns hidden states alone. Raises
    `UnsupportedPlanError` for a model without one.
    """
    structure.check_has_blocks(f"mlp_tile={tile}", "that have feed-forward layers")
    meta_model = structure.meta_model
    parts = {
        f"{name}.{part}": module
        for name, block in zip(structure.stack.names, structure.stack.modules(meta_model), strict=True)
        for part, module in block.named_children()
        if sum(one.ndim == 2 for one in module.parameters()) > 1
        if all(one.ndim < 3 for one in module.parameters())
        if not any(isinstance(one, nn.ModuleList) for one in module.modules())
    }

    def attempt(tried: Any, _: object) -> tuple[str, ...]:
        apart: set[str] = set()
        with ExitStack() as undo, torch.no_grad():
            for name, module in parts.items():
                undo.callback(module.register_forward_hook(partial(_note, apart, name), with_kwargs=True).remove)
            call_model(meta_model, tried)
        return tuple(name for name in parts if name in apart)

    found: tuple[str, ...] = structure.run(attempt)
    if not found:
        raise UnsupportedPlanError(
            f"mlp_tile={tile}: no part of the blocks of {type(structure.model).__name__} is a feed-forward layer that "
            "takes and returns hidden states alone, token by token",
            hint="use a plan without tiles",
        )
    return found


def _note(apart: set[str], name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
    """Take note of `name` where `module` took and returned hidden states alone, and works token by token."""
    given = args[0] if len(args) == 1 and not kwargs else None
    if not isinstance(given, torch.Tensor) or not isinstance(output, torch.Tensor) or given.ndim != 3:
        return
    if not given.is_floating_point() or output.shape != given.shape:
        return
    try:
        with TokensApart(1, lambda: given.shape[_TOKENS]):
            type(module).forward(module, given)
    except UnsupportedPlanError:
        return
    apart.add(name)


def run_in_tiles(module: nn.Module, tile: int, group: TensorGroup | None) -> None:
    """Have `module` work on `tile` tokens after the other; `group` is that of `tp` under sequence parallelism."""
    inner = module.forward

    def one(given: torch.Tensor) -> torch.Tensor:
        with _tokens_of(group, given.shape[_TOKENS]):
            output: torch.Tensor = inner(given.contiguous())
        return output

    def forward(given: torch.Tensor) -> torch.Tensor:
        if not torch.is_grad_enabled():
            return torch.cat([one(each) for each in torch.split(given, tile, _TOKENS)], _TOKENS)
        tiles: Sequence[torch.Tensor] = torch.split(given, tile, _TOKENS)
        return torch.cat([checkpoint(one, each, use_reentrant=False) for each in tiles], _TOKENS)

    set_forward(module, forward)


@contextmanager
def _tokens_of(group: TensorGroup | None, own: int) -> Iterator[None]:
    """Have the ranks of `group` bring together `own` tokens of each in this context."""
    if group is None:
        yield
        return
    before = group.num_tokens
    group.take_tokens(own * group.size)
    try:
        yield
    finally:
        group.take_tokens(before)
