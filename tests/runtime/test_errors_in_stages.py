"""What a user's code raises in a stage of a pipeline is raised there as it is, and told to the other stages."""

from __future__ import annotations

import pytest
import torch
from odd_models import BATCH, LENGTH, WORDS, Base, Block, loss_of, made
from rank_harness import RankHarness, RanksFailedError

from paraplan import runtime
from paraplan.plan.parallel import ParallelPlan

pytestmark = pytest.mark.ranks


class OwnError(ValueError):
    """An exception of the user's."""


class Picky(Block):
    refuses = False

    def forward(self, hidden: torch.Tensor, beside: torch.Tensor | None = None) -> torch.Tensor:
        if self.refuses:
            raise OwnError("no more of these words")
        return super().forward(hidden, beside)


class Picked(Base):
    block = Picky


def train() -> None:
    plan = ParallelPlan(pp=2, pipeline_schedule="1f1b", num_microbatches=2, micro_batch_size=BATCH // 2)
    job = runtime.init(plan, shows_progress=False)
    model = made(Picked)
    last = model.layers[-1]
    engine = job.prepare(model, loss_fn=loss_of, optimizer=lambda held: torch.optim.SGD(held, lr=0.1), verify="off")
    for step in range(2):
        last.refuses = step == 1
        engine.step(*torch.ones(2, BATCH, LENGTH, dtype=torch.long) % WORDS)


def test_an_error_of_a_block_is_raised_as_it_is_and_told_to_the_other_stages(ranks: RankHarness) -> None:
    with pytest.raises(RanksFailedError) as failed:
        ranks.run(train, size=2)
    by_rank = str(failed.value).split("rank 1 raised")
    assert (
        "UnsupportedPlanError: rank 1 ended engine.step after 1 steps: OwnError: no more of these words" in by_rank[0]
    )
    assert by_rank[1].rstrip().endswith("OwnError: no more of these words")
