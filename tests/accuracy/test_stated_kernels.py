"""Kernels, losses and recompute that rows of measured runs state."""

from __future__ import annotations

import numpy as np
import pytest

from paraplan.accuracy.measured_runs import MeasuredRun, read_runs
from paraplan.accuracy.prediction import estimate_run
from paraplan.accuracy.run_workload import BundledData, plan_of_run, workload_of_run
from paraplan.cost.constants import CostConstants
from paraplan.cost.estimate import PlanEstimate
from paraplan.cost.slowest import largest_of
from paraplan.model.named import known_configs
from paraplan.resources import profiles_folder
from tests.accuracy.small_run import run

SLOWEST_OF_8 = float(1 + CostConstants().gpu_deviation * largest_of(np.array([8]))[0])
DATA = BundledData(configs=known_configs())
EXPERTS = MeasuredRun(
    id="experts",
    gpu="H100",
    num_gpus=16,
    model_name="Qwen3_30B_a3B",
    seq_len=4096,
    precision="bf16",
    framework="Megatron-Core",
    ep=8,
    zero_stage=1,
    micro_batch=2,
    global_batch=64,
)


def estimate(row: MeasuredRun) -> PlanEstimate:
    workload = workload_of_run(row, DATA)
    return estimate_run(row, workload, plan_of_run(row, workload.framework))


def test_a_row_states_the_generation_of_its_attention_kernels() -> None:
    row = run(framework="FSDP2", zero_stage=3, seq_len=8192, hidden=4096, heads=32)
    workloads = [workload_of_run(row.replace(flash_generation=each), DATA) for each in (None, 2, 3)]
    assert [each.framework.kernels.flash_generation for each in workloads] == [2, 2, 3]
    assert workload_of_run(row.replace(framework="paraplan"), DATA).framework.kernels.flash_generation is None
    assert estimate(row.replace(flash_generation=3)).step.compute_s < estimate(row).step.compute_s


def test_fused_kernels_that_a_row_states_move_less() -> None:
    row = run(framework="HF Trainer", zero_stage=0, hidden=4096, heads=32, seq_len=4096)
    fused = row.replace(kernels="fused as in FOAK: norms, rotations, SwiGLU")
    assert estimate(fused).step.compute_s < 0.9 * estimate(row).step.compute_s


def test_a_loss_in_chunks_that_a_row_states_holds_fewer_logits() -> None:
    row = run(framework="torchtitan", zero_stage=3, micro_batch=8, torch_compile=True, vocab=151936)
    chunked = row.replace(kernels="chunked cross-entropy")
    peaks = [max(stage.total_bytes for stage in estimate(each).memory) for each in (row, chunked)]
    assert peaks[1] < 0.8 * peaks[0]


def test_transformer_engines_loss_moves_10_bytes_a_logit() -> None:
    row = run(gpu="A100-80GB", framework="Megatron-Core", zero_stage=1, micro_batch=8, num_microbatches=1, vocab=131072)
    stated = row.replace(kernels="cross-entropy of Transformer Engine")
    saved_s = SLOWEST_OF_8 * 8 * 1024 * 131072 * (52 - 10) / (2.039e12 * 0.8)
    assert estimate(row).step.compute_s - estimate(stated).step.compute_s == pytest.approx(saved_s)


def test_experts_that_run_again_leave_attention_alone() -> None:
    states = {
        "": {"recompute": "none"},
        "norms and activations recomputed": {"recompute": "none"},
        "norms and expert layers recomputed, attention is not": {"recompute": "full"},
        "all": {"recompute": "full"},
    }
    large = EXPERTS.replace(micro_batch=4, num_microbatches=1)
    found = [estimate(large.replace(nonstandard_features=features, **values)) for features, values in states.items()]
    seconds = [each.step.step_time_s for each in found]
    assert seconds == sorted(set(seconds))
    peaks = [max(stage.total_bytes for stage in each.memory) for each in found]
    assert peaks == sorted(set(peaks), reverse=True)


def test_experts_that_run_again_exchange_their_tokens_again() -> None:
    again = EXPERTS.replace(nonstandard_features="norms and experts recomputed", recompute="full")
    once, twice = (estimate(each).step.expert_parallel_s for each in (EXPERTS.replace(recompute="none"), again))
    whole = estimate(EXPERTS.replace(recompute="full")).step.expert_parallel_s
    assert twice == pytest.approx(1.5 * once)
    assert twice == pytest.approx(whole)


def test_an_optimizer_of_pure_bf16_moves_half() -> None:
    row = run(framework="HF Trainer", optimizer="adamw_torch", method="full")
    steps = [estimate(row.replace(base_weight_dtype=each)).step.optimizer_s for each in ("fp32", "bf16")]
    assert steps[1] == pytest.approx(steps[0] / 2)


def test_megatron_lm_reduces_gradients_of_bf16_in_fp32() -> None:
    row = run(gpu="A100", framework="Megatron-LM", zero_stage=1, sequence_parallel=True, tp=2)
    kept = [
        workload_of_run(row.replace(precision=precision, grad_dtype=stated), DATA).framework.storage.gradient_bytes
        for precision, stated in (("fp16", ""), ("bf16", ""), ("bf16", "bf16"))
    ]
    assert kept == [2, 4, 2]
    deepspeed = workload_of_run(row.replace(framework="Megatron-DeepSpeed"), DATA)
    assert deepspeed.framework.storage.gradient_bytes == 2


def test_megatron_lm_before_megatron_core_runs_flash_attention_1() -> None:
    row = run(gpu="A100", framework="Megatron-LM", sequence_parallel=True, tp=2, flash_attention=True)
    assert workload_of_run(row, DATA).framework.kernels.flash_generation == 1
    assert workload_of_run(row.replace(framework="Megatron-Core"), DATA).framework.kernels.flash_generation == 3


@pytest.mark.parametrize("zero_stage", [0, 1])
def test_a_row_states_that_nothing_is_sent_beside_compute(zero_stage: int) -> None:
    row = run(framework="Megatron-Core", zero_stage=zero_stage, num_gpus=8)
    unstated, beside, after = (estimate(row.replace(overlaps_gradients=stated)).step for stated in (None, True, False))
    assert unstated.step_time_s == beside.step_time_s
    assert after.data_parallel_s == pytest.approx(after.data_parallel_wire_s)
    assert after.data_parallel_s > 1.5 * beside.data_parallel_s


def test_a_row_states_that_gradients_are_added_after_their_products() -> None:
    row = run(
        framework="Megatron-Core", hidden=8192, heads=64, layers=4, seq_len=4096, num_microbatches=16, global_batch=128
    )
    unstated, fused, apart = (estimate(row.replace(fuses_accumulation=stated)).step for stated in (None, True, False))
    assert unstated.step_time_s == fused.step_time_s
    assert apart.step_time_s > 1.01 * fused.step_time_s


@pytest.mark.parametrize("framework", ["Megatron-Core", "torchtitan"])
def test_collectives_beside_products_leave_one_chunk_alone(framework: str) -> None:
    row = run(framework=framework, hidden=8192, heads=64, layers=8, seq_len=4096, tp=8, sequence_parallel=True)
    unstated, apart, beside = (
        estimate(row.replace(overlaps_products=stated)).step.tensor_parallel_s for stated in (None, False, True)
    )
    assert unstated == apart
    assert apart / 8 < beside < 0.7 * apart
    whole = row.replace(sequence_parallel=False)
    assert estimate(whole.replace(overlaps_products=True)).step == estimate(whole).step


def test_a_switch_reduces_for_all_reduces_but_not_for_sequence_parallelism() -> None:
    shapes: dict[str, object] = {"hidden": 8192, "heads": 64, "layers": 8, "seq_len": 4096, "gpu": "H100-80GB"}
    row = run(framework="torchtitan", **shapes, micro_batch=4, global_batch=32)

    def sums_s(tp: int, sequence_parallel: bool) -> float:
        made = row.replace(tp=tp, sequence_parallel=sequence_parallel)
        return estimate(made).step.tensor_parallel_s

    ratios = {tp: sums_s(tp, True) / sums_s(tp, False) for tp in (4, 8)}
    assert ratios[4] == pytest.approx(1, abs=0.05)  # a switch reduces for groups of more than four
    assert ratios[8] == pytest.approx(1.3, abs=0.05)


def test_a_compiled_loss_moves_less() -> None:
    row = run(
        framework="nanoGPT", zero_stage=0, hidden=768, layers=12, heads=12, vocab=50304, seq_len=1024, micro_batch=8
    )
    plain, compiled = (estimate(row.replace(torch_compile=True, compiled_loss=each)) for each in (False, True))
    saved_bytes = 28 * 50304 * row.seq_len * row.global_batch / row.num_gpus
    rate = workload_of_run(row, DATA).memory_bandwidth_bytes_per_s
    assert plain.step.compute_s - compiled.step.compute_s == pytest.approx(SLOWEST_OF_8 * saved_bytes / rate, rel=0.01)


def test_oneflow_has_a_profile_by_either_name() -> None:
    for name in ("OneFlow", "LiBai (OneFlow)", "LiBai 0.2"):
        profile = workload_of_run(run(framework=name), DATA).framework
        assert (profile.name, profile.kernels.fused, profile.kernels.host_s_per_block) == ("oneflow", True, 0.0)


def test_ligers_kernels_take_time_as_they_were_measured() -> None:
    # Qwen3 0.6B on the Trainer, one GPU each of three kinds: by modules 1.83 to 1.91 times as long as measured.
    path = profiles_folder() / "runs" / "fifth_blind_sources.csv"
    found = [one for one in read_runs(path.read_text(), source=path.name) if isinstance(one, MeasuredRun)]
    rows = [DATA.completed(one) for one in found if one.kernels == "Liger"]
    assert len(rows) == 3
    for row in rows:
        workload = workload_of_run(row, DATA)
        assert workload.training.stack.fused_kernels == "liger"
        assert estimate(row).step.step_time_s == pytest.approx(row.measured_step_time_s, rel=0.1), row.id
