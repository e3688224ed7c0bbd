"""What a prediction says of speeds that nobody measured."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from paraplan.cost.estimate import assumed_speeds
from paraplan.cost.notes import assumed_copies
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


@pytest.mark.parametrize(
    ("profile", "words"),
    [
        ("2xrtx-4090", "21.0 GB/s through the memory of a fast host; 4.00 GB/s were measured"),
        ("2xrtx-4090-no-p2p", None),
        ("rtx-3090-x2-nvlink", None),
        ("1xrtx-4090", None),
        ("dgx-h100", None),
    ],
)
def test_cards_without_p2p_say_how_fast_a_host_their_copies_are_taken_to_go_through(
    workload: MakeWorkload, profile: str, words: str | None
) -> None:
    notes = assumed_copies(workload(profile=profile))
    assert (words is None) == (not notes)
    assert all(words in note and "--link no-p2p" in note for note in notes if words)
