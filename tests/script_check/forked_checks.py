"""Checks of scripts whose ranks are forked from one process that has torch imported."""

from __future__ import annotations

import tempfile
from pathlib import Path

from forked_launch import launch_forked
from rank_harness import RankHarness

from paraplan.script_check.checking import check_script
from paraplan.script_check.records import ScriptReport, ScriptRequest


def checked(
    ranks: RankHarness, script: str, *words: str, num_ranks: int = 2, num_steps: int = 2, shrink: bool = False
) -> ScriptReport:
    """Return the report on `script` with these arguments; `shrink` makes models of transformers smaller."""

    def launch(given: list[str]) -> tuple[int, str]:
        environment = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        with tempfile.TemporaryDirectory() as folder:
            ended = launch_forked(ranks, Path(folder), *given, environment=environment)
        return ended.returncode, ended.stderr

    request = ScriptRequest(
        script=script,
        is_module=False,
        arguments=words,
        num_steps=num_steps,
        shrink_for=num_ranks if shrink else 0,
    )
    return check_script(request, num_ranks=num_ranks, launch=launch)
