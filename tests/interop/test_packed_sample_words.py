"""Packed samples, in the words of the tools that have some."""

from __future__ import annotations

import pytest
import yaml
from exported_plans import subject

from paraplan.errors import UnsupportedPlanError
from paraplan.interop.export import export_plan

PURE: dict[str, object] = {"precision": "bf16-pure", "attention": "flash", "sample_length": 600}
PACKED = PURE | {"packs_samples": True}


@pytest.mark.parametrize("is_packed", [True, False])
def test_tools_that_pack_are_told_to(is_packed: bool) -> None:
    training = PACKED if is_packed else PURE
    written = {name: export_plan(subject("zero-2", **training), name).text for name in ("trl", "axolotl", "torchtune")}
    assert ("--packing true" in written["trl"]) is is_packed
    assert yaml.safe_load(written["axolotl"]).get("sample_packing", False) is is_packed
    assert yaml.safe_load(written["torchtune"])["dataset"]["packed"] is is_packed


def test_trl_keeps_samples_apart_under_flash_attention_alone() -> None:
    for other in ({"attention": "sdpa"}, {"task": "dpo"}):
        with pytest.raises(UnsupportedPlanError, match="keeps them apart under flash attention alone"):
            export_plan(subject("zero-2", **PACKED | other), "trl")


@pytest.mark.parametrize("target", ["accelerate", "deepspeed", "hf-trainer", "megatron-lm", "torchtitan"])
def test_others_are_told_what_the_plan_was_made_for(target: str) -> None:
    exported = export_plan(subject("zero-2", **PACKED), target, partial=True)
    assert "samples of 600 tokens, packed: the plan was made for them" in exported.notes
