"""What is measured of a run, as numbers and as one line."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from paraplan.errors import UsageError
from paraplan.plan.files import PlannedEstimate
from paraplan.plan.kept_runs import PlainPrediction
from paraplan.runtime.step.clocks import waited_for_cpu_s
from paraplan.runtime.step.reports import RunWatch, SpeedBaseline, StepReport, bar_text, count_tokens

CPU = torch.device("cpu")


def test_mfu_is_the_models_flops_over_the_peak_of_all_devices() -> None:
    estimate = PlannedEstimate(model_flops_per_step=4e12)
    assert SpeedBaseline(num_ranks=2, peak_flops_per_s=1e12, estimate=estimate).mfu(step_time_s=4.0, tokens=1) == 0.5
    by_parameters = SpeedBaseline(num_ranks=1, peak_flops_per_s=6e12, num_parameters=10**9)
    assert by_parameters.mfu(step_time_s=1.0, tokens=100) == pytest.approx(0.1)
    assert SpeedBaseline(num_ranks=1, num_parameters=10**9).mfu(step_time_s=1.0, tokens=100) is None


def test_tokens_are_ids_and_other_inputs_count_as_sequences() -> None:
    ids = torch.zeros(4, 7, dtype=torch.long)
    assert count_tokens(ids) == 28
    assert count_tokens({"mask": torch.ones(4, 7, dtype=torch.bool), "input_ids": ids}) == 28
    assert count_tokens(torch.rand(4, 3, 8, 8)) == 4


def test_the_bar_shows_the_share_of_the_steps() -> None:
    report = StepReport(
        step=5,
        loss=2.5,
        grad_norm=None,
        learning_rate=1e-3,
        step_time_s=0.5,
        tokens_per_s=2000.0,
        mfu=0.413,
        peak_memory_bytes=2**30,
    )
    assert bar_text(report, None) == "step 5  loss 2.500  2.00 k tokens/s  MFU 41.3%  1.00 GiB"
    assert bar_text(report, 10).startswith("[############............] step 5/10  loss")


def test_the_last_step_is_drawn_and_the_line_is_ended(capsys: pytest.CaptureFixture[str]) -> None:
    terminal = io.StringIO()
    estimate = PlannedEstimate(step_time_s=1e-9, peak_memory_bytes=2**20)
    watch = RunWatch(
        device=CPU, baseline=SpeedBaseline(num_ranks=1, estimate=estimate), terminal=terminal, total_steps=3
    )
    for step in (1, 2, 3):
        watch.begin()
        watch.end(step=step, loss=torch.tensor(1.0), grad_norm=None, learning_rate=0.1, tokens=8)
        if step == 1:
            sys.stdout.write("the script says so\n")
            assert terminal.getvalue().endswith(" resident\r\x1b[K")  # and has a line of its own
    watch.finish()
    assert "step 3/3" in terminal.getvalue()
    said = capsys.readouterr().err
    assert "(median of 2" in said
    assert ", predicted 1 ns (-100%" in said
    assert said.endswith("; peak memory of tensors, predicted 1.00 MiB, is not measured on a CPU\n")
    assert terminal.getvalue().rstrip().endswith(" resident")
    watch.finish()
    assert capsys.readouterr().err == ""


def test_a_step_on_another_device_than_was_planned_for_is_not_compared() -> None:
    plain = PlainPrediction(
        kind="k", gpu="h100-sxm-80gb", sizes=(1.0,), step_time_s=0.1, peak_memory_bytes=1e9, version="1"
    )
    estimate = PlannedEstimate(step_time_s=0.1, peak_memory_bytes=2**20, plain=plain)
    watch = RunWatch(device=CPU, baseline=SpeedBaseline(num_ranks=1, estimate=estimate), total_steps=2)
    for step in (1, 2):
        watch.begin()
        watch.end(step=step, loss=torch.tensor(1.0), grad_norm=None, learning_rate=0.1, tokens=8)
    said = watch.comparison()
    assert said is not None
    assert said.endswith("on cpu, not compared: the plan's prediction is of h100-sxm-80gb")
    on_cpu = estimate.replace(plain=plain.replace(gpu="cpu"))
    watch.baseline = SpeedBaseline(num_ranks=1, estimate=on_cpu)
    assert "predicted 100 ms" in str(watch.comparison())


@pytest.mark.skipif(waited_for_cpu_s() is None, reason="the system does not say who waits for a CPU")
def test_a_run_says_how_long_other_processes_had_its_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    estimate = PlannedEstimate(step_time_s=0.05, peak_memory_bytes=2**20)
    watch = RunWatch(device=CPU, baseline=SpeedBaseline(num_ranks=1, estimate=estimate), total_steps=3)
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    other = subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"])  # on the same CPU
    try:
        for step in (1, 2, 3):
            watch.begin()
            started_s = time.thread_time()
            while time.thread_time() < started_s + 0.05:
                pass
            watch.end(step=step, loss=torch.tensor(1.0), grad_norm=None, learning_rate=0.1, tokens=8)
    finally:
        other.kill()
        other.wait()
        os.sched_setaffinity(0, allowed)
    watch.finish()
    said = re.search(r"([\d.]+) ms without the (\d+)% in which other.*\(([+-]\d+)% of \1 ms\)", capsys.readouterr().err)
    assert said is not None
    assert int(said[2]) > 10
    assert float(said[1]) == pytest.approx(50, rel=0.2)
    assert int(said[3]) == pytest.approx(100 * (50 / float(said[1]) - 1), abs=2)  # one error, of what ran


def test_metrics_that_cannot_be_written_are_a_users_error(tmp_path: Path) -> None:
    watch = RunWatch(device=CPU, baseline=SpeedBaseline(num_ranks=1), metrics=tmp_path)
    watch.begin()
    with pytest.raises(UsageError, match="cannot write metrics"):
        watch.end(step=1, loss=torch.tensor(1.0), grad_norm=None, learning_rate=0.1, tokens=8)
