"""How `paraplan topo` looks on a terminal: GPU table, link matrix, islands, NUMA nodes, NICs; or a tree."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from paraplan.api.profiles import LinkType, connected_groups, gpu_nics
from paraplan.cli.gpu_states import state_table
from paraplan.cli.known_columns import MOST_ALIKE, UNKNOWN, known_columns
from paraplan.cli.terminal import make_console
from paraplan.units import format_bandwidth, format_bytes

if TYPE_CHECKING:
    from paraplan.hardware.interconnect import InterconnectReport, Verdict
    from paraplan.hardware.probe.cuda_devices import CudaView
    from paraplan.hardware.survey import MachineSurvey
    from paraplan.hardware.topology import Gpu, GpuLink, Nic, NodeTopology

_STYLES = {
    LinkType.NV: "green",
    LinkType.XGMI: "green",
    LinkType.MX: "green",
    LinkType.PIX: "cyan",
    LinkType.PXB: "cyan",
    LinkType.PHB: "yellow",
    LinkType.NODE: "yellow",
    LinkType.SYS: "red",
}

_MEANINGS = {
    LinkType.NV: "NVLinks and their number",
    LinkType.XGMI: "AMD xGMI",
    LinkType.MX: "MetaXLink",
    LinkType.PIX: "one PCIe switch",
    LinkType.PXB: "several PCIe switches",
    LinkType.PHB: "a PCIe host bridge (CPU)",
    LinkType.NODE: "host bridges of one NUMA node",
    LinkType.SYS: "across NUMA nodes",
}


def print_topology(survey: MachineSurvey, console: Console | None = None) -> None:
    """Print a machine as tables. Columns about which nothing is known are left out."""
    console = console or make_console()
    node = survey.node
    console.print(_title(node), soft_wrap=True)
    console.print()
    console.print(_gpu_table(node, survey.cuda))
    if survey.states:
        console.print()
        console.print(state_table(survey.states))
    if (whole := _uniform_links(node)) is not None:
        console.print(f"\n{whole}")
    elif len(node.gpus) > 1 and node.links:
        for block in _matrix_blocks(node, console.width):
            console.print()
            console.print(block)
        console.print(_legend(node), style="dim")
    if node.nics:
        console.print()
        console.print(_nic_table(node.nics))
    console.print()
    lines = [*describe_links(node), *_peer_lines(node), *_numa_lines(node), *interconnect_lines(survey.interconnect)]
    for line in [*lines, *shared_nic_lines(node)]:
        console.print(line)
    for note in survey.cuda.notes if survey.cuda else ():
        console.print(f"CUDA: {note}")


def print_tree(survey: MachineSurvey, console: Console | None = None) -> None:
    """Print a machine as a tree: NUMA nodes, the PCIe switches in them, GPUs and NICs."""
    console = console or make_console()
    node = survey.node
    tree = Tree(_title(node))
    homes: list[int | None] = [*node.numa_groups]
    if any(gpu.numa_node is None for gpu in node.gpus):
        homes.append(None)
    placed = {nic.name: _home(nic, node) for nic in node.nics}
    homes.extend(sorted({home for home in placed.values() if home is not None} - set(homes)))
    if None in placed.values() and None not in homes:
        homes.append(None)
    for home in homes:
        gpus = [gpu for gpu in node.gpus if gpu.numa_node == home]
        nics = [nic for nic in node.nics if placed[nic.name] == home]
        branch = tree.add(f"NUMA {home}" if home is not None else "NUMA node unknown")
        _add_switches(branch, node, gpus, nics)
    console.print(tree)
    for line in describe_links(node):
        console.print(line)


def describe_links(node: NodeTopology) -> list[str]:
    """Return sentences about the links that bypass PCIe: which GPUs they join, how many links, how fast."""
    if len(node.gpus) < 2:
        return []
    islands = node.nvlink_islands
    if not islands:
        fast = "no NVLink between GPUs" if node.links else "nothing is known of the links between GPUs"
        return [f"Links: {fast}"]
    inside = {
        tuple(island): [link for link in node.links if {link.gpu_a, link.gpu_b} <= set(island)] for island in islands
    }
    lines = []
    for island, links in inside.items():
        fast_links = [link for link in links if link.link_type.is_fast]
        whole = len(fast_links) == len(island) * (len(island) - 1) // 2
        manner = "each pair linked" if whole else "partial mesh: not each pair linked"
        lines.append(f"Island: GPU {list_ranges(island)}, {manner}{_rates(fast_links)}")
    alone = sorted({gpu.index for gpu in node.gpus} - {gpu for island in islands for gpu in island})
    if alone:
        lines.append(f"Without fast links: GPU {list_ranges(alone)}")
    return lines


def _uniform_links(node: NodeTopology) -> str | None:
    """Return the links of more than 16 GPUs in a sentence where all pairs have the same, else None."""
    count = len(node.gpus)
    if count <= MOST_ALIKE or len(node.links) != count * (count - 1) // 2 or _has_gpu_links(node):
        return None
    words = {_link_word(link) for link in node.links}
    kinds = {link.link_type for link in node.links}
    return f"Each pair of the {count} GPUs: {words.pop()} ({_MEANINGS[kinds.pop()]})" if len(words) == 1 else None


_DENIED = {
    "NS": "not supported",
    "CNS": "not supported by the chipset",
    "GNS": "not supported by the GPU",
    "TNS": "not supported over this topology",
    "DR": "disabled by a registry key",
    "OK": "allowed",
}
"""Words of `nvidia-smi topo -p2p` for a pair without peer access."""


def _peer_lines(node: NodeTopology) -> list[str]:
    """Return which pairs may read and write each other's memory, by what the driver says of it."""
    pairs: dict[str, list[str]] = {}
    for one in node.peer_access:
        denied = [status for status in (one.read, one.write, one.unnamed) if status not in (None, "OK", "U")]
        if one.is_allowed is not None:
            words = _DENIED.get(denied[0], denied[0]) if denied and not one.is_allowed else "allowed"
            pairs.setdefault(words, []).append(f"{one.gpu_a}-{one.gpu_b}")
    total = sum(map(len, pairs.values()))
    if len(pairs) == 1:
        return [f"Peer access (P2P): {next(iter(pairs))} for {'all pairs' if total > 1 else 'the pair'}"]
    return [f"Peer access (P2P): {words} for GPU pairs {', '.join(names)}" for words, names in pairs.items()]


def _numa_lines(node: NodeTopology) -> list[str]:
    return [f"NUMA {numa_node}: GPU {list_ranges(gpus)}" for numa_node, gpus in node.numa_groups.items()]


def interconnect_lines(report: InterconnectReport | None) -> list[str]:
    """Return the verdicts on the links inside a node and between nodes, and what is worth a word about them."""
    if report is None:
        return []
    verdicts = {"Links in the node": report.node, "Network": report.network}
    return [_verdict_line(name, verdict) for name, verdict in verdicts.items() if verdict is not None] + [
        f"Note: {remark}" for remark in report.remarks
    ]


def shared_nic_lines(node: NodeTopology) -> list[str]:
    """Return which GPUs have the same nearest NICs, and what each is left of them when all send at once."""
    users: dict[tuple[str, ...], list[int]] = {}
    entries = gpu_nics(node)
    for entry in entries:
        if entry.shared_with:
            users.setdefault(entry.nics, []).append(entry.gpu)
    share_of = {entry.gpu: entry.share_bytes_per_s for entry in entries}
    lines = []
    for nics, gpus in users.items():
        share = share_of[gpus[0]]
        each = "" if share is None else f", {format_bandwidth(share)} per direction for each"
        lines.append(f"Shared NIC: GPU {list_ranges(gpus)} use {', '.join(nics)}{each}")
    return lines


def _verdict_line(name: str, verdict: Verdict) -> str:
    return f"{name}: {'fast' if verdict.is_fast else 'slow'}, {verdict.because}"


def list_ranges(numbers: Iterable[int]) -> str:
    """Return numbers as ranges: `0-3,6`."""
    ranges: list[list[int]] = []
    for number in sorted(numbers):
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)


def _title(node: NodeTopology) -> str:
    parts = [node.hostname or node.source, _counted(len(node.gpus), "GPU")]
    if node.driver_version:
        parts.append(f"driver {node.driver_version}")
    if node.cuda_version:
        parts.append(f"CUDA {node.cuda_version}")
    return ", ".join(parts)


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _gpu_table(node: NodeTopology, cuda: CudaView | None) -> Table:
    near = {entry.gpu: entry.nics for entry in gpu_nics(node)}
    columns: dict[str, Callable[[Gpu], str | None]] = {
        "GPU": lambda gpu: str(gpu.index),
        "CUDA": lambda gpu: _cuda_index(gpu, cuda),
        "name": lambda gpu: gpu.name,
        "memory": lambda gpu: None if gpu.memory_total_bytes is None else format_bytes(gpu.memory_total_bytes),
        "used": lambda gpu: None if gpu.memory_used_bytes is None else format_bytes(gpu.memory_used_bytes),
        "cc": lambda gpu: gpu.compute_capability,
        "PCI": lambda gpu: gpu.pci_bus_id,
        "PCIe": _pcie,
        "links": lambda gpu: None if gpu.nvlink_count is None else str(gpu.nvlink_count),
        "MIG": lambda gpu: f"{len(gpu.mig_instances)} slices" if gpu.mig_enabled else None,
        "NUMA": lambda gpu: None if gpu.numa_node is None else str(gpu.numa_node),
        "CPUs": lambda gpu: gpu.cpu_affinity,
        "nearest NIC": lambda gpu: _few(near.get(gpu.index, ())),
    }
    return known_columns(columns, node.gpus)


def _few(names: Sequence[str]) -> str | None:
    """Return the first of some names and how many follow, None for none."""
    return None if not names else names[0] if len(names) == 1 else f"{names[0]} +{len(names) - 1}"


def _cuda_index(gpu: Gpu, cuda: CudaView | None) -> str | None:
    """Return the number under which CUDA shows a GPU, `-` for one that it hides, None where CUDA was not asked."""
    if cuda is None:
        return None
    index = cuda.cuda_index(gpu.index)
    return "-" if index is None else str(index)


def _nic_table(nics: tuple[Nic, ...]) -> Table:
    numbers = {nic.name: f"NIC{number}" for number, nic in enumerate(nics)}
    columns: dict[str, Callable[[Nic], str | None]] = {
        "NIC": lambda nic: numbers[nic.name],
        "name": lambda nic: None if nic.name == numbers[nic.name] else nic.name,
        "kind": lambda nic: nic.kind,
        "state": lambda nic: nic.state,
        "rate": lambda nic: None if nic.rate_bytes_per_s is None else f"{nic.rate_bytes_per_s * 8 / 1e9:g} Gb/s",
        "NUMA": lambda nic: None if nic.numa_node is None else str(nic.numa_node),
        "nearest GPUs": _nearest_gpus,
    }
    return known_columns(columns, nics)


def _pcie(gpu: Gpu) -> str | None:
    if gpu.pcie_generation_max is None or gpu.pcie_width_max is None:
        return None
    at_most = f"{gpu.pcie_generation_max} x{gpu.pcie_width_max}"
    if gpu.pcie_width is not None and gpu.pcie_width < gpu.pcie_width_max:
        return f"{at_most} (now x{gpu.pcie_width})"
    return at_most


def _nearest_gpus(nic: Nic) -> str | None:
    if not nic.gpu_links:
        return None
    nearest = min(nic.gpu_links.values(), key=lambda link: link.distance)
    return f"{nearest} {list_ranges(gpu for gpu, link in nic.gpu_links.items() if link is nearest)}"


def _matrix_blocks(node: NodeTopology, width: int) -> list[Table]:
    """Return the link matrix in as many tables side by side as the width of the terminal makes necessary."""
    gpus = [gpu.index for gpu in node.gpus]
    per_block = max(1, (width - 6) // 6)
    names = {nic.name: f"NIC{number}" for number, nic in enumerate(node.nics)} if _has_gpu_links(node) else {}
    columns: list[int | str] = [*gpus, *names]
    blocks = []
    for start in range(0, len(columns), per_block):
        table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1, 0, 0))
        table.add_column("", no_wrap=True, min_width=5)
        for column in columns[start : start + per_block]:
            table.add_column(f"GPU{column}" if isinstance(column, int) else names[column], no_wrap=True, min_width=5)
        for gpu in gpus:
            cells = [_cell(node, gpu, column) for column in columns[start : start + per_block]]
            table.add_row(Text(f"GPU{gpu}", style="bold"), *cells)
        blocks.append(table)
    return blocks


def _has_gpu_links(node: NodeTopology) -> bool:
    return any(nic.gpu_links for nic in node.nics)


def _cell(node: NodeTopology, gpu: int, column: int | str) -> Text:
    if column == gpu:
        return Text("X", style="dim")
    if isinstance(column, str):
        link_type = next(nic.gpu_links.get(gpu) for nic in node.nics if nic.name == column)
        return Text(link_type or UNKNOWN, style=_STYLES[link_type] if link_type else "")
    link = node.link(gpu, column)
    return Text(_link_word(link) if link else UNKNOWN, style=_STYLES[link.link_type] if link else "")


def _link_word(link: GpuLink) -> str:
    has_count = link.link_type is LinkType.NV and link.nvlink_count
    return f"{link.link_type}{link.nvlink_count}" if has_count else str(link.link_type)


def _legend(node: NodeTopology) -> str:
    used = {link.link_type for link in node.links} | {link for nic in node.nics for link in nic.gpu_links.values()}
    return "; ".join(f"{kind}: {_MEANINGS[kind]}" for kind in LinkType if kind in used)


def _rates(links: list[GpuLink]) -> str:
    counts = sorted({link.nvlink_count for link in links if link.nvlink_count})
    rates = sorted({link.bandwidth_bytes_per_s for link in links if link.bandwidth_bytes_per_s})
    words = ""
    if counts:
        span = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
        words += f", {span} {'link' if counts == [1] else 'links'} a pair"
    if rates:
        low, high = format_bandwidth(rates[0]), format_bandwidth(rates[-1])
        words += f", {low if low == high else f'{low} to {high}'} per direction"
    return words


def _home(nic: Nic, node: NodeTopology) -> int | None:
    """Return the NUMA node of a NIC: its own, or that of the GPUs that are nearer to it than all others."""
    if nic.numa_node is not None or not nic.gpu_links:
        return nic.numa_node
    nearest = min(nic.gpu_links.values(), key=lambda link: link.distance)
    if nearest is LinkType.SYS:
        return None
    near = {gpu.numa_node for gpu in node.gpus if nic.gpu_links.get(gpu.index) is nearest}
    return near.pop() if len(near) == 1 else None


def _add_switches(branch: Tree, node: NodeTopology, gpus: list[Gpu], nics: list[Nic]) -> None:
    """Add the devices of a NUMA node, those that share a PCIe switch under one branch."""
    gpu_number = {gpu.index: number for number, gpu in enumerate(gpus)}
    nic_number = {nic.name: len(gpus) + number for number, nic in enumerate(nics)}
    pairs = [
        (gpu_number[link.gpu_a], gpu_number[link.gpu_b])
        for link in node.links
        if link.link_type is LinkType.PIX and link.gpu_a in gpu_number and link.gpu_b in gpu_number
    ]
    for nic in nics:
        pairs += [(nic_number[nic.name], gpu_number[gpu]) for gpu in nic.pix_gpus if gpu in gpu_number]
        pairs += [
            (nic_number[nic.name], nic_number[other])
            for other, link in nic.nic_links.items()
            if link is LinkType.PIX and other in nic_number
        ]
    labels = [_gpu_label(gpu) for gpu in gpus] + [_nic_label(nic) for nic in nics]
    if not pairs and not nics and len(gpus) > MOST_ALIKE and len({_gpu_details(gpu) for gpu in gpus}) == 1:
        branch.add(Text("  ".join([f"GPU {list_ranges([gpu.index for gpu in gpus])}", *_gpu_details(gpus[0])])))
        return
    for group in connected_groups(range(len(labels)), pairs):
        parent = branch.add("PCIe switch") if len(group) > 1 else branch
        for member in group:
            parent.add(Text(labels[member]))


def _gpu_details(gpu: Gpu) -> tuple[str, ...]:
    details = (gpu.name, gpu.pci_bus_id, format_bytes(gpu.memory_total_bytes) if gpu.memory_total_bytes else None)
    return tuple(detail for detail in details if detail)


def _gpu_label(gpu: Gpu) -> str:
    return "  ".join([f"GPU {gpu.index}", *_gpu_details(gpu)])


def _nic_label(nic: Nic) -> str:
    rate = f"{nic.rate_bytes_per_s * 8 / 1e9:g} Gb/s" if nic.rate_bytes_per_s else None
    return "  ".join([nic.name, *(detail for detail in (nic.kind, rate, nic.state) if detail)])
