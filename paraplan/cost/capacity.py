"""Largest trainings that fit: micro-batches and worlds by ZeRO stage and recompute, and the largest layer alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from paraplan.cost.estimate import fits, peak_memory
from paraplan.cost.memory.optimizers import optimizer_states
from paraplan.cost.plan_table import RECOMPUTES, Ints, Mask, PlanTable
from paraplan.cost.workload import Workload
from paraplan.model.spec import BlockSpec
from paraplan.plan.parallel import ParallelPlan, Recompute
from paraplan.records import Record

MOST_SEQUENCES = 4096
# Replicas are asked about one by one, since memory does not always fall as they grow: shards are rounded up to rows.
_NUMBERS_OF_REPLICAS = (
    np.arange(1, 9),
    np.arange(9, 128),
    np.array([*range(128, 1024, 8), *range(1024, 16385, 64)]),
)
"""World sizes that are asked about: those of one machine, and more where none of these is enough."""
_FIRST_SIZES = 2 ** np.arange(MOST_SEQUENCES.bit_length())
"""Micro-batches that are asked about first: the search has priced most of them."""
_WAYS = 64  # parts into which each further round divides what is open


class FitRow(Record):
    """The largest training that fits under one ZeRO stage and recompute, the other choices of the plan kept.

    `largest_micro_batch` is that of a world of `num_gpus`, None where not even one sequence fits; `fewest_gpus` is the
    smallest world in which a micro-batch of one fits, None where no world of the plan's tp, pp and cp does.
    """

    zero_stage: int
    recompute: Recompute
    num_gpus: int
    largest_micro_batch: int | None
    fewest_gpus: int | None

    @property
    def is_open_ended(self) -> bool:
        """True where larger micro-batches than were tried may fit too."""
        return self.largest_micro_batch == MOST_SEQUENCES


class LargestLayer(Record):
    """The layer with most parameters, whole on one GPU: the training state of it alone, and whether that fits."""

    name: str
    num_parameters: int
    training_state_bytes: int
    fits: bool


def what_fits(workload: Workload, plan: ParallelPlan) -> tuple[FitRow, ...]:
    """Return what fits under each ZeRO stage and recompute, with the axes and the schedule of `plan`.

    The world is all GPUs of the cluster, or that of `plan` where it is larger.
    """
    fixed = plan.world_size // plan.dp
    replicas = max(plan.dp, workload.cluster.num_gpus // fixed)
    offloads_parameters = plan.offload == "parameters"  # which ZeRO-3 alone does
    stages = (3,) if offloads_parameters else (0, 1) if plan.pp > 1 else (0, 1, 2, 3)
    kinds = [
        (stage, recompute)
        for stage in stages
        for recompute in RECOMPUTES
        if recompute in ("selective", *workload.recomputes)
    ]
    count = len(kinds)
    stage_of, recompute_of = (np.array(column) for column in zip(*_numbered(kinds), strict=True))

    def holds(kind: Ints, micro_batch: Ints, dp: Ints) -> Mask:
        table = PlanTable.of_plans([plan.replace(zero_shards=None, devices_per_process=1)]).select(
            np.zeros(len(kind), dtype=np.int64)
        )
        sharded = np.where(dp * plan.cp > 1, stage_of[kind], 0)
        table = replace(table, zero_stage=sharded, recompute=recompute_of[kind], micro_batch_size=micro_batch, dp=dp)
        table = replace(table, ep=np.gcd(table.ep, dp * plan.cp))  # fewer ranks share out the experts among fewer
        return fits(workload, table, peak_memory(workload, table))

    sizes = _last_true(count, lambda kind, size: holds(kind, size, np.full(len(kind), replicas)))
    fewest = _first_true(count, lambda kind, dp: holds(kind, np.ones_like(kind), dp), even=plan.ep)
    return tuple(
        FitRow(
            zero_stage=stage,
            recompute=recompute,
            num_gpus=replicas * fixed,
            largest_micro_batch=int(size) or None,
            fewest_gpus=int(dp) * fixed or None,
        )
        for (stage, recompute), size, dp in zip(kinds, sizes, fewest, strict=True)
    )


def _numbered(kinds: list[tuple[int, Recompute]]) -> list[tuple[int, int]]:
    return [(stage, RECOMPUTES.index(recompute)) for stage, recompute in kinds]


def largest_layer(workload: Workload) -> LargestLayer:
    """Return the layer of the model with most parameters; where it does not fit alone, only tp or ZeRO can split it."""
    model, framework = workload.model, workload.framework
    layers: list[tuple[str, BlockSpec]] = [("embedding", model.embedding), ("head", model.head)]
    layers += [(f"block {number}", block) for number, block in enumerate(model.blocks)]
    name, block = max(layers, key=lambda layer: layer[1].num_parameters)
    states = optimizer_states(model, workload.training.optimizer)
    state = {"embedding": states.embedding, "head": states.head}.get(name, states.blocks)
    weights = (
        framework.storage.weight_bytes + framework.storage.gradient_bytes + framework.storage.master_bytes
        if workload.is_mixed_precision
        else 8.0
    )
    trained = sum(one.num_elements for one in block.parameters if one.trains)
    frozen = sum(one.frozen_bytes or 0.0 for one in block.parameters)
    state_bytes = round(trained * (weights + state) + frozen)
    return LargestLayer(
        name=name,
        num_parameters=block.num_parameters,
        training_state_bytes=state_bytes,
        fits=state_bytes <= workload.usable_memory_bytes,
    )


def least_state_bytes(workload: Workload) -> float:
    """Return what weights and optimizer states take at least on all GPUs together, however a plan divides them.

    Of trained weights a byte each, of tied ends one: what is counted may be in no plan, what is not is on top. Nothing
    of it lies in host memory.
    """
    model = workload.model
    states = optimizer_states(model, workload.training.optimizer, workload.framework.storage.optimizer_state_bytes)
    parts = [(run.block, run.count, states.blocks) for run in model.runs]
    parts += [(model.embedding, 1, states.embedding)]
    parts += [] if model.tied_embeddings else [(model.head, 1, states.head)]
    return sum(
        count
        * sum(one.num_elements * (1.0 + state) if one.trains else one.frozen_bytes or 0.0 for one in block.parameters)
        for block, count, state in parts
    )


def _first_true(count: int, holds: Callable[[Ints, Ints], Mask], *, even: int) -> Ints:
    """Return for each of `count` questions the first number of replicas for which it holds, 0 where it never does.

    What holds for no power of two, nor for one times `even`, is not asked about further: these divide shards evenly.
    """
    first = np.zeros(count, dtype=np.int64)
    powers = 2 ** np.arange(15)
    probes = np.array(sorted({*powers.tolist(), *(even * powers[even * powers <= powers[-1]]).tolist()}))
    may_hold = holds(np.repeat(np.arange(count), len(probes)), np.tile(probes, count)).reshape(count, -1).any(axis=1)
    for numbers in _NUMBERS_OF_REPLICAS:
        rows = np.flatnonzero((first == 0) & may_hold)
        if len(rows):
            answers = holds(np.repeat(rows, len(numbers)), np.tile(numbers, len(rows))).reshape(len(rows), -1)
            first[rows] = np.where(answers.any(axis=1), numbers[np.argmax(answers, axis=1)], 0)
    return first


def _last_true(count: int, holds: Callable[[Ints, Ints], Mask]) -> Ints:
    """Return for each of `count` questions the largest micro-batch for which it holds, 0 where it never does.

    `holds` is given questions by their position and a number for each. What holds for a number holds for all smaller
    ones. Every round asks all open questions about several numbers at once.
    """
    low, high, rows = np.zeros(count, dtype=np.int64), np.full(count, MOST_SEQUENCES + 1), np.arange(count)
    numbers = np.tile(_FIRST_SIZES, (count, 1))
    while len(rows):
        answers = holds(np.repeat(rows, numbers.shape[1]), numbers.ravel()).reshape(numbers.shape)
        passed = answers.sum(axis=1)
        known = np.concatenate([low[rows, None], numbers, high[rows, None]], axis=1)
        low[rows], high[rows] = (known[np.arange(len(rows)), passed + side] for side in (0, 1))
        rows = np.flatnonzero(high - low > 1)
        below, above = low[rows, None], high[rows, None]
        numbers = np.maximum(below + (above - below) * np.arange(1, _WAYS) // _WAYS, below + 1)
    return low
