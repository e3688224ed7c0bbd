"""One machine: its GPUs, the links between them, its NICs. Readers make a `NodeTopology`; everything else asks it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import StrEnum
from functools import cached_property
from typing import Any

from pydantic import Field

from paraplan.records import Record


class LinkType(StrEnum):
    """How two devices of a machine reach each other, in the words of `nvidia-smi topo -m`, nearest first.

    `XGMI` is AMD's counterpart of `NV`, `MX` that of MetaX; `NV` carries its number of links beside it
    (`GpuLink.nvlink_count`).
    """

    NV = "NV"
    XGMI = "XGMI"
    MX = "MX"
    PIX = "PIX"
    PXB = "PXB"
    PHB = "PHB"
    NODE = "NODE"
    SYS = "SYS"

    @property
    def is_fast(self) -> bool:
        """True for links that bypass PCIe: NVLink, xGMI and their kin."""
        return self in (LinkType.NV, LinkType.XGMI, LinkType.MX)

    @property
    def distance(self) -> int:
        """Rank from 0 (NVLink) over 1 (other makers' direct links) and 2 (PIX) to 6 (across sockets)."""
        return _DISTANCES[self]


_DISTANCES = {
    LinkType.NV: 0,
    LinkType.XGMI: 1,
    LinkType.MX: 1,
    LinkType.PIX: 2,
    LinkType.PXB: 3,
    LinkType.PHB: 4,
    LinkType.NODE: 5,
    LinkType.SYS: 6,
}


class MigInstance(Record):
    """A slice of a GPU in MIG mode, as CUDA can be given it by UUID."""

    name: str | None = None
    uuid: str | None = None
    memory_total_bytes: int | None = None


class Gpu(Record):
    """One GPU as its driver reports it. What the driver did not say is None.

    `nvlink_count` counts the active NVLinks of the GPU, wherever they lead; `cpu_affinity` is a list of CPU ranges.
    `numa_node` is the node of the CPUs nearest to the GPU, `memory_numa_node` the one that its own memory forms
    (Grace Hopper). `fabric_clique` is the same for GPUs that NVSwitches join, also those of other machines.
    """

    index: int
    name: str | None = None
    uuid: str | None = None
    pci_bus_id: str | None = None
    memory_total_bytes: int | None = None
    memory_used_bytes: int | None = None
    compute_capability: str | None = None
    numa_node: int | None = None
    memory_numa_node: int | None = None
    cpu_affinity: str | None = None
    nvlink_count: int | None = None
    nvlink_version: int | None = None
    nvlink_to_cpu_count: int | None = None
    pcie_generation: int | None = None
    pcie_generation_max: int | None = None
    pcie_width: int | None = None
    pcie_width_max: int | None = None
    power_limit_w: float | None = None
    ecc_enabled: bool | None = None
    mig_enabled: bool | None = None
    mig_instances: tuple[MigInstance, ...] = ()
    fabric_clique: str | None = None


class GpuLink(Record):
    """The best link of an unordered pair of GPUs (`gpu_a < gpu_b`). Bandwidth is per direction."""

    gpu_a: int
    gpu_b: int
    link_type: LinkType
    nvlink_count: int | None = None
    bandwidth_bytes_per_s: float | None = None


class PeerAccess(Record):
    """Access of a pair of GPUs (`gpu_a < gpu_b`) to each other's memory, in the words of `nvidia-smi topo -p2p`.

    OK, NS (not supported), CNS (by the chipset), GNS (by the GPU), TNS (by the topology), DR (disabled by a registry
    key), U (unknown). `unnamed` is the status of a table that does not say which access it lists.
    """

    gpu_a: int
    gpu_b: int
    read: str | None = None
    write: str | None = None
    nvlink: str | None = None
    atomics: str | None = None
    pcie: str | None = None
    unnamed: str | None = None

    @property
    def is_allowed(self) -> bool | None:
        """True where one GPU may read or write the other's memory, None where no status says so or denies it."""
        statuses = {status for status in (self.read, self.write, self.unnamed) if status not in (None, "U")}
        return "OK" in statuses if statuses else None


class Nic(Record):
    """A network interface, its rate, and its way to each GPU (by index) and to each other NIC (by name)."""

    name: str
    rate_bytes_per_s: float | None = None
    numa_node: int | None = None
    gpu_links: dict[int, LinkType] = Field(default_factory=dict)
    nic_links: dict[str, LinkType] = Field(default_factory=dict)
    pci_bus_id: str | None = None
    kind: str | None = None
    state: str | None = None

    @property
    def pix_gpus(self) -> list[int]:
        """GPUs that share a single PCIe switch with this NIC."""
        return sorted(gpu for gpu, link in self.gpu_links.items() if link is LinkType.PIX)


class NodeTopology(Record):
    """The GPUs, links and NICs of one machine.

    `source` names the reader and what it read. `warnings` says what was missing or contradictory.
    A pair of GPUs without a `GpuLink` is one about which nothing is known.
    """

    source: str
    hostname: str | None = None
    driver_version: str | None = None
    gpus: tuple[Gpu, ...] = ()
    links: tuple[GpuLink, ...] = ()
    nics: tuple[Nic, ...] = ()
    warnings: tuple[str, ...] = ()
    cuda_version: str | None = None
    peer_access: tuple[PeerAccess, ...] = ()

    @cached_property
    def _link_by_pair(self) -> dict[tuple[int, int], GpuLink]:
        return {(link.gpu_a, link.gpu_b): link for link in self.links}

    @cached_property
    def most_nvlinks(self) -> int:
        """The most NVLinks that any GPU lists, over all its peers."""
        total = dict.fromkeys((gpu.index for gpu in self.gpus), 0)
        for link in self.links:
            if link.link_type is LinkType.NV:
                for gpu in {link.gpu_a, link.gpu_b} & total.keys():
                    total[gpu] += link.nvlink_count or 0
        return max(total.values(), default=0)

    def link(self, gpu_a: int, gpu_b: int) -> GpuLink | None:
        """Return the link of a pair of GPU indices in either order, None where nothing is known of it."""
        return self._link_by_pair.get((min(gpu_a, gpu_b), max(gpu_a, gpu_b)))

    def only(self, indices: Sequence[int]) -> NodeTopology:
        """Return the machine with the GPUs of `indices` alone, in that order and under their own indices."""
        by_index = {gpu.index: gpu for gpu in self.gpus}
        kept = set(indices)
        return self.replace(
            gpus=tuple(by_index[index] for index in indices),
            links=tuple(link for link in self.links if {link.gpu_a, link.gpu_b} <= kept),
            peer_access=tuple(pair for pair in self.peer_access if {pair.gpu_a, pair.gpu_b} <= kept),
            nics=tuple(
                nic.replace(gpu_links={gpu: link for gpu, link in nic.gpu_links.items() if gpu in kept})
                for nic in self.nics
            ),
        )

    def first(self, count: int) -> NodeTopology:
        """Return the machine with its first `count` GPUs and all of its NICs."""
        return self.only([gpu.index for gpu in self.gpus[:count]])

    @property
    def nvlink_islands(self) -> list[list[int]]:
        """Sets of two or more GPUs that NVLink or xGMI connects, directly or through others, by smallest index."""
        pairs = [(link.gpu_a, link.gpu_b) for link in self.links if link.link_type.is_fast]
        return [group for group in connected_groups([gpu.index for gpu in self.gpus], pairs) if len(group) > 1]

    @property
    def nvlink_all_to_all(self) -> bool:
        """True where there are two or more GPUs and every pair has its own NVLink or xGMI link."""
        count = len(self.gpus)
        fast = sum(link.link_type.is_fast for link in self.links)
        return count > 1 and fast == count * (count - 1) // 2

    @property
    def numa_groups(self) -> dict[int, list[int]]:
        """GPU indices by NUMA node; GPUs of unknown NUMA node are left out."""
        groups: dict[int, list[int]] = {}
        for gpu in self.gpus:
            if gpu.numa_node is not None:
                groups.setdefault(gpu.numa_node, []).append(gpu.index)
        return dict(sorted(groups.items()))

    def to_report(self) -> dict[str, Any]:
        """Return the JSON object that `paraplan topo --json` prints."""
        return {
            "source": self.source,
            "hostname": self.hostname,
            "driver_version": self.driver_version,
            "gpus": [gpu.model_dump() for gpu in self.gpus],
            "links": [link.model_dump(mode="json") for link in self.links],
            "nvlink_islands": self.nvlink_islands,
            "numa_groups": {str(node): gpus for node, gpus in self.numa_groups.items()},
            "nics": [
                {"name": nic.name, "pix_gpus": nic.pix_gpus} | nic.model_dump(mode="json", exclude={"name"})
                for nic in self.nics
            ],
            "nvlink_all_to_all": self.nvlink_all_to_all,
            "cuda_version": self.cuda_version,
            "peer_access": [pair.model_dump() for pair in self.peer_access],
            "warnings": list(self.warnings),
        }


def connected_groups(members: Iterable[int], pairs: Iterable[tuple[int, int]]) -> list[list[int]]:
    """Return the connected components of a graph, each sorted, in the order of their smallest member."""
    leader = {member: member for member in members}

    def find(member: int) -> int:
        while leader[member] != member:
            leader[member] = leader[leader[member]]
            member = leader[member]
        return member

    for first, second in pairs:
        if first in leader and second in leader:
            low, high = sorted((find(first), find(second)))
            leader[high] = low
    groups: dict[int, list[int]] = {}
    for member in sorted(leader):
        groups.setdefault(find(member), []).append(member)
    return [groups[low] for low in sorted(groups)]
