"""Why a plan does not suit a model, its training or the machines, with what would do."""

from __future__ import annotations

from typing import Literal

from paraplan.errors import PlanError
from paraplan.records import Record

Rule = Literal[
    "precision",
    "positions",
    "ranks",
    "devices_per_process",
    "global_batch",
    "tp",
    "cp",
    "context_heads",
    "stages",
    "ep",
    "sequence_parallel",
    "base_weights",
    "optimizer",
]


class Incompatibility(Record):
    """Why a plan does not suit a model, its training or the machines."""

    rule: Rule
    """Rule that is broken."""
    value: int | str
    """Value that the plan or the training asks for."""
    limit: int | str
    """Limit that the value has to divide, equal or stay within."""
    message: str
    """The value and the limit in a sentence."""
    reason: str
    """Reason without the value, which many plans have in common."""
    allowed: tuple[int | str, ...] = ()
    """Values that would do, where they can be listed."""
    hint: str
    """Way out."""

    def error(self) -> PlanError:
        """Return the error that says so."""
        return PlanError(self.message, hint=self.hint)
