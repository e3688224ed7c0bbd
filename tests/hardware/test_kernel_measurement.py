from __future__ import annotations

import pytest

from paraplan.errors import ProfileError
from paraplan.hardware.catalogue.profile_files import load_machine
from paraplan.hardware.cpus import this_cpu
from paraplan.hardware.measurement.kernels import (
    KernelCase,
    KernelEvent,
    best_matmul_flops_per_s,
    copy_bytes_per_s,
    fit_kernels,
    kernel_cases,
)
from paraplan.hardware.measurement.machine import calibrated_machine, precisions_of
from paraplan.hardware.topology import Gpu, NodeTopology

RATE, HALF_N, HALF_K, LAUNCH_S = 50e9, 40.0, 100.0, 20e-6
CALL_S = 1e-4  # of norm, GELU and sum at any size: as long as the smallest tensors take to move
MOVED, COPIED, PER_PARAMETER_S = 4e9, 9e9, 3e-9


def matmul_s(case: KernelCase, rate: float = RATE) -> float:
    _, n, k = case.sizes
    return case.flops * (1 + HALF_N / n + HALF_K / k) / rate + LAUNCH_S


def event(number: int, case: KernelCase) -> KernelEvent:
    """What a machine with the rates above would report."""
    if case.kind == "matmul":
        return KernelEvent(case=number, times_s=(matmul_s(case, RATE if case.precision == "fp32" else 4 * RATE),))
    if case.kind.startswith("attention"):
        return KernelEvent(case=number, times_s=(case.flops / (RATE / 2),))
    if case.kind == "optimizer":
        return KernelEvent(case=number, times_s=(case.sizes[0] * PER_PARAMETER_S,))
    if case.kind == "overlap":
        return KernelEvent(case=number, times_s=(0.010, 0.004, 0.012))
    rate, num_bytes = (MOVED, 52 * case.sizes[0]) if case.kind == "moved" else (COPIED, 8 * case.sizes[0])
    call_s = CALL_S if case.kind == "moved" else 0.0
    return KernelEvent(case=number, times_s=(call_s + num_bytes / rate,), num_bytes=num_bytes)


def measured(num_ranks: int = 2) -> tuple[tuple[KernelCase, ...], list[KernelEvent]]:
    cases = kernel_cases(("fp32", "bf16"), on_gpus=False, num_ranks=num_ranks)
    return cases, [event(number, case) for number, case in enumerate(cases)]


def test_a_machine_of_known_rates_is_found_again() -> None:
    calibration = fit_kernels(*measured(), source="test")
    fp32, bf16 = calibration.kernels
    assert (fp32.precision, bf16.precision) == ("fp32", "bf16")
    assert fp32.matmul_flops_per_s == pytest.approx(RATE, rel=1e-3)
    assert bf16.matmul_flops_per_s == pytest.approx(4 * RATE, rel=1e-3)
    assert (fp32.half_m, fp32.half_n, fp32.half_k) == pytest.approx((0, HALF_N, HALF_K), rel=1e-2, abs=0.1)
    assert fp32.matmul_launch_s == pytest.approx(LAUNCH_S, rel=1e-2)
    assert fp32.error < 1e-3
    assert fp32.attention_forward_flops_per_s == pytest.approx(RATE / 2)
    assert fp32.attention_backward_flops_per_s == pytest.approx(RATE / 2)
    assert calibration.moved_bytes_per_s == pytest.approx(MOVED)
    assert calibration.optimizer_s_per_parameter == pytest.approx(PER_PARAMETER_S)
    assert calibration.overlap_slowdown == pytest.approx(1.5)  # 2 ms more than the longer of 10 and 4 ms
    assert copy_bytes_per_s(*measured()) == pytest.approx(COPIED)


def test_attention_counts_half_the_scores_and_makes_them_again_backward() -> None:
    sizes = (4, 8, 128, 64)
    forward = KernelCase(kind="attention_forward", precision="fp32", sizes=sizes)
    backward = KernelCase(kind="attention_backward", precision="fp32", sizes=sizes)
    assert forward.flops == 2 * 2 * 4 * 8 * 128 * 128 * 64 / 2
    assert backward.flops == 2.5 * forward.flops


@pytest.mark.parametrize(("both_s", "slowdown"), [(0.009, 1.0), (0.010, 1.0), (0.014, 2.0), (0.050, 2.0)])
def test_overlap_costs_nothing_at_best_and_hides_nothing_at_worst(both_s: float, slowdown: float) -> None:
    cases, events = measured()
    overlap = next(number for number, case in enumerate(cases) if case.kind == "overlap")
    events[overlap] = KernelEvent(case=overlap, times_s=(0.010, 0.004, both_s))
    assert fit_kernels(cases, events, source="test").overlap_slowdown == pytest.approx(slowdown)


def test_what_was_left_out_is_unknown_and_no_matmul_is_an_error() -> None:
    cases, events = measured()
    required = [one for one in events if cases[one.case].is_required]
    calibration = fit_kernels(cases, required, source="test")
    assert [fit.num_timings for fit in calibration.kernels] == [3, 3]
    assert (calibration.moved_bytes_per_s, calibration.optimizer_s_per_parameter) == (None, None)
    assert calibration.kernels[0].attention_forward_flops_per_s is None
    skipped = [KernelEvent(case=number, skipped="no time left") for number in range(len(cases))]
    with pytest.raises(ProfileError, match="no matmul was timed"):
        fit_kernels(cases, skipped, source="test")


def test_one_rank_overlaps_with_nobody() -> None:
    kinds = [case.kind for case in kernel_cases(("fp32",), on_gpus=False, num_ranks=1)]
    assert "overlap" not in kinds
    assert kinds.count("matmul") == 30


def test_a_known_gpu_keeps_its_data_sheet_and_an_unknown_one_gets_what_was_measured() -> None:
    machine = load_machine("dgx-h100")
    cases, events = measured()
    found = calibrated_machine(machine, machine.node, cases, events, links=None, name="mine", source="test")
    assert found.cpu == this_cpu()
    assert found.gpu.peak_flops_per_s == machine.gpu.peak_flops_per_s
    assert found.gpu.calibration is not None
    assert found.name == "mine"
    assert precisions_of(machine.gpu)[0] == "bf16"
    node = NodeTopology(source="test", gpus=(Gpu(index=0, name="Future GPU", memory_total_bytes=2**36),))
    unknown = calibrated_machine(None, node, cases, events, links=None, name="mine", source="test")
    assert unknown.gpu.title == "Future GPU"
    assert unknown.gpu.memory_bytes == 2**36
    assert unknown.gpu.memory_bandwidth_bytes_per_s == pytest.approx(COPIED)
    assert unknown.gpu.peak_flops_per_s["fp32"] == best_matmul_flops_per_s(cases, events, "fp32")
