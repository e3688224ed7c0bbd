"""What would fit: micro-batches and worlds under each ZeRO stage and recompute, and the largest layer alone."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from paraplan.cost.estimate import fits, peak_memory
from paraplan.cost.optimizers import optimizer_states
from paraplan.cost.table import Mask, PlanTable
from paraplan.cost.workload import Workload
from paraplan.model.spec import BlockSpec
from paraplan.plan.parallel import ParallelPlan, Recompute
from paraplan.records import Record

MOST_SEQUENCES, MOST_REPLICAS = 4096, 16384
_RECOMPUTES: tuple[Recompute, ...] = ("none", "selective", "full")


class FitRow(Record):
    """What fits under one ZeRO stage and recompute, the other choices of the plan kept.

    `largest_micro_batch` is that of a world of `num_gpus`, None where not even one sequence fits; `fewest_gpus` is the
    smallest world in which a micro-batch of one fits, None where no world of the plan's tp, pp and cp does.
    """

    zero_stage: int
    recompute: Recompute
    num_gpus: int
    largest_micro_batch: int | None
    fewest_gpus: int | None


class LargestLayer(Record):
    """The layer with most parameters, whole on one GPU: the training state of it alone, and whether that fits."""

    name: str
    num_parameters: int
    training_state_bytes: int
    fits: bool


def what_fits(workload: Workload, plan: ParallelPlan) -> tuple[FitRow, ...]:
    """Return what fits under each ZeRO stage and recompute, with the tp, pp, cp and schedule of `plan`.

    The world is all GPUs of the cluster, or that of `plan` where it is larger.
    """
    fixed = plan.tp * plan.pp * plan.cp
    replicas = max(plan.dp, workload.cluster.num_gpus // fixed)
    stages = (0, 1) if plan.pp > 1 else (0, 1, 2, 3)
    kinds = [(stage, recompute) for stage in stages for recompute in _RECOMPUTES]

    def priced(micro_batches: list[int], dps: list[int]) -> Mask:
        plans = []
        for (stage, recompute), size, dp in zip(kinds * (len(dps) // len(kinds)), micro_batches, dps, strict=True):
            sharded = stage if dp * plan.cp > 1 else 0
            values = {"zero_stage": sharded, "recompute": recompute, "micro_batch_size": size, "dp": dp}
            plans.append(plan.replace(**values, stage_blocks=None))
        return fits(workload, peak_memory(workload, PlanTable.of_plans(plans)))

    count = len(kinds)

    def holds(numbers: list[int]) -> Mask:
        # The fewest replicas are searched for from the end: memory does not grow with them.
        counted_down = [MOST_REPLICAS + 1 - number for number in numbers[count:]]
        return priced(numbers[:count] + [1] * count, [replicas] * count + counted_down)

    found = _last_true([MOST_SEQUENCES] * count + [MOST_REPLICAS] * count, holds)
    alone = priced([1] * count, [1] * count)  # less than two replicas hold, which have DDP's buckets
    fewest = [
        1 if fits_one else MOST_REPLICAS + 1 - number for fits_one, number in zip(alone, found[count:], strict=True)
    ]
    return tuple(
        FitRow(
            zero_stage=stage,
            recompute=recompute,
            num_gpus=replicas * fixed,
            largest_micro_batch=size or None,
            fewest_gpus=dp * fixed if dp <= MOST_REPLICAS else None,
        )
        for (stage, recompute), size, dp in zip(kinds, found[:count], fewest, strict=True)
    )


def largest_layer(workload: Workload) -> LargestLayer:
    """Return the layer of the model with most parameters; where it does not fit alone, only tp or ZeRO can split it."""
    model, habits = workload.model, workload.habits
    layers: list[tuple[str, BlockSpec]] = [("embedding", model.embedding), ("head", model.head)]
    layers += [(f"block {number}", block) for number, block in enumerate(model.blocks)]
    name, block = max(layers, key=lambda layer: layer[1].num_parameters)
    states = optimizer_states(model, workload.training.optimizer)
    state = {"embedding": states.embedding, "head": states.head}.get(name, states.blocks)
    weights = habits.weight_bytes + habits.gradient_bytes + habits.master_bytes if workload.is_mixed_precision else 8.0
    state_bytes = round(block.num_parameters * (weights + state))
    return LargestLayer(
        name=name,
        num_parameters=block.num_parameters,
        training_state_bytes=state_bytes,
        fits=state_bytes <= workload.usable_memory_bytes,
    )


def _last_true(most: list[int], holds: Callable[[list[int]], Mask]) -> list[int]:
    """Return for each question the largest number up to its `most` for which it holds, 0 where it never does.

    What holds for a number holds for all smaller ones. All questions are asked at once, by bisection.
    """
    low, high = np.zeros(len(most), dtype=np.int64), np.array(most, dtype=np.int64) + 1
    while (high - low > 1).any():
        middle = np.maximum((low + high) // 2, 1)
        answers = holds(middle.tolist())
        low, high = np.where(answers, np.maximum(low, middle), low), np.where(answers, high, np.minimum(high, middle))
    return [int(number) for number in low]
