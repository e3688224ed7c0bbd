"""Fused AdamW: said where a plan counts on it and a script does without, and not taken from a checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from paraplan import runtime
from paraplan.plan.files import PlanFile
from paraplan.plan.parallel import ParallelPlan
from paraplan.plan.training import OptimizerName, TrainingSpec
from paraplan.runtime.assembly import unfused_note

GPU, CPU = torch.device("cuda"), torch.device("cpu")


def planned(optimizer: OptimizerName) -> PlanFile:
    training = TrainingSpec(global_batch_size=1, seq_length=8, optimizer=optimizer)
    return PlanFile(plan=ParallelPlan(), training=training)


def adamw(**options: bool) -> torch.optim.Optimizer:
    return torch.optim.AdamW([nn.Parameter(torch.ones(2))], **options)


def test_a_plan_for_fused_adamw_says_where_it_is_not_fused() -> None:
    note = unfused_note([adamw()], planned("adamw"), GPU)
    assert note is not None
    assert "the plan counts on fused AdamW" in note
    assert "\n" not in note
    assert unfused_note([adamw(fused=True), adamw()], planned("adamw"), GPU) == note


@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}])
def test_nothing_is_said_of_what_a_script_has_chosen(options: dict[str, bool]) -> None:
    assert unfused_note([adamw(**options)], planned("adamw"), GPU) is None


def test_nothing_is_said_without_such_a_plan_a_gpu_or_adamw() -> None:
    assert unfused_note([adamw()], planned("adamw_foreach"), GPU) is None
    assert unfused_note([adamw()], PlanFile(plan=ParallelPlan()), GPU) is None
    assert unfused_note([adamw()], None, GPU) is None
    assert unfused_note([adamw()], planned("adamw"), CPU) is None
    assert unfused_note([torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)], planned("adamw"), GPU) is None


def steps(*, fused: bool | None, load: Path | None, save: Path | None) -> list[float]:
    torch.manual_seed(0)
    job = runtime.init(ParallelPlan(micro_batch_size=4))
    engine = job.prepare(
        nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)),
        loss_fn=nn.functional.mse_loss,
        optimizer=lambda given: torch.optim.AdamW(given, lr=1e-2, fused=fused),
    )
    if load is not None:
        engine.load(load)
    inputs = torch.arange(16.0).view(4, 4) / 16
    losses = [engine.step(inputs, inputs.sum(1, keepdim=True)).item() for _ in range(3)]
    if save is not None:
        engine.save(save)
    assert engine.optimizer.param_groups[0]["fused"] is fused
    assert engine.optimizer.param_groups[0]["lr"] == 1e-2
    return losses


def test_a_checkpoint_brings_no_kernels_along(tmp_path: Path) -> None:
    steps(fused=None, load=None, save=tmp_path / "plain")
    fused = steps(fused=True, load=tmp_path / "plain", save=tmp_path / "fused")
    assert fused == pytest.approx(steps(fused=None, load=tmp_path / "plain", save=None), rel=1e-5)
    after = steps(fused=None, load=tmp_path / "fused", save=None)
    assert after == pytest.approx(steps(fused=True, load=tmp_path / "fused", save=None), rel=1e-5)
