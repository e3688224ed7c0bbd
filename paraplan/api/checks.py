"""Checks of a plan for continuous integration."""

from __future__ import annotations

from paraplan.search.check import limit_findings as limit_findings
