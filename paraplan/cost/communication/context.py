"""What context parallelism exchanges: tokens for heads before attention, and heads for tokens after it."""

from __future__ import annotations

import numpy as np

from paraplan.cost.communication.collectives import GroupLinks, group_links
from paraplan.cost.plan_table import RECOMPUTES, Floats, PlanTable
from paraplan.cost.workload import Workload
from paraplan.model.spec import Attention


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
    return once, once * (1 + (table.recompute == RECOMPUTES.index("full")))
