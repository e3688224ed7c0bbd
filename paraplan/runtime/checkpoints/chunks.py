"""A rank's part of a split parameter as torch.distributed.checkpoint reads and writes it: boxes in the whole tensor.

DTensor has no layout for a fused projection of which a rank holds some rows of each of three thirds, so the boxes are
named one by one, by the protocol that torch.distributed.checkpoint has for tensors of other libraries.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from paraplan.runtime.shards.layout import Cut
from paraplan.runtime.torch_private import local_shape_and_offset, make_wrapper


@dataclass(frozen=True)
class Place:
    """Where a part lies in the whole tensor: rank `index` of `tp` has it by `cut`."""

    cut: Cut
    index: int


@dataclass(frozen=True)
class Box:
    """A box of the whole tensor at `offsets`, with its values, which are those of the rank's own tensor."""

    offsets: tuple[int, ...]
    values: torch.Tensor


class SplitPieces(torch.Tensor):
    """This rank's boxes of a parameter (or of what an optimizer keeps of it) split over `tp`, and maybe over `dp` too.

    `tensor` is the part, or a DTensor that shards the rows of the part over `dp`. Reading fills it in place. It has the
    whole tensor's shape and is a tensor in no other way: the protocol looks for boxes in tensors alone.
    """

    _boxes: list[Box]

    @staticmethod
    def __new__(cls, tensor: torch.Tensor, place: Place) -> SplitPieces:
        """Return the boxes of `tensor`."""
        pieces: SplitPieces = make_wrapper(
            cls, place.cut.whole_shape(tensor.shape), dtype=tensor.dtype, device=tensor.device
        )
        pieces._boxes = boxes_of(tensor.detach(), place)
        return pieces

    @classmethod
    def of_shard(cls, tensor: DTensor) -> SplitPieces:
        """Return this rank's box of a tensor that is sharded as torch does it, over any mesh."""
        _, offsets = local_shape_and_offset(tensor.shape, tensor.device_mesh, tensor.placements)
        local = tensor.to_local().detach()
        boxes = [Box(offsets=tuple(offsets), values=local)] if local.numel() else []
        return cls._of_boxes(tensor.shape, tensor.dtype, boxes)

    @classmethod
    def _of_boxes(cls, shape: torch.Size, dtype: torch.dtype, boxes: list[Box]) -> SplitPieces:
        pieces: SplitPieces = make_wrapper(cls, shape, dtype=dtype, device=torch.device("cpu"))
        pieces._boxes = boxes
        return pieces

    def copied(self) -> SplitPieces:
        """Return the same boxes with a copy of their values in the host's memory."""
        boxes = [Box(offsets=box.offsets, values=box.values.to("cpu", copy=True)) for box in self._boxes]
        return SplitPieces._of_boxes(self.shape, self.dtype, boxes)

    def __init__(self, *_: Any) -> None:
        super().__init__()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's own annotation lacks `func`
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Raise: nothing is computed with pieces."""
        raise NotImplementedError(f"{func} of the pieces of a checkpoint")

    def __create_write_items__(self, fqn: str, _: object) -> list[Any]:
        """Return what is written: every box."""
        return [
            WriteItem(
                index=MetadataIndex(fqn, torch.Size(box.offsets), number),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=chunk, properties=TensorProperties(dtype=self.dtype), size=self.shape
                ),
            )
            for number, (box, chunk) in enumerate(zip(self._boxes, self.__create_chunk_list__(), strict=True))
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Return the boxes that this rank holds."""
        return [
            ChunkStorageMetadata(offsets=torch.Size(box.offsets), sizes=torch.Size(box.values.shape))
            for box in self._boxes
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        """Return the values of a box, to be written or filled."""
        return next(box.values for box in self._boxes if torch.Size(box.offsets) == index.offset)


def boxes_of(tensor: torch.Tensor, place: Place) -> list[Box]:
    """Return what `tensor`, a rank's part or a shard of its rows over `dp`, holds of the whole; values are views."""
    first_row, local = 0, tensor
    if isinstance(tensor, DTensor):
        local = tensor.to_local()
        # fully_shard cuts rows like torch.chunk: all shards but the last ones have the same number.
        rows = -(-tensor.shape[0] // tensor.device_mesh.size())
        first_row = rows * tensor.device_mesh.get_local_rank()
    cut = place.cut
    found = []
    for whole_start, part_start, length in cut.pieces(place.index):
        offsets = [0] * local.ndim
        if cut.dim == 0:
            start, stop = max(part_start, first_row), min(part_start + length, first_row + local.shape[0])
            if start >= stop:
                continue
            offsets[0] = whole_start + start - part_start
            values = local.narrow(0, start - first_row, stop - start)
        else:
            if not local.shape[0]:
                continue
            offsets[0], offsets[cut.dim] = first_row, whole_start
            values = local.narrow(cut.dim, part_start, length)
        found.append(Box(offsets=tuple(offsets), values=values))
    return found
