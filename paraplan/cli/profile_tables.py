"""How profiles look on a terminal."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.table import Table

from paraplan.api.profiles import GpuProfile, LinkType, MachineProfile, NetworkProfile, survey_node
from paraplan.cli.terminal import escape, make_console
from paraplan.cli.topology_tables import print_topology
from paraplan.units import GIB, format_bandwidth, format_bytes, format_count, format_flops, format_seconds


def print_machines(machines: list[MachineProfile]) -> None:
    """Print a table of machines: name, GPUs, the links between them, the network."""
    table = Table(box=None, pad_edge=False)
    for heading in ("machine", "GPUs", "links between GPUs", "network a node"):
        table.add_column(heading, no_wrap=heading in ("machine", "GPUs"))
    for machine in machines:
        network = "" if machine.network is None else format_bandwidth(machine.network.node_bandwidth_bytes_per_s)
        table.add_row(machine.name, f"{len(machine.node.gpus)} x {machine.gpu.name}", _links(machine), network)
    _print(table)


def print_gpus(gpus: list[GpuProfile]) -> None:
    """Print a table of kinds of GPU: memory, its bandwidth, matmul peaks, NVLink."""
    table = Table(box=None, pad_edge=False)
    table.add_column("GPU", no_wrap=True)
    for heading in ("GiB", "GB/s", "bf16 TFLOP/s", "fp16", "fp32", "NVLink or xGMI GB/s", "PCIe GB/s"):
        table.add_column(heading, justify="right")
    for gpu in gpus:
        peaks = (gpu.peak("bf16"), gpu.peak("fp16"), gpu.peak("fp32"))
        table.add_row(
            gpu.name,
            f"{gpu.memory_bytes / GIB:.1f}",
            f"{gpu.memory_bandwidth_bytes_per_s / 1e9:.0f}",
            *("" if peak is None else f"{peak / 1e12:.4g}" for peak in peaks),
            _nvlink(gpu),
            f"{gpu.pcie_bandwidth_bytes_per_s / 1e9:.1f}",
        )
    _print(table)


def print_models(models: list[dict[str, Any]]) -> None:
    """Print a table of models: parameters, blocks, width, longest sequence."""
    table = Table("model", box=None, pad_edge=False)
    for heading in ("parameters", "blocks", "hidden size", "longest sequence"):
        table.add_column(heading, justify="right")
    for model in models:
        sizes = (model["num_blocks"], model["hidden_size"], model["max_seq_length"])
        table.add_row(model["name"], format_count(model["num_parameters"]), *map(str, sizes))
    _print(table)


def print_networks(networks: list[NetworkProfile]) -> None:
    """Print a table of networks: NICs of a node, rate of one, all together, latency."""
    table = Table("network", "NICs a node", "rate of one", "of a node", "latency", box=None, pad_edge=False)
    for network in networks:
        table.add_row(
            network.name,
            str(network.nics_per_node),
            format_bandwidth(network.nic_bandwidth_bytes_per_s),
            format_bandwidth(network.node_bandwidth_bytes_per_s),
            format_seconds(network.latency_s),
        )
    _print(table)


def print_machine(machine: MachineProfile) -> None:
    """Print one machine: its topology, its GPU, its network, and where the figures are from."""
    console = _console()
    console.print(f"[bold]{escape(machine.name)}[/bold]  {escape(machine.title)}", soft_wrap=True, markup=True)
    print_topology(survey_node(machine.node, machine=machine), console)
    console.print()
    rows = _gpu_rows(machine.gpu)
    if machine.network is not None:
        rows += _network_rows(machine.network)
    rows.append(("host memory", format_bytes(machine.host_memory_bytes)))
    rows += [("note", note) for note in machine.notes]
    rows += [("also called", ", ".join(machine.aliases))] if machine.aliases else []
    rows.append(("source", machine.source))
    _print_rows(rows, console)


def print_gpu(gpu: GpuProfile) -> None:
    """Print one kind of GPU with its sources."""
    console = _console()
    console.print(f"[bold]{escape(gpu.name)}[/bold]  {escape(gpu.title)}", soft_wrap=True, markup=True)
    rows = _gpu_rows(gpu)
    rows += [("also called", ", ".join(gpu.aliases))] if gpu.aliases else []
    _print_rows([*rows, ("source", gpu.source)], console)


def print_network(network: NetworkProfile) -> None:
    """Print one network with its source."""
    console = _console()
    console.print(f"[bold]{escape(network.name)}[/bold]  {escape(network.title)}", soft_wrap=True, markup=True)
    _print_rows([*_network_rows(network), ("source", network.source)], console)


def _gpu_rows(gpu: GpuProfile) -> list[tuple[str, str]]:
    peaks = ", ".join(f"{kind} {format_flops(rate)}" for kind, rate in gpu.peak_flops_per_s.items())
    access = {True: "peer access", False: "no peer access over it", None: "peer access unknown"}[gpu.peer_access]
    generation = "" if gpu.pcie_generation is None else f"generation {gpu.pcie_generation}, "
    return [
        ("GPU", f"{gpu.title}, {gpu.architecture}, compute capability {gpu.compute_capability or '?'}"),
        ("memory", f"{format_bytes(gpu.memory_bytes)} at {format_bandwidth(gpu.memory_bandwidth_bytes_per_s)}"),
        ("dense peak", peaks),
        ("xGMI" if gpu.vendor == "amd" else "NVLink", f"{_nvlink(gpu)} GB/s" if _nvlink(gpu) else "none"),
        ("PCIe", f"{generation}{format_bandwidth(gpu.pcie_bandwidth_bytes_per_s)} between GPUs, {access}"),
    ]


def _network_rows(network: NetworkProfile) -> list[tuple[str, str]]:
    rate = f"{network.nics_per_node} x {format_bandwidth(network.nic_bandwidth_bytes_per_s)}"
    return [
        ("network", f"{network.name}: {network.title}"),
        (
            "rate",
            f"{rate} = {format_bandwidth(network.node_bandwidth_bytes_per_s)} a node, one direction; "
            f"latency {format_seconds(network.latency_s)}",
        ),
        *(
            (
                f"{entry.num_ranks} ranks",
                f"{_reached(entry.bus_bandwidth_bytes_per_s.items())} with {format_bytes(entry.message_bytes)}",
            )
            for entry in network.measured
        ),
    ]


def _reached(rates: Iterable[tuple[str, float]]) -> str:
    words = (f"{collective} {format_bandwidth(rate)}" for collective, rate in rates)
    return f"{', '.join(words)} on the bus, measured"


def _nvlink(gpu: GpuProfile) -> str:
    if gpu.nvlink_count is None or gpu.nvlink_bandwidth_bytes_per_s is None:
        return ""
    total = gpu.nvlink_count * gpu.nvlink_bandwidth_bytes_per_s / 1e9
    return f"{gpu.nvlink_count} x {gpu.nvlink_bandwidth_bytes_per_s / 1e9:.4g} = {total:.4g}"


def _links(machine: MachineProfile) -> str:
    """Return the links in words: `NV18 all to all`, `NV12 in islands of 2; SYS, NODE`."""
    counts = Counter(
        f"{link.link_type}{link.nvlink_count or ''}" if link.link_type is LinkType.NV else str(link.link_type)
        for link in machine.node.links
    )
    fast = sorted(word for word in counts if word.startswith(("NV", "XGMI")))
    slow = ", ".join(word for word, _ in counts.most_common() if word not in fast)
    if machine.node.nvlink_all_to_all:
        return f"{' and '.join(fast)} all to all"
    sizes = " and ".join(str(size) for size in sorted({len(island) for island in machine.node.nvlink_islands}))
    return "; ".join(part for part in (f"{' and '.join(fast)} in islands of {sizes}" if fast else "", slow) if part)


def _console() -> Console:
    # A pipe has no width of its own; cutting names there would make them useless to grep and awk.
    return make_console() if sys.stdout.isatty() else make_console(width=160)


def _print(table: Table) -> None:
    console = _console()
    console.print(table)
    console.print()


def _print_rows(rows: list[tuple[str, str]], console: Console) -> None:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    for label, text in rows:
        table.add_row(label, text)
    console.print(table)
