"""Parts of the global batch that checks look at: real sequences, taken from the ranks that hold them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from paraplan.runtime.data.batches import MicroBatch, is_of_batch
from paraplan.runtime.exchange import gathered_numbers
from paraplan.runtime.mesh import Mesh
from paraplan.runtime.torch_private import pytree, tensors_in

FEWEST_SEQUENCES = 8
"""Fewest sequences of a batch that shows what compares them."""


@dataclass(frozen=True)
class Part:
    """Inputs and targets of some sequences, with their numbers among all that are looked at."""

    inputs: Any
    targets: Any
    numbers: tuple[int, ...]

    @classmethod
    def of(cls, piece: MicroBatch, place: int = 0) -> Part:
        """Return the part of a micro-batch behind `place` others of its size."""
        size = _num_rows(piece)
        return cls(piece.inputs, piece.targets, tuple(range(place * size, (place + 1) * size)))

    def __len__(self) -> int:
        return len(self.numbers)

    def rows(self, rows: Sequence[int]) -> Part:
        """Return copies of these sequences, in this order."""
        index = torch.tensor(rows)

        def pick(leaf: Any) -> Any:
            if is_of_batch(leaf):
                return leaf[index.to(leaf.device)]
            return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf

        inputs, targets = pytree.tree_map(pick, (self.inputs, self.targets))
        return Part(inputs, targets, tuple(self.numbers[row] for row in rows))

    def micro_batch(self, weight: float, device: torch.device) -> MicroBatch:
        """Return the sequences as a micro-batch that a model may write into."""
        own = self.rows(range(len(self)))
        share = torch.tensor(weight, device=device)
        return MicroBatch(own.inputs, own.targets, num_sequences=len(self), weight=share)


def _num_rows(piece: MicroBatch) -> int:
    """Return the sequences of a micro-batch, also of zeros."""
    leaves = pytree.tree_leaves((piece.inputs, piece.targets))
    return next((int(leaf.shape[0]) for leaf in leaves if is_of_batch(leaf)), 1)


def joined(parts: Sequence[Part]) -> Part:
    """Return all parts as one batch."""

    def join(*leaves: Any) -> Any:
        return torch.cat(leaves) if is_of_batch(leaves[0]) else leaves[0]

    inputs, targets = pytree.tree_map(join, *((one.inputs, one.targets) for one in parts))
    return Part(inputs, targets, tuple(number for one in parts for number in one.numbers))


def halves(parts: Sequence[Part]) -> list[Part]:
    """Return the first halves of two parts, which take no more memory together than one of them does."""
    return [one.rows(range(len(one) // 2)) for one in parts[:2] if len(one) > 1]


def by_targets(part: Part, labels: Any) -> list[Part]:
    """Return the sequences in two: those with the smallest and those with the largest `labels`, added up.

    Targets that a mean goes over are as many in both only where every sequence has as many. Nothing where sums are all
    the same.
    """
    leaves = [leaf for leaf in pytree.tree_leaves(labels) if is_of_batch(leaf) and not leaf.is_complex()]
    sums = sum((leaf.double().flatten(1).sum(1) if leaf.ndim > 1 else leaf.double() for leaf in leaves), torch.zeros(1))
    order: list[int] = torch.argsort(sums, stable=True).tolist()
    if len(order) < 2 or not sums.max() > sums.min():
        return []
    return [part.rows(order[: len(order) // 2]), part.rows(order[len(order) // 2 :])]


class BatchParts:
    """Takes parts of batches as the plan of `mesh` cuts them. Every rank calls the methods together."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh

    def take(self, pieces: Sequence[MicroBatch], *, start: int, is_first: bool) -> list[Part]:
        """Return parts of one size of the global batch, from number `start` on, the same on all ranks.

        In the first check they are many, up to those of two steps. Where ranks have sequences of other lengths, each
        takes parts of its own share: its micro-batches, or the halves of one.
        """
        own, size = [one for one in pieces if one.num_sequences], _num_rows(pieces[0])
        rows = gathered_numbers([float(len(own)), float(size)], self._mesh.world)
        held = {self._mesh.grid.coordinates(rank)["dp"]: int(count) for rank, (count, _) in enumerate(rows)}
        fewest, in_step = min(held.values()), 2 * len(pieces) // self._mesh.plan.pp if is_first else 2
        most = max(2, -(-FEWEST_SEQUENCES // int(rows[0][1])), in_step)
        if len(held) > 1 and self.are_alike(pieces[0]):
            turns = [(place, turn) for turn in range(max(held.values())) for place in sorted(held)]
            places = [(place, turn) for place, turn in turns if turn < held[place]]
            chosen = [places[(start + one) % len(places)] for one in range(min(most, len(places)))]
            found = [self.fetched(pieces[index], place) for place, index in chosen]
        elif fewest > 1:
            found = [own[(start + one) % fewest] for one in range(min(most, fewest))]
        else:
            found = own[:1] if fewest else []
        parts = [Part.of(one, number) for number, one in enumerate(found)]
        if len(held) > 1 and len(parts) == 1 and min(size for _, size in rows) > 1:
            return [parts[0].rows(range(size // 2)), parts[0].rows(range(size // 2, 2 * (size // 2)))]
        return parts

    def are_alike(self, piece: MicroBatch) -> bool:
        """Whether all ranks have sequences of the same lengths."""
        leaves = tensors_in((piece.inputs, piece.targets))
        own = [float(size) for leaf in leaves for size in leaf.shape]
        width = gathered_numbers([float(len(own))], self._mesh.world)
        if any(row != width[0] for row in width):
            return False
        rows = gathered_numbers(own, self._mesh.world)
        return all(row == rows[0] for row in rows)

    def fetched(self, piece: MicroBatch, place: int) -> MicroBatch:
        """Return this micro-batch of rank `place` of dp."""
        group = self._mesh.group("dp")

        def sent(leaf: Any) -> Any:
            if group is None or not is_of_batch(leaf):
                return leaf
            shape = torch.tensor(leaf.shape, device=leaf.device)
            dist.broadcast(shape, group=group, group_src=place)
            value = leaf.detach().contiguous()
            if self._mesh.coordinate("dp") != place:
                value = leaf.new_empty(shape.tolist())
            dist.broadcast(
                value.view(torch.uint8) if value.dtype == torch.bool else value, group=group, group_src=place
            )
            return value

        inputs, targets = pytree.tree_map(sent, (piece.inputs, piece.targets))
        return MicroBatch(inputs, targets, num_sequences=piece.num_sequences)
