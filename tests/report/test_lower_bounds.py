"""Experts under DeepSpeed's ZeRO-3: no speed is claimed, a bound and its reason are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paraplan.accuracy.ranges import step_range
from paraplan.api.imported import alternatives, import_plan, workloads_of
from paraplan.cost.estimate import estimate_plan
from paraplan.cost.lower_bounds import lower_bound_reason
from paraplan.cost.workload import Workload
from paraplan.hardware.catalogue.profile_files import cluster_from_profile
from paraplan.model.reader import read_model
from paraplan.plan.parallel import ParallelPlan
from paraplan.plan.stack import StackSettings
from paraplan.plan.training import LossKernel, TrainingSpec
from paraplan.report.estimate_json import estimate_report
from paraplan.report.plan_words import cautions
from paraplan.report.short_text import plan_lines

PLAN = ParallelPlan(dp=8, zero_stage=3, num_microbatches=1, recompute="full")


def made(model: str, framework: str, loss: LossKernel = "plain") -> Workload:
    training = TrainingSpec(global_batch_size=8, seq_length=2048, loss=loss)
    return Workload.of(read_model(model), training, cluster_from_profile("dgx-h100"), framework=framework)


@pytest.mark.parametrize(
    ("framework", "loss"),
    [("huggingface-trainer", "plain"), ("huggingface-trainer", "liger"), ("deepspeed", "plain"), ("trl", "plain")],
)
def test_a_mixture_under_zero_3_takes_at_least_what_is_priced(framework: str, loss: LossKernel) -> None:
    workload = made("qwen3-30b-a3b", framework, loss)
    estimate = estimate_plan(workload, PLAN)
    (speed,) = (line for line in plan_lines(workload, estimate) if line.label == "Speed")
    assert speed.text.startswith("at least")
    assert "MFU" not in speed.text
    assert any("91.2 s" in words for words in cautions(workload, estimate))
    assert step_range(workload, estimate) is None
    report = estimate_report(workload, estimate)
    assert report["step_is_lower_bound"] is True
    assert report["step_range"] is None


def test_a_comparison_with_a_bound_names_no_ratio(tmp_path: Path) -> None:
    zero = {"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 1, "train_batch_size": 16}
    path = tmp_path / "zero.json"
    path.write_text(json.dumps(zero | {"bf16": {"enabled": True}}))
    imported = import_plan(path, num_gpus=16)
    training = TrainingSpec(global_batch_size=16, seq_length=2048)
    workload = Workload.of(read_model("qwen3-30b-a3b"), training, cluster_from_profile("dgx-h100", num_nodes=2))
    theirs, ours = workloads_of(imported, workload, has_attention=True)
    compared = alternatives(imported, theirs, ours)
    assert compared.now.is_lower_bound
    assert compared.now.fits
    assert compared.verdict == "Of what runs today a bound is predicted, not a speed: a ratio would say nothing."


@pytest.mark.parametrize(
    ("model", "whole_experts", "is_bound"),
    [
        ("qwen3-30b-a3b", None, True),
        ("qwen3-30b-a3b", True, False),  # a script that names transformers 5's products of experts
        ("qwen3.5-35b-a3b", None, False),  # no release of transformers 4 has the family
        ("gpt-oss-20b", None, False),  # whole tensors in transformers 4 too
        ("qwen3-vl-30b-a3b", None, False),
        ("qwen3.5-35b-a3b", False, True),
    ],
)
@pytest.mark.parametrize("framework", ["deepspeed", "huggingface-trainer"])
def test_a_bound_is_told_where_transformers_4_has_experts_as_modules(
    model: str, framework: str, *, whole_experts: bool | None, is_bound: bool
) -> None:
    workload = made(model, framework)
    workload = workload.trained_as(workload.training.replace(stack=StackSettings(whole_experts=whole_experts)))
    assert (lower_bound_reason(workload, PLAN) is not None) is is_bound


@pytest.mark.parametrize(("words", "note"), [("grouped_mm", None), ("eager", "experts_impl eager: priced as")])
def test_a_script_that_chooses_products_of_experts_runs_transformers_5(
    words: str, note: str | None, tmp_path: Path
) -> None:
    command = f"swift sft --model Qwen/Qwen3-30B-A3B --experts_impl {words} --deepspeed zero3 --tuner_type full"
    path = tmp_path / "train.sh"
    path.write_text(f"NPROC_PER_NODE=8 {command}\n")
    imported = import_plan(path)
    assert imported.setup.stack.whole_experts is True
    assert [one for one in imported.notes if "experts" in one] == ([] if note is None else [f"{note} grouped_mm"])


@pytest.mark.parametrize(
    ("model", "framework", "changes"),
    [
        ("llama-3-8b", "deepspeed", {}),
        ("qwen3-30b-a3b", "fsdp", {}),
        ("qwen3-30b-a3b", "megatron-core", {"zero_stage": 1}),
        ("qwen3-30b-a3b", "deepspeed", {"zero_stage": 2}),
        ("qwen3-30b-a3b", "deepspeed", {"dp": 1, "zero_stage": 0, "num_microbatches": 8}),
    ],
)
def test_all_else_is_priced(model: str, framework: str, changes: dict[str, Any]) -> None:
    workload, plan = made(model, framework), PLAN.replace(**changes)
    assert lower_bound_reason(workload, plan) is None
    assert estimate_report(workload, estimate_plan(workload, plan))["step_is_lower_bound"] is False
