"""`paraplan topo`: what GPUs and links are here, or in a capture, or in a profile."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paraplan.api.inspection import inspect_machine, save_inspected, thresholds_of
from paraplan.cli.terminal import show_note
from paraplan.errors import UsageError

if TYPE_CHECKING:  # imported where they are needed, so that the command answers at once
    from paraplan.hardware.interconnect import InterconnectThresholds
    from paraplan.hardware.measurement.links import LinkReport
    from paraplan.hardware.survey import MachineSurvey

app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)


@app.command()
def topo(
    from_file: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="FILE",
            help="Read a saved text instead: `nvidia-smi topo -m`, an NCCL topology XML, `rocm-smi --showtopo`, "
            "`amd-smi topology`, or our own JSON; - for standard input.",
        ),
    ] = None,
    profile: Annotated[
        str | None, typer.Option(metavar="NAME|FILE", help="Show a machine of the profiles instead.")
    ] = None,
    gpus: Annotated[
        str | None,
        typer.Option(
            metavar="LIST|COUNT", help="Show these GPUs alone, by CUDA index or UUID (0,2), or the first two (2)."
        ),
    ] = None,
    tree: Annotated[bool, typer.Option("--tree", help="Show NUMA nodes, switches, GPUs and NICs as a tree.")] = False,
    svg: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the machine into an SVG file as well.")] = None,
    save: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Save the machine as a profile for --profile as well.")
    ] = None,
    fast_node: Annotated[
        float | None,
        typer.Option(metavar="GB/S", min=0.001, help="Rate per GPU from which links in the node are fast."),
    ] = None,
    fast_network: Annotated[
        float | None, typer.Option(metavar="GB/S", min=0.001, help="Rate per GPU from which the network is fast.")
    ] = None,
    measure: Annotated[
        bool,
        typer.Option("--measure", help="Measure the links of this machine, one rank for each GPU; --save keeps it."),
    ] = False,
    ranks: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=2, max=64, help="Measure N CPU processes (2 where there is no GPU), with --measure."
        ),
    ] = None,
    seconds: Annotated[
        float, typer.Option(metavar="S", min=1, max=3600, help="Time that --measure may take after its ranks started.")
    ] = 45.0,
    nnodes: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, max=4096, help="Show N nodes together; run it on each, with one --rdzv-endpoint."
        ),
    ] = None,
    rdzv_endpoint: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Where the nodes meet: an address of the first one.")
    ] = None,
    node_rank: Annotated[
        int | None, typer.Option(metavar="R", min=0, help="Number of this node; free ones are taken otherwise.")
    ] = None,
    wait: Annotated[float, typer.Option(metavar="S", min=1, help="How long --nnodes waits for the others.")] = 120.0,
    watch: Annotated[
        float | None,
        typer.Option(
            metavar="S",
            min=0.1,
            max=3600,
            help="Show what this machine's GPUs do every S seconds: memory, power, clocks, PCIe, what slows them.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show the GPUs of a machine, the links between them, and its network interfaces.

    Without --from and --profile it asks this machine's driver, also for what the GPUs are doing.
    """
    if from_file is not None and profile is not None:
        raise UsageError("--from and --profile both name a machine", hint="give one of them")
    if watch is not None:
        if from_file or profile or as_json:
            raise UsageError("--watch looks at this machine's GPUs", hint="leave out --from, --profile and --json")
        from paraplan.cli.gpu_states import watch as watch_states

        watch_states(watch)
    _check_together(measure=measure, nnodes=nnodes, ranks=ranks, rdzv_endpoint=rdzv_endpoint, node_rank=node_rank)
    thresholds = _thresholds(fast_node, fast_network)
    links = None
    if measure:
        from paraplan.cli.topo_measure import survey_measured

        survey, links = survey_measured(
            lambda: _survey(from_file, profile, gpus, thresholds=thresholds), num_ranks=ranks, max_seconds=seconds
        )
    else:
        survey = _survey(from_file, profile, gpus, thresholds=thresholds)
    if nnodes is not None:
        from paraplan.cli.topo_nodes import gather_survey, print_nodes

        nodes = gather_survey(
            survey.node,
            num_nodes=nnodes,
            endpoint=rdzv_endpoint,
            node_rank=node_rank,
            wait_s=wait,
            thresholds=thresholds,
        )
        typer.echo(json.dumps(nodes.to_report(), indent=2)) if as_json else print_nodes(nodes)
    elif as_json:
        measured = {"measurement": links.model_dump(mode="json")} if links else {}
        typer.echo(json.dumps(survey.to_report() | measured, indent=2))
    else:
        _print(survey, links, tree=tree)
    if svg is not None:
        _write_svg(survey, svg)
    if save is not None:
        _save(survey, save)


def _check_together(
    *, measure: bool, nnodes: int | None, ranks: int | None, rdzv_endpoint: str | None, node_rank: int | None
) -> None:
    """Raise UsageError for options that need another one, or exclude it."""
    if ranks is not None and not measure:
        raise UsageError("--ranks is for --measure, which is not given", hint="add --measure, or leave out --ranks")
    if nnodes is None and (rdzv_endpoint is not None or node_rank is not None):
        option = "--node-rank" if rdzv_endpoint is None else "--rdzv-endpoint"
        raise UsageError(f"{option} is for --nnodes, which is not given", hint="say how many nodes there are")
    if nnodes is not None and measure:
        raise UsageError("--measure measures the links of one machine, and --nnodes shows several", hint="give one")


def _print(survey: MachineSurvey, links: LinkReport | None, *, tree: bool) -> None:
    """Print the machine and what was measured; of CPU processes there is no machine to show."""
    if survey.machine is None or survey.machine.gpu.vendor != "cpu" or links is None:
        from paraplan.cli.topology_tables import print_topology, print_tree

        (print_tree if tree else print_topology)(survey)
    if links is not None:
        from paraplan.cli.topo_measure import print_links

        print_links(links)
    for warning in survey.node.warnings:
        typer.secho(f"warning: {warning}", fg="yellow", err=True)


def _thresholds(fast_node: float | None, fast_network: float | None) -> InterconnectThresholds:
    given = {"node_bytes_per_s": fast_node, "network_bytes_per_s": fast_network}
    return thresholds_of(**{name: rate * 1e9 for name, rate in given.items() if rate is not None})


def _survey(
    from_file: str | None, profile: str | None, gpus: str | None, *, thresholds: InterconnectThresholds
) -> MachineSurvey:
    text = sys.stdin.buffer.read() if from_file == "-" else None
    path = Path(from_file) if from_file not in (None, "-") else None
    return inspect_machine(profile=profile, path=path, text=text, gpus=gpus, thresholds=thresholds)


def _write_svg(survey: MachineSurvey, path: Path) -> None:
    from paraplan.cli.inputs import write_beside_and_rename
    from paraplan.report.topology_svg import render_svg

    write_beside_and_rename(path, render_svg(survey.node))
    typer.echo(f"drawn: {path}", err=True)


def _save(survey: MachineSurvey, path: Path) -> None:
    machine = save_inspected(survey, path)
    typer.echo(f"saved: {path}; use it with --profile {path}", err=True)
    for note in machine.notes:
        show_note(note)
