"""Links between pairs of GPUs from the output of AMD's tools."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from paraplan.hardware.pci import normal_bus_id
from paraplan.hardware.topology import Gpu, GpuLink, LinkType, NodeTopology, PeerAccess

MAX_GPUS = 256

_WEIGHT_OF_XGMI = 15
"""ROCm gives each xGMI hop this weight, and 20 to each PCIe segment and more to a link between CPUs."""

_WEIGHT_WITHIN_A_SOCKET = 40


@dataclass
class PairEvidence:
    """Cells of the tables about one pair: link type as printed, weight, hops, MB/s, whether access is enabled."""

    type_word: str | None = None
    weight: int | None = None
    hops: int | None = None
    megabytes_per_s: int | None = None
    access: str | None = None


@dataclass
class AmdMachine:
    """Everything that was found of a machine: values of each GPU by index, and the evidence for each pair."""

    gpus: dict[int, dict[str, str]] = field(default_factory=dict)
    pairs: dict[tuple[int, int], PairEvidence] = field(default_factory=dict)
    driver_version: str | None = None
    warnings: list[str] = field(default_factory=list)

    def add_gpu(self, index: int, **values: str) -> None:
        """Note a GPU, and values of it that were not known before; indices beyond any machine are ignored."""
        if 0 <= index < MAX_GPUS:
            known = self.gpus.setdefault(index, {})
            for name, value in values.items():
                known.setdefault(name, value)

    def add_cell(self, row: int, column: int, *, kind: str, text: str) -> None:
        """Note a cell of a table of a `kind` (the names of PairEvidence's fields); the diagonal is ignored."""
        if row == column or row not in self.gpus or column not in self.gpus:
            return
        evidence = self.pairs.setdefault((min(row, column), max(row, column)), PairEvidence())
        if kind in ("weight", "hops") and re.fullmatch(r"\d{1,6}", text):
            setattr(evidence, kind, int(text))
        elif kind == "megabytes_per_s" and (found := re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", text)):
            evidence.megabytes_per_s = int(found[2] or found[1])
        elif kind == "access" and text in ("ENABLED", "DISABLED"):
            evidence.access = text
        elif kind == "type_word" and re.fullmatch(r"XGMI|PCIE|XXXX", text):
            evidence.type_word = text

    def topology(self, source: str) -> NodeTopology:
        """Return the machine; `source` names what it was read from."""
        return NodeTopology(
            source=source,
            driver_version=self.driver_version,
            gpus=self.make_gpus(),
            links=self.make_links(),
            peer_access=self.make_peer_access(),
            warnings=tuple(dict.fromkeys(self.warnings)),
        )

    def make_gpus(self) -> tuple[Gpu, ...]:
        """Return the GPUs by index."""
        return tuple(_make_gpu(index, values) for index, values in sorted(self.gpus.items()))

    def make_links(self) -> tuple[GpuLink, ...]:
        """Return the link of each pair for which there is enough evidence, and warn of the others."""
        links = []
        unclear = 0
        routed = self._routed_pairs()
        for (first, second), evidence in sorted(self.pairs.items()):
            link_type = LinkType.SYS if (first, second) in routed else link_type_of(evidence)
            if link_type is None:
                unclear += evidence.type_word is not None or evidence.hops is not None
                continue
            rate = evidence.megabytes_per_s * 1e6 if evidence.megabytes_per_s else None
            links.append(
                GpuLink(
                    gpu_a=first,
                    gpu_b=second,
                    link_type=link_type,
                    bandwidth_bytes_per_s=rate if link_type is LinkType.XGMI else None,
                )
            )
        if unclear:
            self.warnings.append(f"the tables do not say what links {unclear} pairs of GPUs")
        if routed:
            self.warnings.append(
                f"{len(routed)} of {len(self.pairs)} pairs of GPUs are called XGMI, but no link joins them (bandwidth "
                "0, or a weight above that of one hop): they count as not linked"
            )
        return tuple(links)

    def _routed_pairs(self) -> set[tuple[int, int]]:
        """Return the pairs that the tools call XGMI, and whose traffic goes through other GPUs or the host.

        Where some pair of the machine has a bandwidth, or the weight or hops of one link, a pair with none, or with
        more of them, has no link of its own (ROCm/rocm-systems issue 5763). Where all are alike, they tell nothing.
        """
        named = {pair: evidence for pair, evidence in self.pairs.items() if link_type_of(evidence) is LinkType.XGMI}
        rates = any(evidence.megabytes_per_s for evidence in named.values())
        weights = any(evidence.weight == _WEIGHT_OF_XGMI for evidence in named.values())
        hops = any(evidence.hops == 1 for evidence in named.values())
        return {
            pair
            for pair, evidence in named.items()
            if (rates and evidence.megabytes_per_s == 0)
            or (weights and (evidence.weight or 0) > _WEIGHT_OF_XGMI)
            or (hops and (evidence.hops or 0) > 1)
        }

    def make_peer_access(self) -> tuple[PeerAccess, ...]:
        """Return the pairs of which a table says whether access is enabled."""
        return tuple(
            PeerAccess(gpu_a=first, gpu_b=second, unnamed="OK" if evidence.access == "ENABLED" else "NS")
            for (first, second), evidence in sorted(self.pairs.items())
            if evidence.access
        )


def link_type_of(evidence: PairEvidence) -> LinkType | None:
    """Return the kind of link that the cells of a pair mean, None where they leave it open.

    A printed type comes first. PCIe with a weight up to 40, or two hops, stays below one CPU; beyond it crosses
    sockets. Without a type, the weight of one xGMI hop tells xGMI; hops alone tell nothing, for the tools print one
    hop also between GPUs of a hive that no link joins.
    """
    if evidence.type_word == "XGMI":
        return LinkType.XGMI
    if evidence.type_word == "XXXX":
        return None
    if evidence.type_word is None and evidence.weight == _WEIGHT_OF_XGMI:
        return LinkType.XGMI
    if evidence.weight:
        return LinkType.PHB if evidence.weight <= _WEIGHT_WITHIN_A_SOCKET else LinkType.SYS
    if evidence.hops and evidence.type_word == "PCIE":
        return LinkType.PHB if evidence.hops <= 2 else LinkType.SYS
    return LinkType.PHB if evidence.type_word == "PCIE" else None


def _make_gpu(index: int, values: dict[str, str]) -> Gpu:
    node = values.get("numa_node", "")
    memory = values.get("memory_bytes", "")
    used = values.get("memory_used_bytes", "")
    return Gpu(
        index=index,
        name=values.get("name"),
        uuid=values.get("uuid"),
        pci_bus_id=normal_bus_id(values.get("bus_id", "")),
        numa_node=int(node) if re.fullmatch(r"\d{1,4}", node) else None,
        memory_total_bytes=int(memory) if re.fullmatch(r"\d{1,15}", memory) else None,
        memory_used_bytes=int(used) if re.fullmatch(r"\d{1,15}", used) else None,
    )
