"""This machine measured: its kernels and links on real ranks."""

from __future__ import annotations

import datetime as dt
import importlib.metadata
import os
import platform
from collections.abc import Callable
from typing import Any

import paraplan
from paraplan.errors import NoGpuError, UsageError, require_torch
from paraplan.hardware.catalogue.profile_files import cluster_from_profile, load_machine
from paraplan.hardware.catalogue.real_machines import machine_content as machine_content
from paraplan.hardware.catalogue.real_machines import save_machine as save_machine
from paraplan.hardware.cluster import Cluster
from paraplan.hardware.measurement.kernels import KernelEvent, KernelRequest, kernel_cases
from paraplan.hardware.measurement.links import LinkReport, MeasureRequest, RankEvent
from paraplan.hardware.measurement.machine import calibrated_machine, precisions_of
from paraplan.hardware.probe.cuda_devices import visible_devices
from paraplan.hardware.profiles import MachineProfile, Precision
from paraplan.hardware.survey import MachineSurvey, survey_node
from paraplan.launch.ranks.limits import threads_per_rank, usable_cores
from paraplan.measure.machine import measure_kernels, measure_machine

_CPU_RANKS = 2
_LINKS_SHARE = 1 / 3


def measure_links(
    read: Callable[[], MachineSurvey],
    *,
    num_ranks: int | None,
    max_seconds: float,
    watch: Callable[[MeasureRequest], Callable[[RankEvent], None]],
) -> tuple[MachineSurvey, LinkReport]:
    """Return the machine that `read` finds, with what was measured on its links in its profile.

    With `num_ranks`, and where there is no GPU, so many CPU processes of this machine are measured instead.
    """
    require_torch("measuring links")
    survey, environment = survey_to_measure(read, num_ranks=num_ranks)
    machine = survey.machine
    report = measure_machine(
        survey.node,
        cluster=_cluster(survey),
        on_gpus=machine is None or machine.gpu.vendor != "cpu",
        max_seconds=max_seconds,
        environment=environment,
        watch=watch,
    )
    if machine is not None:
        survey = survey.replace(machine=machine.replace(measured=report.to_measured()))
    return survey, report


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


def measure_this_machine(
    num_ranks: int | None,
    seconds: float,
    *,
    name: str,
    precision: Precision | None = None,
    watch_kernels: Callable[[KernelRequest], Callable[[KernelEvent], None]],
    watch_links: Callable[[MeasureRequest], Callable[[RankEvent], None]],
) -> tuple[MachineProfile, LinkReport | None, list[dict[str, Any]]]:
    """Return this machine as measured, what its links do, and each timing of a kernel.

    With `num_ranks`, and where there is no GPU, these are CPU processes. What is watched is told each timing. A
    `precision` is measured alone, which leaves it the time of the others.
    """
    require_torch("paraplan calibrate")
    survey, environment = survey_to_measure(_this_machine, num_ranks=num_ranks)
    gpu = survey.machine.gpu if survey.machine is not None else None
    on_gpus = gpu is None or gpu.vendor != "cpu"
    count = len(survey.node.gpus)
    threads = None if on_gpus else _threads(count)
    links_s = seconds * _LINKS_SHARE if count > 1 else 0.0
    request = KernelRequest(
        device="cuda" if on_gpus else "cpu",
        cases=kernel_cases((precision,) if precision else precisions_of(gpu), on_gpus=on_gpus, num_ranks=count),
        max_seconds=seconds - links_s,
        num_threads=threads,
    )
    links = None
    events = measure_kernels(request, num_ranks=count, environment=environment, on_event=watch_kernels(request))
    if count > 1:
        links = measure_machine(
            survey.node,
            cluster=_cluster(survey),
            on_gpus=on_gpus,
            max_seconds=links_s,
            environment=environment,
            watch=watch_links,
        )
    machine = calibrated_machine(
        survey.machine,
        survey.node,
        request.cases,
        events,
        links=links,
        name=name,
        source=_source(count, threads),
    )
    return machine, links, [request.cases[event.case].model_dump() | event.model_dump() for event in events]


def _this_machine() -> MachineSurvey:
    from paraplan.hardware.probe.nvml import read_this_machine

    return survey_node(read_this_machine(), environment=os.environ)


def _cluster(survey: MachineSurvey) -> Cluster | None:
    machine = survey.machine
    if machine is None:
        return None
    return Cluster(name=machine.name, gpu=machine.gpu, node=survey.node, network=machine.network)


def _threads(num_ranks: int) -> int:
    """Return the threads of a rank: OMP_NUM_THREADS where it is set, else as the launcher shares out the cores."""
    given = os.environ.get("OMP_NUM_THREADS", "")
    return (
        int(given)
        if given.isdecimal() and int(given) > 0
        else threads_per_rank(num_cores=usable_cores(), ranks_per_node=num_ranks)
    )


def _source(num_ranks: int, threads: int | None) -> str:
    each = "GPU" if threads is None else "CPU process"
    many = f"{num_ranks} {each}{'es' if threads is not None else 's'}" if num_ranks > 1 else f"1 {each}"
    of = f" of {threads} thread{'s' if threads != 1 else ''}" if threads is not None else ""
    versions = f"torch {importlib.metadata.version('torch')}, paraplan {paraplan.__version__}"
    return f"paraplan calibrate on {many}{of}, {dt.date.today()}, {versions}, Python {platform.python_version()}"


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
