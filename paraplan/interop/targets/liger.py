"""Liger's kernels in the words of transformers' Trainer and of axolotl."""

from __future__ import annotations

from paraplan.plan.training import TrainingSpec

_LOSS = "fused_linear_cross_entropy"
_KERNELS = ("rope", "rms_norm", "swiglu", "geglu")
_OF_AXOLOTL = ("liger_rope", "liger_rms_norm", "liger_glu_activation")


def fuses_by_liger(training: TrainingSpec) -> bool:
    """Return whether norms, rotations and MLPs are Liger's."""
    return training.stack.fused_kernels == "liger"


def told_kernels(training: TrainingSpec | None) -> frozenset[str]:
    """Return the settings of the software that these words name."""
    return frozenset({"fused_kernels"}) if training is not None and fuses_by_liger(training) else frozenset()


def trainers_liger(training: TrainingSpec) -> dict[str, object]:
    """Return the Trainer's keys: its switch is for loss and kernels, its configuration leaves out one of both."""
    has_loss, has_kernels = training.loss == "liger", fuses_by_liger(training)
    if not has_loss and not has_kernels:
        return {}
    left_out = {} if has_loss else {_LOSS: False}
    if not has_kernels:
        left_out = dict.fromkeys(_KERNELS, False)
    return {"use_liger_kernel": True} | ({"liger_kernel_config": left_out} if left_out else {})


def axolotls_liger(training: TrainingSpec) -> dict[str, object]:
    """Return axolotl's keys without its plugin: one for each kernel."""
    found: dict[str, object] = {f"liger_{_LOSS}": True} if training.loss == "liger" else {}
    return found | (dict.fromkeys(_OF_AXOLOTL, True) if fuses_by_liger(training) else {})
