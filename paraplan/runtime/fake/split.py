"""How a model without values is split over `tp`: searched for as ever, and used without the comparison of numbers."""

from __future__ import annotations

import copy

import torch
from torch import nn

from paraplan.runtime.mesh import Mesh
from paraplan.runtime.split import tensor_parallel
from paraplan.runtime.split.check import shares_with_blocks
from paraplan.runtime.split.forms import forms, tensor_group
from paraplan.runtime.split.layers import BlockSplit, SequenceEnds
from paraplan.runtime.split.regions import split_block
from paraplan.runtime.split.tensor_parallel import TensorSplit
from paraplan.runtime.structure.blocks import find_blocks
from paraplan.runtime.structure.model_structure import BlockCall, ModelStructure
from paraplan.runtime.torch_private import pytree


def split_without_values(model: nn.Module, mesh: Mesh, *, sequence_parallel: bool) -> TensorSplit | None:
    """Return the split of `model`, which is on the meta device, over `tp`; None where that is one rank.

    Of the forms of a split block, the first is taken whose code runs; whether it computes the same needs values.
    """
    if mesh.size("tp") == 1:
        return None
    return tensor_parallel.find_tensor_split(
        ModelStructure(model, find_blocks(model)), mesh=mesh, sequence_parallel=sequence_parallel, check=_unchecked
    )


def _unchecked(
    block: nn.Module, name: str, call: BlockCall, split: BlockSplit, mesh: Mesh, ends: SequenceEnds | None
) -> BlockSplit:
    args, kwargs = pytree.tree_map_only(
        torch.Tensor, lambda leaf: torch.empty_like(leaf, device="meta"), (call.args, call.kwargs)
    )
    for form in forms(block, split, ends, size=mesh.size("tp"), shares=shares_with_blocks(call)):
        part = copy.deepcopy(block)
        split_block(part, form, tensor_group(mesh), ends)
        try:
            with torch.no_grad():
                part(*args, **kwargs)
        except (RuntimeError, TypeError, ValueError, IndexError, AttributeError):
            continue  # sizes that the code names do not fit the parts
        return form
    return split
