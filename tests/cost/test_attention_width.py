"""Flash attention by the width of heads, against hand counts and published rates of kernels."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paraplan.cost.estimate import evaluate_plan
from paraplan.cost.workload import Workload
from paraplan.hardware.architecture import list_architectures, load_architecture
from paraplan.hardware.catalogue.profile_files import cluster_from_profile
from paraplan.model.reader import read_model
from paraplan.model.spec import Attention, ModelSpec
from paraplan.plan.parallel import ParallelPlan
from paraplan.plan.training import AttentionKind, TrainingSpec

MODEL = read_model("llama-3-8b")
TOKENS, LAYERS = 8 * 4096, 32


def with_heads(heads: int, width: int) -> ModelSpec:
    attention = Attention(num_heads=heads, num_kv_heads=8, qk_head_dim=width, v_head_dim=width)
    runs = tuple(run.replace(block=run.block.replace(attention=attention)) for run in MODEL.runs)
    return MODEL.replace(runs=runs)


def compute_s(model: ModelSpec, framework: str, attention: AttentionKind = "flash") -> float:
    training = TrainingSpec(global_batch_size=64, seq_length=4096, attention=attention)
    cluster = cluster_from_profile("dgx-h100")
    steady = cluster.gpu.shared.replace(matmul_cool_gain=0.0)  # products take as long beside longer attention
    cluster = cluster.replace(gpu=cluster.gpu.replace(architecture_profile=steady))
    workload = Workload.of(model, training, cluster, framework=framework)
    workload = replace(workload, constants=workload.constants.replace(gpu_deviation=0.0))
    return evaluate_plan(workload, ParallelPlan(dp=8, zero_stage=1, num_microbatches=8)).step.compute_s


@pytest.mark.parametrize(
    ("width", "slowdown"), [(256, 1.0), (128, 1.0), (96, 1.136), (80, 1.245), (64, 1.408), (32, 1.408)]
)
def test_the_time_of_a_flop_is_linear_in_one_over_the_width_of_a_head(width: int, slowdown: float) -> None:
    # 1 / 0.71 - 1 = 0.408 at 64: a third of it at 96 and 0.6 of it at 80.
    speed = load_architecture("Hopper").attention_speed(3)
    assert speed.forward / speed.peak_share(width, backward=False) == pytest.approx(slowdown, abs=1e-3)
    assert speed.peak_share(128, backward=True) == speed.backward
    assert speed.peak_share(64, backward=True) == pytest.approx(0.76 * 0.59)


def test_heads_of_64_cost_a_step_what_their_rates_say() -> None:
    # The same FLOPs: 4 x 4,096 keys x 4,096 features a token, half of them masked, on 989.4 TFLOP/s.
    half_s = 0.5 * (1 + 350 / 4096) * 4 * 4096 * 4096 * TOKENS * LAYERS / 989.4e12
    more_s = half_s * ((1 / 0.71 - 1) / 0.64 + 2.5 * (1 / 0.76 - 1) / 0.59)
    added_s = compute_s(with_heads(64, 64), "megatron-core") - compute_s(with_heads(32, 128), "megatron-core")
    assert added_s == pytest.approx(more_s, rel=1e-3)


def test_eager_attention_does_not_depend_on_the_width_of_heads() -> None:
    wide, wider = (
        compute_s(with_heads(heads, width), "torchtitan", "eager") for heads, width in ((32, 128), (16, 256))
    )
    narrow = compute_s(with_heads(64, 64), "torchtitan", "eager")
    # Scores move by head: each halving of the width adds as much again as the one before, times two.
    assert narrow - wide == pytest.approx(2 * (wide - wider), rel=1e-6)


@pytest.mark.parametrize(
    ("name", "generation", "narrow", "wide"),
    [
        ("Ampere", 2, (119, 140, 156, 165, 171), (133, 155, 173, 182, 189)),  # both passes, A100
        ("Hopper", 2, (192, 232, 257, 273, 284), (221, 265, 294, 308, 328)),  # both passes, H100
        ("Hopper", 3, (265, 371, 420, 460, 473), (423, 521, 579, 602, 616)),  # FlashAttention 3
        ("Hopper", 3, (288, 334, 363, 379, 388), (410, 484, 518, 529, 539)),  # cuDNN
        ("Blackwell", 2, (206, 280, 327, 352, 367), (249, 325, 368, 391, 404)),
        ("CDNA 3", 2, (133, 211, 228, 255, 270), (164, 214, 257, 290, 307)),
    ],
)
def test_published_causal_kernels_slow_down_as_the_profile_says(
    name: str, generation: int, narrow: tuple[int, ...], wide: tuple[int, ...]
) -> None:
    speed = load_architecture(name).attention_speed(generation)
    ratio = speed.peak_share(64, backward=False) / speed.forward
    measured = [slow / fast for slow, fast in zip(narrow, wide, strict=True)]
    assert ratio == pytest.approx(sum(measured) / len(measured), rel=0.04)
    assert measured == pytest.approx([ratio] * len(measured), rel=0.12)


def test_the_first_generation_has_one_rate_for_all_widths() -> None:
    for architecture in list_architectures():
        speed = architecture.attention_speed(1)
        assert speed.peak_share(64, backward=False) == speed.forward, architecture.name
