"""The timeline of a pipeline as lines of text: what each rank does when, readable without color."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from paraplan.units import format_seconds

if TYPE_CHECKING:
    from paraplan.cost.pipeline.simulation import PipelineOperation, Timeline

_STYLES = {"forward": "cyan", "backward": "green", "weight": "magenta"}
_LETTERS = {"forward": "0123456789", "backward": "abcdefghij", "weight": "ABCDEFGHIJ"}
_IDLE = "."
_GAP = " ~ "
_MOST_RANKS = 16
_LABEL_WIDTH, _SHARE_WIDTH = 9, 10
_LEAST_CELLS = 20
_NEARLY = 1 + 1e-9  # sums of seconds are not exact


@dataclass(frozen=True)
class Window:
    """A part of the time as columns of text: `num_cells` cells of `cell_s` seconds from `start_s` on."""

    start_s: float
    cell_s: float
    num_cells: int


def print_timeline(console: Console, timeline: Timeline) -> None:
    """Print the timeline of one step, a line for each pipeline rank, as wide as the console.

    A digit is the forward pass of a micro-batch, a small letter its backward pass, a capital the gradients of weights
    where they come later; both count micro-batches by their last digit. Where a step has more operations than there
    are columns, its beginning and its end are shown.
    """
    windows = windows_of(timeline, columns=console.width - _LABEL_WIDTH - _SHARE_WIDTH)
    console.print(f"\n[bold]Pipeline[/bold] of one step, {format_seconds(timeline.end_s)}", markup=True)
    for rank in shown_ranks(len(timeline.ranks)):
        if rank is None:
            console.print(Text("    ...", style="dim"))
            continue
        line = Text(f"rank {rank:>2}  ")
        line.append_text(rank_line(timeline.ranks[rank], windows))
        idle = 1 - timeline.busy_s(rank) / timeline.end_s
        line.append(f" {idle:4.0%} idle", style="dim")
        console.print(line, no_wrap=True, crop=True)
    console.print(Text(legend(timeline, is_cut=len(windows) > 1), style="dim"))


def windows_of(timeline: Timeline, *, columns: int) -> list[Window]:
    """Return the windows that show a timeline in `columns` columns: all of it, or its beginning and its end.

    The shortest operation takes a whole number of cells, one where the step does not fit otherwise.
    """
    columns = max(columns, _LEAST_CELLS)
    lengths = [operation.end_s - operation.start_s for rank in timeline.ranks for operation in rank]
    shortest = min((length for length in lengths if length > 0), default=timeline.end_s)
    cells_each = int(columns * shortest / timeline.end_s * _NEARLY)
    if cells_each:
        cell_s = shortest / cells_each
        return [Window(0.0, cell_s, math.ceil(timeline.end_s / cell_s / _NEARLY))]
    each = (columns - len(_GAP)) // 2
    return [Window(0.0, shortest, each), Window(timeline.end_s - each * shortest, shortest, each)]


def rank_line(operations: tuple[PipelineOperation, ...], windows: list[Window]) -> Text:
    """Return one rank's operations in the cells of `windows`; a cell shows what fills most of it."""
    line = Text()
    for number, window in enumerate(windows):
        if number:
            line.append(_GAP, style="dim")
        for operation in _filling(operations, window):
            if operation is None:
                line.append(_IDLE, style="dim")
            else:
                line.append(_LETTERS[operation.kind][operation.micro_batch % 10], style=_STYLES[operation.kind])
    return line


def _filling(operations: tuple[PipelineOperation, ...], window: Window) -> list[PipelineOperation | None]:
    """Return for each cell the operation that fills most of it, None where most of it is idle."""
    cells: list[PipelineOperation | None] = [None] * window.num_cells
    most = [0.0] * window.num_cells
    busy = [0.0] * window.num_cells
    for operation in operations:
        first = int(max(0.0, (operation.start_s - window.start_s) / window.cell_s))
        for cell in range(first, window.num_cells):
            start = window.start_s + cell * window.cell_s
            if start >= operation.end_s:
                break
            share = min(operation.end_s, start + window.cell_s) - max(operation.start_s, start)
            busy[cell] += max(0.0, share)
            if share > most[cell]:
                cells[cell], most[cell] = operation, share
    return [operation if filled > window.cell_s / 2 else None for operation, filled in zip(cells, busy, strict=True)]


def shown_ranks(num_ranks: int) -> list[int | None]:
    """Return the ranks that are shown, None where some are left out: of a long pipeline its first and last."""
    if num_ranks <= _MOST_RANKS:
        return list(range(num_ranks))
    half = _MOST_RANKS // 2
    return [*range(half), None, *range(num_ranks - half, num_ranks)]


def legend(timeline: Timeline, *, is_cut: bool) -> str:
    """Return what the letters mean, as far as they occur."""
    kinds = {operation.kind for rank in timeline.ranks for operation in rank}
    words = ["0-9 forward of a micro-batch", "a-j backward"]
    if "weight" in kinds:
        words.append("A-J gradients of weights")
    words.append(f"{_IDLE} idle")
    if is_cut:
        words.append(f"{_GAP.strip()} left out")
    return ", ".join(words)
