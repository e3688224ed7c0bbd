"""Which blocks of a model each pipeline stage holds."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from paraplan.errors import PlanError
from paraplan.plan.parallel import ParallelPlan

_RELATIVE_ROUNDING = 1e-12


def even_split(num_blocks: int, num_stages: int) -> tuple[int, ...]:
    """Return the blocks of each stage of an even split; the first stages take the remainder, the last has the head."""
    _check_counts(num_blocks, num_stages)
    share, rest = divmod(num_blocks, num_stages)
    return tuple(share + (stage < rest) for stage in range(num_stages))


def stage_blocks(plan: ParallelPlan, num_blocks: int) -> tuple[int, ...]:
    """Return how many of `num_blocks` blocks each stage of `plan` holds: its `stage_blocks`, or an even split.

    Raises `PlanError` where the stages do not hold the blocks exactly, or one holds none.
    """
    if plan.stage_blocks is None:
        return even_split(num_blocks, plan.num_stages)
    reason = stages_reason(plan.num_stages, plan.stage_blocks, num_blocks) or empty_stage_reason(plan.stage_blocks)
    if reason is not None:
        raise PlanError(reason, hint="the plan was made for another model; make it again with paraplan recommend")
    return plan.stage_blocks


def stages_reason(
    num_stages: int, blocks: Sequence[int] | None, num_blocks: int, model: str = "the model"
) -> str | None:
    """Return why stages of `blocks` blocks, None for an even split, cannot hold those of a model, None where they can.

    `model` is its name in the sentence. A stage that is named may hold no block: the embedding or the head alone.
    """
    if blocks is None and num_stages > num_blocks:
        return f"{num_stages} pipeline stages for the {num_blocks} blocks of {model}"
    if blocks is not None and sum(blocks) != num_blocks:
        return f"stage_blocks sum to {sum(blocks)}, and {model} has {num_blocks} blocks"
    return None


def empty_stage_reason(blocks: Sequence[int] | None) -> str | None:
    """Return why a runtime that needs a block in every stage cannot run stages of `blocks` blocks, None where it can.

    Megatron-LM and torchtitan may give the embedding or the head a stage of its own.
    """
    if blocks is not None and min(blocks) < 1:
        return f"stage_blocks={tuple(blocks)} leaves a stage without a block"
    return None


def running_split(num_blocks: int, num_stages: int, *, block_cost: float, head_cost: float) -> tuple[int, ...]:
    """Return the blocks of each stage where one ends with the block that takes the sum of costs past its share.

    nanotron lays out its models so (src/nanotron/models/base.py, `build_model`): the first stages have more, and the
    last ones may have no block, since the head counts too.
    """
    total, reached, stage = num_blocks * block_cost + head_cost, 0.0, 0
    blocks = [0] * num_stages
    for _ in range(num_blocks):
        reached += block_cost
        blocks[stage] += 1
        stage += reached > total * (stage + 1) / num_stages
    return tuple(blocks)


def stage_bounds(blocks: Sequence[int]) -> list[tuple[int, int]]:
    """Return the first block of each stage and the one after its last, for stages of `blocks` blocks."""
    ends = list(accumulate(blocks))
    return list(zip([0, *ends[:-1]], ends, strict=True))


def assign_blocks(
    block_costs: Sequence[float], num_stages: int, *, first_extra: float = 0.0, last_extra: float = 0.0
) -> tuple[int, ...]:
    """Return the number of blocks of each stage that makes the slowest stage as fast as it can be.

    A stage holds consecutive blocks, at least one. `first_extra` and `last_extra` are the costs of what the first and
    the last stage do besides (embedding, head), in the unit of `block_costs`. Among splits with the same slowest stage
    the most even one is taken (least sum of squares), then the one with more blocks in earlier stages.
    Exact by dynamic programming: slowest(s, i) = min over j of max(slowest(s - 1, j), cost of blocks j..i-1).
    """
    num_blocks = len(block_costs)
    _check_counts(num_blocks, num_stages)
    loads = _stage_loads(block_costs, num_stages, first_extra=first_extra, last_extra=last_extra)
    slowest = loads[0][0]
    for load in loads[1:]:
        slowest = np.maximum(slowest[:, None], load).min(axis=0)
    limit = slowest[num_blocks] * (1 + _RELATIVE_ROUNDING)
    squares = {id(load): np.where(load <= limit, load**2, np.inf) for load in loads[:2] + loads[-1:]}
    ends = _most_even_ends([squares[id(load)] for load in loads])
    return tuple(int(end - start) for start, end in zip([0, *ends[:-1]], ends, strict=True))


def _check_counts(num_blocks: int, num_stages: int) -> None:
    reason = stages_reason(num_stages, None, num_blocks)
    if reason is not None:
        raise PlanError(reason, hint=f"use at most {num_blocks} stages")


def _stage_loads(
    block_costs: Sequence[float], num_stages: int, *, first_extra: float, last_extra: float
) -> list[NDArray[np.float64]]:
    """Return `[j, i]` of each stage: its cost with blocks j..i-1, infinite where it would hold none.

    Those between the first and the last are one array.
    """
    running = np.concatenate([[0.0], np.cumsum(np.asarray(block_costs, dtype=np.float64))])
    load = running[None, :] - running[:, None]
    load[np.tril_indices(len(running))] = np.inf
    if num_stages == 1:
        return [load + first_extra + last_extra]
    return [load + first_extra, *[load] * (num_stages - 2), load + last_extra]


def _most_even_ends(squares: Sequence[NDArray[np.float64]]) -> list[int]:
    """Return the end of each stage with the least sum of `squares`; of equals, those with later starts."""
    size = len(squares[0])
    best = squares[0][0]
    starts: list[NDArray[np.intp]] = []
    for square in squares[1:]:
        total = best[:, None] + square
        # argmin takes the first of equals, so the rows are read from the last one back.
        starts.append(size - 1 - total[::-1].argmin(axis=0))
        best = total.min(axis=0)
    ends = [size - 1]
    for start in reversed(starts):
        ends.append(int(start[ends[-1]]))
    return ends[::-1]
