"""Exchanges inside a block: context parallelism sends tokens for heads or a ring of keys, expert parallelism tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from paraplan.cost.blocks.module_traffic import KERNEL_START_S
from paraplan.cost.blocks.routing import busiest_load, expert_ranks
from paraplan.cost.communication.collectives import GroupLinks, expert_links, group_links, inside_links
from paraplan.cost.context_parts import context_parts
from paraplan.cost.plan_table import Floats, Ints, Mask, PlanTable, RecomputeCode
from paraplan.cost.stack import hidden_share
from paraplan.cost.workload import Workload
from paraplan.model.spec import Attention, BlockSpec, Matmul

RING_BYTES = ((28.0, 19.0), (4.0, 22.0))
"""Bytes that each step of a ring moves for an element of queries, and of keys and values, beyond attention's own,
forward and backward: outputs and gradients are added up in fp32 (torch.distributed.tensor.experimental of torch 2.13,
_context_parallel._attention, counted operator by operator)."""

_ENGINE_RING_BYTES = ((8.0, 6.0), (0.0, 6.0))
"""Bytes that a step of Transformer Engine's ring moves (context_parallel.py): one fused operation adds its result to
the output (flash_attn_fwd_out_correction, 8 bytes an element, between outputs of 16 and 32 bits); gradients of queries,
keys and values are added in 16 bits (6)."""

_ORDER_STARTS = (80, 64)
"""Kernels, and reads that the host waits for, with which Transformer Engine's exchange of heads finds the order of
packed samples, for each sample and each rank, forward and backward. Counted with torch's dispatcher: releases 2.10 to
2.17 find it anew for each tensor, in a loop over samples and chunks with two reads of lengths each
(pytorch/attention/dot_product_attention/context_parallel.py): 22 a sample and rank for q, k, v and dout, 14 for out,
dq, dk and dv. 2.18 has one kernel for it. A read counts as much as the start of a kernel, without the wait."""


class Exchanges(NamedTuple):
    """Seconds of one block's exchanges, averaged over the blocks, in a forward and in a backward pass."""

    context_s: Floats
    context_backward_s: Floats
    expert_s: Floats
    """Expert parallelism's that nothing hides."""
    expert_backward_s: Floats
    hidden_s: Floats
    """Expert parallelism's that run beside compute of another micro-batch."""
    hidden_backward_s: Floats

    def select(self, rows: Ints) -> Exchanges:
        """Return those of some of the plans."""
        return Exchanges(*(each[rows] for each in self))


def run_again(workload: Workload, table: PlanTable) -> Mask:
    """Return the plans whose backward pass repeats the exchanges of blocks: torch's policy keeps none of their results.

    (torchtitan/distributed/activation_checkpoint.py.)
    """
    is_full = table.recompute == RecomputeCode.FULL
    if workload.framework.kernels.recomputed_ops == "modules":
        return np.asarray(is_full)
    return np.asarray(is_full | (table.recompute == RecomputeCode.SELECTIVE_OPS))


def _width(attention: Attention, table: PlanTable, *, keys_alone: bool) -> Floats | float:
    """Return the elements of queries, keys, values and outputs of one token, or of keys and values alone.

    Where there are fewer heads of keys than ranks, each is sent to several of them, and by several of tp. Queries and
    outputs go to the ranks that have the same tokens, `(h - 1) / h` of them over h parts of the heads.
    """
    width = attention.qk_head_dim + attention.v_head_dim
    keys = np.maximum(attention.num_kv_heads, table.tp) * width
    if keys_alone:
        return keys
    parts = context_parts(attention, table.tp, table.cp)
    copies = parts.key_copies(np.maximum(attention.num_kv_heads // table.tp, 1))
    leaving = (1.0 - 1.0 / parts.heads) / np.maximum(1.0 - 1.0 / table.cp, 0.5)
    return np.asarray(attention.num_heads * width * leaving + keys * copies)


def context_parallel_s(workload: Workload, table: PlanTable, links: GroupLinks | None = None) -> tuple[Floats, Floats]:
    """Return the seconds of the exchanges of one block, averaged over the blocks, in a forward and a backward pass.

    Queries, keys, values and outputs cross once in each pass, all-to-all (DeepSpeed-Ulysses, Jacobs et al. 2023,
    section 3.1); beyond the ranks that heads divide over, keys and values go to all that have the same heads, as if
    they were gathered (Llama 3, Grattafiori et al. 2024, section 3.3.2). Recomputation repeats the forward pass's.
    Nothing hides them. Frameworks that pass keys and values
    around a ring do so beside the attention core, which they slow down. `links` replaces those of the plans' orders.
    """
    zeros = np.zeros(len(table))
    if not (table.cp > 1).any():
        return zeros, zeros
    training, model = workload.training, workload.model
    rings = workload.framework.kernels.ring_attention
    attentions = [(run.block.attention, run.count) for run in model.runs]
    widths = [
        _width(attention, table, keys_alone=rings) * count for attention, count in attentions if attention is not None
    ]
    width = sum(widths) / model.num_blocks
    tokens = table.tokens(training.seq_length)
    num_bytes = tokens * width * training.activation_bytes / table.tp
    links = links or group_links(workload, table, "cp")
    once = np.where(table.cp > 1, (links.all_gather_s if rings else links.all_to_all_s)(num_bytes), 0.0)
    if not rings:
        forward_s, backward_s = (once + ordered_s for ordered_s in _orders_s(workload, table))
        return forward_s, backward_s + forward_s * run_again(workload, table)
    once = once * (workload.constants.overlap_slowdown - 1)
    added_s = [_ring_steps_s(workload, table, backward=backward) for backward in (False, True)]
    forward_s = once + added_s[0]
    return forward_s, once + added_s[1] + forward_s * run_again(workload, table)


def _orders_s(workload: Workload, table: PlanTable) -> list[Floats]:
    """Return the seconds in which the host finds the order of packed samples for exchanges of heads, in either pass.

    It reads lengths from the GPU all the time, which has nothing else to do meanwhile.
    """
    model = workload.model
    attending = sum(run.count for run in model.runs if run.block.attention is not None) / model.num_blocks
    samples = table.device_batch_size * workload.training.packed_samples * np.where(table.cp > 1, table.cp, 0)
    starts = _ORDER_STARTS if workload.framework.kernels.engine else (0, 0)
    return [np.asarray(samples * attending * count * KERNEL_START_S) for count in starts]


def _ring_steps_s(workload: Workload, table: PlanTable, *, backward: bool) -> Floats:
    """Return the seconds in which the steps of a ring add up what each gives, of a block on average."""
    kernels, model, gpu = workload.framework.kernels, workload.model, workload.cluster.gpu
    query_bytes, key_bytes = (each[backward] for each in (_ENGINE_RING_BYTES if kernels.engine else RING_BYTES))
    each = np.zeros(len(table))
    for run in model.runs:
        if run.block.attention is not None:
            attention = run.block.attention
            kv_heads = np.maximum(attention.num_kv_heads, table.tp)
            key_heads = kv_heads if kernels.groups_in_sdpa else attention.num_heads
            keys = key_heads * (attention.qk_head_dim + attention.v_head_dim)
            moved = attention.num_heads * attention.v_head_dim * query_bytes
            each += run.count * (moved + keys * key_bytes)
    num_bytes = each / model.num_blocks * table.tokens(workload.training.seq_length) / table.tp * table.cp
    bandwidth = gpu.memory_bandwidth_bytes_per_s * workload.constants.memory_bandwidth_efficiency
    return np.where(table.cp > 1, num_bytes / bandwidth, 0.0)


def routed_matmul(block: BlockSpec) -> Matmul | None:
    """Return a matmul of the experts to which a router of `block` sends tokens, None for a block without experts."""
    return next((matmul for matmul in block.matmuls if matmul.num_experts > 1), None)


def touched(parts: Floats | float, rows: float) -> Floats:
    """Return how many of `parts` equal parts hold one of `rows` experts drawn at random: `N (1 - (1 - 1/N)^rows)`."""
    return np.asarray(parts * (1.0 - (1.0 - 1.0 / np.maximum(parts, 1.0)) ** rows))


def _at_own_rate(workload: Workload, links: GroupLinks) -> GroupLinks:
    """Return `links` with the bandwidth that the framework's own exchange reaches of them."""
    own = workload.framework.experts.dispatcher.link_efficiency
    speeds = tuple(
        speed.replace(
            bus_bandwidth_bytes_per_s=speed.bus_bandwidth_bytes_per_s
            * own[speed.kind]
            / workload.links.speed(speed.kind).bus_efficiency["all_to_all"]
        )
        if speed.kind in own
        else speed
        for speed in links.speeds["all_to_all"]
    )
    return replace(links, speeds=dict(links.speeds) | {"all_to_all": speeds})


def _exchange_s(workload: Workload, table: PlanTable, links: GroupLinks, matmul: Matmul, token: Floats) -> Floats:
    """Return the seconds of one exchange where a token of `token` bytes in all goes to the experts of `matmul`.

    Sent once to a node, a token goes to as many as its experts touch, of those nodes that its router may choose
    (DeepSeek-AI 2024, DeepSeek-V3, sections 2.1.2 and 3.2.2), and then to their ranks over the links inside: the
    slower of the two decides. A rank gets it once too (DeepEP, `is_token_in_rank`). Experts are drawn at random.
    """
    rows, cluster = matmul.rows_per_token, workload.cluster
    all_s = links.all_to_all_s(rows * token)
    if not workload.framework.experts.dispatcher.sends_tokens_once:
        return all_s
    ranks = expert_ranks(workload.framework, ep=table.ep, tp=table.tp).astype(float)
    nodes = np.maximum(1.0, table.ep * np.maximum(table.tp, 1) / cluster.gpus_per_node)
    links = _at_own_rate(workload, links)
    within, copies = touched(ranks, rows), touched(np.maximum(1.0, nodes * matmul.group_share), rows)
    if workload.framework.experts.consecutive_when_even and workload.training.expert_load == 1:
        within, copies = (np.ceil(rows * parts / matmul.num_experts) for parts in (ranks, nodes))
    within = within * token
    inside = _at_own_rate(workload, inside_links(workload, np.minimum(ranks.astype(np.int64), cluster.gpus_per_node)))
    once_s = np.maximum(links.all_to_all_s(copies * token), inside.all_to_all_s(within))
    return np.where(nodes > 1, np.minimum(links.all_to_all_s(within), once_s), links.all_to_all_s(within))


def expert_exchange_s(
    workload: Workload, table: PlanTable, tensor: GroupLinks, links: GroupLinks | None = None
) -> tuple[Floats, Floats, Floats, Floats]:
    """Return the seconds of the exchanges of one block, averaged over the blocks, in a forward and a backward pass.

    The first two are what nothing hides, the last two what runs beside compute of another micro-batch.
    A rank sends `k` rows of each of its tokens to the ranks of their experts, all-to-all, and has as many back, in
    either pass (Lepikhin et al. 2020, GShard, section 3.2; Megatron-Core, moe/token_dispatcher.py, alltoall);
    recomputation repeats the forward pass's. The busiest rank decides (`busiest_load`). Beside tensor
    parallelism each of its ranks sends its share of the tokens and then gathers and scatters `k` rows of a token where
    a plain layer has one, which is counted apart; outputs of whole experts are gathered where ranks share their tokens,
    half of an all-reduce. `tensor` are the links of tensor parallelism; `links` replaces those
    of the plans' orders.
    """
    zeros, ranks = np.zeros(len(table)), expert_ranks(workload.framework, ep=table.ep, tp=table.tp)
    is_spread = ranks > 1
    if not is_spread.any():
        return zeros, zeros, zeros, zeros
    model, training = workload.model, workload.training
    links, profile = links or expert_links(workload, table)[0], workload.framework.experts
    tokens = table.tokens(training.seq_length)
    shown, hidden, hidden_backward = zeros, zeros, zeros
    is_sliced = (table.tp > 1) & (table.sequence_parallel == 0) & profile.over_tensor_ranks
    for run in model.runs:
        matmul = routed_matmul(run.block)
        if matmul is not None:
            # The busiest rank has the most to receive, and all wait for it.
            load = busiest_load(training, workload.constants, matmul, ranks=ranks)
            rows, token = matmul.rows_per_token, tokens * matmul.k * training.activation_bytes * load
            splits = (table.tp > 1) & (not profile.over_tensor_ranks)
            gathered = np.where(splits, tensor.all_reduce_s(rows * token) - tensor.all_reduce_s(token), 0.0)
            whole = tokens * matmul.k * training.activation_bytes
            gathered = np.where(is_sliced, tensor.all_reduce_s(whole) / 2.0, gathered)
            there = _exchange_s(workload, table, links, matmul, token / table.tp)
            back = _exchange_s(workload, table, links, matmul, token / table.tp)
            shown = shown + (profile.exchange_wait_s + np.maximum(gathered, 0.0)) * run.count
            hidden, hidden_backward = hidden + (there + back) * run.count, hidden_backward + 2.0 * back * run.count
    apart = np.where(is_spread, 1.0 / model.num_blocks, 0.0)
    share, again = hidden_share(training.stack), run_again(workload, table)
    forward, backward = (shown + (1.0 - share) * hidden) * apart, (shown + (1.0 - share) * hidden_backward) * apart
    repeated = forward + share * hidden * apart
    return forward, backward + repeated * again, share * hidden * apart, share * hidden_backward * apart
