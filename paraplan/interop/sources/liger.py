"""Liger's kernels as transformers' Trainer, LLaMA-Factory and axolotl switch them on."""

from __future__ import annotations

from paraplan.interop.fields import Fields
from paraplan.interop.setup import Setup

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
    has_mlp = all(config.flag(name) is not False for name in _MLP)
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
