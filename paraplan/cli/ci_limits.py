"""`paraplan estimate --max-memory --min-tokens-per-s`: an estimate against limits."""

from __future__ import annotations

from pathlib import Path
from typing import Self

import typer

from paraplan.api.estimates import Estimate
from paraplan.cli.ci import read_memory_limit, report_checks, require_checks
from paraplan.records import Record


class Limits(Record):
    """What an estimate has to keep, and how it is reported; nothing is checked where no limit is given."""

    max_memory_bytes: int | None = None
    min_tokens_per_s: float | None = None
    github: bool = False
    junit: Path | None = None

    @classmethod
    def of(cls, *, max_memory: str | None, min_tokens_per_s: float | None, github: bool, junit: Path | None) -> Self:
        """Return the limits of the command line. Raises `UsageError` for what is no limit."""
        has_limits = max_memory is not None or min_tokens_per_s is not None
        require_checks(has_limits, github=github, junit=junit, needs="--max-memory or --min-tokens-per-s")
        return cls(
            max_memory_bytes=read_memory_limit(max_memory),
            min_tokens_per_s=min_tokens_per_s,
            github=github,
            junit=junit,
        )


def check_limits(estimate: Estimate, limits: Limits, *, model: str, file: Path | None, as_json: bool) -> None:
    """Report the limits that are given. Raises `CheckFailedError` where one is not kept, or the plan does not fit."""
    if limits.max_memory_bytes is None and limits.min_tokens_per_s is None:
        return
    from paraplan.api.checks import limit_findings  # the search, which an estimate without limits does without

    findings = limit_findings(
        estimate.result, max_memory_bytes=limits.max_memory_bytes, min_tokens_per_s=limits.min_tokens_per_s
    )
    if not as_json:
        typer.echo()
    report_checks(
        findings,
        subject=str(file) if file is not None else f"{model}, {estimate.plan.describe()}",
        file=file,
        github=limits.github,
        junit=limits.junit,
        quiet=as_json,
    )
