"""A table of rows dealt out over ranks beside a replicated dense part."""

from __future__ import annotations

import pytest
import torch
from rank_harness import RankHarness
from torch import nn
from training_cases import GLOBAL_BATCH, HIDDEN, VOCABULARY, TokenPairs, loss_fn

from paraplan import runtime
from paraplan.errors import UnsupportedPlanError
from paraplan.plan.parallel import ParallelPlan

pytestmark = pytest.mark.ranks

ROWS = VOCABULARY + 3  # that two ranks do not divide, nor four


class Hybrid(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = runtime.ShardedEmbedding(ROWS, HIDDEN)
        self.dense = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, VOCABULARY))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.dense(self.table(tokens))


def trained(plan: ParallelPlan | None) -> tuple[list[float], list[float], dict[str, torch.Tensor], int]:
    job = runtime.init(plan)
    torch.manual_seed(job.world.rank)
    engine = job.prepare(
        Hybrid(),
        loss_fn=loss_fn,
        optimizer=lambda held: torch.optim.AdamW(held, lr=1e-2, eps=1e-4),
        max_grad_norm=0.3,
    )
    losses, norms = [], []
    for batch, _ in zip(job.shard(TokenPairs(), batch_size=GLOBAL_BATCH), range(3), strict=False):
        losses.append(engine.step(*batch).item())
        norms.append(engine.grad_norm.item())
    table = engine.parameters["table.weight"]
    held = table.to_local() if plan is not None else table
    return losses, norms, {name: engine.whole(name).clone() for name in engine.parameters}, len(held)


@pytest.mark.parametrize(("size", "rows"), [(2, [14, 13]), (4, [7, 7, 7, 6])])
def test_a_table_dealt_out_trains_as_in_one_process(size: int, rows: list[int], ranks: RankHarness) -> None:
    losses, norms, parameters, _ = ranks.run_alone(trained, None)
    plan = ParallelPlan(dp=size, micro_batch_size=GLOBAL_BATCH // size // 3, num_microbatches=3)
    by_rank = ranks.run(trained, plan, size=size, timeout_s=120.0)
    assert [held for *_, held in by_rank] == rows
    for found_losses, found_norms, found, _ in by_rank:
        assert found_losses == pytest.approx(losses, rel=1e-5)
        assert found_norms == pytest.approx(norms, rel=1e-5)
        for name, value in found.items():
            assert (value - parameters[name]).abs().max() <= 1e-4 * parameters[name].abs().max(), name


def _refused() -> str:
    with pytest.raises(UnsupportedPlanError) as refusal:
        trained(ParallelPlan(dp=2, zero_stage=3, micro_batch_size=6))
    return str(refusal.value)


def test_a_table_beside_other_plans_is_refused(ranks: RankHarness) -> None:
    assert "table is a ShardedEmbedding, which stands beside DDP" in ranks.run(_refused, size=2)[0]
