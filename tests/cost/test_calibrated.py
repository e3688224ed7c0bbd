from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from paraplan.cost.constants import CostConstants
from paraplan.cost.estimate import StepEstimate, estimate_plan
from paraplan.cost.workload import Workload, calibrated_constants
from paraplan.hardware.catalogue.profile_files import cluster_from_profile, load_machine
from paraplan.hardware.catalogue.real_machines import save_machine
from paraplan.hardware.link_speed import load_link_speeds
from paraplan.hardware.profiles import KernelCalibration, KernelFit, MeasuredCollective
from paraplan.model.reader import read_model
from paraplan.plan.parallel import ParallelPlan
from paraplan.plan.training import TrainingSpec

FIT = KernelFit(
    precision="fp32",
    matmul_flops_per_s=40e9,
    half_n=50.0,
    matmul_launch_s=1e-5,
    attention_forward_flops_per_s=20e9,
    attention_backward_flops_per_s=25e9,
    num_timings=30,
    error=0.05,
)
CALIBRATION = KernelCalibration(
    kernels=(FIT,),
    moved_bytes_per_s=3e9,
    optimizer_s_per_parameter=4e-9,
    overlap_slowdown=1.9,
    source="test",
)


def step(calibration: KernelCalibration | None, *, precision: str = "fp32", dp: int = 1) -> StepEstimate:
    cluster = cluster_from_profile("cpu", gpus_per_node=2)
    cluster = cluster.replace(gpu=cluster.gpu.replace(calibration=calibration))
    training = TrainingSpec.model_validate({"global_batch_size": 8, "seq_length": 512, "precision": precision})
    workload = Workload.of(read_model("gpt2"), training, cluster, load_link_speeds())
    return estimate_plan(workload, ParallelPlan(dp=dp, micro_batch_size=8 // dp)).step


def test_what_was_measured_comes_before_published_figures() -> None:
    constants = calibrated_constants(CostConstants(), load_machine("cpu").gpu.replace(calibration=CALIBRATION))
    bandwidth = load_machine("cpu").gpu.memory_bandwidth_bytes_per_s
    assert constants.memory_bandwidth_efficiency * bandwidth == pytest.approx(3e9)
    assert constants.unfused_optimizer_bytes / 3e9 == pytest.approx(4e-9)
    assert constants.overlap_slowdown == 1.9
    assert calibrated_constants(CostConstants(), load_machine("cpu").gpu) == CostConstants()


def test_an_optimizer_step_takes_what_it_was_measured_to_take() -> None:
    parameters = read_model("gpt2").parameters.total
    assert step(CALIBRATION).optimizer_s == pytest.approx(parameters * 4e-9)


def test_matmuls_run_at_the_measured_rate() -> None:
    def compute_s(rate: float) -> float:
        fit = FIT.replace(matmul_flops_per_s=rate)
        return step(CALIBRATION.replace(kernels=(fit,))).compute_s

    slow, fast = compute_s(40e9), compute_s(80e9)
    model = read_model("gpt2")
    # Without attention, 3 passes of all products; half_n adds little where layers are wide.
    products_s = 3 * model.flops_per_token(512, with_attention=False) * 8 * 512 / 40e9
    assert slow - fast == pytest.approx(products_s / 2, rel=0.08)


def test_attention_runs_at_the_measured_rate() -> None:
    slow = FIT.replace(attention_forward_flops_per_s=10e9, attention_backward_flops_per_s=12.5e9)
    model = read_model("gpt2")
    pairs = model.flops_per_token(512) - model.flops_per_token(512, with_attention=False)
    more_s = step(CALIBRATION.replace(kernels=(slow,))).compute_s - step(CALIBRATION).compute_s
    forward_s = pairs * 8 * 512 / 2 / 20e9
    assert more_s == pytest.approx(forward_s + forward_s * 2.5 * 20 / 25)


def test_a_precision_that_was_not_measured_is_priced_as_before() -> None:
    only_rates = KernelCalibration(kernels=(FIT,), source="test")
    assert step(only_rates, precision="bf16") == step(None, precision="bf16")
    assert step(only_rates) != step(None)


def test_a_calibrated_machine_is_saved_and_read_with_all_that_was_measured(tmp_path: Path) -> None:
    measured = MeasuredCollective(
        collective="all_reduce",
        num_ranks=2,
        link="loopback",
        latency_s=2e-4,
        bus_bandwidth_bytes_per_s=0.8e9,
        payload_bytes_per_s=4e9,
        source="test",
    )
    machine = load_machine("cpu")
    machine = machine.replace(gpu=machine.gpu.replace(calibration=CALIBRATION), measured=(measured,))
    path = tmp_path / "mine.json"
    save_machine(machine, path)
    for num_ranks in (1, 2, 4):
        cluster = cluster_from_profile(str(path), gpus_per_node=num_ranks)
        assert cluster.gpu.calibration == CALIBRATION
        assert cluster.measured == (measured,)
        assert len(cluster.node.links) == num_ranks * (num_ranks - 1) // 2


def test_measured_collectives_decide_what_ddp_waits_for() -> None:
    cluster = cluster_from_profile("cpu", gpus_per_node=2)

    def wire_s(bandwidth: float) -> float:
        measured = MeasuredCollective(
            collective="all_reduce",
            num_ranks=2,
            link="loopback",
            latency_s=0.0,
            bus_bandwidth_bytes_per_s=bandwidth,
            source="test",
        )
        training = TrainingSpec(global_batch_size=8, seq_length=512, precision="fp32")
        workload = Workload.of(read_model("gpt2"), training, cluster, load_link_speeds())
        workload = replace(workload, cluster=cluster.replace(measured=(measured,)))
        return estimate_plan(workload, ParallelPlan(dp=2, micro_batch_size=4)).step.data_parallel_wire_s

    assert wire_s(0.5e9) == pytest.approx(2 * wire_s(1e9))


@pytest.mark.parametrize("profile", ["dgx-a100", "dgx-b200"])
def test_writing_the_results_of_matmuls_is_exposed_at_the_rate_of_the_memory(profile: str) -> None:
    cluster = cluster_from_profile(profile, gpus_per_node=1)
    training = TrainingSpec(global_batch_size=8, seq_length=1024)
    made = Workload.of(read_model("gpt2"), training, cluster, load_link_speeds())
    hiding = cluster.gpu.shared.replace(matmul_written_share=0.0)
    gpu = cluster.gpu.replace(architecture_profile=hiding)
    exposed, none = (
        estimate_plan(replace(made, cluster=of_it), ParallelPlan(micro_batch_size=8)).step.compute_s
        for of_it in (cluster, cluster.replace(gpu=gpu))
    )
    blocks = [run.block for run in made.model.runs for _ in range(run.count)]
    sizes = [(one.n, one.k) for block in (*blocks, made.model.head) for one in block.matmuls]
    # The result, the gradient of the input and that of the weight, 2 bytes each; waves and the share of the peak that
    # matmuls reach make writes longer too.
    tokens = 8 * 1024
    written_s = sum(2 * (tokens * n + tokens * k + n * k) for n, k in sizes) / cluster.gpu.memory_bandwidth_bytes_per_s
    share = cluster.gpu.shared.matmul_written_share
    assert share * written_s < exposed - none < 2.5 * share * written_s
