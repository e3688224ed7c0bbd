"""Parts of the global batch that checks look at: real sequences, taken from the ranks that hold them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from paraplan.plan.parallel import ParallelPlan
from paraplan.runtime.checks.trials import Piece, gathered_numbers
from paraplan.runtime.data.batches import MicroBatch, is_of_batch
from paraplan.runtime.mesh import Mesh
from paraplan.runtime.torch_private import pytree

FEWEST_SEQUENCES = 8
"""Of which a batch consists that shows what compares them."""


class BatchParts:
    """Takes parts of batches as `plan` cuts them. Every rank calls the methods together."""

    def __init__(self, plan: ParallelPlan, mesh: Mesh) -> None:
        self._plan = plan
        self._mesh = mesh

    def take(self, pieces: Sequence[MicroBatch], *, start: int, most: int) -> list[Piece]:
        """Return parts of the global batch, from number `start` on, the same on all ranks; at most `most` of one size.

        Where ranks have sequences of other lengths, each takes parts of its own share: its micro-batches, or the halves
        of one.
        """
        own = [(one.inputs, one.targets) for one in pieces if one.num_sequences]
        size = num_sequences_of((pieces[0].inputs, pieces[0].targets))
        rows = gathered_numbers([float(len(own)), float(size)], self._mesh)
        held = {self._mesh.grid.coordinates(rank)["dp"]: int(count) for rank, (count, _) in enumerate(rows)}
        fewest = min(held.values())
        if len(held) > 1 and self.are_alike(pieces[0]):
            turns = [(place, turn) for turn in range(max(held.values())) for place in sorted(held)]
            places = [(place, turn) for place, turn in turns if turn < held[place]]
            chosen = [places[(start + one) % len(places)] for one in range(min(most, len(places)))]
            return [self.fetched(pieces[index], place) for place, index in chosen]
        if fewest > 1:
            return [own[(start + one) % fewest] for one in range(min(most, fewest))]
        if len(held) == 1 or not fewest or min(size for _, size in rows) < 2:
            return own[:1] if fewest else []
        return [_cut(own[0], 0, size // 2), _cut(own[0], size // 2, 2 * (size // 2))]

    def most(self, size: int, count: int, *, is_first: bool) -> int:
        """Return how many parts of `size` sequences are looked at, in a step of `count` micro-batches."""
        in_step = 2 * count // self._plan.pp if is_first else 2
        return max(2, -(-FEWEST_SEQUENCES // size), in_step)

    def are_alike(self, piece: MicroBatch) -> bool:
        """Whether all ranks have sequences of the same lengths."""
        leaves = [leaf for leaf in pytree.tree_leaves((piece.inputs, piece.targets)) if isinstance(leaf, torch.Tensor)]
        own = [float(size) for leaf in leaves for size in leaf.shape]
        width = gathered_numbers([float(len(own))], self._mesh)
        if any(row != width[0] for row in width):
            return False
        rows = gathered_numbers(own, self._mesh)
        return all(row == rows[0] for row in rows)

    def fetched(self, piece: MicroBatch, place: int) -> Piece:
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
        return inputs, targets


def joined(first: Piece, second: Piece) -> Piece:
    """Return both pieces as one batch."""

    def both(one: Any, other: Any) -> Any:
        return torch.cat([one, other]) if is_of_batch(one) else one

    inputs, targets = pytree.tree_map(both, first, second)
    return inputs, targets


def copied(piece: Piece) -> Piece:
    """Return a piece that a model may write into."""
    inputs, targets = pytree.tree_map(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, piece)
    return inputs, targets


def num_sequences_of(piece: Piece) -> int:
    """Return the sequences of a piece."""
    return next((int(leaf.shape[0]) for leaf in pytree.tree_leaves(piece) if is_of_batch(leaf)), 1)


def _cut(piece: Piece, start: int, end: int) -> Piece:
    inputs, targets = pytree.tree_map(lambda leaf: leaf[start:end] if is_of_batch(leaf) else leaf, piece)
    return inputs, targets


def in_two(piece: Piece) -> list[Piece]:
    """Return both halves of a piece; of two or three rows the first one and the others."""
    size = num_sequences_of(piece)
    return [piece] if size < 2 else [_cut(piece, 0, size // 2), _cut(piece, size // 2, size)]


def turned(piece: Piece, turn: int) -> Piece:
    """Return the rows of a piece in another order, `turn` places on."""
    inputs, targets = pytree.tree_map(lambda leaf: leaf.roll(turn, 0) if turn and is_of_batch(leaf) else leaf, piece)
    return inputs, targets


def halves(parts: Sequence[Piece]) -> list[Piece]:
    """Return the first halves of two parts, which take no more memory together than one of them does."""
    return [_cut(one, 0, size // 2) for one in parts[:2] if (size := num_sequences_of(one)) > 1]
