"""The moving average of the parameters: torch's own, whatever the plan, and kept in checkpoints."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_harness import RankHarness
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from training_cases import GLOBAL_BATCH, MODELS, TOKENS, TokenPairs, loss_fn

from paraplan import runtime
from paraplan.errors import UsageError
from paraplan.plan.parallel import ParallelPlan
from paraplan.runtime.data.sharding import shard_dataset
from paraplan.runtime.data.streams import BatchSettings
from paraplan.runtime.engine import Engine

DECAY, FIRST_STEPS, LAST_STEPS = 0.8, 2, 1
Found = tuple[list[float], dict[str, torch.Tensor], dict[str, torch.Tensor]]

PLANS = {
    "one process": None,
    "ddp": ParallelPlan(dp=2, micro_batch_size=6),
    "zero 2": ParallelPlan(dp=2, zero_stage=2, micro_batch_size=6),
    "zero 3": ParallelPlan(dp=2, zero_stage=3, micro_batch_size=6),
    "split layers": ParallelPlan(tp=2, sequence_parallel=True, micro_batch_size=6, num_microbatches=2),
    "pipeline": ParallelPlan(pp=2, pipeline_schedule="1f1b", micro_batch_size=4, num_microbatches=3),
}


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-4, fused=True)


def model_of(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model: nn.Module = MODELS["two blocks"]()
    return model


def prepared(job: runtime.Job, seed: int = 0) -> Engine:
    return job.prepare(
        model_of(seed),
        loss_fn=loss_fn,
        optimizer=sgd,
        verify="off",  # plain torch is what it is compared with
        example_inputs=torch.zeros(2, TOKENS, dtype=torch.long),
    )


def train(job: runtime.Job, engine: Engine, num_steps: int) -> Found:
    """Return the losses of evaluations with averages, the averages and the parameters behind them."""
    losses = []
    batches = job.shard(TokenPairs(), batch_size=GLOBAL_BATCH, seed=3, skip=engine.num_steps)
    for (inputs, targets), _ in zip(batches, range(num_steps), strict=False):
        engine.step(inputs, targets)
        engine.eval_step(inputs, targets)
        with engine.averaged():
            losses.append(engine.eval_step(inputs, targets).item())
    with engine.averaged():
        averages = {name: engine.whole(name).clone() for name in engine.parameters}
    return losses, averages, {name: engine.whole(name).clone() for name in engine.parameters}


def train_and_save(plan: ParallelPlan | None, folder: str) -> Found:
    with runtime.init(plan) as job:
        engine = prepared(job)
        engine.average(DECAY)
        found = train(job, engine, FIRST_STEPS)
        engine.save(folder)
        with engine.averaged():
            engine.export(f"{folder}.safetensors")
        return found


def load_and_train(plan: ParallelPlan | None, folder: str) -> Found:
    with runtime.init(plan) as job:
        engine = prepared(job, seed=5)
        engine.average(DECAY)
        inputs, targets = next(iter(job.shard(TokenPairs(), batch_size=GLOBAL_BATCH)))
        engine.eval_step(inputs, targets)  # gathers what `load` changes
        engine.load(folder)
        return train(job, engine, LAST_STEPS)


def train_plainly() -> list[Found]:
    """Return the same of plain torch, behind the first steps and behind all."""
    model = model_of(0)
    optimizer = sgd(list(model.parameters()))
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    batches = shard_dataset(TokenPairs(), BatchSettings(GLOBAL_BATCH, 1, 0, torch.device("cpu"), seed=3))
    losses: list[float] = []
    found: list[Found] = []
    for step, (inputs, targets) in enumerate(batches, start=1):
        optimizer.zero_grad()
        loss_fn(model(inputs), targets).backward()
        optimizer.step()
        averaged.update_parameters(model)
        losses.append(loss_fn(averaged(inputs), targets).item())
        if step in (FIRST_STEPS, FIRST_STEPS + LAST_STEPS):
            copies: Any = [
                {name: value.detach().clone() for name, value in held.named_parameters()}
                for held in (averaged.module, model)
            ]
            found.append((losses, *copies))
            losses = []
        if step == FIRST_STEPS + LAST_STEPS:
            break
    return found


def assert_same(found: Found, expected: Found) -> None:
    assert found[0] == pytest.approx(expected[0], rel=1e-5)
    for mine, theirs in zip(found[1:], expected[1:], strict=True):
        for name, tensor in mine.items():
            torch.testing.assert_close(tensor, theirs[name], rtol=1e-4, atol=1e-5)


def run(ranks: RankHarness, work: Any, plan: ParallelPlan | None, folder: Path) -> list[Found]:
    if plan is None:
        return [ranks.run_alone(work, None, str(folder))]
    return ranks.run(work, plan, str(folder), size=plan.world_size)


@pytest.mark.ranks
@pytest.mark.parametrize(
    # The others keep parameters as one of these does; one of them is read under all the same.
    "written_under",
    [pytest.param(name, marks=[pytest.mark.with_all] * (name != "zero 3")) for name in PLANS],
)
def test_averages_are_torchs_own_and_go_on_under_another_plan(
    written_under: str, ranks: RankHarness, tmp_path: Path
) -> None:
    first, last = train_plainly()
    names = [*PLANS]
    read_under = names[names.index(written_under) - 1]
    for found in run(ranks, train_and_save, PLANS[written_under], tmp_path / "checkpoint"):
        assert_same(found, first)
    for found in run(ranks, load_and_train, PLANS[read_under], tmp_path / "checkpoint"):
        assert_same(found, last)
    safetensors = pytest.importorskip("safetensors.torch")
    exported = safetensors.load_file(tmp_path / "checkpoint.safetensors")
    for name, average in first[1].items():
        torch.testing.assert_close(exported[name], average, rtol=1e-4, atol=1e-5)


def test_a_checkpoint_without_averages_begins_them_and_one_with_them_is_read_without(tmp_path: Path) -> None:
    with runtime.init() as job:
        engine, batch = prepared(job), next(iter(job.shard(TokenPairs(), batch_size=GLOBAL_BATCH)))
        engine.step(*batch)
        engine.save(tmp_path / "without")
        again = prepared(job, seed=5)
        again.average(DECAY)
        again.load(tmp_path / "without")
        with again.averaged():
            for name in engine.parameters:
                assert torch.equal(again.whole(name), engine.whole(name))
        again.step(*batch)
        again.save(tmp_path / "with")
        plain = prepared(job, seed=6)
        plain.load(tmp_path / "with")
        for name in plain.parameters:
            assert torch.equal(plain.whole(name), again.whole(name))


def test_calls_that_averages_do_not_go_with_are_refused(tmp_path: Path) -> None:
    with runtime.init() as job:
        engine, batch = prepared(job), next(iter(job.shard(TokenPairs(), batch_size=GLOBAL_BATCH)))
        with pytest.raises(UsageError, match="no average of the parameters"), engine.averaged():
            pass
        for decay in (1.0, -0.1, math.nan):
            with pytest.raises(UsageError, match="of an average of parameters"):
                engine.average(decay)
        engine.average(DECAY)
        with pytest.raises(UsageError, match="was called before"):
            engine.average(DECAY)
        with engine.averaged():
            for call in (lambda: engine.step(*batch), lambda: engine.save(tmp_path), lambda: engine.load(tmp_path)):
                with pytest.raises(UsageError, match=r"inside of engine.averaged"):
                    call()
            with pytest.raises(UsageError, match="inside of"), engine.averaged():
                pass
