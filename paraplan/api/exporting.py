"""A plan as the configuration of another tool."""

from __future__ import annotations

from pathlib import Path

from paraplan.api.plans import load_plan
from paraplan.api.recommendations import Recommendation
from paraplan.cost.framework_files import framework_of_target, load_framework
from paraplan.errors import UnsupportedPlanError
from paraplan.interop.export import TARGETS, export_plan
from paraplan.interop.exported import Exported, Subject
from paraplan.plan.files import PlanFile

EXPORT_TARGETS = {name: target.title for name, target in TARGETS.items()}
"""The formats that plans are written in, and what each is."""


_HARMLESS = ("rank_order=", "machines")


def export(
    plan: PlanFile | Recommendation | str | Path,
    target: str,
    *,
    partial: bool = False,
    path: str = "plan.json",
    script: str = "train.py",
    image: str | None = None,
) -> Exported:
    """Return a plan in the words of `target`: torchrun, accelerate, deepspeed, megatron-lm, slurm and others.

    `plan` is a recommendation, a plan file or its path. `path` is where commands find it, `script` what they start,
    `image` the container of Kubernetes targets. Raises `UsageError` for an unknown target, and `UnsupportedPlanError`
    where the target cannot express all of the plan. `partial` leaves out what changes neither batch nor memory: the
    order of ranks, the name of the machines.
    """
    if isinstance(plan, Recommendation):
        plan = plan.plan_file()
    elif not isinstance(plan, PlanFile):
        plan, path = load_plan(plan), str(plan)
    made_for = load_framework(plan.framework).export_target if plan.framework is not None else None
    subject = Subject(file=plan, path=path, script=script, image=image, made_for=made_for)
    exported = export_plan(subject, target, partial=partial)
    changing = [gap for gap in exported.gaps if not gap.part.startswith(_HARMLESS)]
    if changing:
        raise UnsupportedPlanError(
            f"without {' and '.join(gap.part for gap in changing)} {target} would run another plan than {path}, of "
            "another batch or memory",
            hint=f"make a plan that it can run: paraplan recommend --framework {framework_of_target(target) or 'NAME'}",
        )
    return exported
