"""The soak of elastic jobs, for a few faults."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from nodes import missing_for_hosts

SCRIPT = Path(__file__).parents[2] / "scripts" / "soak_elastic.py"


@pytest.mark.ranks
@pytest.mark.with_all  # a node that dies and comes back, and a lost rank, are tests of their own
def test_an_elastic_job_is_exact_after_faults_one_after_the_other() -> None:
    if reason := missing_for_hosts():
        pytest.skip(reason)
    ended = subprocess.run(
        [sys.executable, SCRIPT, "--faults", "6", "--hosts", "3"], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    figures = json.loads(ended.stdout[ended.stdout.index("{\n") :])
    assert sum(figures["faults"].values()) == 6
    assert figures["steps never done"] == 0
