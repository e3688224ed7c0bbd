"""Machines: those of a profile, of a saved topology, or this one."""

from __future__ import annotations

from pathlib import Path

from paraplan.errors import UsageError
from paraplan.hardware.catalogue.composed_machines import LinkKind as LinkKind
from paraplan.hardware.cluster import Cluster
from paraplan.hardware.topology import NodeTopology
from paraplan.units import format_bytes


def load_cluster(
    source: str | Path | None = None,
    *,
    num_nodes: int | None = None,
    gpus_per_node: int | None = None,
    network: str | None = None,
    link: LinkKind | None = None,
    host_memory_bytes: int | None = None,
) -> Cluster:
    """Return `num_nodes` machines of one kind, one by default, of each the first `gpus_per_node` GPUs (or all).

    `source` is the name of a profile (`dgx-h100`), the path of one, a number of GPUs of a kind (`8xh100`, which `link`
    connects; `32xh100` are 4 machines of 8), or None for this machine. `network` names the network between machines,
    `host_memory_bytes` is the memory of each of them where that is not the profile's. Raises `ProfileError` for a
    profile that does not exist or cannot be read, and `NoGpuError` where this machine has no GPU.
    """
    if source is not None:
        from paraplan.hardware.catalogue.profile_files import cluster_from_profile

        cluster = cluster_from_profile(
            str(source), num_nodes=num_nodes, gpus_per_node=gpus_per_node, network=network, link=link
        )
    else:
        from paraplan.hardware.probe.this_machine import cluster_of_this_machine

        cluster = cluster_of_this_machine(num_nodes=num_nodes or 1, gpus_per_node=gpus_per_node)
    if host_memory_bytes is None:
        return cluster
    from paraplan.hardware.profile_json import PLAUSIBLE

    least, most = (int(limit) for limit in PLAUSIBLE["host_memory_bytes"])
    if cluster.gpu.vendor == "cpu":
        raise UsageError(
            "--host-memory is of machines with GPUs: CPU processes share their host's", hint="leave it out"
        )
    if not least <= host_memory_bytes <= most:
        limits = f"{format_bytes(least)} to {format_bytes(most)}"
        raise UsageError(f"--host-memory={format_bytes(host_memory_bytes)} is not within {limits}", hint="say 128GiB")
    return cluster.replace(host_memory_bytes=host_memory_bytes)


def load_cluster_for(
    num_ranks: int,
    source: str | Path | None = None,
    *,
    num_nodes: int | None = None,
    gpus_per_node: int | None = None,
    network: str | None = None,
    link: LinkKind | None = None,
    host_memory_bytes: int | None = None,
) -> Cluster:
    """Return the machines of `load_cluster`, by default as many as `num_ranks` ranks need."""
    cluster = load_cluster(
        source,
        num_nodes=num_nodes,
        gpus_per_node=gpus_per_node,
        network=network,
        link=link,
        host_memory_bytes=host_memory_bytes,
    )
    if num_nodes is not None or num_ranks <= cluster.num_gpus:
        return cluster
    return cluster.replace(num_nodes=-(-num_ranks // cluster.gpus_per_node))


def probe_topology() -> NodeTopology:
    """Return the GPUs, links and network interfaces of this machine, as its driver and sysfs tell them.

    Raises `NoGpuError` where there is no GPU or no driver to ask.
    """
    from paraplan.hardware.probe.nvml import read_this_machine

    return read_this_machine()


def read_topology(text: str, *, source: str = "text") -> NodeTopology:
    """Return the topology of a text: `nvidia-smi topo -m`, an NCCL XML, `rocm-smi --showtopo`, or paraplan's JSON.

    `source` names the text in errors. Raises `TopologyError` for a text that describes no topology.
    """
    from paraplan.hardware.readers.any_text import read_topology as read

    return read(text, source=source)
