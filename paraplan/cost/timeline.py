"""Timeline of one optimizer step: when each pipeline rank computes, communicates and idles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from paraplan.cost.blocks.costs import block_costs
from paraplan.cost.estimate import PlanEstimate
from paraplan.cost.pipeline.simulation import (
    OperationKind,
    PassSeconds,
    PipelineOperation,
    Timeline,
    simulate_pipeline,
)
from paraplan.cost.pipeline.stages import all_ranks
from paraplan.cost.plan_table import Floats, PlanTable
from paraplan.cost.step import MicroBatchTime, micro_batch_times
from paraplan.cost.workload import Workload
from paraplan.plan.parallel import Axis, ParallelPlan

Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv"]


class Transfer(NamedTuple):
    """Exposed communication of one axis within an operation."""

    axis: Axis
    collective: Collective
    start_s: float
    end_s: float


class Slice(NamedTuple):
    """One operation of a rank from `start_s` to `end_s`; the `transfers` at its end are part of it.

    Where several collectives belong to an operation they run between its kernels; here their sum stands at its end.
    """

    kind: OperationKind
    micro_batch: int
    virtual_stage: int
    start_s: float
    end_s: float
    transfers: tuple[Transfer, ...]


@dataclass(frozen=True)
class StepTimeline:
    """One step on every pipeline rank: its operations, then what replicas exchange, then the optimizer.

    `reduction` is what is waited for after the operations, `hidden` what runs beside them, `optimizer_s` the seconds of
    the optimizer's step after both.
    """

    ranks: tuple[tuple[Slice, ...], ...]
    reduction: tuple[Transfer, ...]
    hidden: tuple[Transfer, ...]
    operations_end_s: float
    optimizer_s: float
    step_time_s: float

    def busy_s(self, rank: int) -> float:
        """Seconds that a rank is in an operation."""
        return sum(each.end_s - each.start_s for each in self.ranks[rank])

    def waiting_s(self, rank: int) -> float:
        """Seconds in the bubble of the pipeline."""
        return max(0.0, self.operations_end_s - self.busy_s(rank))

    def sending_s(self, rank: int) -> float:
        """Seconds of a rank's operations that are communication."""
        return sum(each.end_s - each.start_s for part in self.ranks[rank] for each in part.transfers)


def step_timeline(workload: Workload, estimate: PlanEstimate) -> StepTimeline:
    """Return the timeline of one step of an estimated plan; without a pipeline it has one rank, which all are like."""
    plan = estimate.plan
    slots, shares = _slots(workload, plan)
    timeline = _timeline(plan, slots, shares)
    ranks = tuple(
        tuple(
            _slice(workload, plan, slots[rank], shares[rank][operation.virtual_stage // plan.pp, 0], operation)
            for operation in operations
        )
        for rank, operations in enumerate(timeline.ranks)
    )
    step, end_s = estimate.step, timeline.end_s
    hidden_s = min(max(0.0, step.data_parallel_wire_s - step.data_parallel_s), end_s)
    kinds = _reduction_kinds(workload, plan)
    return StepTimeline(
        ranks=ranks,
        reduction=_row("dp", kinds, end_s, step.data_parallel_s),
        hidden=_row("dp", kinds, end_s - hidden_s, hidden_s),
        operations_end_s=end_s,
        optimizer_s=step.optimizer_s,
        step_time_s=step.step_time_s,
    )


def pipeline_timeline(workload: Workload, plan: ParallelPlan) -> Timeline | None:
    """Return every rank's operations of one step with their start and end, None for a plan without a pipeline.

    Seconds are those of the estimate: of each rank's blocks, with recomputation, what tensor parallelism adds and the
    sends that are waited for. The chunks of a rank share its time by their blocks, embedding and head apart.
    """
    return None if plan.pipeline_schedule is None else _timeline(plan, *_slots(workload, plan))


def _slots(workload: Workload, plan: ParallelPlan) -> tuple[list[MicroBatchTime], list[Floats]]:
    """Return the seconds of each rank and the shares of its chunks in them."""
    table = PlanTable.of_plans([plan])
    costs = block_costs(workload, table)
    stages = all_ranks(table, workload.model.num_blocks).apart(plan.pp)
    return micro_batch_times(workload, table, costs, stages), [stage.chunk_shares(table.virtual) for stage in stages]


def _timeline(plan: ParallelPlan, slots: list[MicroBatchTime], shares: list[Floats]) -> Timeline:
    ends = (0, plan.num_stages - 1)
    chunks = [
        slots[stage % plan.pp]
        .of_rank(shares[stage % plan.pp])
        .chunk(shares[stage % plan.pp][stage // plan.pp], has_end=stage in ends)
        for stage in range(plan.num_stages)
    ]
    names = ("forward_s", "backward_s", "weight_s")
    stages = PassSeconds(*(np.concatenate([getattr(chunk, name) for chunk in chunks]) for name in names))
    schedule = plan.pipeline_schedule or "1f1b"
    is_interleaved = schedule == "1f1b" and plan.virtual_pipeline_size > 1
    return simulate_pipeline(
        "interleaved_1f1b" if is_interleaved else schedule,
        stages,
        num_ranks=plan.pp,
        num_microbatches=plan.num_microbatches,
    )


def _slice(
    workload: Workload, plan: ParallelPlan, slot: MicroBatchTime, share: float, operation: PipelineOperation
) -> Slice:
    """Return an operation with its transfers: those of tensor, context and expert parallelism, then the send.

    `share` is the part of the rank's blocks in the operation's chunk.

    The ranks that exchange rows of experts are among those of dp, where they are shown.
    """
    forward_tp, forward_cp = slot.forward_tensor_parallel_s, slot.forward_context_parallel_s
    forward_ep = slot.forward_expert_parallel_s
    seconds = {
        "forward": (forward_tp, forward_cp, forward_ep, slot.send_s / 2),
        "backward": (
            slot.tensor_parallel_s - forward_tp,
            slot.context_parallel_s - forward_cp,
            slot.expert_parallel_s - forward_ep,
            slot.send_s / 2,
        ),
    }.get(operation.kind, ())
    lengths = tuple(float(each[0]) * share for each in seconds) if seconds else (0.0,) * 4
    tp_s, cp_s, ep_s, pp_s = lengths
    # Of tensor parallelism, sequence parallelism makes gathers and scatters, which move the same bytes each way.
    split: tuple[Collective, ...] = ("all_gather", "reduce_scatter") if plan.sequence_parallel else ("all_reduce",)
    exchange: Collective = "send_recv" if workload.framework.kernels.ring_attention else "all_to_all"
    parts: list[tuple[Axis, dict[Collective, float], float]] = [
        ("tp", dict.fromkeys(split, 1.0), tp_s),
        ("cp", {exchange: 1.0}, cp_s),
        ("dp", {"all_to_all": 1.0}, ep_s),
        ("pp", {"send_recv": 1.0}, pp_s),
    ]
    start = operation.end_s - min(sum(lengths), operation.end_s - operation.start_s)
    transfers: list[Transfer] = []
    for axis, kinds, length in parts:
        transfers += _row(axis, kinds, start, min(length, operation.end_s - start))
        start = transfers[-1].end_s if transfers else start
    return Slice(*operation, tuple(transfers))


def _reduction_kinds(workload: Workload, plan: ParallelPlan) -> dict[Collective, float]:
    """Return what replicas exchange in a step, each kind with its share of the bytes.

    DDP all-reduces gradients. ZeRO-1 scatters gradients and gathers parameters once, ZeRO-2 scatters in every
    micro-batch, ZeRO-3 gathers twice beside that (Rajbhandari et al. 2020, section 7). Hybrid sharding also averages
    each rank's share between the groups, which moves it twice.
    """
    if not plan.zero_stage:
        return {"all_reduce": 1.0}
    gradient = float(workload.gradient_bytes(plan.zero_stage))
    parameter, count = float(workload.training.activation_bytes), plan.num_microbatches
    scattered = {1: 1, 2: count, 3: count}[plan.zero_stage] * gradient
    gathered = {1: 1, 2: 1, 3: 2 * count}[plan.zero_stage] * parameter
    kinds: dict[Collective, float] = {"reduce_scatter": scattered, "all_gather": gathered}
    return kinds | ({"all_reduce": 2 * scattered / plan.zero_shards} if plan.zero_shards else {})


def _row(axis: Axis, kinds: dict[Collective, float], start_s: float, length_s: float) -> tuple[Transfer, ...]:
    """Return transfers one after the other that take `length_s` together, shared out by the weights of their kinds."""
    if length_s <= 0:
        return ()
    found, total = [], sum(kinds.values())
    for collective, weight in kinds.items():
        end_s = start_s + length_s * weight / total
        found.append(Transfer(axis, collective, start_s, end_s))
        start_s = end_s
    return tuple(found)
