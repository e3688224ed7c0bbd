"""A job as a context: it is closed at the end, and left at once where its script fails."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from rank_harness import RankHarness
from torch import nn
from training_cases import GLOBAL_BATCH, TOKENS, Decoder, TokenPairs, loss_fn

from paraplan import runtime
from paraplan.errors import ParaplanError, UsageError
from paraplan.plan.parallel import ParallelPlan
from paraplan.runtime.checkpoints.loading import find_whole
from paraplan.runtime.engine import Engine


def prepared(job: runtime.Job) -> Engine:
    torch.manual_seed(0)
    return job.prepare(
        Decoder(num_layers=2),
        loss_fn=loss_fn,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        example_inputs=torch.zeros(2, TOKENS, dtype=torch.long),
    )


def train_in_a_context(folder: str) -> tuple[int, int, bool]:
    with runtime.init() as job:
        engine = prepared(job)
        for inputs, targets in job.shard(TokenPairs(), batch_size=GLOBAL_BATCH):
            engine.step(inputs, targets)
        engine.save(folder, wait=False)
        place = (job.dp, job.dp_rank)
    with pytest.raises(UsageError, match=r"after job.close"):
        engine.step(inputs, targets)
    return *place, dist.is_initialized()


@pytest.mark.ranks
def test_a_context_closes_the_job_with_its_checkpoint_whole(ranks: RankHarness, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    assert ranks.run(train_in_a_context, str(folder), size=2) == [(2, 0, False), (2, 1, False)]
    assert find_whole(folder) == folder


def fail_on_rank_1() -> tuple[str, bool]:
    try:
        with runtime.init() as job:
            engine = prepared(job)
            for inputs, targets in job.shard(TokenPairs(), batch_size=GLOBAL_BATCH):
                if job.world.rank == 1 and engine.num_steps == 1:
                    raise ValueError("the script has failed")
                engine.step(inputs, targets)
    except (ValueError, ParaplanError) as error:
        return str(error), dist.is_initialized()
    return "", True


@pytest.mark.ranks
def test_a_rank_that_fails_leaves_at_once_and_is_not_taken_for_one_that_is_done(ranks: RankHarness) -> None:
    (told, _), (failed, is_member) = ranks.run(fail_on_rank_1, size=2)
    assert failed == "the script has failed"
    assert not is_member
    assert "a rank has ended" in told
    assert "same number of batches; job.shard does" not in told


def places(plan: ParallelPlan) -> tuple[int, int]:
    with runtime.init(plan) as job:
        return job.dp, job.dp_rank


@pytest.mark.ranks
def test_ranks_of_one_copy_of_the_model_have_one_place_in_data_parallelism(ranks: RankHarness) -> None:
    found = ranks.run(places, ParallelPlan(dp=2, tp=2), size=4)
    assert found == [(2, 0), (2, 0), (2, 1), (2, 1)]


def jobs_one_after_another() -> list[float]:
    """Return the losses of jobs that ranks close and begin at other times."""
    losses = []
    for number in range(4):
        with runtime.init(ParallelPlan(dp=2, micro_batch_size=2), shows_progress=False) as job:
            torch.manual_seed(0)
            engine = job.prepare(
                nn.Linear(4, 1),
                loss_fn=lambda outputs, targets: (outputs - targets).square().mean(),
                optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            )
            losses.append(engine.step(torch.ones(2, 4), torch.zeros(2, 1)).item())
        time.sleep(0.3 * (job.world.rank == number % 2))
    return losses


@pytest.mark.ranks
def test_a_script_may_close_a_job_and_begin_another(ranks: RankHarness) -> None:
    for losses in ranks.run(jobs_one_after_another, size=2):
        assert losses == losses[:1] * 4
