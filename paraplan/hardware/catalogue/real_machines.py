"""Profiles of real machines: made from what a machine shows, and written as files."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from paraplan.errors import ProfileError
from paraplan.hardware.catalogue.machine_files import compact_machine
from paraplan.hardware.catalogue.profile_files import find_gpu
from paraplan.hardware.profiles import GpuProfile, MachineProfile, NetworkProfile
from paraplan.hardware.topology import NodeTopology

ASSUMED_LATENCY_S = 10e-6
"""One-way time of a small message between nodes where nobody measured it: between InfiniBand's and Ethernet's."""


def machine_from_topology(
    node: NodeTopology,
    *,
    name: str,
    gpu: GpuProfile | None = None,
    network: NetworkProfile | None = None,
    host_memory_bytes: int | None = None,
) -> MachineProfile:
    """Return a profile of a real machine, for `paraplan topo --save`. `notes` says what is left to fill in.

    The kind of GPU is found by the name that the driver gave, unless `gpu` is given. A machine of mixed kinds gets
    the kind with the least matmul peak. Raises `ProfileError` for no GPUs, and for a kind that no profile describes.
    """
    if not node.gpus:
        raise ProfileError("a machine without GPUs makes no profile", hint="use --profile cpu")
    notes: list[str] = []
    kinds = {kind.name: kind for kind in ([gpu] if gpu is not None else _kinds(node))}
    if len(kinds) > 1:
        notes.append(f"the GPUs are of {len(kinds)} kinds ({', '.join(sorted(kinds))}); plans use the slowest")
    if network is None and not node.nics:
        notes.append("network: nothing is known of it; name one (paraplan profiles list) before planning several nodes")
    elif network is None:
        network, note = _network_of(node)
        notes += [note] if note else []
    if host_memory_bytes is None:
        notes.append("host_memory_bytes: fill it in before planning with offload")
    return MachineProfile(
        name=name,
        title=f"{len(node.gpus)} x {next(iter(kinds.values())).title}",
        gpu=min(kinds.values(), key=lambda kind: max(kind.peak_flops_per_s.values())),
        node=node,
        network=network,
        host_memory_bytes=host_memory_bytes,
        notes=tuple(notes),
        source=f"this machine, {node.source}",
    )


def machine_content(machine: MachineProfile) -> dict[str, Any]:
    """Return the JSON object from which `load_machine` makes `machine` again, with its GPU and network inline."""
    content = compact_machine(machine).model_dump(mode="json", exclude_none=True)
    content["gpu"] = machine.gpu.model_dump(mode="json", exclude_none=True)
    if machine.network is not None:
        content["network"] = machine.network.model_dump(mode="json", exclude_none=True)
    return content


def save_machine(machine: MachineProfile, path: str | Path) -> None:
    """Write `machine` so that `load_machine` reads it: beside `path` first, then renamed onto it.

    Raises `ProfileError` where the folder cannot be written.
    """
    target = Path(path)
    text = json.dumps(machine_content(machine), indent=2, ensure_ascii=False) + "\n"
    try:
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", dir=target.parent, prefix=f".{target.name}.", delete=False
        ) as file:
            file.write(text)
        # mkstemp makes a file for its owner alone; a profile is made to be shared, as far as the umask allows.
        umask = os.umask(0)
        os.umask(umask)
        Path(file.name).chmod(0o666 & ~umask)
        Path(file.name).replace(target)
    except OSError as error:
        raise ProfileError(f"cannot write {target}: {error.strerror}", hint="choose another file") from None


def _kinds(node: NodeTopology) -> list[GpuProfile]:
    kinds = []
    for gpu in node.gpus:
        name = gpu.name or "of unknown name"
        kind = find_gpu(name, memory_total_bytes=gpu.memory_total_bytes)
        if kind is None:
            raise ProfileError(
                f"no profile describes GPU {gpu.index} ({name})",
                hint="write one (paraplan profiles show h100-sxm-80gb --json is a pattern) and name it with --gpu FILE",
            )
        kinds.append(kind)
    return kinds


def _network_of(node: NodeTopology) -> tuple[NetworkProfile | None, str | None]:
    rates = [nic.rate_bytes_per_s for nic in node.nics if nic.rate_bytes_per_s is not None]
    if not rates:
        return None, "network: the rates of the NICs are unknown; fill in network.nic_bandwidth_bytes_per_s"
    fastest = max(rates)
    network = NetworkProfile(
        name="network",
        title=f"{rates.count(fastest)} NICs as the machine reports them",
        nics_per_node=rates.count(fastest),
        nic_bandwidth_bytes_per_s=fastest,
        latency_s=ASSUMED_LATENCY_S,
        source=f"{node.source}; the latency is assumed",
    )
    return network, f"network.latency_s: assumed to be {ASSUMED_LATENCY_S:g} s; measure it"
