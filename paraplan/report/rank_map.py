"""The ranks of a plan as a map: which ranks form a group of each axis, as tables that a page colors."""

from __future__ import annotations

from html import escape

from paraplan.plan.parallel import Axis, ParallelPlan
from paraplan.plan.ranks import RankGrid
from paraplan.records import Record
from paraplan.report.topology_svg import group_hue

_MOST_NODES = 16

AXIS_TITLES: dict[Axis, str] = {
    "tp": "tensor-parallel groups (tp)",
    "cp": "context-parallel groups (cp)",
    "pp": "pipelines (pp)",
    "dp": "data-parallel groups (dp)",
}


class AxisGroups(Record):
    """The groups of one axis: `group_of[rank]` is the number of the group that holds a rank."""

    axis: Axis
    group_of: tuple[int, ...]


def axis_groups(plan: ParallelPlan) -> list[AxisGroups]:
    """Return the groups of each axis that has several ranks, the innermost axis first."""
    grid = RankGrid.of_plan(plan)
    found = []
    for axis in reversed(plan.rank_order):
        if getattr(plan, axis) == 1:
            continue
        number = {rank: index for index, group in enumerate(grid.groups(axis)) for rank in group}
        found.append(AxisGroups(axis=axis, group_of=tuple(number[rank] for rank in range(grid.world_size))))
    return found


def map_table(groups: AxisGroups, *, ranks_per_node: int) -> str:
    """Return a table with a row for each machine and a cell for each of its ranks, colored by group.

    Of more than 16 machines the first and the last eight are shown.
    """
    world = len(groups.group_of)
    nodes = -(-world // ranks_per_node)
    half = _MOST_NODES // 2
    shown = list(range(nodes)) if nodes <= _MOST_NODES else [*range(half), *range(nodes - half, nodes)]
    columns = range(min(ranks_per_node, world))
    head = "".join(f'<th scope="col">{column}</th>' for column in columns)
    rows = []
    for node in shown:
        if nodes > _MOST_NODES and node == nodes - half:
            rows.append(
                f'<tr><th scope="row">…</th><td colspan="{len(columns)}" class="soft">machines between</td></tr>'
            )
        first = node * ranks_per_node
        cells = "".join(_cell(groups, rank) for rank in range(first, min(world, first + ranks_per_node)))
        rows.append(f'<tr><th scope="row">node {node}</th>{cells}</tr>')
    return (
        f'<table class="map"><caption>{escape(AXIS_TITLES[groups.axis])}</caption>'
        f'<thead><tr><th scope="col">local rank</th>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table>'
    )


def _cell(groups: AxisGroups, rank: int) -> str:
    group = groups.group_of[rank]
    tip = f"rank {rank}: {groups.axis} group {group}"
    return f'<td style="--h:{group_hue(group)}" title="{tip}">{group}</td>'
