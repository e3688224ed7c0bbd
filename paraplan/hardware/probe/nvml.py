"""This machine's GPUs through NVML: the only module that imports pynvml."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pynvml

from paraplan.errors import NoGpuError
from paraplan.hardware.probe.nvml_gpus import SeenGpu, read_gpu
from paraplan.hardware.probe.nvml_links import read_links, read_peer_access
from paraplan.hardware.probe.nvml_queries import Questions
from paraplan.hardware.probe.sysfs import add_host_facts
from paraplan.hardware.topology import NodeTopology

_HINT = "name a machine with --profile (`paraplan profiles list` shows them) or give a saved text with --from"
_APPLE = f"{_HINT}; paraplan explain mac says more"

# Return codes of nvmlInit (nvml.h, nvmlReturn_t), in words that say what to do.
_INIT_FAILURES = {
    4: ("the NVIDIA driver denies access to the GPUs", "ask for access to /dev/nvidia*, or " + _HINT),
    9: ("the NVIDIA driver is installed but not loaded", "load it (modprobe nvidia), or " + _HINT),
    12: ("no NVIDIA driver on this machine", _HINT),
    18: ("the NVIDIA driver and its library have different versions", "restart the machine, or " + _HINT),
}


def read_this_machine(library: Any = pynvml, *, root: Path = Path("/"), platform: str = sys.platform) -> NodeTopology:
    """Return this machine: its GPUs through NVML, its NUMA nodes and NICs from sysfs below `root`.

    `library` is pynvml or something with its functions. Raises NoGpuError where there is no driver or no GPU.
    """
    if platform == "darwin":
        raise NoGpuError("Apple's GPUs are not planned for: torch has no collectives on them", hint=_APPLE)
    node = read_nvml(library, source="NVML")
    return add_host_facts(node.replace(hostname=socket.gethostname()), root=root)


def read_nvml(library: Any = pynvml, *, source: str) -> NodeTopology:
    """Return the GPUs and links that NVML reports.

    What NVML denies, does not support or does not know is None, with a warning where that is out of the ordinary. A
    GPU that answers nothing is left out, with a warning. Raises NoGpuError where NVML cannot start or shows no GPU.
    """
    with started_nvml(library) as ask:
        return _read_started(ask, source=source)


@contextmanager
def started_nvml(library: Any | None = None) -> Iterator[Questions]:
    """Start NVML for this context and yield what asks it. Raises `NoGpuError` where it cannot start."""
    library = library or pynvml
    try:
        library.nvmlInit()
    except library.NVMLError as error:
        code = getattr(error, "value", None)
        message, hint = _INIT_FAILURES.get(code or 0, (f"NVML does not start: {error}", _HINT))
        raise NoGpuError(message, hint=hint) from None
    try:
        yield Questions(library)
    finally:
        _shut_down(library)


def _read_started(ask: Questions, *, source: str) -> NodeTopology:
    count = ask.machine("number of GPUs", "nvmlDeviceGetCount") or 0
    driver = ask.text(ask.machine("driver version", "nvmlSystemGetDriverVersion"))
    cuda = ask.machine("CUDA version", "nvmlSystemGetCudaDriverVersion")
    seen: list[SeenGpu] = []
    for index in range(count):
        gpu = read_gpu(ask, index)
        if gpu is not None:
            seen.append(gpu)
    if not seen:
        reasons = "; ".join(ask.warnings())
        raise NoGpuError(
            f"the NVIDIA driver {driver or ''} shows no GPU" + (f": {reasons}" if reasons else ""), hint=_HINT
        )
    links = read_links(ask, seen)
    peer_access = read_peer_access(ask, seen)
    return NodeTopology(
        source=source,
        driver_version=driver,
        cuda_version=f"{cuda // 1000}.{cuda % 1000 // 10}" if cuda else None,
        gpus=tuple(one.gpu for one in seen),
        links=links,
        peer_access=peer_access,
        warnings=tuple(ask.warnings()),
    )


def _shut_down(library: Any) -> None:
    """End the use of NVML; a driver that fails even then has already been reported."""
    try:
        library.nvmlShutdown()
    except library.NVMLError:
        return
