"""Tables in the shape of `nvidia-smi topo -m`, drawn for machines that exist only in these tests."""

from __future__ import annotations

from dataclasses import dataclass, field

LEGEND = """
Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)
  NODE = Connection traversing PCIe as well as the interconnect between PCIe Host Bridges within a NUMA node
  PHB  = Connection traversing PCIe as well as a PCIe Host Bridge (typically the CPU)
  PXB  = Connection traversing multiple PCIe bridges (without traversing the PCIe Host Bridge)
  PIX  = Connection traversing at most a single PCIe bridge
  NV#  = Connection traversing a bonded set of # NVLinks
"""


@dataclass
class SmiTable:
    """A table to print: words of GPU pairs, of GPU-NIC pairs, and the affinity columns of each GPU."""

    gpus: list[list[str]]
    nics: list[list[str]] = field(default_factory=list)
    affinity: list[tuple[str, ...]] = field(default_factory=list)
    columns: tuple[str, ...] = ("CPU Affinity", "NUMA Affinity", "GPU NUMA ID")

    def labels(self) -> list[str]:
        """Return the names of rows and columns."""
        return [f"GPU{number}" for number in range(len(self.gpus))] + [
            f"NIC{number}" for number in range(len(self.nics))
        ]

    def rows(self) -> list[list[str]]:
        """Return the words of each row, NIC rows last."""
        rows = [words + [nic[number] for nic in self.nics] for number, words in enumerate(self.gpus)]
        for number, nic in enumerate(self.nics):
            rows.append(nic + ["X" if other == number else "NODE" for other in range(len(self.nics))])
        return rows

    def with_tabs(self) -> str:
        """Return the text as nvidia-smi itself prints it."""
        header = "\t" + "\t".join(self.labels())
        if self.affinity:
            header += "\t" + "\t".join(self.columns)
        lines = [header]
        for number, (label, words) in enumerate(zip(self.labels(), self.rows(), strict=True)):
            line = label + "\t" + "\t".join(f" {word} " if word == "X" else word for word in words)
            if self.affinity and number < len(self.gpus):
                cpu, numa, *memory = self.affinity[number]
                line += f"\t{cpu}\t{numa}" + (f"\t\t{memory[0]}" if memory else "")
            lines.append(line)
        return "\n".join(lines) + "\n" + LEGEND

    def with_spaces(self) -> str:
        """Return the text as a terminal shows it: each tab runs to the next multiple of eight."""
        return self.with_tabs().expandtabs(8)

    def table_with_spaces(self) -> str:
        """Return the rows alone, without the legend."""
        return self.with_spaces().split("\nLegend")[0].rstrip("\n") + "\n"


def bridged_pairs(*, numa: bool = True) -> SmiTable:
    """Return four GPUs of which 0-3 and 1-2 have bridges of four links; the sockets are 0-1 and 2-3; two NICs."""
    gpus = [
        ["X", "NODE", "SYS", "NV4"],
        ["NODE", "X", "NV4", "SYS"],
        ["SYS", "NV4", "X", "NODE"],
        ["NV4", "SYS", "NODE", "X"],
    ]
    nics = [["PIX", "NODE", "SYS", "SYS"], ["SYS", "SYS", "NODE", "PXB"]]
    affinity = [("0-9,20-29", "0", "N/A")] * 2 + [("10-19,30-39", "1", "N/A")] * 2
    return SmiTable(gpus, nics, affinity if numa else [])


def switched(count: int, *, links: int = 18, nics: int = 0) -> SmiTable:
    """Return GPUs that NVSwitches join, half of them on each of two sockets."""
    gpus = [["X" if a == b else f"NV{links}" for b in range(count)] for a in range(count)]
    half = count // 2
    affinity = [(f"{16 * (a // half)}-{16 * (a // half) + 15}", str(a // half), "N/A") for a in range(count)]
    return SmiTable(gpus, [["PIX" if b == a % count else "SYS" for b in range(count)] for a in range(nics)], affinity)
