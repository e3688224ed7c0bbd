"""Products and attention kernels beside what people measured of them."""

from __future__ import annotations

import pytest

from paraplan.cost.blocks.costs import block_costs
from paraplan.cost.blocks.kernels import computed_share
from paraplan.cost.estimate import evaluate_plan
from paraplan.cost.framework_files import FrameworkCatalog
from paraplan.cost.plan_table import PlanTable
from paraplan.cost.workload import Workload
from paraplan.hardware.architecture import load_architecture
from paraplan.hardware.catalogue.profile_files import cluster_from_profile, load_gpu
from paraplan.hardware.profiles import GpuProfile
from paraplan.model.reader import read_model
from paraplan.model.spec import Attention
from paraplan.plan.parallel import ParallelPlan
from paraplan.plan.training import TrainingSpec

TERA = 1e12


def attention_rate(gpu: GpuProfile, width: int, *, backward: bool, generation: int = 2) -> float:
    speed = gpu.shared.attention_speed(generation)
    assert speed.is_of_reached
    assert gpu.reached_matmul_flops_per_s is not None
    return speed.peak_share(width, backward=backward) * gpu.reached_matmul_flops_per_s


@pytest.mark.parametrize(
    ("name", "measured"),
    [
        ("rtx-3090", (76.34, 76.68, 76.58)),
        ("rtx-4090", (170.06, 173.31, 162.39, 167.80, 165.94, 168.38)),
        ("rtx-5090", (236.03, 242.18, 221.65, 240.05)),
        ("rtx-pro-6000-blackwell", (417.98, 409.42, 417.34)),
        ("rtx-a6000", (123.34,)),
        ("l40s", (269.15,)),
    ],
)
def test_cards_reach_what_most_people_measured(name: str, measured: tuple[float, ...]) -> None:
    reached = load_gpu(name).reached_matmul_flops_per_s
    assert reached is not None
    below = sum(value <= reached / TERA * 1.001 for value in measured)
    assert below >= len(measured) / 2
    assert min(measured) <= reached / TERA <= max(measured)


@pytest.mark.parametrize(
    ("name", "width", "backward", "measured"),
    [
        ("rtx-4090", 64, False, 168.91),
        ("rtx-4090", 128, False, 169.28),
        ("rtx-4090", 64, True, 124.81),
        ("rtx-4090", 128, True, 124.57),
    ],
)
def test_flash_attention_on_an_rtx_4090_runs_at_its_measured_rate(
    name: str, width: int, backward: bool, measured: float
) -> None:
    assert attention_rate(load_gpu(name), width, backward=backward) / TERA == pytest.approx(measured, rel=0.02)


def test_flash_attention_on_an_rtx_a5000_runs_at_its_measured_rate() -> None:
    card = load_gpu("rtx-a5000").replace(reached_matmul_flops_per_s=0.797 * 111.1e12)
    card = card.model_copy(update={"architecture_profile": load_architecture("Ampere GA10x")})
    assert attention_rate(card, 64, backward=False) / TERA == pytest.approx(81.7, rel=0.02)
    assert attention_rate(card, 64, backward=True) / TERA == pytest.approx((70.07 + 74.80 + 77.42) / 3, rel=0.03)


@pytest.mark.parametrize(
    ("name", "peak", "tokens", "forward", "backward"),
    [
        # 4 and 8 sequences, 32 and 64 heads: medians of ROCm/aiter's table, causal, fp32 sums backward.
        ("CDNA 3", 1307e12, 2048, 426, 332),
        ("CDNA 3", 1307e12, 8192, 541, 435),
        ("CDNA 4", 2500e12, 2048, 898, 621),
        ("CDNA 4", 2500e12, 8192, 1318, 773),
    ],
)
def test_attention_of_aiter_runs_at_its_measured_rate(
    name: str, peak: float, tokens: int, forward: float, backward: float
) -> None:
    speed = load_architecture(name).attention_speed(3)
    slower = 1 + speed.causal_tokens / tokens
    assert speed.forward * peak / slower / TERA == pytest.approx(forward, rel=0.24 if tokens == 2048 else 0.03)
    assert speed.backward * peak / slower / TERA == pytest.approx(backward, rel=0.13 if tokens == 2048 else 0.03)


def test_tiles_on_compute_units_slow_gradients_of_a_narrow_model() -> None:
    cluster = cluster_from_profile("mi300x-x8")
    assert cluster.gpu.num_multiprocessors == 304
    plan = PlanTable.of_plans([ParallelPlan(dp=8, num_microbatches=1, micro_batch_size=28)])

    def backward_s(gpu: GpuProfile) -> float:
        training = TrainingSpec(global_batch_size=224, seq_length=1024, attention="flash")
        machines = cluster.replace(gpu=gpu)
        workload = Workload.of(read_model("gpt2-xl"), training, machines, framework="plain-pytorch")
        costs = block_costs(workload, plan)
        return float(costs.backward_s[costs.key[0], 0])

    # 1,600 x 1,600 weights are 91 tiles of 128 x 256 for 304 units, or smaller tiles that read more.
    assert backward_s(cluster.gpu) > 1.02 * backward_s(cluster.gpu.replace(num_multiprocessors=None))


FRAMEWORKS = FrameworkCatalog()


def test_maxtext_attends_as_transformer_engine_does() -> None:
    training = TrainingSpec(global_batch_size=8, seq_length=8192, attention="flash")

    def compute_s(framework: str) -> float:
        workload = Workload.of(
            read_model("llama-3-8b"),
            training,
            cluster_from_profile("dgx-b200"),
            framework=FRAMEWORKS.bundled(framework),
        )
        return evaluate_plan(workload, ParallelPlan(dp=8, zero_stage=3, num_microbatches=1)).step.compute_s

    # Half a square of 8,192 keys, forward and 2.5 times as much backward, at 0.53 and 0.47 for 0.16 and 0.14.
    flops = 0.5 * (1 + 880 / 8192) * 4 * 8192 * 8192 * 4096 * 32
    cheaper_s = flops / 2250e12 * (1 / 0.53 + 2.5 / 0.47)
    assert compute_s("jax") < compute_s("fsdp") - cheaper_s


@pytest.mark.parametrize("window", [None, 4096, 1024, 128])
def test_a_causal_mask_halves_the_pairs_of_all_keys_and_not_those_of_a_window(window: int | None) -> None:
    attention, length = Attention(num_heads=1, num_kv_heads=1, qk_head_dim=64, v_head_dim=64, window=window), 4096
    seen = sum(min(query + 1, window or length) for query in range(length))
    assert computed_share(attention, length) * length * min(length, window or length) == pytest.approx(seen, rel=0.01)
    # A block at each edge of the mask is computed whole: one edge without a window, nearly two with a short one.
    blocks = computed_share(attention, length, edge_tokens=350.0) * min(length, window or length) - seen / length
    assert blocks == pytest.approx(175.0 * (2.0 - (window or length) / length), abs=1.0)
