"""Machines that ought to be equal: which of them differs from the others, and in what."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial
from itertools import combinations
from typing import Any, NamedTuple

from paraplan.hardware.topology import Gpu, GpuLink, LinkType, Nic, NodeTopology
from paraplan.units import format_bytes

_MEMORY_TOLERANCE = 0.02  # drivers of different age hold back a little more or less of a GPU's memory
_DOWN_STATES = ("down", "disabled", "init", "polling")
_MOST_LABELS = 4

Render = Callable[[Any, str], str]


class _Fact(NamedTuple):
    """Something that equal devices have in common: how it is read, and put into words with the device's label."""

    read: Callable[[Any], Hashable | None]
    render: Render


class _Item(NamedTuple):
    """A device that every node has, and what each node says of it (None: unknown)."""

    label: str
    values: tuple[Hashable | None, ...]


def node_names(nodes: Sequence[NodeTopology]) -> list[str]:
    """Return what the nodes are called in messages: `node 1 (gpu-b)`, without the host's name where it is unknown."""
    return [f"node {rank} ({node.hostname})" if node.hostname else f"node {rank}" for rank, node in enumerate(nodes)]


def compare_nodes(nodes: Sequence[NodeTopology]) -> list[str]:
    """Return a sentence for each way in which a node differs from the others, the most general first.

    What most nodes have is taken as right. Where as many have one as the other, the faster, wider or more is: what is
    broken has less. Unknown values differ from nothing. Of equal nodes nothing is said.
    """
    names = node_names(nodes)
    said = [sentence for fact in _NODE_FACTS for sentence in _compare_items(names, [_item("", nodes, fact)], fact)]
    if len({len(node.gpus) for node in nodes}) == 1:
        said += _compare_gpus(names, nodes)
        said += _compare_links(names, nodes)
    said += _compare_nics(names, nodes)
    hosts = Counter(node.hostname for node in nodes if node.hostname)
    said += [f"{count} nodes call themselves {host}" for host, count in hosts.items() if count > 1]
    return said


def weakest_node(nodes: Sequence[NodeTopology]) -> NodeTopology:
    """Return the node with the fewest GPUs, then the least memory of a GPU, then the fewest links and slowest NICs.

    What it can do all can. Raises ValueError for no nodes.
    """
    return min(nodes, key=_strength)


def _strength(node: NodeTopology) -> tuple[int, int, int, float]:
    memory = min((gpu.memory_total_bytes for gpu in node.gpus if gpu.memory_total_bytes is not None), default=0)
    links = sum(link.nvlink_count or 1 for link in node.links if link.link_type.is_fast)
    rates = sum(nic.rate_bytes_per_s or 0.0 for nic in node.nics if not _is_down(nic))
    return len(node.gpus), memory, links, rates


def _item(label: str, devices: Iterable[Any], fact: _Fact) -> _Item:
    return _Item(label, tuple(None if device is None else fact.read(device) for device in devices))


def _compare_items(names: Sequence[str], items: Sequence[_Item], fact: _Fact) -> list[str]:
    """Return what differs; devices that differ in the same way share a sentence."""
    labels_of: dict[tuple[Hashable | None, ...], list[str]] = {}
    for item in items:
        labels_of.setdefault(item.values, []).append(item.label)
    return [
        sentence
        for values, labels in labels_of.items()
        for sentence in _odd_ones(names, values, partial(_with_label, fact.render, _few(labels)))
    ]


def _with_label(render: Render, label: str, value: Hashable) -> str:
    return render(value, label)


def _odd_ones(names: Sequence[str], values: Sequence[Hashable | None], render: Callable[[Hashable], str]) -> list[str]:
    groups: dict[Hashable, list[int]] = {}
    for position, value in enumerate(values):
        if value is not None:
            groups.setdefault(value, []).append(position)
    if len(groups) < 2:
        return []
    usual = max(groups, key=lambda value: (len(groups[value]), _goodness(value), -groups[value][0]))
    alike = len(groups[usual])
    others = f"{alike} of {len(names)} have" if alike > 1 else f"{names[groups[usual][0]]} has"
    return [
        f"{_join([names[position] for position in positions])} {'has' if len(positions) == 1 else 'have'} "
        f"{render(value)}, where {others} {render(usual)}"
        for value, positions in groups.items()
        if value != usual
    ]


def _goodness(value: Hashable) -> float:
    """Return what decides between values that as many nodes have: the number, the nearness of a link, or nothing."""
    if isinstance(value, _LinkWord):
        return value.goodness
    return float(value) if isinstance(value, int | float) else 0.0


def _join(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else ", ".join(names[:-1]) + " and " + names[-1]


def _few(labels: Sequence[str]) -> str:
    more = len(labels) - _MOST_LABELS
    return ", ".join(labels[:_MOST_LABELS]) + (f" and {more} more" if more > 0 else "")


def _kinds(node: NodeTopology) -> str | None:
    found = {gpu.name for gpu in node.gpus}
    return None if None in found or not found else ", ".join(sorted(name for name in found if name is not None))


_NODE_FACTS = (
    _Fact(lambda node: node.driver_version, lambda version, _: f"driver {version}"),
    _Fact(lambda node: node.cuda_version, lambda version, _: f"CUDA {version}"),
    _Fact(lambda node: len(node.gpus), lambda count, _: f"{count} GPU" if count == 1 else f"{count} GPUs"),
    _Fact(_kinds, lambda kinds, _: kinds),
)


def _on_off(name: str) -> Render:
    return lambda is_on, label: f"{name} {'on' if is_on else 'off'} on {label}"


_GPU_FACTS = (
    _Fact(lambda gpu: gpu.nvlink_count, lambda count, label: f"{count} active NVLinks on {label}"),
    _Fact(lambda gpu: gpu.pcie_width, lambda width, label: f"PCIe x{width} on {label}"),
    _Fact(lambda gpu: gpu.pcie_generation_max, lambda number, label: f"PCIe {number}.0 at most on {label}"),
    _Fact(lambda gpu: gpu.power_limit_w, lambda watts, label: f"a power limit of {watts:g} W on {label}"),
    _Fact(lambda gpu: gpu.ecc_enabled, _on_off("ECC")),
    _Fact(lambda gpu: gpu.mig_enabled, _on_off("MIG")),
    _Fact(lambda gpu: gpu.numa_node, lambda number, label: f"{label} in NUMA node {number}"),
)


def _compare_gpus(names: Sequence[str], nodes: Sequence[NodeTopology]) -> list[str]:
    """Compare the GPUs of each position."""
    rows: list[tuple[str, list[Gpu]]] = [
        (f"GPU {gpu.index}", [node.gpus[position] for node in nodes]) for position, gpu in enumerate(nodes[0].gpus)
    ]
    return [
        sentence
        for fact in (_memory_fact(nodes), *_GPU_FACTS)
        for sentence in _compare_items(names, [_item(label, gpus, fact) for label, gpus in rows], fact)
    ]


def _memory_fact(nodes: Sequence[NodeTopology]) -> _Fact:
    """Return how the memory of GPUs is compared: sizes that are nearly the same count as the largest of them."""
    sizes = {gpu.memory_total_bytes for node in nodes for gpu in node.gpus if gpu.memory_total_bytes is not None}

    def read(gpu: Gpu) -> int | None:
        size = gpu.memory_total_bytes
        return None if size is None else max(other for other in sizes if other <= size * (1 + _MEMORY_TOLERANCE))

    return _Fact(read, lambda size, label: f"{format_bytes(size)} on {label}")


class _LinkWord(NamedTuple):
    """A link as two nodes are compared by it."""

    word: str
    goodness: float


def _link_word(link: GpuLink) -> _LinkWord:
    count = link.nvlink_count or 0
    word = f"{link.link_type}{count or ''}" if link.link_type is LinkType.NV else str(link.link_type)
    return _LinkWord(word, count - 1000.0 * link.link_type.distance)


def _compare_links(names: Sequence[str], nodes: Sequence[NodeTopology]) -> list[str]:
    """Compare the link of each pair of positions."""
    fact = _Fact(_link_word, lambda link, label: f"{link.word} between GPUs {label}")
    indices = [[gpu.index for gpu in node.gpus] for node in nodes]
    items = []
    for first, second in combinations(range(len(indices[0])), 2):
        links = [node.link(own[first], own[second]) for node, own in zip(nodes, indices, strict=True)]
        items.append(_item(f"{indices[0][first]}-{indices[0][second]}", links, fact))
    return _compare_items(names, items, fact)


_NIC_FACTS = (
    _Fact(lambda nic: not _is_down(nic), lambda is_up, label: f"{label} up" if is_up else f"{label} down"),
    _Fact(
        lambda nic: None if _is_down(nic) else nic.rate_bytes_per_s,
        lambda rate, label: f"{rate * 8 / 1e9:g} Gb/s on {label}",
    ),
)


def _is_down(nic: Nic) -> bool:
    return (nic.state or "").lower() in _DOWN_STATES


def _compare_nics(names: Sequence[str], nodes: Sequence[NodeTopology]) -> list[str]:
    """Compare NICs by name where the nodes name them alike, else by how many there are of each rate."""
    by_name = [{nic.name: nic for nic in node.nics} for node in nodes]
    every = list(dict.fromkeys(name for nics in by_name for name in nics))
    common = [name for name in every if all(name in nics for nics in by_name)]
    if 2 * len(common) < len(every):
        fact = _Fact(_rates, lambda rates, _: rates)
        return _compare_items(names, [_item("", nodes, fact)], fact)
    present = _Fact(lambda has: has, lambda has, label: label if has else f"no {label}")
    said = _compare_items(names, [_Item(name, tuple(name in nics for nics in by_name)) for name in every], present)
    for fact in _NIC_FACTS:
        said += _compare_items(names, [_item(name, [nics.get(name) for nics in by_name], fact) for name in every], fact)
    return said


def _rates(node: NodeTopology) -> str:
    """Return the NICs that are up, by rate: `8 NICs of 400 Gb/s, 1 NIC of unknown rate`."""
    rates = Counter(nic.rate_bytes_per_s for nic in node.nics if not _is_down(nic))
    if not rates:
        return "no NIC"
    ordered = sorted(rates.items(), key=lambda entry: -(entry[0] or 0.0))
    return ", ".join(
        f"{count} {'NIC' if count == 1 else 'NICs'} of {'unknown rate' if rate is None else f'{rate * 8 / 1e9:g} Gb/s'}"
        for rate, count in ordered
    )
