"""What a script gives the runtime by mistake is refused at once, by the argument's name, with the way out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from paraplan import runtime
from paraplan.errors import ParaplanError
from paraplan.runtime import Job

SAMPLES = [(torch.zeros(2), torch.zeros(2))] * 8


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def _prepared(job: Job, **others: Any) -> Any:
    return job.prepare(**{"model": nn.Linear(2, 2), "loss_fn": functional.mse_loss, "optimizer": _sgd} | others)


@pytest.fixture(scope="module")
def job() -> Job:
    return runtime.init()


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda _: runtime.init("plan.json"), "plan='plan.json' of init"),
        (lambda _: runtime.init(strategy="fsdp"), "'ddp' or 'dp'"),
        (lambda _: runtime.init(plans=None), "did you mean plan"),
        (lambda job: _prepared(job, model="llama"), "model='llama' of Job.prepare"),
        (lambda job: _prepared(job, optimizer=_sgd(nn.Linear(2, 2).parameters())), "a function of the parameters"),
        (lambda job: _prepared(job, loss_fn=nn.MSELoss), "MSELoss()"),
        (lambda job: _prepared(job, loss_fn=0.5), "a function of outputs and targets"),
        (lambda job: _prepared(job, scheduler=0.5), "a function of the optimizer"),
        (lambda job: _prepared(job, max_grad_norm=-1.0), "max_grad_norm=-1.0"),
        (lambda job: _prepared(job, max_grad_norm="1"), "max_grad_norm='1'"),
        (lambda job: _prepared(job, verify_every=-1), "verify_every=-1"),
        (lambda job: _prepared(job, batch_coupling="ignore"), "'warn', 'refuse' or 'gather'"),
        (lambda job: _prepared(job, recompute="full"), "recompute='full'"),
        (lambda job: _prepared(job, lr=0.1), "no argument 'lr'"),
        (lambda job: job.prepare(nn.Linear(2, 2)), "missing a required argument: 'loss_fn'"),
        (lambda job: job.shard(SAMPLES, batch_size="8"), "batch_size='8' of Job.shard"),
        (lambda job: job.shard(SAMPLES, skip=-1), "skip=-1"),
        (lambda job: job.shard(SAMPLES, num_workers=-1), "num_workers=-1"),
        (lambda job: _prepared(job).save(None), "folder=None of Engine.save"),
        (lambda job: _prepared(job).load(3), "folder=3 of Engine.load"),
        (lambda job: _prepared(job).on_step("log"), "callback='log' of Engine.on_step"),
    ],
)
def test_a_wrong_argument_is_refused_by_its_name(call: Callable[[Job], object], said: str, job: Job) -> None:
    with pytest.raises(ParaplanError) as refused:
        call(job)
    assert said in refused.value.text
    assert refused.value.hint
