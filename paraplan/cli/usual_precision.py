"""The precision that is taken where none is given."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from paraplan.cli.options import PrecisionName
from paraplan.cli.terminal import show_note

if TYPE_CHECKING:
    from paraplan.api.workloads import Cluster
    from paraplan.cli.choices import TrainingChoices


def with_precision(choices: TrainingChoices, cluster: Cluster) -> TrainingChoices:
    """Return the choices with fp16 where no precision is given and the GPUs have no bf16, and say so."""
    peaks = cluster.gpu.peak_flops_per_s
    if choices.precision is not None or "bf16" in peaks or "fp16" not in peaks:
        return choices
    show_note(f"{cluster.gpu.title} has no bf16 arithmetic: --precision fp16 is taken")
    return replace(choices, precision=PrecisionName.fp16)
