"""Pairs of GPUs by NVML: NVLinks between them, their common ancestor on PCIe, and peer access."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

from paraplan.hardware.architecture import LinkRates
from paraplan.hardware.probe.nvml_gpus import SeenGpu
from paraplan.hardware.probe.nvml_queries import Questions
from paraplan.hardware.topology import GpuLink, LinkType, PeerAccess

# nvml.h, nvmlGpuTopologyLevel_t. Internal is two GPUs on one board, behind the board's own switch.
_LEVELS = {
    0: LinkType.PIX,
    10: LinkType.PIX,
    20: LinkType.PXB,
    30: LinkType.PHB,
    40: LinkType.NODE,
    50: LinkType.SYS,
}

# nvml.h, nvmlGpuP2PCapsIndex_t and nvmlGpuP2PStatus_t.
_PEER_QUESTIONS = {"read": 0, "write": 1, "nvlink": 2, "atomics": 3, "pcie": 4}
_PEER_STATUSES = {0: "OK", 1: "CNS", 2: "GNS", 3: "TNS", 4: "DR", 5: "NS", 6: "U"}


def read_links(ask: Questions, seen: list[SeenGpu]) -> tuple[GpuLink, ...]:
    """Return the best link of each pair: NVLinks, direct or through NVSwitches, else the common ancestor on PCIe.

    Links that lead to no GPU of the list, and links that are down, are said in the warnings.
    """
    by_bus_id = {one.gpu.pci_bus_id: one for one in seen if one.gpu.pci_bus_id}
    for one in seen:
        hidden = sum(count for bus_id, count in one.nvlinks.to_bus_id.items() if bus_id not in by_bus_id)
        if hidden:
            ask.note(f"GPU {one.gpu.index} has {hidden} NVLinks to devices that are not visible here")
        if one.nvlinks.to_unknown:
            ask.note(f"GPU {one.gpu.index} has {one.nvlinks.to_unknown} NVLinks to unknown ends")
        if one.nvlinks.active and one.nvlinks.inactive:
            ask.note(f"GPU {one.gpu.index} has {one.nvlinks.inactive} NVLinks that are down or unused")
    rates = LinkRates()
    return tuple(
        link for first, second in combinations(seen, 2) if (link := _read_link(ask, first, second, rates)) is not None
    )


def _read_link(ask: Questions, first: SeenGpu, second: SeenGpu, of_link: LinkRates) -> GpuLink | None:
    pair = {"gpu_a": first.gpu.index, "gpu_b": second.gpu.index}
    count = _count_nvlinks(first, second)
    if count:
        rates = [
            of_link.nvlink(name=one.gpu.name, compute_capability=one.gpu.compute_capability) for one in (first, second)
        ]
        known = [rate for rate in rates if rate is not None]
        rate = min(known) * count if len(known) == 2 else None
        return GpuLink(link_type=LinkType.NV, nvlink_count=count, bandwidth_bytes_per_s=rate, **pair)
    level = ask.gpu(
        first.gpu.index,
        "common ancestor",
        "nvmlDeviceGetTopologyCommonAncestor",
        first.handle,
        second.handle,
    )
    link_type = _LEVELS.get(level) if level is not None else None
    return GpuLink(link_type=link_type, **pair) if link_type else None


def _count_nvlinks(first: SeenGpu, second: SeenGpu) -> int:
    """Return the number of NVLinks of a pair: the direct ones, or as many as both have to NVSwitches."""
    direct = max(
        first.nvlinks.to_bus_id[second.gpu.pci_bus_id or ""], second.nvlinks.to_bus_id[first.gpu.pci_bus_id or ""]
    )
    cliques = {first.gpu.fabric_clique, second.gpu.fabric_clique}
    if direct or (None not in cliques and len(cliques) == 2):
        return direct
    return min(first.nvlinks.to_switch, second.nvlinks.to_switch)


def read_peer_access(ask: Questions, seen: list[SeenGpu]) -> tuple[PeerAccess, ...]:
    """Return for each pair whether one GPU may read, write and use atomics on the other, over NVLink and over PCIe."""
    return tuple(
        PeerAccess.model_validate(
            {"gpu_a": first.gpu.index, "gpu_b": second.gpu.index, **dict(_read_statuses(ask, first, second))}
        )
        for first, second in combinations(seen, 2)
    )


def _read_statuses(ask: Questions, first: SeenGpu, second: SeenGpu) -> Iterator[tuple[str, str]]:
    for name, number in _PEER_QUESTIONS.items():
        status = ask.gpu(
            first.gpu.index,
            f"peer access ({name})",
            "nvmlDeviceGetP2PStatus",
            first.handle,
            second.handle,
            number,
            absent_is_normal=True,
        )
        if status in _PEER_STATUSES:
            yield name, _PEER_STATUSES[status]
