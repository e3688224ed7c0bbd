"""Seconds in which the host starts what a block does: floors under the time of its passes."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from paraplan.cost.blocks.module_traffic import KERNEL_START_S, LLAMA_KERNELS, num_kernels
from paraplan.cost.communication.collectives import GroupLinks
from paraplan.cost.communication.data_parallel import WeightWork
from paraplan.cost.communication.exchanges import routed_matmul
from paraplan.cost.communication.tensor_parallel import planned_sends
from paraplan.cost.framework import MODULES_BACKWARD_HOST, MODULES_RERUN_HOST
from paraplan.cost.plan_table import Floats, Ints, Mask, PlanTable, ScheduleCode
from paraplan.cost.workload import Workload


class HostSeconds(NamedTuple):
    """The host's time for a block on average, one entry a plan, in seconds: it starts kernels and collectives."""

    kernels_s: Floats
    """The kernels of a forward pass."""
    forward_s: Floats
    backward_s: Floats
    again_s: Floats
    """A forward pass that runs again in full."""
    again_in_part_s: Floats
    """One that finds operations kept: modules go through all of a block, and start no collective."""
    idle_s: Floats
    """Seconds of a forward pass before which the host waits for the GPU: they come on top of what the GPU takes."""

    def select(self, rows: Ints) -> HostSeconds:
        """Return those of some of the plans."""
        return HostSeconds(*(each[rows] for each in self))


_HALVES_HOST = 1.5
"""How many times as long the host needs for a backward pass in two halves: ranks of a pipeline took 1.2 to 1.6 times as
much CPU time for whole steps (12 small blocks on two CPU ranks, torch 2.13)."""


_ROTATION_STARTS = (26, 22)
"""Kernels that start for each sample of a layer where queries and keys are turned one by one, once the lengths of
samples are read, in a forward and in a backward pass. Counted with torch's dispatcher: Megatron-Core from 17 June to
17 August 2026, core 0.19.0 among it, where the fused kernel does not turn them
(core/models/common/embeddings/rope_utils.py): 13 a tensor, 11 in the backward pass. Core 0.14 and before had one of 12
and 6."""


def host_seconds(workload: Workload, table: PlanTable, tp: GroupLinks, work: WeightWork) -> HostSeconds:
    """Return the seconds of the host for the blocks of each plan."""
    found = _host_seconds(workload, table, tp, work)
    is_compiled, casts = workload.compiles(table.recompute), workload.casts_shards(table.zero_stage > 0)
    if workload.training.compiled and not is_compiled.all():
        found = _where(is_compiled, found, _host_seconds(workload.uncompiled(), table, tp, work))
    return _where(casts, host_seconds(workload.without_autocast(), table, tp, work), found) if casts.any() else found


def _where(mask: Mask, first: HostSeconds, second: HostSeconds) -> HostSeconds:
    return HostSeconds(*(np.where(mask, *pair) for pair in zip(first, second, strict=True)))


def _host_seconds(workload: Workload, table: PlanTable, tp: GroupLinks, work: WeightWork) -> HostSeconds:
    kernels_s = _block_host_s(workload, table)
    forward_starts, backward_starts = _collective_host_s(workload, table, tp)
    again_s = kernels_s * _rerun_host(workload, table)
    halves = np.where(table.schedule == ScheduleCode.ZERO_BUBBLE, _HALVES_HOST, 1.0)
    turned_s, turned_backward_s = _turned_s(workload, table)
    backward_s = (
        kernels_s * (MODULES_BACKWARD_HOST if workload.block_kernels.starts_modules else 1.0) * halves
        + turned_backward_s
    )
    return HostSeconds(
        kernels_s=kernels_s,
        forward_s=kernels_s + forward_starts + work.forward_host_s,
        backward_s=backward_s + backward_starts + work.backward_host_s,
        again_s=again_s + forward_starts + work.again_host_s,
        again_in_part_s=again_s,
        idle_s=turned_s,
    )


def _block_host_s(workload: Workload, table: PlanTable) -> Floats:
    """Return the seconds of the host to start a block's kernels, averaged over the blocks.

    One process starts the kernels of all its GPUs, by threads that share Python's lock.
    """
    framework, model = workload.framework, workload.model
    adapters = sum(run.block.adapter_kernels * run.count for run in model.runs) / max(1, model.num_blocks)
    routed = sum(run.count for run in model.runs if routed_matmul(run.block)) / max(1, model.num_blocks)
    starts = adapters * KERNEL_START_S + routed * framework.experts.dispatcher.host_s_per_layer
    kernels = workload.block_kernels
    of_kernels = kernels.host_s_per_block
    if kernels.starts_modules:
        whole = [(run.block.before_freezing or run.block, run.count) for run in model.runs]  # adapters come beside it
        of_kernels *= sum(num_kernels(block) * count for block, count in whole) / max(1, model.num_blocks)
        of_kernels /= LLAMA_KERNELS
    return np.asarray((of_kernels + starts) * table.devices)


def _turned_s(workload: Workload, table: PlanTable) -> list[Floats]:
    """Return the seconds in which the host turns queries and keys of packed samples one by one, in either pass."""
    model = workload.model
    turned = sum(run.count for run in model.runs if any(one.is_turned for one in run.block.saved)) / model.num_blocks
    samples = (
        table.device_batch_size * workload.training.packed_samples * (workload.training.stack.fuses_rotations is False)
    )
    return [np.asarray(samples * turned * starts * KERNEL_START_S) for starts in _ROTATION_STARTS]


def _rerun_host(workload: Workload, table: PlanTable) -> Floats:
    """Return how many times as long as for a forward pass the host needs for a block that runs again."""
    kernels = workload.block_kernels
    has_hooks = kernels.starts_modules and kernels.checkpoints != "reentrant"
    times = MODULES_RERUN_HOST if has_hooks else (1.0, 1.0, 1.0)
    return np.asarray((1.0, *times))[table.recompute]


def _collective_host_s(workload: Workload, table: PlanTable, tp: GroupLinks) -> tuple[Floats, Floats]:
    """Return the seconds of the host to start the collectives of tensor parallelism in a block's two passes.

    Either pass has two all-reduces, or under sequence parallelism two all-gathers and two reduce-scatters in their
    place; the backward pass gathers two inputs again that were not kept (see `tensor_parallel_s`). Others follow
    transformers' plan. None starts faster than one of a byte ends.
    """
    framework = workload.framework
    least_s = tp.all_reduce_s(np.ones(len(table)))
    one_s = np.where(table.tp > 1, framework.kernels.collective_host_s, 0.0)
    if framework.tensor_parallel.follows_library_plan:
        forward_s, backward_s = (each.num_collectives * np.maximum(least_s, one_s) for each in planned_sends(workload))
        return forward_s, backward_s
    is_divided = table.sequence_parallel == 1
    count = np.where(is_divided, 4.0, 2.0)
    again = np.where(is_divided, 0.0 if framework.tensor_parallel.keeps_gathered_inputs else 2.0, 0.0)
    return np.maximum(2.0 * least_s, one_s * count), np.maximum(2.0 * least_s, one_s * (count + again))
