"""MLPs over tiles of a sequence: a block keeps their input, and computes tile by tile again in its backward pass.

`TiledMLP` of DeepSpeed (runtime/sequence_parallel/ulysses_sp.py, deepspeedai/DeepSpeed at edaa722), which axolotl and
Unsloth took over, and Liger's. Its forward pass keeps no graph; its backward pass runs the forward pass of each tile
again, beside a gradient of the whole input. What adapters keep counts as it does without tiles.
"""

from __future__ import annotations

import numpy as np

from paraplan.cost.blocks.kernels import KernelTimes
from paraplan.cost.blocks.saved_tensors import Shardings, kept_tensors, tensor_bytes
from paraplan.cost.plan_table import Floats
from paraplan.model.spec import BlockSpec, SavedTensor
from paraplan.plan.training import TrainingSpec


def beside_mlp(block: BlockSpec, training: TrainingSpec) -> BlockSpec:
    """Return what `block` keeps where its MLP runs in tiles: the input of that, and all that others keep.

    Blocks with experts, and those that were traced, stay as they are.
    """
    if training.stack.mlp_tile is None or not has_tiles(block):
        return block
    return block.replace(saved=_without_inner(block, block.saved), saved_fused=_without_inner(block, block.saved_fused))


def has_tiles(block: BlockSpec) -> bool:
    """Return whether a block has an MLP of linear layers alone."""
    matmuls = [one for one in block.matmuls if one.name.startswith("mlp.")]
    return bool(matmuls) and not any(one.num_experts > 1 for one in block.matmuls)


def tile_bytes(block: BlockSpec, training: TrainingSpec, shardings: Shardings, *, fused_kernels: bool) -> Floats:
    """Return what the backward pass of an MLP holds of one tile, with the gradient of its input; 0 without tiles."""
    if training.stack.mlp_tile is None or not has_tiles(block):
        return np.zeros_like(shardings.tp)
    inner = [
        tensor_bytes(block, tensor, training, shardings, is_first=True)
        for tensor in kept_tensors(block, training, fused_kernels=fused_kernels)
        if _is_inner(tensor)
    ]
    held = sum(inner, np.zeros_like(shardings.tp)) + np.max([*inner, np.zeros_like(shardings.tp)], axis=0)
    whole = tensor_bytes(block, _input(block), training, shardings, is_first=True)
    return np.asarray(held / np.ceil(shardings.own_tokens / training.stack.mlp_tile) + whole)


def tiles_again_s(block: BlockSpec, times: KernelTimes) -> Floats:
    """Return the seconds of an MLP's forward pass, which its backward pass runs again; 0 without tiles."""
    if times.training.stack.mlp_tile is None or not has_tiles(block):
        return np.zeros_like(times.shardings.tp)
    whole = block.before_freezing or block
    rest = beside_mlp(whole, times.training)
    between_s = times.parts_s(whole).between - times.parts_s(rest).between
    return np.asarray(
        times.products_s(block, [one for one in block.matmuls if one.name.startswith("mlp.")]) + between_s
    )


def _without_inner(block: BlockSpec, tensors: tuple[SavedTensor, ...]) -> tuple[SavedTensor, ...]:
    rest = tuple(tensor for tensor in tensors if not _is_inner(tensor))
    return rest if any(tensor.role == "mlp_input" for tensor in rest) else (*rest, _input(block))


def _is_inner(tensor: SavedTensor) -> bool:
    """Return whether a tensor stands between the input of an MLP and its output."""
    return tensor.module == "mlp" and tensor.role not in ("mlp_input", "mlp_output_mask")


def _input(block: BlockSpec) -> SavedTensor:
    kept = [tensor for tensor in (block.before_freezing or block).saved if tensor.role == "mlp_input"]
    width = next(one.k for one in block.matmuls if one.name.startswith("mlp."))
    return kept[0] if kept else SavedTensor(role="mlp_input", elements_per_token=width, num_readers=1, module="mlp")
