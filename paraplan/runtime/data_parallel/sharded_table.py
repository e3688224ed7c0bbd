"""A large embedding table dealt out over `dp` beside a dense part that DDP replicates.

Every rank has some rows of the table, with their gradients and optimizer state. The ranks bring their tokens together,
each looks up those that it has, and what they found is summed and dealt back.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from paraplan.errors import UnsupportedPlanError
from paraplan.plan.parallel import ParallelPlan
from paraplan.runtime.mesh import Mesh
from paraplan.runtime.shards.group import TensorGroup, reduce_scatter
from paraplan.runtime.shards.sharding import Sharding


class ShardedEmbedding(nn.Embedding):
    """An `nn.Embedding` whose rows `job.prepare` deals out over the ranks of `dp`; in one process it is no other."""

    _group: TensorGroup | None = None

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the rows of `tokens`, of which every rank has as many."""
        group = self._group
        if group is None:
            return super().forward(tokens)
        assert isinstance(self.weight, DTensor)
        rows = self.weight.to_local()
        start = _rows_each(self.num_embeddings, group.size) * group.index
        own = _gathered(tokens.reshape(-1), group) - start
        is_other = (own < 0) | (own >= rows.shape[0])
        if rows.shape[0]:
            found = nn.functional.embedding(own.masked_fill(is_other, 0), rows)
        else:
            found = rows.new_zeros((own.shape[0], self.embedding_dim)) + rows.sum()
        found = found.masked_fill(is_other[:, None], 0.0)
        sharding = Sharding(dim=0, segments=(found.shape[0],), size=group.size)
        return reduce_scatter(found, sharding, group).reshape(*tokens.shape, self.embedding_dim)


def shard_tables(model: nn.Module, plan: ParallelPlan, mesh: Mesh) -> None:
    """Leave this rank's rows in every `ShardedEmbedding` of `model`.

    Raises `UnsupportedPlanError` for a plan that deals out or splits the dense part too, and for tables with options
    that look at all rows.
    """
    tables = {name: module for name, module in model.named_modules() if isinstance(module, ShardedEmbedding)}
    if not tables or plan.world_size == 1:
        return
    if plan.dp != plan.world_size or plan.zero_stage:
        raise UnsupportedPlanError(
            f"{next(iter(tables))} is a ShardedEmbedding, which stands beside DDP, and the plan is '{plan.describe()}'",
            hint="use nn.Embedding, or a plan of dp alone",
        )
    group = TensorGroup(size=mesh.size("dp"), index=mesh.coordinate("dp"), handle=mesh.group("dp"))
    for name, table in tables.items():
        if table.padding_idx is not None or table.max_norm is not None or table.scale_grad_by_freq or table.sparse:
            raise UnsupportedPlanError(
                f"{name} has padding_idx, max_norm, scale_grad_by_freq or sparse, which look at all rows of a table",
                hint="leave these out of a ShardedEmbedding",
            )
        table.weight = nn.Parameter(_shard(table.weight.detach(), group, mesh), table.weight.requires_grad)
        table._group = group


def sharded_names(module: nn.Module) -> list[str]:
    """Return the names of the parameters of tables that are dealt out: no replica averages them."""
    return [name for name, parameter in module.named_parameters() if isinstance(parameter, DTensor)]


def _rows_each(num_rows: int, size: int) -> int:
    return -(-num_rows // size)  # as DTensor deals them out: the last ranks have fewer


def _shard(whole: torch.Tensor, group: TensorGroup, mesh: Mesh) -> DTensor:
    each = _rows_each(whole.shape[0], group.size)
    start = min(each * group.index, whole.shape[0])
    local = whole[start : start + each].clone()
    return DTensor.from_local(
        local, mesh.axis_mesh("dp"), [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride()
    )


def _gathered(tokens: torch.Tensor, group: TensorGroup) -> torch.Tensor:
    parts = [torch.empty_like(tokens) for _ in range(group.size)]
    dist.all_gather(parts, tokens.contiguous(), group=group.handle)
    return torch.cat(parts)
