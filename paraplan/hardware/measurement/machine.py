"""The profile of a machine as calibration found it."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence

from paraplan.errors import ProfileError
from paraplan.hardware.architecture import architecture_of
from paraplan.hardware.catalogue.profile_files import with_architecture
from paraplan.hardware.catalogue.real_machines import machine_from_topology
from paraplan.hardware.cpus import this_cpu
from paraplan.hardware.measurement.kernels import (
    KernelCase,
    KernelEvent,
    best_matmul_flops_per_s,
    copy_bytes_per_s,
    fit_kernels,
)
from paraplan.hardware.measurement.links import LinkReport
from paraplan.hardware.profiles import GpuProfile, MachineProfile, Precision
from paraplan.hardware.topology import NodeTopology

CPU_PRECISIONS: tuple[Precision, ...] = ("fp32", "bf16")
_UNKNOWN_PCIE_BYTES_PER_S = 4e9  # the slowest PCIe that a GPU of the last ten years has: x4 of generation 3


def precisions_of(gpu: GpuProfile | None) -> tuple[Precision, ...]:
    """Return the precisions worth measuring, that of most trainings first; of an unknown GPU all three."""
    if gpu is not None and gpu.vendor == "cpu":
        return CPU_PRECISIONS
    wanted: tuple[Precision, ...] = ("bf16", "fp16", "fp32")
    return wanted if gpu is None else tuple(name for name in wanted if name in gpu.peak_flops_per_s)


def calibrated_machine(
    machine: MachineProfile | None,
    node: NodeTopology,
    cases: Sequence[KernelCase],
    events: Sequence[KernelEvent],
    *,
    links: LinkReport | None,
    name: str,
    source: str,
) -> MachineProfile:
    """Return the profile of the machine `node` with what was measured on it.

    `machine` is what is known of it, None for GPUs that no profile describes: these get one from what was measured.
    GPUs of a known kind keep their data sheet's peaks, in which MFU is counted. Raises `ProfileError` where too little
    was measured to make a profile.
    """
    if machine is not None and machine.gpu.vendor == "cpu":
        made = _cpu_machine(machine, cases, events, links=links, source=source)
    elif machine is not None:
        made = machine
    else:
        gpu = _unknown_gpu(node, cases, events, links=links, source=source)
        made = machine_from_topology(node, name=name, gpu=gpu)
    calibration = fit_kernels(cases, events, source=source)
    return made.replace(
        name=name,
        gpu=made.gpu.replace(calibration=calibration),
        measured=links.to_measured() if links is not None else (),
        cpu=this_cpu(),
        source=f"{made.source}; calibrated: {source}" if made.source != source else source,
    )


def host_memory_bytes() -> int:
    """Return the memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _cpu_machine(
    machine: MachineProfile,
    cases: Sequence[KernelCase],
    events: Sequence[KernelEvent],
    *,
    links: LinkReport | None,
    source: str,
) -> MachineProfile:
    memory = host_memory_bytes()
    share = memory // len(machine.node.gpus)
    gpu = machine.gpu.replace(
        title=f"CPU process on {this_cpu()}",
        architecture=platform.machine(),
        memory_bytes=share,
        memory_bandwidth_bytes_per_s=_copied(cases, events),
        peak_flops_per_s=_reached(cases, events, CPU_PRECISIONS),
        pcie_bandwidth_bytes_per_s=_between_ranks(links) or machine.gpu.pcie_bandwidth_bytes_per_s,
        source=source,
    )
    node = machine.node.replace(
        gpus=tuple(one.replace(name=gpu.title, memory_total_bytes=share) for one in machine.node.gpus)
    )
    return machine.replace(title=gpu.title, gpu=gpu, node=node, host_memory_bytes=memory, aliases=(), source=source)


def _unknown_gpu(
    node: NodeTopology,
    cases: Sequence[KernelCase],
    events: Sequence[KernelEvent],
    *,
    links: LinkReport | None,
    source: str,
) -> GpuProfile:
    first = node.gpus[0]
    if first.memory_total_bytes is None:
        raise ProfileError("the driver does not say how much memory the GPUs have", hint="write their profile by hand")
    gpu = GpuProfile(
        name=(first.name or "gpu").lower().replace(" ", "-"),
        title=first.name or "GPU of unknown name",
        vendor="nvidia",
        architecture=architecture_of(first.compute_capability),
        compute_capability=first.compute_capability,
        memory_bytes=first.memory_total_bytes,
        memory_bandwidth_bytes_per_s=_copied(cases, events),
        peak_flops_per_s=_reached(cases, events, ("bf16", "fp16", "fp32")),
        pcie_bandwidth_bytes_per_s=_between_ranks(links) or _UNKNOWN_PCIE_BYTES_PER_S,
        source=f"{source}; peaks are the fastest matmuls that were timed",
    )
    return with_architecture(gpu)


def _copied(cases: Sequence[KernelCase], events: Sequence[KernelEvent]) -> float:
    bandwidth = copy_bytes_per_s(cases, events)
    if bandwidth is None:
        raise ProfileError("no copy was timed", hint="allow more time with --seconds")
    return bandwidth


def _reached(
    cases: Sequence[KernelCase], events: Sequence[KernelEvent], precisions: Sequence[Precision]
) -> dict[Precision, float]:
    reached = {precision: best_matmul_flops_per_s(cases, events, precision) for precision in precisions}
    return {precision: rate for precision, rate in reached.items() if rate is not None}


def _between_ranks(links: LinkReport | None) -> float | None:
    """Return what one rank sends another, None where it was not measured."""
    if links is None:
        return None
    rates = [link.fit.bus_bandwidth_bytes_per_s for link in links.links if link.collective == "send_recv"]
    return min(rates, default=None)
