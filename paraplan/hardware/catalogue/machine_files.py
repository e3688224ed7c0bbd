"""The compact form of a machine on disk, and its expansion into a `MachineProfile`."""

from __future__ import annotations

from itertools import combinations
from typing import Literal, Self

from pydantic import Field, model_validator

from paraplan.hardware.profiles import GpuProfile, MachineProfile, MeasuredCollective, NetworkProfile
from paraplan.hardware.topology import Gpu, GpuLink, LinkType, Nic, NodeTopology, PeerAccess
from paraplan.records import Record, SourceKind

MAX_GPUS = 256
"""More GPUs than any single machine or NVLink domain holds: a larger number in a file is a slip."""


class LinkRule(Record):
    """One kind of link and the sets of GPUs inside which every pair has it. `"all"` is the set of all GPUs.

    Of the rules of a machine the first that covers a pair decides its link, so nearer kinds stand first.
    Bandwidth is per direction; None takes it from the GPU's data sheet.
    """

    link_type: LinkType
    nvlink_count: int | None = Field(default=None, gt=0)
    bandwidth_bytes_per_s: float | None = Field(default=None, gt=0)
    groups: tuple[tuple[int, ...], ...] | Literal["all"] = "all"


class NicRule(Record):
    """A network interface. `near` lists GPUs by their link to it; all others are NODE or SYS by NUMA node.

    An unknown rate is that of the machine's network; an unknown NUMA node is that of the near GPUs if they agree.
    """

    name: str
    rate_bytes_per_s: float | None = Field(default=None, gt=0)
    numa_node: int | None = None
    near: dict[LinkType, tuple[int, ...]] = Field(default={})


class MachineFile(Record):
    """A machine as a file describes it, apart from its `gpu` and `network`, which the reader resolves first.

    `numa_nodes` lists the GPUs of each NUMA node. `gpus` replaces it where single GPUs are described (saved machines).
    """

    name: str = Field(min_length=1)
    title: str = ""
    aliases: tuple[str, ...] = ()
    num_gpus: int = Field(gt=0, le=MAX_GPUS)
    numa_nodes: dict[int, tuple[int, ...]] = Field(default={})
    gpus: tuple[Gpu, ...] = ()
    links: tuple[LinkRule, ...] = ()
    nics: tuple[NicRule, ...] = ()
    peer_access: tuple[PeerAccess, ...] = ()
    host_memory_bytes: int | None = Field(default=None, gt=0)
    cpu: str | None = None
    measured: tuple[MeasuredCollective, ...] = ()
    notes: tuple[str, ...] = ()
    source: str = ""
    source_kind: SourceKind | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.gpus and sorted(gpu.index for gpu in self.gpus) != list(range(self.num_gpus)):
            raise ValueError(f"gpus must describe GPU 0 to {self.num_gpus - 1}, each once, as num_gpus says")
        named = [gpu for group in self.numa_nodes.values() for gpu in group]
        if len(named) != len(set(named)):
            raise ValueError("numa_nodes names a GPU twice")
        for rule in self.links:
            if rule.groups != "all":
                named += [gpu for group in rule.groups for gpu in group]
        for nic in self.nics:
            named += [gpu for group in nic.near.values() for gpu in group]
        outside = sorted({gpu for gpu in named if not 0 <= gpu < self.num_gpus})
        if outside:
            raise ValueError(f"GPU {outside[0]} is named, but num_gpus={self.num_gpus} numbers them from 0")
        return self

    def expand(self, *, gpu: GpuProfile, network: NetworkProfile | None, source: str) -> MachineProfile:
        """Return the machine with one `Gpu`, `GpuLink` and `Nic` for each device; `source` says where it was read."""
        gpus = self.gpus or self._gpus(gpu)
        node = NodeTopology(
            source=source,
            gpus=gpus,
            links=self._links(gpu),
            nics=tuple(self._nic(rule, gpus, network) for rule in self.nics),
            peer_access=self.peer_access,
        )
        return MachineProfile(
            name=self.name,
            title=self.title or self.name,
            aliases=self.aliases,
            gpu=gpu,
            node=node,
            network=network,
            host_memory_bytes=self.host_memory_bytes,
            cpu=self.cpu,
            measured=self.measured,
            notes=self.notes,
            source=self.source or source,
            source_kind=self.source_kind,
        )

    def _gpus(self, gpu: GpuProfile) -> tuple[Gpu, ...]:
        numa_of = {index: numa for numa, group in self.numa_nodes.items() for index in group}
        share = gpu.memory_bytes
        if gpu.vendor == "cpu" and self.host_memory_bytes is not None:
            share = min(share, self.host_memory_bytes // self.num_gpus)
        return tuple(
            Gpu(
                index=index,
                name=gpu.title,
                memory_total_bytes=share,
                compute_capability=gpu.compute_capability,
                numa_node=numa_of.get(index),
            )
            for index in range(self.num_gpus)
        )

    def _links(self, gpu: GpuProfile) -> tuple[GpuLink, ...]:
        by_pair: dict[tuple[int, int], GpuLink] = {}
        for rule in self.links:
            groups = (tuple(range(self.num_gpus)),) if rule.groups == "all" else rule.groups
            bandwidth = rule.bandwidth_bytes_per_s or link_bandwidth(gpu, rule.link_type, rule.nvlink_count)
            for group in groups:
                for gpu_a, gpu_b in combinations(sorted(set(group)), 2):
                    if (gpu_a, gpu_b) not in by_pair:
                        by_pair[gpu_a, gpu_b] = GpuLink(
                            gpu_a=gpu_a,
                            gpu_b=gpu_b,
                            link_type=rule.link_type,
                            nvlink_count=rule.nvlink_count,
                            bandwidth_bytes_per_s=bandwidth,
                        )
        return tuple(by_pair[pair] for pair in sorted(by_pair))

    def _nic(self, rule: NicRule, gpus: tuple[Gpu, ...], network: NetworkProfile | None) -> Nic:
        link_of = {index: link for link, group in rule.near.items() for index in group}
        numa = rule.numa_node
        if numa is None:
            homes = {gpu.numa_node for gpu in gpus if gpu.index in link_of}
            numa = homes.pop() if len(homes) == 1 else None
        for gpu in gpus:
            if gpu.index not in link_of and numa is not None and gpu.numa_node is not None:
                link_of[gpu.index] = LinkType.NODE if gpu.numa_node == numa else LinkType.SYS
        rate = rule.rate_bytes_per_s
        if rate is None and network is not None:
            rate = network.nic_bandwidth_bytes_per_s
        return Nic(name=rule.name, rate_bytes_per_s=rate, numa_node=numa, gpu_links=dict(sorted(link_of.items())))


def link_bandwidth(gpu: GpuProfile, link_type: LinkType, nvlink_count: int | None) -> float | None:
    """Return the data sheet's bandwidth of a link between two GPUs of this kind, per direction; None if unknown."""
    if not link_type.is_fast:
        return gpu.pcie_bandwidth_bytes_per_s
    if nvlink_count is None or gpu.nvlink_bandwidth_bytes_per_s is None:
        return None
    return nvlink_count * gpu.nvlink_bandwidth_bytes_per_s


def compact_machine(machine: MachineProfile) -> MachineFile:
    """Return the form in which `machine` is saved: pairs with equal links share a rule.

    UUIDs and host names are left out: a profile is made to be shared, and they name one machine. Of CPU processes,
    which are all the same, there may be more or fewer than were saved.
    """
    if machine.gpu.vendor == "cpu":
        return MachineFile(
            name=machine.name,
            title=machine.title,
            aliases=machine.aliases,
            num_gpus=len(machine.node.gpus),
            links=(LinkRule(link_type=LinkType.NODE),),
            host_memory_bytes=machine.host_memory_bytes,
            cpu=machine.cpu,
            measured=machine.measured,
            notes=machine.notes,
            source=machine.source,
            source_kind=machine.source_kind,
        )
    pairs_of: dict[tuple[LinkType, int | None, float | None], list[tuple[int, int]]] = {}
    for link in machine.node.links:
        key = (link.link_type, link.nvlink_count, link.bandwidth_bytes_per_s)
        pairs_of.setdefault(key, []).append((link.gpu_a, link.gpu_b))
    return MachineFile(
        name=machine.name,
        title=machine.title,
        aliases=machine.aliases,
        num_gpus=len(machine.node.gpus),
        gpus=tuple(_without_identity(gpu) for gpu in machine.node.gpus),
        links=tuple(
            LinkRule(link_type=kind, nvlink_count=count, bandwidth_bytes_per_s=bandwidth, groups=tuple(pairs))
            for (kind, count, bandwidth), pairs in pairs_of.items()
        ),
        nics=tuple(
            NicRule(
                name=nic.name,
                rate_bytes_per_s=nic.rate_bytes_per_s,
                numa_node=nic.numa_node,
                near={
                    kind: tuple(gpu for gpu, link in nic.gpu_links.items() if link is kind)
                    for kind in dict.fromkeys(nic.gpu_links.values())
                },
            )
            for nic in machine.node.nics
        ),
        peer_access=machine.node.peer_access,
        host_memory_bytes=machine.host_memory_bytes,
        cpu=machine.cpu,
        measured=machine.measured,
        notes=machine.notes,
        source=machine.source,
        source_kind=machine.source_kind,
    )


def _without_identity(gpu: Gpu) -> Gpu:
    slices = tuple(instance.replace(uuid=None) for instance in gpu.mig_instances)
    return gpu.replace(uuid=None, memory_used_bytes=None, fabric_clique=None, mig_instances=slices)
