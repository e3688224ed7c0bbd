"""A machine as a picture: GPUs in their NUMA nodes, NVLinks by width, PCIe switches, NICs; for light and dark pages."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from paraplan.hardware.topology import Gpu, GpuLink, LinkType, Nic, NodeTopology
from paraplan.report.topology_layout import Arc, Box, Layout, lay_out
from paraplan.units import format_bandwidth, format_bytes, gpus

_STYLE = """
.topology{--ink:#1c2430;--soft:#5b6675;--paper:#ffffff;--frame:#f3f5f8;--edge:#c9d1db;--gpu:#e3f1d3;--gpu-edge:#6a9a2d;
--link:#5c9e1a;--switch:#d9e6f7;--switch-edge:#5f8ac7;--nic:#fdeccb;--nic-edge:#cf9526;--host:#e4e7ec;--host-edge:#8a95a5;
font-family:system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif}
@media (prefers-color-scheme:dark){.topology{--ink:#e8ecf2;--soft:#a3aebd;--paper:#14181f;--frame:#1c222b;
--edge:#3a4452;--gpu:#2c3d1c;--gpu-edge:#8cc34a;--link:#8fd13f;--switch:#1f3353;--switch-edge:#6f9fe0;--nic:#43330f;--nic-edge:#e0aa45;
--host:#2a313c;--host-edge:#7d8998}}
.topology text{fill:var(--ink);text-anchor:middle;font-size:11px}.topology .title{font-size:16px;font-weight:600;
text-anchor:start}.topology .soft{fill:var(--soft);text-anchor:start}.topology .name{font-size:14px;font-weight:600}
.topology .small{font-size:10px;fill:var(--soft)}.topology .count{font-size:10px;font-weight:600;paint-order:stroke;
stroke:var(--paper);stroke-width:4px;stroke-linejoin:round}.paper{fill:var(--paper)}
.frame{fill:var(--frame);stroke:var(--edge)}.gpu{fill:var(--gpu);stroke:var(--gpu-edge)}.link{fill:none;stroke:var(--link);
stroke-linecap:round}.switch{fill:var(--switch);stroke:var(--switch-edge)}.nic{fill:var(--nic);stroke:var(--nic-edge)}
.host{fill:var(--host);stroke:var(--host-edge)}.wire{stroke:var(--host-edge);stroke-width:1.3;fill:none}
.fabric{fill:var(--gpu);stroke:var(--link);stroke-width:1.5}
""".strip()

TITLE_HEIGHT = 62
_NOT_XML = re.compile("[^\\t\\n\\r\\x20-\\ud7ff\\ue000-\\ufffd\\U00010000-\\U0010ffff]")
"""Characters that XML 1.0 (section 2.2) has no place for, escaped or not."""

_CHARACTER = 6.2
"""Width of a character of 11 px on average, to decide what fits; a browser's own fonts differ by a tenth."""


_GROUP_HEIGHT = 22
_GOLDEN_DEGREES = 137.5
"""Hues of neighbouring groups lie that far apart: close to never alike."""


class GroupRow(NamedTuple):
    """One axis of a plan on a machine: the number of the group that each GPU, by its index, belongs to."""

    name: str
    group_of: dict[int, int]


def group_hue(group: int) -> float:
    """Return the hue of a group of ranks in degrees."""
    return round((210 + group * _GOLDEN_DEGREES) % 360, 1)


def render_svg(node: NodeTopology, *, groups: Sequence[GroupRow] = ()) -> str:
    """Return the picture of a machine as an SVG document; more than 16 GPUs under one fabric stand in rows.

    Above each GPU stand the `groups` that it belongs to, in a color for each.
    """
    layout = lay_out(node, top=TITLE_HEIGHT, above=_GROUP_HEIGHT * len(groups))
    legend, legend_height = _legend(node, layout)
    height = layout.height + legend_height
    body = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="topology" role="img" aria-label="{_text(_heading(node))}" '
        f'viewBox="0 0 {layout.width:g} {height:g}" width="{layout.width:g}" height="{height:g}">',
        f"<style>{_STYLE}</style>",
        f'<rect class="paper" width="{layout.width:g}" height="{height:g}"/>',
        *_titles(node, layout.width),
        *(cell for number, row in enumerate(groups) for cell in _group_row(layout, row, number)),
        *(_rectangle(frame, "frame", radius=10) for frame in layout.frames),
        *_sockets(layout),
        *(f'<path class="wire" d="M{x:g} {above:g}V{below:g}"/>' for x, above, below in layout.wires),
        *(_labelled(host, "host", "") for host in layout.hosts),
        *(_labelled(switch, "switch", "small") for switch in layout.switches),
        *(_nic(box, nic) for box, nic in layout.nics),
        *_fabric(layout, node),
        *(_arc(arc) for arc in reversed(layout.arcs)),
        *_counts(layout.arcs),
        *(_gpu(layout.gpus[gpu.index], gpu, node) for gpu in node.gpus),
        *legend,
        "</svg>",
    ]
    return "\n".join(body) + "\n"


def _group_row(layout: Layout, row: GroupRow, number: int) -> list[str]:
    """Return a colored field above each GPU that has a rank."""
    cells = []
    for gpu, group in row.group_of.items():
        box = layout.gpus[gpu]
        y = (box.y - layout.above if layout.rows else TITLE_HEIGHT - 6) + number * _GROUP_HEIGHT
        place = f'x="{box.x:g}" y="{y:g}" width="{box.width:g}" height="{_GROUP_HEIGHT - 4}"'
        fill = f"hsl({group_hue(group):g} 70% 50%)"
        words = _text(f"{row.name} group {group}")
        cells.append(
            f'<rect {place} rx="4" fill="{fill}" fill-opacity="0.34" stroke="{fill}"/>'
            f'<text x="{box.middle:g}" y="{y + 13:g}">{words}</text>'
        )
    return cells


def _text(text: str) -> str:
    return escape(_NOT_XML.sub("", text))


def _heading(node: NodeTopology) -> str:
    names = list(dict.fromkeys(gpu.name for gpu in node.gpus if gpu.name is not None))
    count = len(node.gpus)
    if not count:
        return "no GPUs"
    if len(names) == 1:
        return f"{count} x {names[0]}"
    return f"{gpus(count)} of {len(names)} kinds" if names else gpus(count)


def _titles(node: NodeTopology, width: float) -> list[str]:
    source = " · ".join(
        part for part in (node.hostname, node.source, node.driver_version and f"driver {node.driver_version}") if part
    )
    title, below = _cut(_heading(node), width - 40, scale=1.5), _cut(source, width - 40)
    return [f'<text class="title" x="20" y="28">{title}</text>', f'<text class="soft" x="20" y="47">{below}</text>']


def _cut(text: str, width: float, *, scale: float = 1.0) -> str:
    """Return as much of a text as fits a width, escaped."""
    room = max(1, int(width / (_CHARACTER * scale)))
    return _text(text if len(text) <= room else text[: room - 1] + "…")


def _rectangle(box: Box, style: str, *, radius: float) -> str:
    place = f'x="{box.x:g}" y="{box.y:g}" width="{box.width:g}" height="{box.height:g}"'
    return f'<rect class="{style}" {place} rx="{radius:g}"/>'


def _labelled(box: Box, style: str, text_style: str) -> str:
    middle = box.y + box.height / 2 + 3.8
    words = _cut(box.label, box.width - 4, scale=0.9 if text_style == "small" else 1.0)
    label = f'<text class="{text_style}" x="{box.middle:g}" y="{middle:g}">{words}</text>'
    return _rectangle(box, style, radius=5) + label


def _sockets(layout: Layout) -> list[str]:
    """Return the lines between the CPUs of neighbouring NUMA nodes."""
    lines = []
    for left, right in zip(layout.hosts, layout.hosts[1:], strict=False):
        y = left.y + left.height / 2
        lines.append(f'<path class="wire" stroke-dasharray="4 3" d="M{left.x + left.width:g} {y:g}H{right.x:g}"/>')
    return lines


def _gpu(box: Box, gpu: Gpu, node: NodeTopology) -> str:
    facts = [gpu.name, gpu.pci_bus_id, None if gpu.numa_node is None else f"NUMA {gpu.numa_node}"]
    tip = " · ".join(fact for fact in (f"GPU {gpu.index}", *facts) if fact)
    memory = "" if gpu.memory_total_bytes is None else format_bytes(gpu.memory_total_bytes)
    mixed = len({each.name for each in node.gpus}) > 1
    small = [_short_name(gpu.name)] if mixed and gpu.name else []
    small += [memory] if memory else []
    top = box.y + (24 if small else box.height / 2 + 5)
    lines = [f'<text class="name" x="{box.middle:g}" y="{top:g}">{box.label}</text>']
    for number, text in enumerate(small):
        y = box.y + (41 if len(small) == 1 else 38 + 13 * number)
        lines.append(f'<text class="small" x="{box.middle:g}" y="{y:g}">{_cut(text, box.width - 4, scale=0.92)}</text>')
    return f"<g><title>{_text(tip)}</title>{_rectangle(box, 'gpu', radius=7)}{''.join(lines)}</g>"


def _short_name(name: str) -> str:
    words = [word for word in name.split() if word not in ("NVIDIA", "AMD", "GeForce", "Tesla", "Instinct", "Graphics")]
    return " ".join(words)


def _nic(box: Box, nic: Nic) -> str:
    rate = "rate unknown" if nic.rate_bytes_per_s is None else f"{nic.rate_bytes_per_s * 8 / 1e9:g} Gb/s"
    return f"<g><title>{_text(f'{nic.name} · {rate}')}</title>{_labelled(box, 'nic', 'small')}</g>"


def _stroke(count: int | None) -> float:
    """Return the width of a line for so many links: few differ clearly, many do not fill the picture."""
    links = count or 1
    return min(0.6 + 1.3 * links, 3.0 + 0.3 * links)


def _fabric(layout: Layout, node: NodeTopology) -> list[str]:
    if layout.fabric is None:
        return []
    box, count = layout.fabric, layout.fabric_count or None
    rate = next((link.bandwidth_bytes_per_s for link in node.links if link.link_type.is_fast), None)
    words = [box.label, _link_word(next(link for link in node.links if link.link_type.is_fast))]
    words += [f"{format_bandwidth(rate)} per direction, each pair"] if rate else []
    lines = [
        f'<path class="link" stroke-width="{_stroke(count):.1f}" d="M{gpu.middle:g} {box.bottom:g}V{gpu.y:g}"/>'
        for gpu in ([] if layout.rows else layout.gpus.values())
    ]
    return [*lines, _labelled(box._replace(label=" · ".join(words)), "fabric", "")]


def _arc(arc: Arc) -> str:
    peak = arc.y - arc.height * 4 / 3
    path = f"M{arc.x_from:g} {arc.y:g}C{arc.x_from:g} {peak:g} {arc.x_to:g} {peak:g} {arc.x_to:g} {arc.y:g}"
    link = arc.link
    rate = (
        "" if link.bandwidth_bytes_per_s is None else f" · {format_bandwidth(link.bandwidth_bytes_per_s)} per direction"
    )
    tip = f"GPU {link.gpu_a} - GPU {link.gpu_b} · {_link_word(link)}{rate}"
    stroke = f'stroke-width="{_stroke(link.nvlink_count):.1f}"'
    return f'<path class="link" {stroke} d="{path}"><title>{_text(tip)}</title></path>'


def _counts(arcs: list[Arc]) -> list[str]:
    """Return the words of the arcs, where they are few enough to be read."""
    if len(arcs) > 8:
        return []
    places = [((arc.x_from + arc.x_to) / 2, arc.y - arc.height + 3) for arc in arcs]
    return [
        f'<text class="count" x="{x:g}" y="{y:g}">{_link_word(arc.link)}</text>'
        for (x, y), arc in zip(places, arcs, strict=True)
    ]


def _link_word(link: GpuLink) -> str:
    count = link.nvlink_count
    if link.link_type is LinkType.NV:
        return f"NV{count or ''}"
    return f"{link.link_type} x{count}" if count and count > 1 else str(link.link_type)


def _legend(node: NodeTopology, layout: Layout) -> tuple[list[str], float]:
    """Return the legend and its height: the links by width, then how PCIe joins the GPUs, and what was missing."""
    x, y, parts = 20.0, layout.legend_y, []
    widths = {_link_word(arc.link): arc.link for arc in layout.arcs}
    for word, link in sorted(widths.items()):
        rate = (
            ""
            if link.bandwidth_bytes_per_s is None
            else f", {format_bandwidth(link.bandwidth_bytes_per_s)} per direction"
        )
        label = f"{word}{rate}"
        if x + 40 + len(label) * _CHARACTER > layout.width - 20 and x > 20:
            x, y = 20.0, y + 18
        stroke = f'stroke-width="{_stroke(link.nvlink_count):.1f}"'
        parts.append(f'<path class="link" {stroke} d="M{x:g} {y:g}h26"/>')
        parts.append(f'<text class="soft" x="{x + 34:g}" y="{y + 4:g}">{_text(label)}</text>')
        x += 34 + len(label) * _CHARACTER + 22
    y += 20 if widths else 0
    for line in _pcie_lines(node, layout.width):
        parts.append(f'<text class="soft" x="20" y="{y + 4:g}">{line}</text>')
        y += 16
    return parts, y - layout.legend_y + 12


def _pcie_lines(node: NodeTopology, width: float) -> list[str]:
    slow = [link for link in node.links if not link.link_type.is_fast]
    lines = []
    if slow:
        kinds = sorted({link.link_type for link in slow}, key=lambda kind: kind.distance)
        shown = ", ".join(f"{kind} ({sum(link.link_type is kind for link in slow)} pairs)" for kind in kinds)
        lines.append(f"{'Other pairs' if len(slow) < len(node.links) else 'GPUs'} over PCIe: {shown}")
    if any(nic.rate_bytes_per_s for nic in node.nics):
        total = sum(nic.rate_bytes_per_s or 0 for nic in node.nics) * 8 / 1e9
        lines.append(
            f"1 NIC, {total:g} Gb/s" if len(node.nics) == 1 else f"{len(node.nics)} NICs, {total:g} Gb/s together"
        )
    if node.warnings:
        more = f" (and {len(node.warnings) - 1} more warnings)" if len(node.warnings) > 1 else ""
        lines.append(f"Warning: {node.warnings[0]}{more}")
    return [_cut(line, width - 40) for line in lines]
