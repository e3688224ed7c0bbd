"""How often a job fails, and what its failures cost: what `recommend` expects of a training with failures."""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import ValidationError

from paraplan.errors import UsageError
from paraplan.plan.goodput import FailureCosts as FailureCosts
from paraplan.plan.goodput import FailureRate as FailureRate
from paraplan.plan.goodput import GoodputEstimate as GoodputEstimate
from paraplan.plan.goodput import MeasuredCosts as MeasuredCosts
from paraplan.plan.goodput import best_interval as best_interval
from paraplan.plan.goodput import estimate_goodput as estimate_goodput

_HINT = "name a folder of paraplan-runs, whose script trained with paraplan.runtime"


def read_measured_costs(folder: Path) -> MeasuredCosts:
    """Return the costs that a run of `paraplan launch` has noted in its folder. Raises `UsageError` without any."""
    path = folder / "run.json"
    try:
        costs = json.loads(path.read_text(encoding="utf-8"))["goodput"]["costs"]
        return MeasuredCosts.model_validate(costs)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}", hint=_HINT) from None
    except (ValueError, KeyError, TypeError, RecursionError, ValidationError):
        raise UsageError(f"{path} holds no costs of checkpoints and restarts", hint=_HINT) from None
