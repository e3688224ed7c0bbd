"""Inputs whose rows are no sequences: patches of images, a number of them for each sequence, one behind the other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from paraplan.errors import UsageError
from paraplan.runtime.torch_private import pytree

_GRIDS = {"pixel_values": "image_grid_thw", "pixel_values_videos": "video_grid_thw"}
"""Inputs of Qwen-VL and its kin, by what their processors say of them: frames, rows and columns of patches."""


@dataclass(frozen=True)
class PackedRows:
    """Rows of which a batch cuts those of each sequence together: `padded` [sequences, most rows, ...] and `counts`."""

    padded: torch.Tensor
    counts: torch.Tensor

    def rows(self) -> torch.Tensor:
        """Return the rows one behind the other, as the model takes them."""
        present = torch.arange(self.padded.shape[1], device=self.counts.device) < self.counts[:, None]
        return self.padded[present]


pytree.register_pytree_node(
    PackedRows,
    lambda one: ([one.padded, one.counts], None),
    lambda leaves, _: PackedRows(*leaves),
    serialized_type_name="paraplan.PackedRows",
)


def pack_rows(rows: torch.Tensor, counts: torch.Tensor | list[int]) -> PackedRows:
    """Return `rows` as an input of `engine.step`, of which the first `counts[0]` belong to the first sequence, etc.

    Each rank, micro-batch and stage then gets the rows of its own sequences, and the model a tensor as before. Raises
    `UsageError` where the counts do not add up to the rows.
    """
    numbers = torch.as_tensor(counts, device=rows.device)
    if int(numbers.sum()) != len(rows):
        raise UsageError(
            f"{len(rows)} packed rows, and counts of sequences that add up to {int(numbers.sum())}",
            hint="give the number of rows of each sequence, in their order",
        )
    parts = torch.split(rows, numbers.tolist())
    return PackedRows(torch.nn.utils.rnn.pad_sequence([*parts], batch_first=True), numbers)


def with_rows_packed(inputs: Any, size: int) -> Any:
    """Return a batch of `size` sequences in which patches belong to their sequences, as its processor says.

    With several images in a sequence the script says it, by `pack_rows`.
    """
    if not isinstance(inputs, dict):
        return inputs
    found = {}
    for name, grid in _GRIDS.items():
        rows, grids = inputs.get(name), inputs.get(grid)
        if isinstance(rows, torch.Tensor) and isinstance(grids, torch.Tensor) and len(rows) != size == len(grids):
            found[name] = pack_rows(rows, grids.prod(-1))
    return inputs | found


def as_the_model_takes_them(inputs: Any) -> Any:
    """Return inputs with packed rows as tensors."""

    def is_packed(leaf: Any) -> bool:
        return isinstance(leaf, PackedRows)

    if not any(map(is_packed, pytree.tree_leaves(inputs, is_leaf=is_packed))):
        return inputs
    return pytree.tree_map(lambda leaf: leaf.rows() if is_packed(leaf) else leaf, inputs, is_leaf=is_packed)
