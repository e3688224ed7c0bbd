"""A rank's part of a split parameter as torch.distributed.checkpoint reads and writes it: boxes in the whole tensor.

DTensor has no placement for a fused projection of which a rank holds some rows of each of three thirds, so the boxes
are named one by one, by the protocol that torch.distributed.checkpoint has for tensors of other libraries.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from paraplan.runtime.shards.sharding import Sharding
from paraplan.runtime.torch_private import local_shape_and_offset, make_wrapper


@dataclass(frozen=True)
class ShardLocation:
    """Where a part lies in the whole tensor: rank `index` of `tp` has it by `sharding`."""

    sharding: Sharding
    index: int


def locations(shardings: Mapping[str, Sharding], index: int) -> dict[str, ShardLocation]:
    """Return where the parts of rank `index` of `tp` lie, by the names of the parameters."""
    return {name: ShardLocation(sharding=sharding, index=index) for name, sharding in shardings.items()}


@dataclass(frozen=True)
class Chunk:
    """A box of the whole tensor at `offsets`, with its values, which are those of the rank's own tensor."""

    offsets: tuple[int, ...]
    values: torch.Tensor


class CheckpointChunks(torch.Tensor):
    """This rank's boxes of a parameter (or of what an optimizer keeps of it) split over `tp`, and maybe over `dp` too.

    `tensor` is the part, or a DTensor that shards the rows of the part over `dp`. Reading fills it in place. It has the
    whole tensor's shape and is a tensor in no other way: the protocol looks for boxes in tensors alone.
    """

    _chunks: list[Chunk]

    @staticmethod
    def __new__(cls, tensor: torch.Tensor, place: ShardLocation) -> CheckpointChunks:
        """Return the boxes of `tensor`."""
        pieces: CheckpointChunks = make_wrapper(
            cls, place.sharding.whole_shape(tensor.shape), dtype=tensor.dtype, device=tensor.device
        )
        pieces._chunks = chunks_of(tensor.detach(), place)
        return pieces

    @classmethod
    def of_shard(cls, tensor: DTensor) -> CheckpointChunks:
        """Return this rank's box of a tensor that is sharded as torch does it, over any mesh."""
        _, offsets = local_shape_and_offset(tensor.shape, tensor.device_mesh, tensor.placements)
        local = tensor.to_local().detach()
        boxes = [Chunk(offsets=tuple(offsets), values=local)] if local.numel() else []
        return cls._of_chunks(tensor.shape, tensor.dtype, boxes)

    @classmethod
    def _of_chunks(cls, shape: torch.Size, dtype: torch.dtype, boxes: list[Chunk]) -> CheckpointChunks:
        pieces: CheckpointChunks = make_wrapper(cls, shape, dtype=dtype, device=torch.device("cpu"))
        pieces._chunks = boxes
        return pieces

    @property
    def chunks(self) -> list[Chunk]:
        """The boxes that this rank holds."""
        return list(self._chunks)

    def copied(self) -> CheckpointChunks:
        """Return the same boxes with a copy of their values in the host's memory."""
        boxes = [Chunk(offsets=box.offsets, values=box.values.to("cpu", copy=True)) for box in self._chunks]
        return CheckpointChunks._of_chunks(self.shape, self.dtype, boxes)

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
            for number, (box, chunk) in enumerate(zip(self._chunks, self.__create_chunk_list__(), strict=True))
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Return the boxes that this rank holds."""
        return [
            ChunkStorageMetadata(offsets=torch.Size(box.offsets), sizes=torch.Size(box.values.shape))
            for box in self._chunks
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        """Return the values of a box, to be written or filled."""
        return next(box.values for box in self._chunks if torch.Size(box.offsets) == index.offset)


def chunks_of(tensor: torch.Tensor, place: ShardLocation) -> list[Chunk]:
    """Return what `tensor`, a rank's part or a shard of its rows over `dp`, holds of the whole; values are views."""
    first_row, local = 0, tensor
    if isinstance(tensor, DTensor):
        local = tensor.to_local()
        # fully_shard cuts rows like torch.chunk: all shards but the last ones have the same number.
        rows = -(-tensor.shape[0] // tensor.device_mesh.size())
        first_row = rows * tensor.device_mesh.get_local_rank()
    sharding = place.sharding
    found = []
    for whole_start, part_start, length in sharding.pieces(place.index):
        offsets = [0] * local.ndim
        if sharding.dim == 0:
            start, stop = max(part_start, first_row), min(part_start + length, first_row + local.shape[0])
            if start >= stop:
                continue
            offsets[0] = whole_start + start - part_start
            values = local.narrow(0, start - first_row, stop - start)
        else:
            if not local.shape[0]:
                continue
            offsets[0], offsets[sharding.dim] = first_row, whole_start
            values = local.narrow(sharding.dim, part_start, length)
        found.append(Chunk(offsets=tuple(offsets), values=values))
    return found
