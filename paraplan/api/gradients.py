"""Whether a plan trains a model as one process does."""

from __future__ import annotations

from collections.abc import Callable

from paraplan.model.reader import find_config, is_factory
from paraplan.plan.check import CheckReport, CheckRequest, smaller_plan
from paraplan.plan.parallel import ParallelPlan
from paraplan.plan.support import check_supported


def check_gradients(
    model: str,
    plan: ParallelPlan,
    *,
    max_ranks: int = 8,
    num_steps: int = 3,
    max_layers: int | None = None,
    seq_length: int = 16,
    keeps_width: bool = False,
    split_by: str = "paraplan",
    timeout_s: float = 600.0,
    say: Callable[[str], None] = lambda text: None,
) -> CheckReport:
    """Return how losses, gradients and parameters of a small model under a plan differ from those of one process.

    `model` is a reference as `load_model` takes it, `say` is told what is run. Raises `UnsupportedPlanError` for a plan
    that the runtime does not execute, and `CheckRunError` where ranks fail.
    """
    small = smaller_plan(plan, max_ranks=max_ranks)
    check_supported(small)
    request = CheckRequest(
        model=model if is_factory(model) else str(find_config(model)),
        plan=small,
        folder="",
        max_layers=max_layers or (small.num_stages + 1 if small.num_stages > 1 else 2),
        seq_length=seq_length,
        num_steps=num_steps,
        keeps_width=keeps_width,
        split_by=split_by,
    )
    from paraplan.launch.checking import check_plan

    return check_plan(request, plan, timeout_s=timeout_s, say=say).replace(model=model)
