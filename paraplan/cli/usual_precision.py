"""The precision that is taken where none is given."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from paraplan.api.workloads import usual_precision
from paraplan.cli.options import PrecisionName
from paraplan.cli.terminal import show_note

if TYPE_CHECKING:
    from paraplan.api.workloads import Cluster
    from paraplan.cli.choices import TrainingChoices


def with_precision(choices: TrainingChoices, cluster: Cluster) -> TrainingChoices:
    """Return the choices with fp16 where no precision is given and the GPUs have no bf16, and say so."""
    if choices.precision is not None or usual_precision(cluster) == "bf16":
        return choices
    show_note(f"{cluster.gpu.title} has no bf16 arithmetic: --precision fp16 is taken")
    return replace(choices, precision=PrecisionName.fp16)
