from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import ClassVar

import pytest
from case_selection import with_all
from small_run import run

from paraplan.accuracy.factors import CalibrationRun, FactorName, RunPrices, scaled
from paraplan.accuracy.run_workload import BundledData
from paraplan.accuracy.why import PeakParts, memory_factors, source_factors, step_time_factors
from paraplan.cost.estimate import evaluate_plan
from paraplan.cost.workload import Workload
from paraplan.hardware.catalogue.profile_files import load_network
from paraplan.plan.parallel import ParallelPlan
from paraplan.progress import watched_by

MakeWorkload = Callable[..., Workload]
PLANS = (
    ParallelPlan(dp=16, num_microbatches=4),
    ParallelPlan(dp=4, tp=4, num_microbatches=16),
    ParallelPlan(dp=8, pp=2, pipeline_schedule="1f1b", num_microbatches=8),
    ParallelPlan(dp=16, num_microbatches=4, recompute="full"),
)


@pytest.mark.parametrize(
    "name",  # some that all plans have, and some that one of them has
    [*with_all(["matmul", "recompute", "network"]), "bubble"],
)
def test_the_factor_that_a_source_differs_in_is_named(workload: MakeWorkload, name: FactorName) -> None:
    made = workload("llama-3-8b", profile="dgx-a100", num_nodes=2, seq_length=4096)
    plain = [CalibrationRun(made, plan, 1.0) for plan in PLANS]
    times = RunPrices(plain).times({name: 0.5})
    runs = [CalibrationRun(made, plan, float(time)) for plan, time in zip(PLANS, times, strict=True)]
    found = step_time_factors("made up", runs)
    assert found.best is not None
    assert (found.best.factor, found.best.scale) == (name, 0.5)
    assert found.best.error < 1e-6 < found.error


def test_nothing_is_named_for_a_source_that_is_predicted(workload: MakeWorkload) -> None:
    made = workload("gpt2", profile="dgx-a100")
    plan = ParallelPlan(dp=8, num_microbatches=8)
    found = step_time_factors("own", [CalibrationRun(made, plan, evaluate_plan(made, plan).step.step_time_s)])
    assert found.error == pytest.approx(0, abs=1e-9)
    assert found.best is None


def test_a_network_scales_with_what_was_measured_on_it(workload: MakeWorkload) -> None:
    network = load_network("aws-efa-3200-playbook")
    made = workload("gpt2", profile="aws-p5-48xlarge", num_nodes=2)
    made = replace(made, cluster=made.cluster.replace(network=network))
    slower = scaled(made, {"network": 0.5, "latency": 2.0}).cluster.network
    assert slower is not None
    assert slower.latency_s == 2 * network.latency_s
    assert len(slower.measured) == 6
    for was, now in zip(network.measured, slower.measured, strict=True):
        assert now.bus_bandwidth_bytes_per_s["all_reduce"] == was.bus_bandwidth_bytes_per_s["all_reduce"] / 2


def test_the_part_of_a_peak_that_is_too_small_is_named() -> None:
    parts = {"parameter_bytes": 10.0, "gradient_bytes": 10.0, "optimizer_state_bytes": 20.0, "workspace_bytes": 1.0}
    peaks = [
        PeakParts(parts | {"activation_bytes": size, "beside_bytes": 2.0}, 43.0 + size, 43.0 + 2 * size)
        for size in (5.0, 10.0, 40.0)
    ]
    found = memory_factors("made up", peaks)
    assert found.best is not None
    assert (found.best.factor, found.best.scale) == ("activation_bytes", 2.0)


def test_sources_stand_apart_and_long_ones_are_looked_at_in_part() -> None:
    runs = [run(id=str(row), source="long", measured_step_time_s=1.0) for row in range(3)]
    runs += [run(id="short", source="short", measured_step_time_s=1.0, measured_peak_mem_gib=10.0)]
    found = source_factors(runs, BundledData(), most_runs=2)
    assert [(one.source, one.quantity, one.runs) for one in found] == [
        ("long", "step time", 2),
        ("short", "step time", 1),
        ("short", "peak memory", 1),
    ]
    assert found[0].effects == tuple(sorted(found[0].effects, key=lambda effect: effect.error))


@pytest.mark.with_all  # sources stand apart, above
def test_sources_that_were_looked_at_before_a_stop_are_returned() -> None:
    class Stopping:
        said: ClassVar[list[str | None]] = []

        def show(self, text: str | None) -> None:
            self.said.append(text)

        def is_stopped(self) -> bool:
            return len(self.said) == 2

        @contextmanager
        def stoppable(self) -> Iterator[None]:
            yield

    runs = [run(id=name, source=name, measured_step_time_s=1.0) for name in "abc"]
    with watched_by(Stopping()):
        found = source_factors(runs, BundledData())
    assert [one.source for one in found] == ["a", "b"]
    assert [text.split(", ")[1:] for text in Stopping.said if text] == [
        ["a", "0 of 3 sources"],
        ["b", "1 of 3 sources"],
    ]
