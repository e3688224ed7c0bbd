"""Activations that wait on the host, in the words of the tools that do it, and of those that do not."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from exported_plans import subject

from paraplan.api.imported import Tool, import_plan
from paraplan.errors import UnsupportedPlanError
from paraplan.interop.export import TARGETS, export_plan, why_inexpressible
from paraplan.plan.parallel import ParallelPlan
from paraplan.plan.training import TrainingSpec

WITH_WORDS = ("trl", "axolotl", "torchtune")
PURE: dict[str, object] = {"precision": "bf16-pure", "offloads_activations": True}


def test_tools_that_offload_activations_are_told_to() -> None:
    script = export_plan(subject("zero-2", **PURE), "trl", partial=True).text
    assert "--activation_offloading true" in script
    assert yaml.safe_load(export_plan(subject("zero-2", **PURE), "axolotl").text)["activation_offloading"] is True
    assert yaml.safe_load(export_plan(subject("zero-2", **PURE), "torchtune").text)["enable_activation_offloading"]
    without = PURE | {"offloads_activations": False}
    assert "activation_offloading" not in export_plan(subject("zero-2", **without), "axolotl").text


@pytest.mark.parametrize("target", ["axolotl", "torchtune"])
def test_tools_that_offload_what_checkpointing_keeps_refuse_it_without(target: str) -> None:
    with pytest.raises(UnsupportedPlanError, match="offloads activations of checkpointed blocks alone"):
        export_plan(subject("zero-3", **PURE), target)


@pytest.mark.parametrize("target", sorted(set(TARGETS) - set(WITH_WORDS)))
def test_what_frees_memory_is_not_left_out_in_silence(target: str) -> None:
    with pytest.raises(UnsupportedPlanError, match=f"no --offload-activations for {target}"):
        export_plan(subject("zero-2", **PURE), target, partial=True)


def test_the_search_knows_who_has_it() -> None:
    training = TrainingSpec(global_batch_size=8, seq_length=128, offloads_activations=True)
    plan = ParallelPlan(dp=8, zero_stage=2, recompute="full")
    assert "--offload-activations" in (why_inexpressible("megatron-lm", plan, training, 32) or "")
    assert why_inexpressible("accelerate", plan, training, 32) is None


@pytest.mark.parametrize(
    ("text", "tool", "offloads"),
    [
        ("model_name_or_path: m\nactivation_offloading: true\n", "trl", True),
        ("model_name_or_path: m\n", "trl", None),
        ("base_model: m\ngradient_checkpointing: true\nactivation_offloading: true\n", "axolotl", True),
        ("base_model: m\ngradient_checkpointing: offload\n", "axolotl", True),
        ("base_model: m\ngradient_checkpointing: true\n", "axolotl", None),
    ],
)
def test_configurations_that_ask_for_it_are_read_so(tmp_path: Path, text: str, tool: Tool, offloads: bool) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text, encoding="utf-8")
    training = import_plan(path, tool).setup.training
    assert training.get("offloads_activations") is offloads
