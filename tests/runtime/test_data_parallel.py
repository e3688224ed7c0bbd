"""DataParallel in one process: what is refused without its GPUs, what the model is wrapped in. The sums of DDP."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_harness import RankHarness, RanksFailedError
from torch import nn
from training_cases import GLOBAL_BATCH, train

from paraplan import runtime
from paraplan.errors import UnsupportedPlanError, UsageError
from paraplan.plan.parallel import ParallelPlan
from paraplan.runtime.data_parallel.wrapping import (
    ReplicaReduction,
    Wrapping,
    share_among_devices,
    wrap_data_parallel,
)
from paraplan.runtime.job_start import check_devices
from paraplan.runtime.mesh import build_mesh
from paraplan.runtime.precision import ReduceType
from paraplan.runtime.structure.blocks import compile_blocks, find_blocks
from paraplan.runtime.torch_private import default_store

TWO_GPUS = ParallelPlan(devices_per_process=2, micro_batch_size=GLOBAL_BATCH)


class Wrapper(nn.Module):
    """Takes what DataParallel takes."""

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__()
        self.module, self.options = module, options


@pytest.mark.skipif(torch.cuda.device_count() > 1, reason="this machine has the GPUs")
def test_a_machine_without_the_gpus_refuses_dataparallel_with_both_numbers() -> None:
    with pytest.raises(UsageError, match="divides batches over 2 CUDA GPUs, and this process sees"):
        runtime.init(strategy="dp")
    with pytest.raises(UsageError, match="divides batches over 2 CUDA GPUs, and this process sees"):
        runtime.init(TWO_GPUS)


def test_as_many_gpus_as_planned_will_do() -> None:
    check_devices(TWO_GPUS, 2)
    check_devices(ParallelPlan(dp=8), 0)
    with pytest.raises(UsageError, match="over 2 CUDA GPUs, and this process sees 1"):
        check_devices(TWO_GPUS, 1)


@pytest.mark.ranks
def test_several_processes_refuse_dataparallel(ranks: RankHarness) -> None:
    with pytest.raises(RanksFailedError, match="strategy=dp is DataParallel in one process, and this job has 2"):
        ranks.run(_init_dataparallel, size=2)


def _init_dataparallel() -> None:
    runtime.init(strategy="dp")


def test_the_devices_of_the_plan_reach_the_wrapper() -> None:
    model = nn.Linear(2, 2)
    wrapped = share_among_devices(model, range(3), wrapper=Wrapper)
    assert isinstance(wrapped, Wrapper)
    assert wrapped.module is model
    assert wrapped.options == {"device_ids": [0, 1, 2], "output_device": 0}


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch's DataParallel runs the model alone where there is no GPU")
def test_a_plan_of_several_devices_is_executed_with_torchs_dataparallel() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    called = wrap_data_parallel(model, Wrapping([]), mesh=build_mesh(TWO_GPUS, runtime.init().world), precision="fp32")
    assert isinstance(called, nn.DataParallel)
    assert called.module is model


def test_compiled_blocks_are_refused_under_dataparallel() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with pytest.raises(UnsupportedPlanError, match="devices_per_process=2: DataParallel copies blocks"):
        compile_blocks(model, find_blocks(model), "inductor", plan=TWO_GPUS)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs in one process")
def test_two_gpus_of_one_process_train_as_one() -> None:
    alone, shared = train("decoder", ParallelPlan(micro_batch_size=GLOBAL_BATCH)), train("decoder", TWO_GPUS)
    assert shared.losses == pytest.approx(alone.losses, rel=1e-5)


class Bucket:
    """Gradients as DDP gives them to what sums them."""

    def __init__(self) -> None:
        self.gradients = torch.ones(4)

    def buffer(self) -> torch.Tensor:
        return self.gradients

    def is_last(self) -> bool:
        return True


@pytest.mark.ranks
@pytest.mark.parametrize("reduce_dtype", ["fp32", "bf16"])
def test_a_sum_on_its_way_does_not_hold_its_process_group(reduce_dtype: ReduceType, ranks: RankHarness) -> None:
    num_references, _ = ranks.run(_count_references_of_a_sum, reduce_dtype, size=2)
    assert num_references == 0, "a thread of the group would drop the last one, wait for itself, and abort the rank"


def _count_references_of_a_sum(reduce_dtype: ReduceType) -> int:
    job = runtime.init()
    group = job.mesh.replica_group
    assert group is not None
    if not job.is_main:
        default_store().wait(["counted"])
        dist.all_reduce(torch.ones(4, dtype=torch.bfloat16 if reduce_dtype == "bf16" else None), group=group)
        return 0
    before = sys.getrefcount(group)
    summed = ReplicaReduction([*nn.Linear(2, 2).parameters()], group, reduce_dtype).sum(bucket := Bucket())
    num_references = sys.getrefcount(group) - before
    default_store().set("counted", "")
    summed.wait()
    assert bucket.gradients.tolist() == [2.0] * 4
    return num_references
