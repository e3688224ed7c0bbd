"""Which ranks of a grid of rings may be swapped: rings can be turned and mirrored, equal groups exchanged."""

from __future__ import annotations

from collections.abc import Mapping

MAX_STEPS = 500
"""Steps of the search for one symmetry; where they run out it is not used, which costs time and never an order."""


def ordered_pairs(labels: Mapping[tuple[int, int], object], *, num_ranks: int) -> list[tuple[int, int]]:
    """Return pairs of ranks of which the first may be demanded to have the lower GPU, whatever the links are.

    `labels` says of each pair of ranks (the lower first, or a rank twice) what they exchange. Rank k comes after rank i
    where a symmetry that moves none of the ranks below i carries i to k: of all orders that are alike by symmetry, the
    first in the dictionary meets all these demands at once (Puget, Breaking symmetries in all different problems,
    IJCAI 2005).
    """
    table = [[labels.get((min(a, b), max(a, b))) for b in range(num_ranks)] for a in range(num_ranks)]
    return [
        (rank, other)
        for rank in range(num_ranks)
        for other in range(rank + 1, num_ranks)
        if _carries([*range(rank), other], table, [MAX_STEPS])
    ]


def _carries(images: list[int], table: list[list[object]], steps: list[int]) -> bool:
    """Tell whether a symmetry begins with these images of the ranks 0, 1, and so on."""
    for place, image in enumerate(images):
        row, target = table[place], table[image]
        if any(row[before] != target[images[before]] for before in range(place + 1)):
            return False
    return _completes(images, table, steps)


def _completes(images: list[int], table: list[list[object]], steps: list[int]) -> bool:
    place = len(images)
    if place == len(table):
        return True
    row = table[place]
    for image in range(len(table)):
        if image in images:
            continue
        steps[0] -= 1
        if steps[0] < 0:
            return False
        target = table[image]
        if row[place] == target[image] and all(row[before] == target[images[before]] for before in range(place)):
            images.append(image)
            if _completes(images, table, steps):
                return True
            images.pop()
    return False
