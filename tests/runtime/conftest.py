"""Fixtures of the runtime's tests."""

from __future__ import annotations

import pytest
from rank_harness import RankHarness


@pytest.fixture(scope="session")
def ranks() -> RankHarness:
    return RankHarness()
