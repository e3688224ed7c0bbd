"""Ranks that share a GPU: every collective goes over copies, here of tensors on the CPU."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from case_selection import with_all
from rank_harness import RankHarness
from torch import nn
from training_cases import Training, train

from paraplan import runtime
from paraplan.plan.parallel import ParallelPlan
from paraplan.runtime import shared_gpu, world

pytestmark = pytest.mark.ranks

PLANS = {
    "ddp": ParallelPlan(dp=2, micro_batch_size=6),
    "zero 2": ParallelPlan(dp=2, zero_stage=2, micro_batch_size=3, num_microbatches=2),
    "zero 3": ParallelPlan(dp=2, zero_stage=3, micro_batch_size=6),
    "pipeline": ParallelPlan(pp=2, pipeline_schedule="1f1b", micro_batch_size=3, num_microbatches=4),
    "split layers": ParallelPlan(tp=2, micro_batch_size=12),
}

_kept: list[nn.Module] = []
"""DDP's reducer, dropped at the end of a function, drops its group under Python's lock and joins gloo's threads there.

One that has yet to drop its last work waits for that lock (torch's issue 56297): here nothing comes after that work.
"""


def share() -> None:
    """Have this rank's groups be of the kind that ranks on one GPU have, and copy every tensor."""
    world._backend = lambda *_: shared_gpu.register()
    shared_gpu.SharedGpuGroup.is_staged = lambda *_: True  # type: ignore[method-assign]


def trained(plan: ParallelPlan) -> Training:
    share()
    return train("decoder", plan)


@pytest.mark.parametrize("name", with_all(PLANS) or [*PLANS][-2:])
def test_plans_train_over_copies_as_one_process(name: str, ranks: RankHarness) -> None:
    (expected,) = ranks.run(train, "decoder", ParallelPlan(micro_batch_size=12), size=1)
    for found in ranks.run(trained, PLANS[name], size=2, is_fresh=True):
        assert found.losses == pytest.approx(expected.losses, rel=1e-5)


def collectives() -> dict[str, list[float]]:
    share()
    job = runtime.init(ParallelPlan(dp=2), shows_progress=False)
    rank = dist.get_rank()

    def ones(size: int, value: float) -> torch.Tensor:
        return torch.full((size,), float(value))

    found = {"mean": ones(2, rank), "sum": ones(2, rank)}
    dist.all_reduce(found["mean"], op=dist.ReduceOp.AVG)
    works = [dist.all_reduce(found["sum"], async_op=True)]
    gathered = [ones(1, 9), ones(1, 9)]
    dist.all_gather(gathered, ones(1, rank))
    found |= {"gathered": torch.cat(gathered), "scattered": ones(1, 9), "changed": ones(2, 9), "received": ones(1, 9)}
    dist.reduce_scatter(found["scattered"], [ones(1, 1), ones(1, 2)])
    dist.all_to_all_single(found["changed"], torch.arange(2.0) + 10 * rank)
    sent = ones(1, rank)
    operations = [dist.P2POp(dist.irecv, found["received"], 1 - rank), dist.P2POp(dist.isend, sent, 1 - rank)]
    works += dist.batch_isend_irecv(operations)
    for work in works:
        assert work is not None
        work.wait()
    linear = nn.parallel.DistributedDataParallel(nn.Linear(1, 1, bias=False))
    linear(ones(1, rank)).backward()
    assert linear.module.weight.grad is not None
    found["ddp"] = linear.module.weight.grad.flatten()
    _kept.append(linear)
    job.close()
    return {name: value.tolist() for name, value in found.items()}


def test_every_kind_of_collective_gives_what_torch_promises(ranks: RankHarness) -> None:
    first, second = ranks.run(collectives, size=2, is_fresh=True)
    both = {"mean": [0.5, 0.5], "sum": [1.0, 1.0], "gathered": [0.0, 1.0], "ddp": [0.5]}
    assert first == both | {"scattered": [2.0], "changed": [0.0, 10.0], "received": [1.0]}
    assert second == both | {"scattered": [4.0], "changed": [1.0, 11.0], "received": [0.0]}
