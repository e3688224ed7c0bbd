"""A cluster from the few words with which a table of runs describes its machines."""

from __future__ import annotations

import re
from itertools import combinations

from paraplan.errors import ProfileError, near_names
from paraplan.hardware.catalogue.profile_files import cluster_from_profile, list_gpus, load_machine, load_network
from paraplan.hardware.cluster import Cluster
from paraplan.hardware.profiles import GpuProfile, NetworkProfile
from paraplan.hardware.topology import Gpu, GpuLink, LinkType, NodeTopology
from paraplan.records import Record
from paraplan.units import GIB

_MEMORY = re.compile(r"(\d+)\s*gi?b", re.IGNORECASE)
_NIC_LATENCY_S = 5e-6
_GH200, _GH200_ON_BOARDS = "gh200-96gb", "gh200-quad-96gb"


class DescribedMachines(Record):
    """The machines of a run as a table describes them; None is unknown.

    `gpu` is a name such as `A100-80GB`; `link` names the links inside a node (`NVLink3 600GB/s`, `PCIe`), "" if
    unknown; `network_bits_per_s_per_gpu` is the rate of the NICs divided by the GPUs of a node; `network` names one of
    the bundled networks, which is taken instead; `cpu` is the model of the CPUs.
    """

    gpu: str
    num_gpus: int
    gpus_per_node: int | None = None
    link: str = ""
    network_bits_per_s_per_gpu: float | None = None
    network: str = ""


def gpu_by_label(label: str, gpus: list[GpuProfile] | None = None) -> GpuProfile:
    """Return the bundled kind of GPU that a label such as `A100-80GB` or `RTX4090-24GB` means.

    A name or an alias as it stands comes first: H20 is not the card with more memory. Of kinds with the same name the
    nearest in memory is taken. Raises `ProfileError` for a label that names none.
    """
    known = gpus if gpus is not None else list_gpus()
    plain_label = _hyphenated(label)
    for gpu in known:
        if plain_label in (gpu.name, *gpu.aliases, *map(_hyphenated, gpu.driver_names)):
            return gpu
    memory = _MEMORY.search(label)
    wanted = _key(label)
    found = [gpu for gpu in known if wanted in {_key(name) for name in (gpu.name, gpu.title, *gpu.aliases)}]
    if not found:
        # A100-SXM4, V100-SXM2: each generation has one SXM module.
        plain = re.sub(r"sxm\d?$", "", wanted)
        found = [gpu for gpu in known if plain in {_key(name) for name in (gpu.name, *gpu.aliases)}]
    if not found:
        raise ProfileError(
            f"no profile describes the GPU {label!r}", hint=near_names(label, [gpu.name for gpu in known])
        )
    if memory is None:
        return found[0]
    return min(found, key=lambda gpu: abs(gpu.memory_bytes - int(memory.group(1)) * GIB))


def described_cluster(machines: DescribedMachines, gpus: list[GpuProfile] | None = None) -> Cluster:
    """Return the cluster of a description.

    A node is what NVLink connects: of GB200 and GB300 up to a rack of 72. Assumed where the description is silent:
    8 GPUs a node, or the largest number below that divides all; NVLink between all GPUs of a node where the GPU has
    NVLink and the link is not said to be PCIe. V100 and P100 divide their links over their peers where no NVSwitch is
    named: eight stand as in the DGX-1, fewer give a third of their links to each of up to 3 peers. So do later GPUs
    that are said to be four a node: HGX boards of four have no NVSwitch. Four GH200 are those that share the power of
    a board. GPUs of AMD are linked as in the bundled machine that has them. Between nodes one NIC for each GPU, of the
    rate that its architecture usually has.
    """
    gpu = gpu_by_label(machines.gpu, gpus)
    usual = max(size for size in range(1, 9) if machines.num_gpus % size == 0)
    per_node = min(machines.gpus_per_node or usual, machines.num_gpus)
    is_rack = "nvl72" in gpu.title.lower() or gpu.name.startswith(("gb200", "gb300"))
    if is_rack:
        # A rack of 18 trays is one NVLink domain: the largest share of it that divides the ranks.
        per_node = max(size for size in range(1, 73) if machines.num_gpus % size == 0)
    is_board = machines.gpus_per_node == 4 and not is_rack
    if is_board and gpu.name == _GH200:
        gpu = gpu_by_label(_GH200_ON_BOARDS, gpus)
    num_nodes = max(1, machines.num_gpus // per_node)
    if num_nodes * per_node != machines.num_gpus:
        raise ProfileError(f"{machines.num_gpus} GPUs are no whole number of nodes of {per_node}")
    bits_per_s = machines.network_bits_per_s_per_gpu or gpu.shared.usual_network_bits_per_s
    described = NetworkProfile(
        name="described",
        title=f"{bits_per_s / 1e9:g} Gb/s per GPU",
        nics_per_node=per_node,
        nic_bandwidth_bytes_per_s=bits_per_s / 8,
        latency_s=_NIC_LATENCY_S,
        source="the description of the run",
    )
    network = load_network(machines.network) if machines.network else described
    return Cluster(
        name=machines.gpu,
        gpu=gpu,
        node=_node(gpu, per_node, machines.link, is_board=is_board),
        num_nodes=num_nodes,
        network=network if num_nodes > 1 else None,
    )


def _node(gpu: GpuProfile, count: int, link: str, *, is_board: bool) -> NodeTopology:
    words = link.lower()
    if gpu.vendor == "amd" and count > 1 and "pcie" not in words:
        return load_machine(f"{count}x{gpu.name}").node.replace(source="description")
    has_nvlink = bool(gpu.nvlink_count) and ("pcie" not in words or "nvlink" in words)
    pairs_only = "pair" in words or "bridge" in words
    shares = 1
    if has_nvlink and not pairs_only and (gpu.nvlink_generation or 3) <= 2 and "switch" not in words:
        if count == 8:
            cube = cluster_from_profile("dgx-1-v100" if gpu.nvlink_count == 6 else "dgx-1-p100").node
            return cube.replace(source="description")
        shares = 3 if count <= 4 else 1
    elif has_nvlink and is_board and "switch" not in words:
        shares = 3
    links = []
    for first, second in combinations(range(count), 2):
        joined = has_nvlink and (not pairs_only or first // 2 == second // 2)
        number = max(1, (gpu.nvlink_count or 0) // shares)
        links.append(
            GpuLink(
                gpu_a=first,
                gpu_b=second,
                link_type=LinkType.NV if joined else LinkType.NODE,
                nvlink_count=number if joined else None,
                bandwidth_bytes_per_s=number * (gpu.nvlink_bandwidth_bytes_per_s or 0) if joined else None,
            )
        )
    gpus = tuple(Gpu(index=index, memory_total_bytes=gpu.memory_bytes) for index in range(count))
    return NodeTopology(source="description", gpus=gpus, links=tuple(links))


def _hyphenated(name: str) -> str:
    return "-".join(name.lower().split())


def _key(name: str) -> str:
    key = re.sub(r"[^a-z0-9]", "", _MEMORY.sub("", name.lower()))
    return re.sub(r"^(nvidia|amd|tesla|geforce|instinct|dgx|hgx)+", "", key)
