"""Faults that were reported in public are found and named, and the same scripts without them are equal."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from case_selection import with_all
from forked_checks import checked
from rank_harness import RankHarness

from paraplan.script_check.records import ScriptReport

sys.path.append(str(Path(__file__).parent / "faults"))
corpus = __import__("corpus")
FAULTS = {fault.name: fault for fault in corpus.FAULTS}
ALWAYS = ("owner keeps it", "decay by dimensions", "reduced over dp alone")
"""One of each kind of script, and of what is compared: other tests see the rest of the kinds in records alone."""


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
    report = checked(ranks, FAULTS[name].path, name, num_ranks=FAULTS[name].num_ranks)
    assert is_named(FAULTS[name], report), report.difference


# Right scripts of libraries are in test_right_scripts: this one has parts that torch knows nothing of.
@pytest.mark.with_all  # right scripts are in test_right_scripts
@pytest.mark.ranks
@pytest.mark.parametrize("name", ["fused in halves", *with_all([name for name in FAULTS if name != "fused in halves"])])
def test_a_script_without_its_fault_is_equal(ranks: RankHarness, name: str) -> None:
    report = checked(ranks, FAULTS[name].path, name, "mended", num_ranks=FAULTS[name].num_ranks)
    assert report.is_equal, report.difference


@pytest.mark.ranks
def test_ranks_that_all_share_one_sequence_are_beside_one_process_that_has_it_whole(ranks: RankHarness) -> None:
    script = FAULTS["mean of each part"].path
    report = checked(ranks, script, "mean of each part", "mended", num_ranks=2)
    assert report.is_equal, report.difference
    assert checked(ranks, script, "mean of each part", num_ranks=2).difference is not None
