"""Checks as continuous integration shows them: plain lines, GitHub annotations, JUnit XML."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paraplan.api.plans import load_plan
from paraplan.cli.inputs import write_beside_and_rename
from paraplan.cli.options import memory_size
from paraplan.errors import CheckFailedError, UsageError
from paraplan.units import one_line

if TYPE_CHECKING:  # the search, which most commands do without
    from paraplan.api.estimates import Estimate
    from paraplan.api.workloads import Workload
    from paraplan.search.verification import Finding

CI_PANEL = "Checks for continuous integration"

GithubOption = Annotated[
    bool,
    typer.Option("--github", help="Print failed checks as GitHub annotations too.", rich_help_panel=CI_PANEL),
]
JunitOption = Annotated[
    Path | None,
    typer.Option("--junit", metavar="FILE", help="Write the checks as JUnit XML.", rich_help_panel=CI_PANEL),
]
ToleranceOption = Annotated[
    str | None,
    typer.Option(
        "--tolerance", metavar="PERCENT", help="How much slower than the best plan is allowed, 5% unless told."
    ),
]


@dataclass(frozen=True, kw_only=True)
class LimitOptions:
    """Limits that an estimate has to keep, and how checks are reported; nothing is checked where no limit is given."""

    max_memory: Annotated[
        int | None,
        typer.Option(
            "--max-memory",
            metavar="SIZE",
            parser=memory_size,
            help="Exit with status 1 if the peak on a GPU is above this: 70GiB.",
            rich_help_panel=CI_PANEL,
        ),
    ] = None
    min_tokens_per_s: Annotated[
        float | None,
        typer.Option(
            "--min-tokens-per-s",
            min=0,
            help="Exit with status 1 if a GPU trains fewer tokens per second.",
            rich_help_panel=CI_PANEL,
        ),
    ] = None
    github: GithubOption = False
    junit: JunitOption = None

    def require(self) -> None:
        """Raise `UsageError`, before long work, for what is no limit, or for a report of none."""
        has_limits = self.max_memory is not None or self.min_tokens_per_s is not None
        given = {"--github": self.github, "--junit": self.junit is not None}
        named = " and ".join(name for name, is_given in given.items() if is_given)
        if named and not has_limits:
            raise UsageError(
                f"{named} reports checks, and there are none", hint="add --max-memory or --min-tokens-per-s"
            )

    def check(self, estimate: Estimate, *, model: str, file: Path | None, as_json: bool) -> None:
        """Report the limits that are given. Raises `CheckFailedError` where one is broken, or the plan does not fit."""
        if self.max_memory is None and self.min_tokens_per_s is None:
            return
        from paraplan.api.checks import limit_findings  # the search, which an estimate without limits does without

        findings = limit_findings(
            estimate.result, max_memory_bytes=self.max_memory, min_tokens_per_s=self.min_tokens_per_s
        )
        if not as_json:
            typer.echo()
        report_checks(
            findings,
            subject=str(file) if file is not None else f"{model}, {estimate.plan.describe()}",
            file=file,
            github=self.github,
            junit=self.junit,
            quiet=as_json,
        )


def read_tolerance(text: str | None) -> float:
    """Return the share in a text such as `5%` or `5`, 0.05 without one. Raises `UsageError` for anything else."""
    return 0.05 if text is None else read_percent(text, option="--tolerance")


def read_percent(text: str, *, option: str, most: float = float("inf")) -> float:
    """Return the share in a text such as `5%` or `5`. Raises `UsageError` for no number, or one above `most`."""
    try:
        percent = float(text.strip().removesuffix("%"))
    except ValueError:
        percent = -1.0
    if not 0 <= percent <= most or percent == float("inf"):
        limit = "" if most == float("inf") else f" to {most:.0f}"
        raise UsageError(f"{option} {text} is not a percentage", hint=f"write a number from 0{limit}, such as 5 or 5%")
    return percent / 100


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


def report_checks(
    findings: Sequence[Finding], *, subject: str, file: Path | None, github: bool, junit: Path | None, quiet: bool
) -> None:
    """Print the checks of `subject` and write their JUnit XML; `quiet` leaves stdout to JSON.

    `file` is what annotations point at. Raises `CheckFailedError` where a check does not hold, after all is written.
    """
    if junit is not None:
        write_beside_and_rename(junit, junit_xml(findings, subject=subject, file=file))
    width = max(len(finding.name) for finding in findings)
    if not quiet:
        typer.echo(f"Checks of {subject}")
        for finding in findings:
            typer.echo(f"  {'pass' if finding.passed else 'FAIL'}  {finding.name:{width}}  {finding.message}")
    failed = [finding for finding in findings if not finding.passed]
    if github:
        for finding in failed:
            typer.echo(annotation(finding, file=file), err=quiet)
    if failed:
        names = " and ".join(finding.name for finding in failed)
        raise CheckFailedError(
            f"{len(failed)} of {len(findings)} checks of {subject} failed: {names}", hint=_way_out(failed)
        )


def _way_out(failed: Sequence[Finding]) -> str:
    if any(finding.name in ("max-memory", "min-tokens-per-s") for finding in failed):
        return "paraplan recommend shows plans that need less memory or take less time"
    return "paraplan recommend with the same options and -o writes a plan that passes"


def annotation(finding: Finding, *, file: Path | None) -> str:
    """Return a workflow command of GitHub Actions that shows a failed check beside a file.

    Its syntax and escapes are those of GitHub's toolkit (packages/core/src/command.ts).
    """
    place = f"file={_property(str(file))}," if file is not None else ""
    message = finding.message.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    return f"::error {place}title={_property(f'paraplan: {finding.name}')}::{message}"


def _property(text: str) -> str:
    for character, code in (("%", "%25"), ("\r", "%0D"), ("\n", "%0A"), (":", "%3A"), (",", "%2C")):
        text = text.replace(character, code)
    return text


def junit_xml(findings: Sequence[Finding], *, subject: str, file: Path | None) -> str:
    """Return the checks as JUnit XML: a test suite with a test case for each."""
    import xml.etree.ElementTree as ET  # few commands write XML

    failures = sum(not finding.passed for finding in findings)
    counts = {"tests": str(len(findings)), "failures": str(failures), "errors": "0", "skipped": "0"}
    suites = ET.Element("testsuites", counts)
    suite = ET.SubElement(suites, "testsuite", {"name": one_line(f"paraplan: {subject}")} | counts)
    for finding in findings:
        attributes = {"classname": "paraplan", "name": finding.name}
        if file is not None:
            attributes["file"] = one_line(str(file))
        case = ET.SubElement(suite, "testcase", attributes)
        message = one_line(finding.message)
        if finding.passed:
            ET.SubElement(case, "system-out").text = message
        else:
            ET.SubElement(case, "failure", {"message": message, "type": "CheckFailed"}).text = message
    ET.indent(suites)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ET.tostring(suites, encoding="unicode") + "\n"
