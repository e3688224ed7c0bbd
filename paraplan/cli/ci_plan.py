"""`paraplan recommend --check PLAN`: a plan file against what would be recommended now."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import typer

from paraplan.api.plans import load_plan
from paraplan.api.workloads import Workload
from paraplan.cli.ci import read_tolerance, report_checks
from paraplan.errors import UsageError


def refuse_beside_check(options: Mapping[str, object]) -> None:
    """Raise `UsageError` for an option, by its name, that has a value and asks for more than a check answers."""
    beside = [name for name, value in options.items() if value is not None]
    if beside:
        raise UsageError(
            f"{' and '.join(beside)} beside --check, which only checks a plan for paraplan's runtime",
            hint="leave one of them out",
        )


def check_plan_file(
    workload: Workload, path: Path, *, tolerance: str | None, github: bool, junit: Path | None, as_json: bool
) -> None:
    """Check a plan file and report it. Raises `CheckFailedError` where a check does not hold."""
    from paraplan.api.recommendations import check as check_plan

    check = check_plan(workload, load_plan(path).plan, tolerance=read_tolerance(tolerance))
    if as_json:
        report = {
            "plan": check.plan.model_dump(mode="json"),
            "passed": check.passed,
            "checks": [finding.model_dump() for finding in check.findings],
            "step_time_s": check.estimate.step.step_time_s if check.estimate is not None else None,
            "best_step_time_s": check.best.step.step_time_s if check.best is not None else None,
            "best_plan": check.best.plan.model_dump(mode="json") if check.best is not None else None,
        }
        typer.echo(json.dumps(report, indent=2))
    report_checks(check.findings, subject=str(path), file=path, github=github, junit=junit, quiet=as_json)
