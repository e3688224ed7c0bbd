"""Collectives of tensor parallelism in the two passes of blocks."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import numpy as np

from paraplan.cost.communication.collectives import GroupLinks, overlap_s
from paraplan.cost.communication.exchanges import routed_matmul
from paraplan.cost.plan_table import Floats, Ints, PlanTable
from paraplan.cost.workload import Workload
from paraplan.model.spec import BlockSpec
from paraplan.model.tensor_split import projected_width


def tensor_parallel_s(
    workload: Workload,
    table: PlanTable,
    links: GroupLinks,
    activation: Floats,
    num_blocks: Ints,
    computed_s: tuple[Floats, Floats],
) -> tuple[Floats, Floats]:
    """Return the exposed seconds of `num_blocks` blocks of each plan in a forward and a backward pass.

    `activation` are the bytes of all tokens between two blocks, `computed_s` the seconds that the passes compute.
    """
    if workload.framework.tensor_parallel.follows_library_plan:
        passes = planned_sends(workload)
        forward_s, backward_s = (
            num_blocks * each.seconds(links, activation / workload.model.hidden_size) for each in passes
        )
        return forward_s, backward_s
    summed_s = num_blocks * reductions_share(workload) * _summed_s(table, links, activation)
    forward_s, backward_s = _two_sums_s(workload, table, summed_s, *computed_s)
    heads_s = [num_blocks * each for each in _shared_heads_s(workload, table, links)]
    return forward_s + heads_s[0], backward_s + heads_s[1]


class PlannedSends(NamedTuple):
    """The sends of ranks in one pass of a block on average: elements of a token of each collective, with its count."""

    sums: Counter[float]
    gathers: Counter[float]

    @property
    def num_collectives(self) -> float:
        """Collectives in the pass of a block on average."""
        return sum(self.sums.values()) + sum(self.gathers.values())

    def seconds(self, links: GroupLinks, each_bytes: Floats) -> Floats:
        """Return the seconds of a block on average, where one element of all tokens takes `each_bytes`."""
        summed = sum((count * links.all_reduce_s(size * each_bytes) for size, count in self.sums.items()), 0.0)
        gathered = sum((count * links.all_gather_s(size * each_bytes) for size, count in self.gathers.items()), 0.0)
        return np.asarray(summed + gathered)


def planned_sends(workload: Workload) -> tuple[PlannedSends, PlannedSends]:
    """Return what ranks send in the two passes of a block on average, by transformers' plan of its layers.

    In a forward pass they sum what products give whose inputs are divided, and gather what others give that the plan
    wants whole. In a backward pass the gradient of an input is summed for each product whose outputs are divided, and
    gathered for one that takes a share of a whole input. Experts read one input, and their outputs are summed once;
    whole ones, over ranks of tensor parallelism, exchange tokens instead (huggingface/transformers 5.24,
    src/transformers/distributed/tensor_parallel.py).
    """
    model = workload.model
    passes = tuple(PlannedSends(Counter(), Counter()) for _ in range(2))
    for run in model.runs:
        for send, size in _sends_of(run.block, whole_experts=workload.framework.experts.over_tensor_ranks):
            into = passes[send.is_backward].gathers if send.gathers else passes[send.is_backward].sums
            into[size] += run.count / max(1, model.num_blocks)  # type: ignore[assignment]  # shares, not counts
    return passes[0], passes[1]


class _Send(NamedTuple):
    is_backward: bool
    gathers: bool


def _sends_of(block: BlockSpec, *, whole_experts: bool) -> list[tuple[_Send, float]]:
    sends = []
    for one in block.matmuls:
        if one.split == "none" or one.of_activations or one.num_experts > 1:
            continue
        if one.split == "row":
            sends.append((_Send(is_backward=False, gathers=False), float(one.n)))
        elif one.gathers:
            sends.append((_Send(is_backward=False, gathers=True), float(one.n)))
        gathers_gradient = one.split == "row" and one.gathers
        if one.split == "column" or gathers_gradient:
            sends.append((_Send(is_backward=True, gathers=gathers_gradient), float(one.k)))
    routed = routed_matmul(block)
    if routed is not None and not whole_experts:
        sends += [(_Send(is_backward=backward, gathers=False), float(routed.k)) for backward in (False, True)]
    return sends


def _shared_heads_s(workload: Workload, table: PlanTable, links: GroupLinks) -> list[Floats]:
    """Return the seconds of a block on average in which ranks that share heads of keys gather what projections give.

    In a backward pass they sum the gradients of all and share them out (megatron/core/tensor_parallel/mappings.py,
    `all_gather_last_dim_from_tensor_parallel_region`).
    """
    zeros = np.zeros(len(table))
    if not (workload.key_heads(table.tp) > 1).any():
        return [zeros, zeros]
    each = table.tokens(workload.training.seq_length) * workload.training.activation_bytes
    forward_s, backward_s = zeros, zeros
    for run in workload.model.runs:
        core = run.block.attention
        if core is not None:
            shares = np.where(table.tp > core.num_kv_heads, run.count / max(1, workload.model.num_blocks), 0.0)
            num_bytes = each * projected_width(run.block)
            forward_s = forward_s + shares * links.all_gather_s(num_bytes)
            backward_s = backward_s + shares * links.reduce_scatter_s(num_bytes)
    return [forward_s, backward_s]


def reductions_share(workload: Workload) -> float:
    """Return the all-reduces of tensor parallelism in a pass of a block over two, averaged over the blocks.

    Whole experts, each on one rank of tensor parallelism, leave those of the attention and of shared experts.
    """
    model = workload.model
    if not workload.framework.experts.over_tensor_ranks or not model.num_blocks:
        return 1.0
    routed = [(run.block.matmuls, run.count) for run in model.runs if routed_matmul(run.block)]
    spared = sum(
        max(0, 2 - sum(one.split == "row" and one.num_experts == 1 for one in matmuls)) * count
        for matmuls, count in routed
    )
    return 1.0 - spared / 2.0 / model.num_blocks


def _summed_s(table: PlanTable, tp: GroupLinks, activation: Floats) -> Floats:
    """Return the seconds in which ranks sum an activation: under sequence parallelism by two collectives.

    These are no faster where a switch reduces (NVLink SHARP), as an all-reduce is: for them NCCL does so with buffers
    that are registered alone.
    """
    in_two = tp.reduce_scatter_s(activation) + tp.all_gather_s(activation)
    return np.where(table.sequence_parallel == 1, in_two, tp.all_reduce_s(activation))


def _two_sums_s(
    workload: Workload, table: PlanTable, summed_s: Floats, forward_s: Floats, backward_s: Floats
) -> tuple[Floats, Floats]:
    """Return the exposed seconds of tensor parallelism in forward and backward passes, from those of one sum.

    Each block sums two activations in either pass (Shoeybi et al. 2019, section 3). Beside the gradients of weights,
    half of the backward pass, run the two of the backward pass; under sequence parallelism the gathering of outputs'
    gradients does not, and inputs are gathered again (Korthikanti et al. 2022, section 4.2.2): one sum exposed and two
    hidden. Where collectives go beside the products themselves, the first of tp chunks stays alone.
    """
    profile, slowdown = workload.framework.tensor_parallel, workload.constants.overlap_slowdown
    is_divided = table.sequence_parallel == 1
    forward, backward, sums = 2.0 * summed_s, 2.0 * summed_s, 2.0
    if profile.overlaps_backward:
        backward, sums = is_divided * summed_s + overlap_s(2.0 * summed_s, backward_s / 2.0, slowdown=slowdown), 3.0
    if workload.training.stack.overlaps_products:
        first = summed_s / table.tp
        beside = [
            count * first + overlap_s(count * (summed_s - first), compute_s, slowdown=slowdown)
            for count, compute_s in ((2.0, forward_s), (sums, backward_s))
        ]
        forward = np.where(is_divided, beside[0], forward)
        backward = np.where(is_divided, beside[1], backward)
    return forward, np.asarray(backward)
