"""What expert parallelism exchanges: each token's rows go to the ranks of its experts and come back."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from paraplan.cost.communication.collectives import GroupLinks, expert_links
from paraplan.cost.plan_table import RECOMPUTES, Floats, Ints, PlanTable
from paraplan.cost.workload import Workload
from paraplan.model.spec import BlockSpec


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


def rows_per_token(block: BlockSpec) -> float:
    """Return to how many experts a router of `block` sends each token, 0 for a block without experts."""
    return max((matmul.rows_per_token for matmul in block.matmuls if matmul.num_experts > 1), default=0.0)


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
    links = links or expert_links(workload, table)[0]
    token = table.micro_batch_size * training.seq_length / table.cp * model.hidden_size * training.activation_bytes
    once = zeros
    for run in model.runs:
        rows = rows_per_token(run.block)
        if rows:
            gathered = np.where(table.tp > 1, tensor.all_reduce_s(rows * token) - tensor.all_reduce_s(token), 0.0)
            sent = 2.0 * links.all_to_all_s(rows * token / table.tp)
            once = once + np.where(table.ep > 1, sent + np.maximum(gathered, 0.0), 0.0) * run.count
    once = once / model.num_blocks
    return once, once * (1 + (table.recompute == RECOMPUTES.index("full")))


def sharded_parameters(table: PlanTable, parameters: Floats, experts: Floats) -> Floats:
    """Return the parameters whose optimizer state one rank has, of `parameters` that it holds, `experts` of them.

    ZeRO shards over all ranks of dp and cp, and experts over those that hold the same ones: `ep` times fewer.
    """
    alike = parameters + experts * (table.ep - 1)
    return np.where(table.zero_stage >= 1, alike / table.shard_size, parameters)
