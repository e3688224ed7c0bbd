"""What a prediction says of speeds that nobody measured."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from paraplan.cost.estimate import assumed_speeds
from paraplan.cost.workload import Workload

MakeWorkload = Callable[..., Workload]


@pytest.mark.parametrize(
    ("profile", "attention", "words"),
    [
        ("dgx-h100", "sdpa", []),
        ("dgx-a100", "sdpa", []),
        ("azure-nd96isr-mi300x-v5", "sdpa", []),
        ("mi100-x4", "sdpa", ["matmuls reach 85% of the peak, FlashAttention reaches 45% of the peak"]),
        ("mi100-x4", "eager", ["matmuls reach 85% of the peak"]),
        ("gcp-g2-standard-96", "eager", []),
        ("aws-g5-12xlarge", "eager", ["matmuls reach 85% of the peak"]),
        ("rtx-3090-x2", "sdpa", []),
        ("cpu", "sdpa", []),
    ],
)
def test_a_prediction_says_which_speeds_nobody_measured(
    workload: MakeWorkload, profile: str, attention: str, words: list[str]
) -> None:
    notes = assumed_speeds(workload(profile=profile, attention=attention))
    assert [note.partition(": ")[2] for note in notes] == words
