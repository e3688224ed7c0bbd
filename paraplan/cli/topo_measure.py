"""`paraplan topo --measure`: what the links of this machine reach, beside what their data sheets say."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from paraplan.cli.terminal import make_console
from paraplan.errors import NoGpuError, UsageError
from paraplan.hardware.cluster import Cluster
from paraplan.hardware.cuda_view import visible_devices
from paraplan.hardware.link_measurement import LinkReport, MeasuredLink, RankEvent
from paraplan.hardware.profile_files import cluster_from_profile, load_machine
from paraplan.hardware.survey import MachineSurvey, survey_node
from paraplan.launch.measuring import measure_machine
from paraplan.units import format_bandwidth, format_bytes, format_seconds

_CPU_RANKS = 2
_COLUMNS = {"collective": 14, "latency": 7, "busbw": 10, "at": 8, "reached": 10, "expected": 10}


def survey_measured(
    read: Callable[[], MachineSurvey], *, num_ranks: int | None, max_seconds: float
) -> tuple[MachineSurvey, LinkReport]:
    """Return the machine that `read` finds, with what was measured on its links in its profile.

    With `num_ranks`, and where there is no GPU, so many CPU processes of this machine are measured instead.
    """
    survey, environment = survey_to_measure(read, num_ranks=num_ranks)
    on_gpus = survey.machine is None or survey.machine.gpu.vendor != "cpu"
    machine = survey.machine
    cluster = None
    if machine is not None:
        cluster = Cluster(name=machine.name, gpu=machine.gpu, node=survey.node, network=machine.network)
    progress = measuring_progress()
    with progress:
        report = measure_machine(
            survey.node,
            cluster=cluster,
            on_gpus=on_gpus,
            max_seconds=max_seconds,
            environment=environment,
            watch=lambda request: advance(progress, request.num_timings),
        )
    if machine is not None:
        survey = survey.replace(machine=machine.replace(measured=report.to_measured()))
    return survey, report


def print_links(report: LinkReport, console: Console | None = None) -> None:
    """Print latency and bandwidth of each group and collective, measured and expected."""
    console = console or make_console()
    console.print(f"Links, {report.source}", soft_wrap=True)
    for group in dict.fromkeys(link.group for link in report.links):
        links = [link for link in report.links if link.group == group]
        console.print()
        console.print(_group_words(links[0]))
        table = Table(box=None, pad_edge=False, header_style="bold")
        for name, width in _COLUMNS.items():
            table.add_column(name, no_wrap=True, min_width=width, justify="right" if table.columns else "left")
        for link in links:
            table.add_row(*_row(link))
        console.print(table)
    console.print()
    console.print(
        "busbw: the bandwidth on the bus as nccl-tests defines it, fitted; at: the largest message, and what it "
        "reached; expected: of that message, by the data sheet and published measurements",
        style="dim",
    )
    for note in report.notes:
        console.print(f"Left out: {note}", soft_wrap=True)


def _group_words(link: MeasuredLink) -> str:
    if link.expected is None:
        return link.group.title
    payload = format_bandwidth(link.expected.payload_bytes_per_s)
    return f"{link.group.title}: {link.expected.kind}, {payload} per GPU and direction by the data sheet"


def _row(link: MeasuredLink) -> list[str]:
    largest = link.times[-1]
    share = link.share_of_expected
    return [
        str(link.collective),
        format_seconds(link.fit.latency_s),
        format_bandwidth(link.fit.bus_bandwidth_bytes_per_s),
        format_bytes(largest.num_bytes),
        format_bandwidth(largest.bus_bandwidth_bytes_per_s),
        "?" if share is None else format_bandwidth(largest.bus_bandwidth_bytes_per_s / share),
    ]


def survey_to_measure(
    read: Callable[[], MachineSurvey], *, num_ranks: int | None
) -> tuple[MachineSurvey, dict[str, str]]:
    """Return the machine to measure, and the environment in which ranks see exactly its GPUs.

    With `num_ranks`, and where `read` finds no GPU, these are CPU processes of this machine.
    """
    survey = _cpu_survey(num_ranks) if num_ranks is not None else _gpu_survey(read)
    environment = dict(os.environ)
    if survey.cuda is not None and (survey.machine is None or survey.machine.gpu.vendor != "cpu"):
        devices = [
            device for gpu in survey.node.gpus for device in survey.cuda.devices if device.nvml_index == gpu.index
        ]
        environment["CUDA_VISIBLE_DEVICES"] = visible_devices(devices, survey.cuda)
    return survey, environment


def measuring_progress() -> Progress:
    """Return the bar of a measurement: on a terminal's stderr, nothing in a pipe."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(file=sys.stderr),
        disable=not sys.stderr.isatty(),
        transient=True,
    )


def advance(progress: Progress, num_timings: int) -> Callable[[RankEvent], None]:
    """Return what moves a bar of `num_timings` on with each report of the ranks that measure links."""
    task = progress.add_task("starting ranks", total=num_timings)

    def step(event: RankEvent) -> None:
        progress.update(task, advance=1, description=event.collective)

    return step


def _gpu_survey(read: Callable[[], MachineSurvey]) -> MachineSurvey:
    try:
        survey = read()
    except NoGpuError:
        return _cpu_survey(_CPU_RANKS)
    if survey.cuda is None:
        raise UsageError("only this machine can be measured", hint="leave out --from and --profile")
    shown = {device.nvml_index for device in survey.cuda.devices}
    if not shown:
        raise UsageError(
            "CUDA shows no GPU to this process: CUDA_VISIBLE_DEVICES hides them",
            hint="unset it, or measure CPU processes with --ranks 2",
        )
    return survey.replace(node=survey.node.only([gpu.index for gpu in survey.node.gpus if gpu.index in shown]))


def _cpu_survey(num_ranks: int) -> MachineSurvey:
    node = cluster_from_profile("cpu", gpus_per_node=num_ranks).node
    return survey_node(node, machine=load_machine("cpu").replace(node=node))
