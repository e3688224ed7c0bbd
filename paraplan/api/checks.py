"""Checks of a plan for continuous integration."""

from __future__ import annotations

from paraplan.search.verification import limit_findings as limit_findings
