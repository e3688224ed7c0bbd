"""What is put around the blocks of a model or of a stage, the same for both: recompute inside, then DDP or ZeRO."""

from __future__ import annotations

from torch import nn

from paraplan.runtime.data_parallel import apply_data_parallelism
from paraplan.runtime.recompute import recompute_blocks
from paraplan.runtime.recompute_policy import RecomputedBlocks
from paraplan.runtime.setting import Setting


def recompute_and_shard(
    module: nn.Module,
    blocks: list[nn.Module],
    setting: Setting,
    *,
    again: RecomputedBlocks,
    first: int = 0,
    apart: frozenset[nn.Parameter] = frozenset(),
    replicates: bool = True,
) -> nn.Module:
    """Return what is to be called in the place of `module`: the model or a stage of it, replicated or sharded.

    `again` says which of its `blocks`, the first of which has number `first`, run again in the backward pass. The
    parameters `apart` stay whole under ZeRO; without `replicates` there is no DDP.
    """
    plan = setting.plan
    recompute_blocks(
        [block for number, block in enumerate(blocks, first) if number in again.numbers],
        again.recompute,
        in_halves=plan.pipeline_schedule == "zero_bubble",
        are_all=plan.pp == 1,
        keeps=again.keeps,
    )
    return apply_data_parallelism(
        module,
        blocks,
        plan=setting.plan,
        mesh=setting.mesh,
        precision=setting.precision,
        apart=apart,
        replicates=replicates,
        find_unused=setting.find_unused,
    )
