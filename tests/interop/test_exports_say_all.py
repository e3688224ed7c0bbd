"""What a plan was made for is in the file of every tool, or told beside it: nothing of a training is dropped."""

from __future__ import annotations

import pytest
from exported_plans import STARTS_OUR_RUNTIME, subject

from paraplan.errors import PlanError, UnsupportedPlanError
from paraplan.interop.export import TARGETS, export_plan
from paraplan.model.quantizers import quantizers

LORA = {"train": "lora:r=16"}
SETTINGS: dict[str, dict[str, object]] = {
    "seq_length": {"seq_length": 8192},
    "adapters": LORA,
    "fp32": {"precision": "fp32"},
    "bf16-pure": {"precision": "bf16-pure"},
    "fp8": {"linear_precision": "fp8"},
    "mxfp8": {"linear_precision": "mxfp8"},
    "adamw_8bit": {"optimizer": "adamw_8bit"},
    "muon": {"optimizer": "muon"},
    "sgd": {"optimizer": "sgd"},
    "eager": {"attention": "eager"},
    "flash": {"attention": "flash"},
    "compiled": {"compiled": True},
    "liger": {"loss": "liger"},
    "chunked": {"loss": "chunked"},
    "packed": {"sample_length": 600, "packs_samples": True},
    "activations on the host": {"offloads_activations": True},
    "dpo": {"task": "dpo"},
    "tiles": {"stack": {"mlp_tile": 4096}},
    "experts": {"stack": {"whole_experts": True}},
    "kernels": {"stack": {"fused_kernels": "liger"}},
}
FROZEN = ("nf4", "int8", "fp8")


def written(target: str, plan: str, training: dict[str, object]) -> tuple[object, ...] | None:
    """Return the file, its notes and gaps; None for a plan that is refused."""
    try:
        exported = export_plan(subject(plan, **training), target, partial=True)
    except (UnsupportedPlanError, PlanError):
        return None
    return exported.text, exported.notes, exported.gaps


@pytest.mark.parametrize("plan", ["ddp", "zero-2", "zero-3", "fsdp and tp"])
@pytest.mark.parametrize("target", sorted(set(TARGETS) - STARTS_OUR_RUNTIME))
def test_no_setting_of_a_training_is_dropped(target: str, plan: str) -> None:
    usual, adapted = written(target, plan, {}), written(target, plan, LORA)
    assert usual is not None
    dropped = [name for name, setting in SETTINGS.items() if written(target, plan, setting) == usual]
    if adapted is not None:
        dropped += [base for base in FROZEN if written(target, plan, LORA | {"base_weights": base}) == adapted]
        stored = LORA | {"base_weights": "nf4"}
        by_tools = [name for name, tool in quantizers().items() if tool.requires is not None]
        usual = written(target, plan, stored)
        dropped += [name for name in by_tools if usual and written(target, plan, stored | {"quantizer": name}) == usual]
    assert dropped == []


@pytest.mark.parametrize("target", ["trl", "accelerate", "axolotl", "hf-trainer"])
def test_the_release_that_stores_the_weights_is_told(target: str) -> None:
    exported = export_plan(subject("zero-3", **LORA, base_weights="nf4:double", quantizer="transformers-4"), target)
    assert any("pip install 'transformers>=4.47,<5'" in note for note in exported.notes)
    assert exported.gaps == ()


@pytest.mark.parametrize("target", ["accelerate", "hf-trainer"])
@pytest.mark.parametrize(
    ("plan", "base", "is_told"), [("zero-3", "nf4", True), ("zero-3", "int8", False), ("ddp", "nf4", False)]
)
def test_how_4_bit_weights_are_sharded_is_left_to_the_script(
    target: str, plan: str, base: str, *, is_told: bool
) -> None:
    notes = export_plan(subject(plan, **LORA, base_weights=base), target).notes
    assert any("bnb_4bit_quant_storage=torch.bfloat16" in note for note in notes) is is_told
