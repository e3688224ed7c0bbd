"""Plan files: read, made and written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import ValidationError

from paraplan.errors import PlanError
from paraplan.plan.files import PlanFile
from paraplan.plan.parallel import AXES as AXES
from paraplan.plan.parallel import ParallelPlan
from paraplan.plan.parallel import micro_batches as micro_batches


def load_plan(path: str | Path) -> PlanFile:
    """Return a plan file: the plan, and what it was made for. Raises `PlanError` where it cannot be read."""
    try:
        text = Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise PlanError(f"cannot read the plan {path}: {reason}", hint="write one with paraplan recommend -o") from None
    return PlanFile.from_json(text, source=str(path))


def make_plan(**fields: Any) -> ParallelPlan:
    """Return a plan of these fields; raise `PlanError` in words, not a ValidationError, where they contradict."""
    try:
        return ParallelPlan.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        hint = "paraplan explain plans-and-ranks says what goes together"
        raise PlanError(first["msg"].removeprefix("Value error, "), hint=hint) from None
