"""Several optimizers and schedulers: those of one process, under every plan and over checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from case_selection import with_all
from rank_harness import RankHarness
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, StepLR
from training_cases import GLOBAL_BATCH, MODELS, TOKENS, TokenPairs, loss_fn

from paraplan import runtime
from paraplan.errors import UsageError
from paraplan.plan.parallel import ParallelPlan
from paraplan.runtime.checkpoints.boxes import CheckpointError
from paraplan.runtime.data.sharding import shard_dataset
from paraplan.runtime.data.streams import BatchSettings
from paraplan.runtime.engine import Engine

FIRST_STEPS, LAST_STEPS, MAX_NORM = 2, 2, 0.5
Found = tuple[list[float], list[float], dict[str, torch.Tensor]]

PLANS = {
    "one process": None,
    "ddp": ParallelPlan(dp=2, micro_batch_size=6),
    "zero 3": ParallelPlan(dp=2, zero_stage=3, micro_batch_size=6),
    "split layers": ParallelPlan(tp=2, micro_batch_size=6, num_microbatches=2),
    "pipeline": ParallelPlan(pp=2, pipeline_schedule="1f1b", micro_batch_size=4, num_microbatches=3),
}


def muon_and_adamw(parameters: list[nn.Parameter]) -> list[torch.optim.Optimizer]:
    matrices = [parameter for parameter in parameters if parameter.ndim == 2]
    vectors = [parameter for parameter in parameters if parameter.ndim != 2]
    return [torch.optim.Muon(matrices, lr=1e-2), torch.optim.AdamW(vectors, lr=2e-2, eps=1e-4)]


def two_schedules(optimizers: list[torch.optim.Optimizer]) -> list[LRScheduler]:
    first, second = optimizers
    return [StepLR(first, 1, gamma=0.8), LambdaLR(second, lambda step: 1 / (1 + step))]


def prepared(job: runtime.Job, seed: int, **options: Any) -> Engine:
    torch.manual_seed(seed)
    defaults: dict[str, Any] = {"optimizer": muon_and_adamw, "scheduler": two_schedules, "max_grad_norm": MAX_NORM}
    return job.prepare(
        MODELS["two blocks"](),
        loss_fn=loss_fn,
        example_inputs=torch.zeros(2, TOKENS, dtype=torch.long),
        verify="off",  # plain torch is what it is compared with
        **(defaults | options),
    )


def train(job: runtime.Job, engine: Engine, num_steps: int) -> Found:
    batches = job.shard(TokenPairs(), batch_size=GLOBAL_BATCH, seed=3, skip=engine.num_steps)
    losses = [engine.step(*batch).item() for batch, _ in zip(batches, range(num_steps), strict=False)]
    rates = [group["lr"] for group in engine.optimizer.param_groups]
    return losses, rates, {name: engine.whole(name).clone() for name in engine.parameters}


def train_and_save(plan: ParallelPlan | None, folder: str) -> Found:
    with runtime.init(plan) as job:
        engine = prepared(job, seed=0)
        found = train(job, engine, FIRST_STEPS)
        engine.save(folder)
        return found


def load_and_train(plan: ParallelPlan | None, folder: str) -> Found:
    with runtime.init(plan) as job:
        engine = prepared(job, seed=5)
        engine.load(folder)
        return train(job, engine, LAST_STEPS)


def train_plainly() -> list[Found]:
    torch.manual_seed(0)
    model = MODELS["two blocks"]()
    optimizers = muon_and_adamw(list(model.parameters()))
    schedules = two_schedules(optimizers)
    batches = shard_dataset(TokenPairs(), BatchSettings(GLOBAL_BATCH, 1, 0, torch.device("cpu"), seed=3))
    losses: list[float] = []
    found: list[Found] = []
    for step, (inputs, targets) in enumerate(batches, start=1):
        model.zero_grad()
        loss = loss_fn(model(inputs), targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        for one in [*optimizers, *schedules]:
            one.step()
        losses.append(loss.item())
        if step in (FIRST_STEPS, FIRST_STEPS + LAST_STEPS):
            rates = [group["lr"] for optimizer in optimizers for group in optimizer.param_groups]
            found.append((losses, rates, {name: value.detach().clone() for name, value in model.named_parameters()}))
            losses = []
        if step == FIRST_STEPS + LAST_STEPS:
            break
    return found


def assert_same(found: Found, expected: Found) -> None:
    assert found[0] == pytest.approx(expected[0], rel=1e-4)
    assert found[1] == pytest.approx(expected[1])
    for name, tensor in found[2].items():
        # Muon computes in bfloat16, where the last bits of a gradient can turn a rounding.
        torch.testing.assert_close(tensor, expected[2][name], rtol=1e-3, atol=2e-3)


def run(ranks: RankHarness, work: Any, plan: ParallelPlan | None, folder: Path) -> list[Found]:
    if plan is None:
        return [ranks.run_alone(work, None, str(folder))]
    return ranks.run(work, plan, str(folder), size=plan.world_size)


@pytest.mark.ranks
@pytest.mark.parametrize("written_under", with_all(PLANS) or ["zero 3"])
def test_two_optimizers_train_as_in_one_process_and_go_on_under_another_plan(
    written_under: str, ranks: RankHarness, tmp_path: Path
) -> None:
    first, last = train_plainly()
    names = [*PLANS]
    read_under = names[names.index(written_under) - 1]
    for found in run(ranks, train_and_save, PLANS[written_under], tmp_path / "checkpoint"):
        assert_same(found, first)
    for found in run(ranks, load_and_train, PLANS[read_under], tmp_path / "checkpoint"):
        assert_same(found, last)


def test_a_list_of_one_is_that_one_and_other_things_are_refused() -> None:
    with runtime.init() as job:
        engine = prepared(job, 0, optimizer=lambda held: [torch.optim.SGD(held, lr=0.1)], scheduler=None)
        assert isinstance(engine.optimizer, torch.optim.SGD)
        for made, words in [
            (lambda held: [], "an empty list"),
            (lambda held: [torch.optim.SGD(held), held], "returned list"),
            (lambda held: [torch.optim.SGD(held), torch.optim.SGD(held)], "a parameter is in two optimizers"),
        ]:
            with pytest.raises(UsageError, match=words):
                prepared(job, 0, optimizer=made, scheduler=None)


def test_schedulers_of_another_training_are_refused_from_a_checkpoint(tmp_path: Path) -> None:
    with runtime.init() as job:
        batch = next(iter(job.shard(TokenPairs(), batch_size=GLOBAL_BATCH)))
        engine = prepared(job, 0)
        engine.step(*batch)
        engine.save(tmp_path / "checkpoint")
        turned = prepared(job, 0, scheduler=lambda made: [*reversed(two_schedules(made))])
        with pytest.raises(CheckpointError, match="scheduler 0 was another one"):
            turned.load(tmp_path / "checkpoint")
