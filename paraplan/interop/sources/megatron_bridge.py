"""Megatron-Bridge's YAML of overrides of a recipe, read back. Sections as in its `ConfigContainer` of August 2026."""

from __future__ import annotations

import re
from collections.abc import Mapping

from paraplan.interop.fields import Fields
from paraplan.interop.known_keys import key_table
from paraplan.interop.setup import Given, Setup
from paraplan.interop.sources.adapters import trainable_of
from paraplan.interop.sources.documents import load_document
from paraplan.interop.sources.megatron_lm import megatron_setup

_SECTIONS = ("model", "train", "optimizer", "ddp", "dist", "comm_overlap")
"""Sections whose fields are Megatron-Core's options."""
_OF_RECIPE = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "micro_batch_size", "global_batch_size")
_RANK = 32
_FP8 = {"delayed": "delayed", "current": "tensorwise", "subchannel": "blockwise", "mxfp8": "mxfp8"}
"""Recipe in a precision's name, and Megatron-LM's word for it (src/megatron/bridge/training/mixed_precision.py)."""


def read_megatron_bridge(text: str, *, source: str, given: Given) -> Setup:
    """Return the training that a recipe's overrides describe; what they leave out is the recipe's, and said.

    Raises `PlanError` naming the file and key for what is broken.
    """
    document = load_document(text, source, hint="Megatron-Bridge's *_override_example.yaml are working ones")
    fields = Fields(document, source=source)
    table, notes = key_table("megatron-bridge"), list[str]()
    options: dict[str, object] = dict(table.defaults)
    for name in _SECTIONS:
        options |= fields.taken(name)
    options.setdefault("seq_length", fields.section("dataset").value("seq_length"))
    options |= _precision(fields.value("mixed_precision"), has_key="mixed_precision" in document, notes=notes)
    left_out = [name for name in _OF_RECIPE if options.get(name) is None]
    if left_out:
        options.setdefault("micro_batch_size", 1)
        notes.append(f"{', '.join(left_out)}: the recipe's own, taken as 1")
    flat = Fields(options, source=source)
    setup = megatron_setup(flat, given)
    train, found = _trained(fields)
    return setup.replace(
        tool="Megatron-Bridge",
        target="megatron-bridge",
        framework="megatron-bridge",
        train=train or setup.train,
        says_gpus=False,
        notes=(*setup.notes, *notes, *found, *table.notes(flat), *table.notes(fields)),
    )


def _precision(value: object, *, has_key: bool, notes: list[str]) -> dict[str, object]:
    """Return Megatron-LM's options for the name of a precision; without one a recipe has bf16."""
    if has_key and value is None:
        return {}
    if isinstance(value, Mapping):
        return {name: value[name] for name in ("bf16", "fp16", "fp8_recipe") if name in value} | (
            {"fp8_format": value["fp8"]} if value.get("fp8") else {}
        )
    if not has_key:
        notes.append("mixed_precision: the recipe's own, taken as bf16_mixed")
    words = str(value or "bf16_mixed").lower()
    found: dict[str, object] = {"fp16" if words.startswith("fp16") else "bf16": True}
    if "nvfp4" in words:
        return found | {"fp4_format": "e2m1"}
    scales = next((option for word, option in _FP8.items() if re.search(rf"(_|\b){word}_", words)), None)
    return found if scales is None else found | {"fp8_format": "hybrid", "fp8_recipe": scales}


def _trained(fields: Fields) -> tuple[str | None, list[str]]:
    """Return the adapters of `peft`; Megatron-Bridge adapts attention and MLPs unless told otherwise."""
    section = fields.section("peft")
    if section.count("dim") is None and not section.values:
        return None, []
    return trainable_of(
        section,
        rank=section.count("dim") or _RANK,
        targets=section.value("target_modules") or "all",
        dropout=section.value("dropout") or 0.0,
    )
