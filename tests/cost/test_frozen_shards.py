"""Frozen weights under ZeRO-3: all ranks together hold each of them once, experts too, and copy what is away."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paraplan.cost.estimate import estimate_plan
from paraplan.cost.workload import Workload
from paraplan.hardware.catalogue.profile_files import cluster_from_profile
from paraplan.model.reader import read_model
from paraplan.plan.parallel import ParallelPlan
from paraplan.plan.training import TrainingSpec

MakeWorkload = Callable[..., Workload]


def frozen_bytes(made: Workload) -> float:
    return sum((part.frozen_bytes or 0.0) * count for part, count in made.model.all_parameters)


@settings(max_examples=25)
@given(
    model=st.sampled_from(["qwen3-30b-a3b", "mixtral-8x7b", "gpt-oss-20b", "llama-3-8b"]),
    ep=st.sampled_from([1, 2, 4, 8]),
    tp=st.sampled_from([1, 2]),
    weights=st.sampled_from([None, "nf4"]),
    offloads=st.booleans(),
)
def test_ranks_hold_or_have_on_the_host_all_that_is_frozen(
    model: str, ep: int, tp: int, weights: str | None, offloads: bool
) -> None:
    spec, dp = read_model(model), 8 // tp
    if ep > dp or (weights and (tp > 1 or ep > 1)):  # whose weights no plan divides
        return
    fields = {"base_weights": weights} if weights else {}
    training = TrainingSpec(global_batch_size=8, seq_length=512, train="lora:r=8", **fields)
    made = Workload.of(spec, training, cluster_from_profile("dgx-h100"))
    plan = ParallelPlan(dp=dp, tp=tp, ep=ep if spec.num_experts > 1 else 1, zero_stage=3, num_microbatches=tp)
    found = estimate_plan(made, plan.replace(offload="parameters") if offloads else plan)
    held = found.host_bytes_per_node if offloads else 8 * found.peak_memory_bytes
    assert held >= 0.999 * frozen_bytes(made)
    if offloads:
        assert held <= 1.2 * frozen_bytes(made)  # and what trains, with its optimizer


@pytest.mark.parametrize(("model", "count"), [("qwen3-30b-a3b", 1), ("llama-3-8b", 2)])
def test_frozen_weights_that_are_on_the_host_are_copied_for_each_pass(
    workload: MakeWorkload, model: str, count: int
) -> None:
    made = workload(model, profile="8xh100", seq_length=512, global_batch_size=8 * count, train="lora:r=8")
    plan = ParallelPlan(dp=8, zero_stage=3, num_microbatches=count)
    here, away = (estimate_plan(made, plan.replace(offload=where)).step for where in ("none", "parameters"))
    copied_s = 2 * count * frozen_bytes(made) / 8 / made.cluster.gpu.pcie_bandwidth_bytes_per_s
    assert away.data_parallel_s - here.data_parallel_s == pytest.approx(copied_s, rel=0.05)
