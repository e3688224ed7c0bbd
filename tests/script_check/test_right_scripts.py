"""Right scripts of many kinds are equal to one process: no check of them raises an alarm."""

from __future__ import annotations

import pytest
import right_scripts
from paraplan.api.scripts import check_script

USUAL = ("ddp/gan", "fsdp2/clip", "accelerate/accumulate", "trainer/smoothing")
CASES = [pytest.param(name, marks=[] if name in USUAL else pytest.mark.with_all) for name in right_scripts.SCRIPTS]


@pytest.mark.ranks
@pytest.mark.parametrize("name", CASES)
def test_a_right_script_is_no_alarm(name: str) -> None:
    report = check_script(right_scripts.__file__, [name], num_ranks=2)
    assert report.difference is None, report.difference
    assert report.num_steps == 2


@pytest.mark.with_all
@pytest.mark.ranks
def test_a_loss_that_compares_samples_is_told_as_the_mean_of_shares() -> None:
    (name,) = right_scripts.BY_SHARE
    found = check_script(right_scripts.__file__, [name], num_ranks=2).difference
    assert found is not None
    assert found.kind == "mean of shares"
