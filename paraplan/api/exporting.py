"""A plan as the configuration of another tool."""

from __future__ import annotations

from paraplan.interop.export import TARGETS, export_plan
from paraplan.interop.exported import Exported, Subject
from paraplan.plan.files import PlanFile

EXPORT_TARGETS = {name: target.title for name, target in TARGETS.items()}
"""The formats that plans are written in, and what each is."""


def export(
    plan: PlanFile,
    target: str,
    *,
    partial: bool = False,
    path: str = "plan.json",
    script: str = "train.py",
    image: str | None = None,
) -> Exported:
    """Return a plan in the words of `target`: torchrun, accelerate, deepspeed, megatron-lm, slurm and others.

    `path` is where commands find the plan, `script` what they start, `image` the container of Kubernetes targets.
    Raises `UsageError` for an unknown target, and `UnsupportedPlanError` where the target cannot express all of the
    plan, unless `partial` asks for the rest.
    """
    subject = Subject(file=plan, path=path, script=script, image=image)
    return export_plan(subject, target, partial=partial)
