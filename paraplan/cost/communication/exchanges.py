"""Exchanges inside a block: context parallelism sends tokens for heads or a ring of keys, expert parallelism tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from paraplan.cost.communication.collectives import GroupLinks, expert_links, group_links, inside_links
from paraplan.cost.plan_table import Floats, Ints, Mask, PlanTable, RecomputeCode
from paraplan.cost.workload import Workload
from paraplan.model.spec import Attention, BlockSpec


@dataclass(frozen=True, eq=False)
class Exchanges:
    """Seconds of one block's exchanges, averaged over the blocks, in a forward and in a backward pass."""

    context_s: Floats
    context_backward_s: Floats
    expert_s: Floats
    expert_backward_s: Floats

    def select(self, rows: Ints) -> Exchanges:
        """Return those of some of the plans."""
        return Exchanges(
            self.context_s[rows], self.context_backward_s[rows], self.expert_s[rows], self.expert_backward_s[rows]
        )


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

    Where there are fewer heads of keys than ranks, each is sent to several of them.
    """
    width = attention.qk_head_dim + attention.v_head_dim
    keys = attention.num_kv_heads * width
    if keys_alone:
        return keys
    own = np.maximum(attention.num_kv_heads // table.tp, 1)
    return np.asarray(attention.num_heads * width + keys * table.cp / np.gcd(own, table.cp))


def context_parallel_s(workload: Workload, table: PlanTable, links: GroupLinks | None = None) -> tuple[Floats, Floats]:
    """Return the seconds of the exchanges of one block, averaged over the blocks, in a forward and a backward pass.

    Queries, keys, values and outputs cross once in each pass, all-to-all (DeepSpeed-Ulysses, Jacobs et al. 2023,
    section 3.1); recomputation repeats the forward pass's. Nothing hides them. Frameworks that pass keys and values
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
    tokens = table.micro_batch_size * training.seq_length / table.cp
    num_bytes = tokens * width * training.activation_bytes / table.tp
    links = links or group_links(workload, table, "cp")
    once = np.where(table.cp > 1, (links.all_gather_s if rings else links.all_to_all_s)(num_bytes), 0.0)
    if rings:
        once = once * (workload.constants.overlap_slowdown - 1)
    return once, once * (1 + run_again(workload, table))


def rows_per_token(block: BlockSpec) -> float:
    """Return to how many experts a router of `block` sends each token, 0 for a block without experts."""
    return max((matmul.rows_per_token for matmul in block.matmuls if matmul.num_experts > 1), default=0.0)


def _exchange_s(workload: Workload, table: PlanTable, links: GroupLinks, rows: float, token: Floats) -> Floats:
    """Return the seconds of one exchange where `rows` experts want each token of `token` bytes in all.

    Sent once to a node, a token goes to as many as `rows` experts drawn at random touch, `N (1 - (1 - 1/N)^rows)` of N,
    and then to its experts over the links inside: the slower of the two decides (DeepSeek-AI 2024, DeepSeek-V3,
    section 3.2.2).
    """
    all_s = links.all_to_all_s(rows * token)
    if not workload.framework.experts.sends_tokens_once:
        return all_s
    cluster = workload.cluster
    nodes = np.maximum(1.0, table.ep * np.maximum(table.tp, 1) / cluster.gpus_per_node)
    copies = nodes * (1.0 - (1.0 - 1.0 / nodes) ** rows)
    inside = inside_links(workload, np.minimum(table.ep, cluster.gpus_per_node))
    once_s = np.maximum(links.all_to_all_s(copies * token), inside.all_to_all_s(rows * token))
    return np.where(nodes > 1, np.minimum(all_s, once_s), all_s)


def expert_exchange_s(
    workload: Workload, table: PlanTable, tensor: GroupLinks, links: GroupLinks | None = None
) -> tuple[Floats, Floats]:
    """Return the seconds of the exchanges of one block, averaged over the blocks, in a forward and a backward pass.

    A rank sends `k` rows of each of its tokens to the ranks of their experts, all-to-all, and has as many back, in
    either pass (Lepikhin et al. 2020, GShard, section 3.2; Megatron-Core, moe/token_dispatcher.py, alltoall);
    recomputation repeats the forward pass's. Routing is taken to be balanced, and nothing hides the exchanges. Beside
    tensor parallelism each of its ranks sends its share of the tokens and then gathers and scatters `k` rows of a token
    where a plain layer has one, which is counted apart. `tensor` are the links of tensor parallelism; `links` replaces
    those of the plans' orders.
    """
    zeros = np.zeros(len(table))
    if not (table.ep > 1).any():
        return zeros, zeros
    model, training = workload.model, workload.training
    links, profile = links or expert_links(workload, table)[0], workload.framework.experts
    token = table.micro_batch_size * training.seq_length / table.cp * model.hidden_size * training.activation_bytes
    once = zeros
    for run in model.runs:
        rows = rows_per_token(run.block)
        if rows:
            splits = (table.tp > 1) & (not profile.over_tensor_ranks)
            gathered = np.where(splits, tensor.all_reduce_s(rows * token) - tensor.all_reduce_s(token), 0.0)
            sent = 2.0 * _exchange_s(workload, table, links, rows, token / table.tp) * (1.0 - profile.hidden_share)
            sent = sent + profile.exchange_wait_s
            once = once + np.where(table.ep > 1, sent + np.maximum(gathered, 0.0), 0.0) * run.count
    once = once / model.num_blocks
    return once, once * (1 + run_again(workload, table))
