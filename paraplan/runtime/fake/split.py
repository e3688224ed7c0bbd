"""How a model without values is split over `tp`: searched for as ever, and used without the comparison of numbers."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from paraplan.runtime.mesh import Mesh
from paraplan.runtime.split import tensor_parallel
from paraplan.runtime.split.check import shares_with_blocks
from paraplan.runtime.split.layers import SequenceEnds
from paraplan.runtime.split.search import BlockSplit
from paraplan.runtime.split.tensor_parallel import TensorSplit
from paraplan.runtime.structure.blocks import find_blocks
from paraplan.runtime.structure.model_structure import BlockCall, ModelStructure
from paraplan.runtime.torch_private import pytree


def split_without_values(model: nn.Module, mesh: Mesh, *, sequence_parallel: bool) -> TensorSplit | None:
    """Return the split of `model`, which is on the meta device, over `tp`; None where that is one rank.

    Of the two forms of a split block, the one is taken whose code runs; whether it computes the same needs values.
    """
    if mesh.size("tp") == 1:
        return None
    return tensor_parallel.find_tensor_split(
        ModelStructure(model, find_blocks(model)), mesh=mesh, sequence_parallel=sequence_parallel, check=_unchecked
    )


def _unchecked(
    block: nn.Module, name: str, call: BlockCall, split: BlockSplit, mesh: Mesh, ends: SequenceEnds | None
) -> BlockSplit:
    if ends is not None or split.draws or shares_with_blocks(call):
        return split
    part, direct = copy.deepcopy(block), replace(split, use_local_output=True)
    tensor_parallel.split_block(part, direct, tensor_parallel.tensor_group(mesh), None)
    args, kwargs = pytree.tree_map(_without_values, (call.args, call.kwargs))
    try:
        with torch.no_grad():
            part(*args, **kwargs)
    except (RuntimeError, TypeError, ValueError, IndexError, AttributeError):
        return split  # sizes that the code names do not fit the parts
    return direct


def _without_values(leaf: Any) -> Any:
    return torch.empty_like(leaf, device="meta") if isinstance(leaf, torch.Tensor) else leaf
