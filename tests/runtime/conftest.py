"""Fixtures of the runtime's tests."""

from __future__ import annotations

import pytest
from case_selection import run_all
from rank_harness import RankHarness


@pytest.fixture(scope="session", autouse=True)
def _all_cases(request: pytest.FixtureRequest) -> None:
    run_all(request.config.getoption("--all"))


@pytest.fixture(scope="session")
def ranks() -> RankHarness:
    return RankHarness()
