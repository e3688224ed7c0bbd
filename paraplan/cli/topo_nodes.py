"""`paraplan topo --nnodes N --rdzv-endpoint HOST:PORT`: all nodes together, and which of them differs."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from paraplan.api.inspection import gather_nodes
from paraplan.cli.terminal import make_console
from paraplan.cli.topology_tables import describe_links, interconnect_lines, shared_nic_lines
from paraplan.units import format_bytes

if TYPE_CHECKING:
    from paraplan.hardware.interconnect import InterconnectThresholds
    from paraplan.hardware.node_survey import ClusterSurvey
    from paraplan.hardware.topology import NodeTopology


def gather_survey(
    node: NodeTopology,
    *,
    num_nodes: int,
    endpoint: str | None,
    node_rank: int | None,
    wait_s: float,
    thresholds: InterconnectThresholds,
) -> ClusterSurvey:
    """Return the survey of all nodes, of which this is one; every node must ask for it."""
    return gather_nodes(
        node,
        num_nodes=num_nodes,
        endpoint=endpoint,
        node_rank=node_rank,
        wait_s=wait_s,
        thresholds=thresholds,
        on_wait=_say_on_a_terminal,
    )


def print_nodes(survey: ClusterSurvey, console: Console | None = None) -> None:
    """Print the nodes as a table, what differs between them, and the verdicts on their links."""
    console = console or make_console()
    count = len(survey.nodes)
    console.print(f"{count} {'node' if count == 1 else 'nodes'}, {survey.num_gpus} GPUs")
    console.print()
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("node", "host", "driver", "GPUs", "memory", "NICs"):
        table.add_column(name, overflow="fold")
    for rank, node in enumerate(survey.nodes):
        table.add_row(*(Text(cell) for cell in _row(rank, node)))
    console.print(table)
    console.print()
    for difference in survey.differences:
        console.print(Text(f"Differs: {difference}", style="yellow"), soft_wrap=True)
    if count > 1 and not survey.differences:
        console.print("The nodes are alike.")
    if survey.cluster is not None:
        node = survey.cluster.node
        for line in [*describe_links(node), *interconnect_lines(survey.interconnect), *shared_nic_lines(node)]:
            console.print(line)
    for rank, node in enumerate(survey.nodes):
        for warning in node.warnings:
            typer.secho(f"warning: node {rank}: {warning}", fg="yellow", err=True)


def _row(rank: int, node: NodeTopology) -> list[str]:
    names = {gpu.name or "GPU" for gpu in node.gpus}
    memory = min((gpu.memory_total_bytes for gpu in node.gpus if gpu.memory_total_bytes is not None), default=None)
    rates: dict[str, int] = {}
    for nic in node.nics:
        rate = "?" if nic.rate_bytes_per_s is None else f"{nic.rate_bytes_per_s * 8 / 1e9:g} Gb/s"
        rates[rate] = rates.get(rate, 0) + 1
    return [
        str(rank),
        node.hostname or "?",
        node.driver_version or "?",
        f"{len(node.gpus)} x {', '.join(sorted(names))}",
        format_bytes(memory),
        ", ".join(f"{count} x {rate}" for rate, count in rates.items()) or "none known",
    ]


def _say_on_a_terminal(message: str) -> None:
    if sys.stderr.isatty():
        typer.echo(message, err=True)
