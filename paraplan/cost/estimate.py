"""Memory and time of plans: whole tables for the search, records for what is shown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from paraplan.cost.blocks.costs import BlockCosts, block_costs
from paraplan.cost.blocks.matmuls import counted_peak
from paraplan.cost.cost_model import CostModel
from paraplan.cost.memory.parts import StageMemory
from paraplan.cost.memory.peak import cached_bytes, host_bytes, peak_bytes, peak_of
from paraplan.cost.memory.rank import RankMemory
from paraplan.cost.pipeline.stages import (
    StageBlocks,
    all_ranks,
    are_unlike,
    even_stage,
    fullest_ranks,
    inner_ranks,
    running_parameters,
)
from paraplan.cost.plan_table import Floats, Mask, PlanTable
from paraplan.cost.step import StepTime, step_time
from paraplan.cost.workload import Workload
from paraplan.plan.compatibility import why_incompatible
from paraplan.plan.incompatibility import Incompatibility
from paraplan.plan.memory_record import MEMORY_PARTS, MemoryParts
from paraplan.plan.parallel import ParallelPlan
from paraplan.records import Record

_SMALL_ROWS = 8_000


class _OfStage(Record):
    pipeline_stage: int


class MemoryEstimate(MemoryParts, _OfStage):
    """Bytes that one rank of a pipeline stage allocates at its peak; the parts sum to `total_bytes`.

    The total is what `torch.cuda.max_memory_allocated` shows, `device_bytes` what `nvidia-smi` shows beside it. Parts
    are those of the peak's own moment: where activations are freed before all gradients are there, it has few of them.
    `host_bytes` is what offload keeps in the host's memory for this rank. `cached_device_bytes` is what `nvidia-smi`
    would show if the GPU were never full: where that is more than it has, torch's allocator has to give back what it
    keeps for later. It gives back whole segments alone.
    """

    device_bytes: int
    host_bytes: int = 0
    cached_device_bytes: int = 0


class StepPart(NamedTuple):
    """An exposed part of a step."""

    name: str
    """The field of `StepEstimate`."""
    title: str
    waste: str = ""
    """The name of this time where the GPUs do not compute; nothing for work."""


STEP_PARTS = (
    StepPart("compute_s", "forward and backward"),
    StepPart("recompute_s", "recompute"),
    StepPart("tensor_parallel_s", "tensor-parallel communication", "tensor-parallel communication"),
    StepPart("context_parallel_s", "context-parallel communication", "context-parallel communication"),
    StepPart("expert_parallel_s", "expert-parallel communication", "sending tokens to experts"),
    StepPart("pipeline_bubble_s", "pipeline bubble", "waiting in the pipeline"),
    StepPart("pipeline_send_s", "pipeline sends", "sends between pipeline stages"),
    StepPart("data_parallel_s", "exposed data-parallel communication", "exposed data-parallel communication"),
    StepPart("optimizer_s", "optimizer", "the optimizer"),
)
"""The parts of a step in the order in which they are shown."""


class StepEstimate(Record):
    """Seconds of one optimizer step; the exposed parts sum to `step_time_s`. `*_wire_s` also counts what is hidden.

    `model_flops_per_s_per_gpu` counts three times the forward FLOPs, of frozen layers twice, and recomputation not
    (Narayanan et al. 2021, eq. 3, and PaLM, Chowdhery et al. 2022, appendix B).
    """

    step_time_s: float
    compute_s: float
    recompute_s: float
    tensor_parallel_s: float
    context_parallel_s: float
    expert_parallel_s: float = 0.0
    pipeline_bubble_s: float
    pipeline_send_s: float
    data_parallel_s: float
    optimizer_s: float
    data_parallel_wire_s: float
    tokens_per_s_per_gpu: float
    model_flops_per_s_per_gpu: float
    mfu: float


class PlanEstimate(Record):
    """The costs of one plan: memory of each pipeline stage, the step, and whether it fits.

    `host_bytes_per_node` is what offload keeps in the memory of one machine, at most, beside the
    `host_memory_bytes` that it has, None where nobody said.
    """

    plan: ParallelPlan
    memory: tuple[MemoryEstimate, ...]
    step: StepEstimate
    usable_memory_bytes: int
    host_bytes_per_node: int = 0
    host_memory_bytes: int | None = None

    @property
    def peak_memory_bytes(self) -> int:
        """Bytes of the fullest stage."""
        return max(stage.total_bytes for stage in self.memory)

    @property
    def fits(self) -> bool:
        """True where the fullest stage stays within the usable memory of a GPU, and offload within the host's."""
        return self.peak_memory_bytes <= self.usable_memory_bytes and self.fits_host

    @property
    def cached_device_bytes(self) -> int:
        """The bytes that torch's allocator would take of the fullest GPU, with the context, if it gave nothing back."""
        return max(stage.cached_device_bytes for stage in self.memory)

    @property
    def fits_host(self) -> bool:
        """True where what is offloaded stays within the host's memory, or nobody said how much that is."""
        return self.host_memory_bytes is None or self.host_bytes_per_node <= self.host_memory_bytes


FULL_MEMORY = 0.95
"""Share of the usable memory above which fragmentation may exceed what is left."""


def allocator_holds(workload: Workload, estimate: PlanEstimate) -> bool:
    """Return whether what torch's allocator takes and keeps is within a GPU's memory on every stage."""
    return estimate.cached_device_bytes <= workload.cluster.gpu_memory_bytes


def leaves_room(workload: Workload, estimate: PlanEstimate) -> bool:
    """Return whether a plan is far enough from the limit: by its peak, and by what torch's allocator keeps."""
    is_full = estimate.peak_memory_bytes > FULL_MEMORY * estimate.usable_memory_bytes
    return not is_full and allocator_holds(workload, estimate)


def peak_memory(workload: Workload, table: PlanTable, costs: BlockCosts | None = None) -> Floats:
    """Return the peak bytes of each plan, of the fullest of a few stages.

    These are the first and the last one, the second where pp > 2, and the one between with most parameters where
    stages differ. `costs` are the plans' `block_costs`, where they are known.
    """
    workload = CostModel.of_workload(workload)
    costs = costs or block_costs(workload, table)
    peaks = np.zeros(len(table))
    rows_of = [np.arange(len(table)), np.flatnonzero(table.pp > 1), np.flatnonzero(table.pp > 2)]
    ranks = [(of_rank, np.full(len(of_rank), number)) for of_rank, number in zip(rows_of, (0, -1, 1), strict=True)]
    running = running_parameters(workload.model)
    unlike = np.flatnonzero(are_unlike(table, running))
    fullest = fullest_ranks(table.select(unlike), running) if len(unlike) else unlike
    ranks += [(unlike[fullest > 1], fullest[fullest > 1])]
    # Ranks of a small table are computed side by side, those of a large one in turn, as far as caches reach.
    together = [ranks] if len(table) <= _SMALL_ROWS else [[each] for each in ranks]
    for group in together:
        rows = np.concatenate([of_rank for of_rank, _ in group])
        rank = np.concatenate([number for _, number in group])
        part = table if len(rows) == len(table) else table.select(rows)
        stage = even_stage(
            part,
            workload.model.num_blocks,
            np.where(rank < 0, part.pp - 1, rank),
            are_alike=len(workload.model.runs) == 1,
        )
        of_part = costs if part is table else costs.select(rows)
        np.maximum.at(peaks, rows, peak_bytes(RankMemory.of(workload, part, of_part, stage)))
    return peaks


def step_times(workload: Workload, table: PlanTable) -> StepTime:
    """Return the step time of each plan by parts, from the first and the last pipeline rank and two between."""
    workload, last = CostModel.of_workload(workload), table.pp - 1
    model = workload.model
    ranks = (np.zeros_like(last), *inner_ranks(table, running_parameters(model)), last)
    stages = [even_stage(table, model.num_blocks, rank, are_alike=len(model.runs) == 1) for rank in ranks]
    costs = block_costs(workload, table)
    return step_time(workload, table, costs, stages)


def fits(workload: Workload, table: PlanTable, peak_bytes: Floats) -> Mask:
    """Return which plans' peaks stay within the usable memory of a GPU."""
    return peak_bytes <= workload.usable_bytes(table.axes)


def why_unsuitable(workload: Workload, plan: ParallelPlan) -> Incompatibility | None:
    """Return why a plan does not suit the model, the training and the machines of a workload, None where it does."""
    rules = workload.framework.split_rules
    return why_incompatible(plan, workload.model, workload.training, workload.cluster, rules)


def assumed_speeds(workload: Workload) -> tuple[str, ...]:
    """Return in a sentence what nobody measured of the GPU's speed; none where all of it was."""
    gpu, training = workload.cluster.gpu, workload.training
    if gpu.vendor == "cpu" or (
        gpu.calibration is not None and gpu.calibration.fit(training.compute_precision) is not None
    ):
        return ()
    parts = []
    if gpu.reached_matmul_flops_per_s is None and training.precision != "fp32":
        parts.append(f"matmuls reach {workload.constants.usual_reached_share:.0%} of the peak")
    generation = workload.framework.kernels.flash_generation
    attention = gpu.shared.attention_speed(generation, uses_sdpa=training.attention == "sdpa")
    if training.attention != "eager" and attention.source_kind in ("assumed", "memory"):
        of = "the best matmul" if attention.is_of_reached else "the peak"
        parts.append(f"FlashAttention reaches {attention.forward:.0%} of {of}")
    return (f"assumed, not measured on {gpu.title}: {', '.join(parts)}",) if parts else ()


def estimate_plan(workload: Workload, plan: ParallelPlan) -> PlanEstimate:
    """Return the memory of every stage and the step time of one plan.

    Raises `PlanError` where the plan does not suit the model, the training or the machines, with what would do.
    """
    found = why_unsuitable(workload, plan)
    if found is not None:
        raise found.error()
    return evaluate_plan(workload, plan)


def evaluate_plan(workload: Workload, plan: ParallelPlan) -> PlanEstimate:
    """Return the estimate of a plan without asking whether it suits the workload.

    For plans that were run: tables of runs round batches, and count stages with the embedding and the head.
    """
    return evaluate_plans(workload, [plan])[0]


def host_share(workload: Workload, plan: ParallelPlan) -> float:
    """Return the share of a step for which GPUs wait for the host to start kernels and collectives."""
    sharding = workload.framework.data_parallel.sharding.replace(gather_host_s=0.0, reduce_host_s=0.0)
    quick = workload.framework.changed(
        kernels={"host_s_per_block": 0.0, "collective_host_s": 0.0}, data_parallel={"sharding": sharding}
    )
    without = evaluate_plan(replace(workload, framework=quick), plan)
    return 1.0 - without.step.step_time_s / evaluate_plan(workload, plan).step.step_time_s


def evaluate_plans(workload: Workload, plans: Sequence[ParallelPlan]) -> list[PlanEstimate]:
    """Return what `evaluate_plan` says of each of some plans of equal `pp`, for little more than one costs."""
    workload, table = CostModel.of_workload(workload), PlanTable.of_plans(plans)
    costs, ranks = block_costs(workload, table), all_ranks(table, workload.model.num_blocks)
    time = step_time(workload, table, costs, ranks.apart(plans[0].pp))
    usable, gpus_per_node = workload.usable_bytes(table.axes), workload.cluster.gpus_per_node
    return [
        PlanEstimate(
            plan=plan,
            memory=memory,
            step=_step_record(workload, plan, time, row),
            usable_memory_bytes=int(usable[row]),
            host_bytes_per_node=min(plan.world_size, gpus_per_node) * max(stage.host_bytes for stage in memory),
            host_memory_bytes=workload.cluster.host_memory_bytes,
        )
        for row, (plan, memory) in enumerate(zip(plans, _stage_memories(workload, table, costs, ranks), strict=True))
    ]


def stage_memories(
    workload: Workload, plan: ParallelPlan, costs: BlockCosts | None = None
) -> tuple[MemoryEstimate, ...]:
    """Return the memory of each pipeline rank of a plan. `costs` are its `block_costs`, where they are known."""
    table = PlanTable.of_plans([plan])
    costs = costs or block_costs(workload, table)
    return _stage_memories(workload, table, costs, all_ranks(table, workload.model.num_blocks))[0]


def _stage_memories(
    workload: Workload, table: PlanTable, costs: BlockCosts, ranks: StageBlocks
) -> list[tuple[MemoryEstimate, ...]]:
    """Return the memory of each rank of each plan; `ranks` are those of `all_ranks`."""
    pp = len(ranks.rank) // len(table)
    rows = np.repeat(np.arange(len(table)), pp)
    held = RankMemory.of(workload, table.select(rows), costs.select(rows), ranks)
    memory = peak_of(held)
    cached, on_host = cached_bytes(held, memory), host_bytes(held)
    communicators_bytes = workload.communicators_bytes(table.axes)
    records = [
        _memory_record(
            workload,
            row,
            memory,
            stage=row % pp,
            cached=float(cached[row]),
            on_host=float(on_host[row]),
            communicators_bytes=int(communicators_bytes[row // pp]),
        )
        for row in range(len(rows))
    ]
    return [tuple(records[first : first + pp]) for first in range(0, len(records), pp)]


def _memory_record(
    workload: Workload,
    row: int,
    memory: StageMemory,
    *,
    stage: int,
    cached: float,
    on_host: float,
    communicators_bytes: int,
) -> MemoryEstimate:
    parts = {name: round(float(getattr(memory, name)[row])) for name in MEMORY_PARTS}
    total = sum(parts.values())
    at_least, at_most = (
        workload.constants.device_bytes(
            held,
            communicators_bytes=communicators_bytes,
            context_bytes=workload.framework.storage.context_bytes,
        )
        for held in (total, cached)
    )
    # A GPU that is full has the allocator give back what it keeps for later.
    on_device = min(at_most, max(at_least, workload.cluster.gpu_memory_bytes))
    return MemoryEstimate(
        pipeline_stage=stage,
        **parts,
        total_bytes=total,
        device_bytes=on_device,
        host_bytes=round(on_host),
        cached_device_bytes=at_most,
    )


def _step_record(workload: Workload, plan: ParallelPlan, time: StepTime, row: int) -> StepEstimate:
    training, model = workload.training, workload.model
    step_time_s = float(time.step_time_s[row])
    tokens_per_s = training.tokens_per_step / step_time_s / (plan.world_size * plan.devices_per_process)
    flops_per_s = model.training_flops_per_token(training.attended_length) * tokens_per_s
    return StepEstimate(
        step_time_s=step_time_s,
        compute_s=float(time.compute_s[row]),
        recompute_s=float(time.recompute_s[row]),
        tensor_parallel_s=float(time.tensor_parallel_s[row]),
        context_parallel_s=float(time.context_parallel_s[row]),
        expert_parallel_s=float(time.expert_parallel_s[row]),
        pipeline_bubble_s=float(time.pipeline_bubble_s[row]),
        pipeline_send_s=float(time.pipeline_send_s[row]),
        data_parallel_s=float(time.data_parallel_s[row]),
        optimizer_s=float(time.optimizer_s[row]),
        data_parallel_wire_s=float(time.data_parallel_wire_s[row]),
        tokens_per_s_per_gpu=tokens_per_s,
        model_flops_per_s_per_gpu=flops_per_s,
        mfu=flops_per_s / counted_peak(workload.cluster.gpu, training, uses_tf32=workload.framework.kernels.uses_tf32),
    )
