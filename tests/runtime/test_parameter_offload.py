"""One process whose parameters wait on the host: it trains what it trains with all of them on its device."""

from __future__ import annotations

from pathlib import Path

import torch
from rank_harness import RankHarness
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy

from paraplan import ParallelPlan, runtime
from paraplan.runtime import Engine, Job
from paraplan.runtime.checks.references import Verify

WHOLE = ParallelPlan(micro_batch_size=2, num_microbatches=2)
ON_HOST = WHOLE.replace(zero_stage=3, offload="parameters")


def _engine(job: Job, *, verify: Verify = "auto") -> Engine:
    torch.manual_seed(0)
    blocks = [nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True) for _ in range(2)]
    return job.prepare(
        nn.Sequential(nn.Embedding(40, 16), *blocks, nn.Linear(16, 40)),
        loss_fn=lambda outputs, targets: cross_entropy(outputs.flatten(0, 1), targets.flatten()),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
        max_grad_norm=1.0,
        verify=verify,
    )


def _steps(engine: Engine, *, seed: int) -> list[float]:
    drawn = torch.Generator().manual_seed(seed)
    batches = (torch.randint(40, (4, 8), generator=drawn) for _ in range(2))
    return [engine.step(batch, batch).item() for batch in batches]


def _train(plan: ParallelPlan, folder: Path) -> tuple[list[float], dict[str, torch.Tensor], bool]:
    with runtime.init(plan) as job:
        engine = _engine(job)
        losses = _steps(engine, seed=1)
        engine.save(folder)
        is_sharded = all(isinstance(each, DTensor) for each in engine.parameters.values())
        return losses, {name: engine.whole(name).clone() for name in engine.parameters}, is_sharded


def _go_on(plan: ParallelPlan, folder: Path) -> list[float]:
    with runtime.init(plan) as job:
        engine = _engine(job, verify="off")
        engine.load(folder)
        return _steps(engine, seed=2)


def _both(folder: Path) -> None:
    losses, parameters, _ = _train(WHOLE, folder / "whole")
    on_host, offloaded, is_sharded = _train(ON_HOST, folder / "on-host")
    assert is_sharded
    assert losses == on_host
    assert all(torch.equal(parameters[name], offloaded[name]) for name in parameters)
    assert _go_on(ON_HOST, folder / "whole") == _go_on(WHOLE, folder / "on-host")


def test_one_process_trains_the_same_with_its_parameters_on_the_host(tmp_path: Path, ranks: RankHarness) -> None:
    ranks.run_alone(_both, tmp_path)
