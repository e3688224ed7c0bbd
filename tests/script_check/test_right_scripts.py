"""Right scripts of many kinds are equal to one process: no check of them raises an alarm."""

from __future__ import annotations

import pytest
import right_frameworks
import right_scripts
from case_selection import with_all
from forked_checks import checked
from rank_harness import RankHarness

pytestmark = pytest.mark.ranks

# Two optimizers on shards; libraries, one of them over several batches; losses that one process has in another measure,
# or in halves. Clipping is in test_check_script.
USUAL = ("fsdp2/gan", "trainer/smoothing", "ddp/sum")
OTHERS = [
    name for name in right_scripts.scripts() if name not in (*USUAL, *right_scripts.BY_SHARE, *right_scripts.WRONG)
]
NOT_OF_THIS_PROJECT = ("trl", "deepspeed")


@pytest.mark.parametrize("name", [*USUAL, *with_all(OTHERS)])
def test_a_right_script_is_no_alarm(name: str, ranks: RankHarness) -> None:
    library = name.partition("/")[0]
    if library in NOT_OF_THIS_PROJECT:
        pytest.importorskip(library)
    report = checked(ranks, right_scripts.__file__, name)
    assert report.difference is None, report.difference
    assert report.num_steps >= 2  # of each optimizer


@pytest.mark.with_all  # what frameworks divide themselves: its kinds, FSDP2 and DTensors, are above
@pytest.mark.parametrize("name", right_frameworks.SCRIPTS)
def test_a_right_script_of_a_framework_is_no_alarm(name: str, ranks: RankHarness) -> None:
    pytest.importorskip({"torchtitan": "torchtitan", "megatron": "megatron.core"}[name.partition("/")[0]])
    report = checked(ranks, right_frameworks.__file__, name, num_ranks=right_frameworks.SCRIPTS[name][0])
    assert report.difference is None, report.difference


@pytest.mark.with_all  # what each batch gives is looked at for pairs too, and its kind is in test_script_findings
@pytest.mark.parametrize("name", [*right_scripts.BY_SHARE])
def test_a_loss_that_compares_samples_is_told_as_the_mean_of_shares(name: str, ranks: RankHarness) -> None:
    found = checked(ranks, right_scripts.__file__, name).difference
    assert found is not None
    assert found.kind == "mean of shares"


@pytest.mark.with_all
@pytest.mark.parametrize("name", right_scripts.WRONG)
def test_a_loss_that_is_multiplied_by_the_ranks_of_zero_is_told_with_its_factor(name: str, ranks: RankHarness) -> None:
    pytest.importorskip("deepspeed")
    found = checked(ranks, right_scripts.__file__, name).difference
    assert found is not None
    assert (found.kind, found.name) == ("scaled", "0.weight")
    assert found.factor == pytest.approx(2.0)
