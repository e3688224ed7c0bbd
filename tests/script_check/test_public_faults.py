"""Faults that were reported in public are found and named, and the same scripts without them are equal."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import pytest
from case_selection import with_all
from forked_launch import launch_forked
from rank_harness import RankHarness

from paraplan.script_check.checking import check_script
from paraplan.script_check.records import ScriptReport, ScriptRequest

sys.path.append(str(Path(__file__).parent / "faults"))
corpus = __import__("corpus")
FAULTS = {fault.name: fault for fault in corpus.FAULTS}
ALWAYS = ("unused later", "owner keeps it", "decay by dimensions", "bias on every rank", "reduced over dp alone")
"""One of each kind of script, and of what is compared: other tests see the rest of the kinds in records alone."""


def checked(ranks: RankHarness, fault: corpus.Fault, *words: str) -> ScriptReport:
    def launch(given: list[str]) -> tuple[int, str]:
        environment = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        with tempfile.TemporaryDirectory() as folder:
            ended = launch_forked(ranks, Path(folder), *given, environment=environment)
        return ended.returncode, ended.stderr

    request = ScriptRequest(script=fault.path, is_module=False, arguments=(fault.name, *words), num_steps=2)
    return check_script(request, num_ranks=fault.num_ranks, launch=launch)


def is_named(fault: corpus.Fault, report: ScriptReport) -> bool:
    """Whether kind, parameter and words of the cause are those that are to be told."""
    if fault.kind == "note":
        return any(fault.words in note for note in report.notes)
    found = report.difference
    return found is not None and (
        found.kind == fault.kind and fault.words in found.cause and fault.parameter in ("", found.name)
    )


@pytest.mark.ranks
@pytest.mark.parametrize("name", [*ALWAYS, *with_all([name for name in FAULTS if name not in ALWAYS])])
def test_a_public_fault_is_found_and_named(ranks: RankHarness, name: str) -> None:
    report = checked(ranks, FAULTS[name])
    assert is_named(FAULTS[name], report), report.difference


@pytest.mark.ranks
@pytest.mark.parametrize(
    "name", ["owner keeps it", "fused in halves", *with_all([name for name in FAULTS if name != "owner keeps it"])]
)
def test_a_script_without_its_fault_is_equal(ranks: RankHarness, name: str) -> None:
    report = checked(ranks, FAULTS[name], "mended")
    assert report.is_equal, report.difference
