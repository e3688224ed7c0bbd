"""Liger's kernels as transformers' Trainer, LLaMA-Factory and axolotl switch them on."""

from __future__ import annotations

import json
from functools import cache

from paraplan.interop.fields import Fields
from paraplan.interop.setup import Setup
from paraplan.model.spec import ModelSpec
from paraplan.resources import profiles_folder

_MLP = ("swiglu", "geglu")


def with_trainers_liger(setup: Setup, fields: Fields, *, key: str = "use_liger_kernel", has_loss: bool = True) -> Setup:
    """Return a setup with what `key` switches on: norms, rotations and MLPs in one kernel each, and the fused loss.

    `liger_kernel_config` may leave some out; `has_loss` is False where the tool leaves the loss out itself.
    """
    if not fields.flag(key):
        return setup
    config = fields.section("liger_kernel_config")
    fuses = has_loss and config.flag("fused_linear_cross_entropy") is not False
    found = setup.replace(loss="liger") if fuses else setup
    has_norms = config.flag("rms_norm") is not False
    has_mlp = False not in [config.flag(name) for name in _MLP]  # each of which is asked for
    if config.flag("rope") is False and has_norms and has_mlp:
        found = found.replace(notes=(*found.notes, "liger_kernel_config.rope false: priced as if on"))
    return _with_kernels(found, has_norms=has_norms, has_mlp=has_mlp)


def with_axolotls_liger(setup: Setup, fields: Fields) -> Setup:
    """Return a setup with what axolotl's keys switch on beside the loss: each kernel has one of its own."""
    has_norms = bool(fields.flag("liger_rms_norm"))
    has_mlp = bool(fields.flag("liger_glu_activation") or fields.flag("liger_swiglu"))
    if fields.flag("liger_rope") is False and has_norms and has_mlp:
        setup = setup.replace(notes=(*setup.notes, "liger_rope false: priced as if on"))
    return _with_kernels(setup, has_norms=has_norms, has_mlp=has_mlp)


def _with_kernels(setup: Setup, *, has_norms: bool, has_mlp: bool) -> Setup:
    if has_norms and has_mlp:
        return setup.replace(stack=setup.stack.replace(fused_kernels="liger"))
    if has_norms or has_mlp:
        part = "norms" if has_norms else "MLPs"
        return setup.replace(notes=(*setup.notes, f"Liger's kernels for {part} alone: priced without them"))
    return setup


def with_families_of_liger(setup: Setup, model: ModelSpec) -> Setup:
    """Return a setup without Liger's kernels where the tool has none for the model's family, and says so in its log.

    Losses of pairs that TRL takes from Liger go without the model's code, and axolotl puts the fused loss into any.
    """
    asks = setup.loss == "liger" or setup.stack.fused_kernels == "liger"
    is_traced = any(run.block.is_traced for run in model.runs)
    own_loss = setup.tool.startswith("TRL") and setup.task is not None
    families = _families(setup.tool.partition(",")[0])
    if not asks or is_traced or own_loss or {model.model_type, model.model_type.removesuffix("_text")} & families:
        return setup
    tool = setup.tool.partition(",")[0]
    keeps_loss = tool == "axolotl" or setup.loss != "liger"
    if keeps_loss and setup.stack.fused_kernels != "liger":
        return setup
    note = f"Liger has no kernels for {model.model_type}: {tool} trains without, as is priced"
    loss = setup.loss if keeps_loss else "plain"
    kernels = None if setup.stack.fused_kernels == "liger" else setup.stack.fused_kernels
    stack = setup.stack.replace(fused_kernels=kernels)
    return setup.replace(loss=loss, stack=stack, notes=(*setup.notes, note))


@cache
def _families(tool: str) -> frozenset[str]:
    """Return the model types that a tool switches Liger's kernels on for (`profiles/liger.json`)."""
    table = json.loads((profiles_folder() / "liger.json").read_text(encoding="utf-8"))
    if tool == "LLaMA-Factory":
        return frozenset(table["llama-factory"])
    return frozenset(table["families"] + (table["axolotl"] if tool == "axolotl" else []))
