"""A time that no plan goes below, cheap enough for every plan of a space: what is slower anyway need not be priced."""

from __future__ import annotations

import numpy as np

from paraplan.cost.blocks.costs import BlockCosts, block_costs
from paraplan.cost.communication.collectives import fastest_links
from paraplan.cost.communication.exchanges import context_parallel_s, expert_exchange_s
from paraplan.cost.communication.offload import offload_gather_s
from paraplan.cost.communication.tensor_parallel import reductions_share
from paraplan.cost.plan_table import SCHEDULES, Floats, PlanTable, RecomputeCode, first_rows
from paraplan.cost.step import optimizer_s
from paraplan.cost.workload import Workload
from paraplan.hardware.profiles import Collective

_GPIPE, _ONE_FORWARD, _INTERLEAVED, _ZERO_BUBBLE = (
    SCHEDULES.index(name) for name in ("gpipe", "1f1b", "interleaved_1f1b", "zero_bubble")
)


def least_step_s(workload: Workload, table: PlanTable, costs: BlockCosts | None = None) -> Floats:
    """Return seconds of a step that each plan needs at least.

    Counted are compute, tensor and context parallelism, sends between stages, over the fastest links that any order of
    ranks gives, and the optimizer's step; what data parallelism adds is not. `costs` are the plans' `block_costs`,
    where they are known.
    """
    costs = costs or block_costs(workload, table)
    key = costs.key
    parameters = costs.of_all(costs.parameters) + costs.embedding_parameters[key] + costs.head_parameters[key]
    sharded = parameters / table.pp / np.where(table.zero_stage >= 1, table.shard_size, 1)
    frozen = costs.of_all(costs.frozen_bytes) / table.pp / table.shard_size
    alone = offload_gather_s(workload, table, sharded, frozen) + optimizer_s(workload, table, sharded)
    firsts, alike = first_rows(key, table.devices)  # blocks of plans that are sharded alike cost the same
    blocks_s = _blocks_s(workload, table.select(firsts), costs.select(firsts))[alike]
    least_s = _pipeline_s(workload, table, costs, blocks_s) + alone
    return np.asarray(least_s * workload.time_factors(table))


def _blocks_s(workload: Workload, table: PlanTable, costs: BlockCosts) -> Floats:
    """Return the seconds of one micro-batch in all blocks."""
    key, num_blocks = costs.key, workload.model.num_blocks
    is_full = table.recompute == RecomputeCode.FULL
    activation = costs.boundary_bytes[key] * np.where(table.sequence_parallel == 1, table.tp, 1)
    all_reduce_s = fastest_links(workload, table.tp, "all_reduce").all_reduce_s(activation) * reductions_share(workload)
    profile = workload.framework.tensor_parallel
    backward_sends = table.sequence_parallel if profile.overlaps_backward else 2.0
    if workload.training.stack.overlaps_products:  # beside them all but the first chunk may be hidden
        all_reduce_s = all_reduce_s / np.where(table.sequence_parallel == 1, table.tp, 1)
    kind: Collective = "all_gather" if workload.framework.kernels.ring_attention else "all_to_all"
    exchanges: Floats | int = sum(context_parallel_s(workload, table, fastest_links(workload, table.cp, kind)))
    if (table.ep > 1).any():
        tensor = fastest_links(workload, table.tp, "all_reduce")
        experts = fastest_links(workload, table.ep, "all_to_all")
        exchanges = exchanges + sum(expert_exchange_s(workload, table, tensor, experts)[:2])  # what nothing hides
    sends = num_blocks * (all_reduce_s * (2.0 * (1 + is_full) + backward_sends) + exchanges)
    forward_s = costs.of_all(costs.forward_s)
    again = np.where(is_full, forward_s, costs.of_all(costs.recompute_s))
    forwards = 1 + workload.training.learns_from.extra_forwards
    return np.asarray(forward_s * forwards + costs.of_all(costs.backward_s) + again + sends)


def _pipeline_s(workload: Workload, table: PlanTable, costs: BlockCosts, blocks_s: Floats) -> Floats:
    """Return the seconds of all micro-batches: the largest of what the mean stage, the first and the last one need.

    Under GPipe and 1F1B the slowest stage k waits for the stages before it, and they for it: a step takes at least
    `sum of t_j over j < k + m t_k`, whose mean over k is `(m + (p - 1) / 2)` times the mean stage; the last stage waits
    for all others. Interleaved they wait for one chunk of each stage alone, under zero bubble for the forward passes.
    """
    key, num_blocks, pp, count = costs.key, workload.model.num_blocks, table.pp, table.num_microbatches
    framework = workload.framework
    boundary = costs.boundary_bytes[key] / np.where(framework.pipeline.splits_sends, table.tp, 1)
    send_s = 2.0 * fastest_links(workload, pp, "send_recv").send_s(boundary)
    sends = np.where(pp > 1, table.virtual * send_s, 0.0)
    embedding_s, head_s = costs.embedding_s[key], costs.head_s[key]
    each = (blocks_s + embedding_s + head_s) / pp + sends
    # Chunks are alike where blocks are, and are divided evenly; the last ones have no more than their share.
    is_even = (table.split == 0) & (len(workload.model.runs) == 1)
    share = (num_blocks // (pp * table.virtual)) / num_blocks * is_even
    chunk, forward = blocks_s * share, costs.of_all(costs.forward_s) * share
    last = chunk * table.virtual + head_s + sends
    is_one_chunk = (table.schedule == _GPIPE) | (table.schedule == _ONE_FORWARD)
    kinds = [is_one_chunk, table.schedule == _INTERLEAVED, table.schedule == _ZERO_BUBBLE]
    waited = np.select(kinds, [each, chunk, forward], default=0.0)
    waited_by_last = np.select(kinds, [(each * pp - last) / np.maximum(pp - 1, 1), chunk, forward], default=0.0)
    return np.asarray(
        np.maximum.reduce(
            [
                count * each + waited * (pp - 1) / 2,
                count * (chunk * table.virtual + embedding_s + sends),
                count * last + waited_by_last * (pp - 1),
            ]
        )
    )
