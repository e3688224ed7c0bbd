from __future__ import annotations

import io

import numpy as np
import pytest
from rich.console import Console

from paraplan.cli.timeline import print_timeline, rank_line, shown_ranks, windows_of
from paraplan.cost.pipeline.simulation import PassSeconds, Timeline, simulate_pipeline
from paraplan.plan.parallel import ScheduleName


def timeline(schedule: ScheduleName, *, ranks: int, micro_batches: int, chunks: int = 1) -> Timeline:
    stages = PassSeconds(*(np.full(ranks * chunks, seconds) for seconds in (1.0, 2.0, 1.0)))
    return simulate_pipeline(schedule, stages, num_ranks=ranks, num_microbatches=micro_batches)


def printed(found: Timeline, *, width: int = 100, color: bool = False) -> str:
    stream = io.StringIO()
    print_timeline(Console(file=stream, width=width, force_terminal=color, no_color=not color, highlight=False), found)
    return stream.getvalue()


def test_gpipe_reads_as_in_its_paper() -> None:
    found = timeline("gpipe", ranks=2, micro_batches=2)
    lines = [rank_line(rank, windows_of(found, columns=20)).plain for rank in found.ranks]
    assert lines == ["0011......aaaabbbb", "..0011aaaabbbb...."]


def test_one_forward_one_backward_reads_as_in_its_paper() -> None:
    found = timeline("1f1b", ranks=4, micro_batches=8)
    windows = windows_of(found, columns=60)
    assert rank_line(found.ranks[0], windows).plain == "0123......aa4bb5cc6dd7ee.ff.gg.hh"
    assert rank_line(found.ranks[3], windows).plain == "...0aa1bb2cc3dd4ee5ff6gg7hh......"


def test_the_share_of_idle_cells_is_that_of_the_bubble() -> None:
    found = timeline("1f1b", ranks=4, micro_batches=4)
    windows = windows_of(found, columns=84)
    for rank, operations in enumerate(found.ranks):
        line = rank_line(operations, windows).plain
        assert line.count(".") / len(line) == pytest.approx(1 - found.busy_s(rank) / found.end_s)


def test_a_long_step_shows_its_beginning_and_its_end() -> None:
    found = timeline("1f1b", ranks=4, micro_batches=64)
    text = printed(found, width=80)
    assert " ~ " in text
    assert "~ left out" in text
    first = next(line for line in text.splitlines() if line.startswith("rank  0"))
    assert first.startswith("rank  0  0123")
    assert first.rstrip().endswith("idle")


@pytest.mark.parametrize("width", [40, 80, 100, 120])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved_1f1b", "zero_bubble"])
def test_every_line_fits_its_console(width: int, schedule: ScheduleName) -> None:
    chunks = 2 if schedule == "interleaved_1f1b" else 1
    for micro_batches in (4, 16, 128):
        found = timeline(schedule, ranks=4, micro_batches=micro_batches, chunks=chunks)
        assert all(len(line) <= width for line in printed(found, width=width).splitlines())


def test_without_colour_every_kind_has_letters_of_its_own() -> None:
    text = printed(timeline("zero_bubble", ranks=4, micro_batches=8))
    assert "\x1b" not in text
    assert "A-J gradients of weights" in text
    rows = "".join(line[9:80] for line in text.splitlines() if line.startswith("rank"))
    for letters in ("0123", "abcd", "ABCD"):
        assert any(letter in rows for letter in letters)


def test_colours_are_there_where_a_terminal_takes_them() -> None:
    assert "\x1b[36m" in printed(timeline("1f1b", ranks=2, micro_batches=4), color=True)


def test_a_long_pipeline_shows_its_ends() -> None:
    assert shown_ranks(4) == [0, 1, 2, 3]
    assert shown_ranks(64) == [*range(8), None, *range(56, 64)]
    assert "    ...\n" in printed(timeline("1f1b", ranks=20, micro_batches=20))
