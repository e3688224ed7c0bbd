"""Activations that wait in the host's memory: what that frees, what it takes, and who does not do it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from paraplan.cost.estimate import PlanEstimate, evaluate_plan
from paraplan.cost.workload import Workload
from paraplan.errors import NoPlanFitsError, UnsupportedPlanError
from paraplan.hardware.catalogue.profile_files import cluster_from_profile
from paraplan.model.reader import read_model
from paraplan.plan.executor import ANYTHING
from paraplan.plan.parallel import Offload, ParallelPlan
from paraplan.plan.stack import StackSettings
from paraplan.plan.support import check_supported
from paraplan.plan.training import TrainingSpec
from paraplan.search.constraints import Constraints
from paraplan.search.search import search
from paraplan.search.what_helps import what_helps
from paraplan.units import GIB

LLAMA_3_2_3B = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_hidden_layers": 28,
    "num_attention_heads": 24,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
}
FULL = ParallelPlan(micro_batch_size=2, recompute="full")
LONG = ParallelPlan(recompute="full")


@pytest.fixture(scope="module")
def torchtune(tmp_path_factory: pytest.TempPathFactory) -> Workload:
    """Return the run of torchtune's ladder of optimizations: a full fine-tuning in bf16 on one A100."""
    config = Path(tmp_path_factory.mktemp("model")) / "config.json"
    config.write_text(json.dumps(LLAMA_3_2_3B))
    training = TrainingSpec(
        global_batch_size=2, seq_length=4096, precision="bf16-pure", loss="chunked", compiled=True, attention="flash"
    )
    cluster = cluster_from_profile("1xa100-80gb")
    return Workload.of(read_model(str(config)), training, cluster, framework="torchtune")


def longer(workload: Workload) -> Workload:
    return workload.trained_as(workload.training.replace(seq_length=65536, global_batch_size=1))


def both(workload: Workload, plan: ParallelPlan) -> tuple[PlanEstimate, PlanEstimate]:
    offloaded = workload.trained_as(workload.training.replace(offloads_activations=True))
    return evaluate_plan(workload, plan), evaluate_plan(offloaded, plan)


def test_as_much_leaves_the_gpu_for_as_little_time_as_torchtune_measured(torchtune: Workload) -> None:
    """README.md of pytorch/torchtune, gradients not kept: 23.1 to 21.8 GiB, 7,309 to 7,301 tokens/s."""
    kept, offloaded = both(torchtune, FULL)
    boundary = 2 * 4096 * 3072 * 2
    assert kept.host_bytes_per_node == 0
    assert offloaded.host_bytes_per_node == pytest.approx((28 - 2) * boundary, rel=0.01)
    assert offloaded.host_bytes_per_node == pytest.approx((23.1 - 21.8) * GIB, rel=0.1)
    assert offloaded.step.step_time_s == pytest.approx(kept.step.step_time_s * 7309 / 7301, rel=0.005)


def test_long_sequences_need_as_much_less_of_the_gpu(torchtune: Workload) -> None:
    kept, offloaded = both(longer(torchtune), LONG)
    freed = kept.peak_memory_bytes - offloaded.peak_memory_bytes
    assert freed == pytest.approx(offloaded.host_bytes_per_node, rel=0.01)
    assert freed > 8 * GIB


@pytest.mark.parametrize(
    ("profile", "tokens", "offload"),
    [("1xh100", 500_000, "parameters"), ("8xh100", 3_670_016, "optimizer"), ("32xh100", 15_728_640, "optimizer")],
)
def test_the_longest_sequences_that_somebody_trained_just_fit(profile: str, tokens: int, offload: Offload) -> None:
    """Llama 8B, ZeRO-3, optimizer and checkpoints on the host, tiles (Bekman et al. 2025, arXiv 2506.13996)."""
    cluster = cluster_from_profile(profile)
    training = TrainingSpec(
        global_batch_size=1,
        seq_length=tokens,
        precision="bf16",
        loss="chunked",
        offloads_activations=True,
        stack=StackSettings(mlp_tile=4096),
    )
    workload = Workload.of(read_model("llama-3-8b"), training, cluster)
    plan = ParallelPlan(cp=cluster.num_gpus, zero_stage=3, recompute="full", offload=offload)
    found = evaluate_plan(workload, plan)
    assert found.fits
    assert found.peak_memory_bytes > 0.85 * found.usable_memory_bytes


def test_copies_that_take_longer_than_compute_are_the_time_of_a_pass(torchtune: Workload) -> None:
    plan = FULL.replace(recompute="none")
    kept, offloaded = both(torchtune, plan)
    moved = (offloaded.host_bytes_per_node + 2 * kept.memory[0].activation_bytes / 28) / 1e9
    assert moved > 20
    gpu = torchtune.cluster.gpu
    slow = replace(torchtune, cluster=torchtune.cluster.replace(gpu=gpu.replace(pcie_bandwidth_bytes_per_s=4e9)))
    slow_kept, slow_offloaded = both(slow, plan)
    assert slow_kept.step.step_time_s == kept.step.step_time_s
    at_least = 2 * offloaded.host_bytes_per_node / 4e9
    assert at_least < slow_offloaded.step.step_time_s < 1.3 * at_least
    assert offloaded.step.step_time_s < slow_offloaded.step.step_time_s / 2


def test_paraplans_runtime_refuses_it_beside_compiled_blocks_with_what_would_do(torchtune: Workload) -> None:
    own = Workload.of(torchtune.model, torchtune.training.replace(offloads_activations=True), torchtune.cluster)
    with pytest.raises(UnsupportedPlanError, match="what compiled blocks keep is the compiler's choice"):
        check_supported(FULL, training=own.training)
    check_supported(FULL, training=own.training.replace(compiled=False))
    with pytest.raises(NoPlanFitsError, match="no plan suits") as refused:
        search(own)
    assert "leave out --offload-activations" in (refused.value.hint or "")


def test_it_is_offered_where_memory_is_tight_to_those_who_have_it(torchtune: Workload) -> None:
    one = Constraints(recompute="full")
    made = longer(torchtune)
    best = search(made, num_candidates=1, executor=ANYTHING, fixed=one).best
    tight = best.replace(usable_memory_bytes=int(best.peak_memory_bytes / 0.97))
    found = {each.options: each for each in what_helps(made, tight, executor=ANYTHING, fixed=one)}
    assert found["--offload-activations"].saved_bytes > 8 * GIB
    assert found["--offload-activations"].keeps_training
    assert "--offload-activations" not in {each.options for each in what_helps(made, tight, fixed=one)}
