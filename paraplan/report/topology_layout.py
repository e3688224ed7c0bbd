"""Where the parts of a machine stand in its picture: NUMA nodes side by side, GPUs in a row, the rest below."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from paraplan.hardware.topology import Gpu, GpuLink, LinkType, Nic, NodeTopology, connected_groups

GPU_WIDTH, GPU_HEIGHT, PITCH = 84, 58, 98
NIC_HEIGHT, NIC_PITCH = 20, 25
PADDING, MARGIN = 16, 20
SWITCH_HEIGHT, HOST_HEIGHT = 16, 26
MAX_MESH_GPUS = 4
"""Up to so many GPUs a full mesh is drawn link by link, above that as one bar."""

GPUS_OF_A_ROW = 12
"""GPUs of a rack under one fabric stand in rows of so many."""
MAX_ROW_GPUS = 16
"""Up to so many GPUs stand in one row."""
MAX_LINKS_PER_GPU = 18
"""No GPU has had more NVLinks: a machine that lists more has them through NVSwitch, where all pairs share them."""

BEHIND_SWITCH = (LinkType.PIX, LinkType.PXB)


class Box(NamedTuple):
    """A rectangle with a text."""

    x: float
    y: float
    width: float
    height: float
    label: str

    @property
    def middle(self) -> float:
        """Horizontal middle."""
        return self.x + self.width / 2

    @property
    def bottom(self) -> float:
        """Lower edge."""
        return self.y + self.height


class Arc(NamedTuple):
    """A link between the tops of two GPUs, `height` above them; `count` NVLinks (None unknown)."""

    x_from: float
    x_to: float
    y: float
    height: float
    link: GpuLink


class Layout(NamedTuple):
    """All parts with their places. `wires` are vertical lines: x, upper y, lower y."""

    width: float
    height: float
    frames: list[Box]
    gpus: dict[int, Box]
    switches: list[Box]
    nics: list[tuple[Box, Nic]]
    hosts: list[Box]
    wires: list[tuple[float, float, float]]
    arcs: list[Arc]
    fabric: Box | None
    fabric_count: int | None
    legend_y: float
    above: float = 0
    """Space left free over each GPU of rows."""
    rows: bool = False
    """Whether GPUs stand in rows below the fabric, without a line for each."""


class Group(NamedTuple):
    """GPUs behind one PCIe switch with the NICs there; without a switch a single GPU."""

    gpus: list[Gpu]
    nics: list[Nic]
    has_switch: bool


class Home(NamedTuple):
    """A NUMA node (None unknown): its groups, and the NICs that hang from the CPU."""

    numa_node: int | None
    groups: list[Group]
    nics: list[Nic]


def homes_of(node: NodeTopology) -> list[Home]:
    """Return the NUMA nodes of a machine in the order of their first GPU, those with NICs only behind."""
    near = {nic.name: _near_gpus(nic) for nic in node.nics}
    order: dict[int | None, list[Gpu]] = {}
    for gpu in node.gpus:
        order.setdefault(gpu.numa_node, []).append(gpu)
    place = {nic.name: _nic_numa(nic, node) for nic in node.nics}
    for nic in node.nics:
        if not near[nic.name]:
            order.setdefault(place[nic.name], [])
    homes = []
    for numa, gpus in order.items():
        groups = [_group(members, gpus, node, near) for members in _switch_groups(gpus, node, near)]
        loose = [nic for nic in node.nics if not near[nic.name] and place[nic.name] == numa]
        homes.append(Home(numa_node=numa, groups=groups, nics=loose))
    return homes


def lay_out(node: NodeTopology, *, top: float, above: float = 0) -> Layout:
    """Return the places of everything, the first row `top` below the upper edge, `above` left free over each GPU.

    `above` goes beneath `top` where the GPUs stand in one row.
    """
    homes = homes_of(node)
    fabric_count = _fabric_count(node)
    is_bare = len(homes) == 1 and not node.nics and not any(group.has_switch for group in homes[0].groups)
    if fabric_count is not None and is_bare and len(node.gpus) > MAX_ROW_GPUS:
        return _lay_out_rows(node, fabric_count, top=top, above=above)
    top += above
    arcs_height = 0.0 if fabric_count is not None else _arcs_height(node, homes)
    gpu_y = top + PADDING + (62 if fabric_count is not None else arcs_height)
    switch_y = gpu_y + GPU_HEIGHT + 16
    nic_y = switch_y + SWITCH_HEIGHT + 12
    rows = max([_nic_rows(group) for home in homes for group in home.groups], default=0)
    loose_rows = max([_loose_rows(home) for home in homes], default=0)
    has_switches = any(group.has_switch for home in homes for group in home.groups)
    host_y = (nic_y + rows * NIC_PITCH + 6) if has_switches else switch_y + 8
    loose_y = host_y + HOST_HEIGHT + 14
    frame_bottom = (loose_y + loose_rows * NIC_PITCH if loose_rows else host_y + HOST_HEIGHT + 4) + PADDING / 2
    parts = Layout(0, 0, [], {}, [], [], [], [], [], None, fabric_count, frame_bottom + 24)
    x = float(MARGIN)
    for home in homes:
        width: float = max(1, sum(len(group.gpus) for group in home.groups)) * PITCH - PITCH + GPU_WIDTH + 2 * PADDING
        width = max(width, 130 if len(homes) > 1 else 260)
        parts.frames.append(Box(x, gpu_y - PADDING, width, frame_bottom - gpu_y + PADDING, ""))
        parts.hosts.append(Box(x + PADDING, host_y, width - 2 * PADDING, HOST_HEIGHT, _host_label(home)))
        columns = max(1, sum(len(group.gpus) for group in home.groups))
        first = x + (width - columns * PITCH + PITCH - GPU_WIDTH) / 2
        _place_groups(parts, home, first, gpu_y=gpu_y, switch_y=switch_y, nic_y=nic_y, host_y=host_y)
        _place_loose(parts, home, first, columns, y=loose_y, host_y=host_y)
        x += width + 28
    width = max(x - 28 + MARGIN, 460)
    fabric = None
    if fabric_count is not None:
        left, right = min(box.x for box in parts.gpus.values()), max(box.x + box.width for box in parts.gpus.values())
        fabric = Box(left, top, right - left, 30, _fabric_label(node, fabric_count))
    parts.arcs.extend(_arcs(node, parts.gpus) if fabric is None else [])
    return parts._replace(width=width, height=parts.legend_y, fabric=fabric)


def _lay_out_rows(node: NodeTopology, fabric_count: int, *, top: float, above: float) -> Layout:
    """Return the places of a rack's GPUs, of which nothing but the fabric is known: rows below it."""
    width = GPUS_OF_A_ROW * PITCH - PITCH + GPU_WIDTH
    top += PADDING
    fabric = Box(MARGIN + PADDING, top, width, 30, _fabric_label(node, fabric_count))
    first, pitch = fabric.bottom + PADDING + above, GPU_HEIGHT + above + PADDING
    gpus = {}
    for number, gpu in enumerate(node.gpus):
        row, column = divmod(number, GPUS_OF_A_ROW)
        place = Box(fabric.x + column * PITCH, first + row * pitch, GPU_WIDTH, GPU_HEIGHT, f"GPU {gpu.index}")
        gpus[gpu.index] = place
    bottom = max(box.bottom for box in gpus.values()) + PADDING
    frame = Box(MARGIN, top - PADDING, width + 2 * PADDING, bottom - top + PADDING, "")
    whole = frame.width + 2 * MARGIN
    return Layout(
        whole, bottom + 24, [frame], gpus, [], [], [], [], [], fabric, fabric_count, bottom + 24, above, rows=True
    )


def _nic_numa(nic: Nic, node: NodeTopology) -> int | None:
    """Return the NUMA node of a NIC: its own, else that of the GPUs that it reaches without crossing sockets."""
    if nic.numa_node is not None:
        return nic.numa_node
    here = {gpu.numa_node for gpu in node.gpus if nic.gpu_links.get(gpu.index, LinkType.SYS) is not LinkType.SYS}
    return here.pop() if len(here) == 1 else None


def _near_gpus(nic: Nic) -> list[int]:
    """Return the GPUs behind the same PCIe switch as a NIC: of those with PIX, else of those with PXB."""
    for kind in BEHIND_SWITCH:
        found = [gpu for gpu, link in nic.gpu_links.items() if link is kind]
        if found:
            return found
    return []


def _switch_groups(gpus: list[Gpu], node: NodeTopology, near: dict[str, list[int]]) -> list[list[int]]:
    here = {gpu.index for gpu in gpus}
    pairs = [(link.gpu_a, link.gpu_b) for link in node.links if link.link_type in BEHIND_SWITCH]
    for members in near.values():
        pairs += [(members[0], other) for other in members[1:]]
    return connected_groups(here, [pair for pair in pairs if here.issuperset(pair)])


def _group(members: list[int], gpus: list[Gpu], node: NodeTopology, near: dict[str, list[int]]) -> Group:
    nics = [nic for nic in node.nics if near[nic.name] and near[nic.name][0] in members]
    return Group(
        gpus=[gpu for gpu in gpus if gpu.index in members], nics=nics, has_switch=len(members) > 1 or bool(nics)
    )


def _nic_rows(group: Group) -> int:
    return -(-len(group.nics) // len(group.gpus))


def _loose_rows(home: Home) -> int:
    columns = max(1, sum(len(group.gpus) for group in home.groups))
    return -(-len(home.nics) // columns)


def _host_label(home: Home) -> str:
    if home.numa_node is None:
        return "CPU"
    affinities = {gpu.cpu_affinity for group in home.groups for gpu in group.gpus}
    affinity = affinities.pop() if len(affinities) == 1 else None
    return f"NUMA {home.numa_node}" + (f": CPU {affinity}" if affinity else "")


def _place_groups(
    parts: Layout, home: Home, x: float, *, gpu_y: float, switch_y: float, nic_y: float, host_y: float
) -> None:
    for group in home.groups:
        width = len(group.gpus) * PITCH - (PITCH - GPU_WIDTH)
        for position, gpu in enumerate(group.gpus):
            box = Box(x + position * PITCH, gpu_y, GPU_WIDTH, GPU_HEIGHT, f"GPU {gpu.index}")
            parts.gpus[gpu.index] = box
            parts.wires.append((box.middle, box.bottom, switch_y if group.has_switch else host_y))
        if group.has_switch:
            switch = Box(x, switch_y, width, SWITCH_HEIGHT, "PCIe switch" if len(group.gpus) > 1 else "switch")
            parts.switches.append(switch)
            # The uplink runs beside the NICs, in the gap to the next group, so that it crosses none.
            parts.wires.append((x + width - 3, switch.bottom, host_y))
        for number, nic in enumerate(group.nics):
            row, column = divmod(number, len(group.gpus))
            place = Box(x + column * PITCH, nic_y + row * NIC_PITCH, GPU_WIDTH - 10, NIC_HEIGHT, nic.name)
            parts.nics.append((place, nic))
            above = switch_y + SWITCH_HEIGHT if row == 0 else place.y - NIC_PITCH + NIC_HEIGHT
            parts.wires.append((place.middle, above, place.y))
        x += len(group.gpus) * PITCH


def _place_loose(parts: Layout, home: Home, x: float, columns: int, *, y: float, host_y: float) -> None:
    for number, nic in enumerate(home.nics):
        row, column = divmod(number, columns)
        box = Box(x + column * PITCH, y + row * NIC_PITCH, GPU_WIDTH, NIC_HEIGHT, nic.name)
        parts.nics.append((box, nic))
        above = host_y + HOST_HEIGHT if row == 0 else box.y - NIC_PITCH + NIC_HEIGHT
        parts.wires.append((box.middle, above, box.y))


def _fast(node: NodeTopology) -> list[GpuLink]:
    return [link for link in node.links if link.link_type.is_fast]


def _fabric_count(node: NodeTopology) -> int | None:
    """Return the links of a pair (0 unknown) where all pairs are linked alike and too many to draw one by one."""
    counts = {link.nvlink_count or 0 for link in _fast(node)}
    few = len(node.gpus) <= MAX_MESH_GPUS
    if not node.nvlink_all_to_all or len(counts) != 1:
        return None
    count = counts.pop()
    return None if few and count * (len(node.gpus) - 1) <= MAX_LINKS_PER_GPU else count


def _fabric_label(node: NodeTopology, count: int) -> str:
    link = _fast(node)[0]
    if link.link_type is LinkType.NV and count * (len(node.gpus) - 1) > MAX_LINKS_PER_GPU:
        return "NVSwitch"
    return f"{'NVLink' if link.link_type is LinkType.NV else link.link_type.replace('XGMI', 'xGMI')} between all pairs"


def _arcs_height(node: NodeTopology, homes: Iterable[Home]) -> float:
    order = [gpu.index for home in homes for group in home.groups for gpu in group.gpus]
    place = {gpu: position for position, gpu in enumerate(order)}
    spans = [abs(place[link.gpu_a] - place[link.gpu_b]) for link in _fast(node)]
    return _arc_height(max(spans)) + 14 if spans else 0.0


def _arc_height(span: float) -> float:
    return 16 + 19 * span


def _arcs(node: NodeTopology, gpus: dict[int, Box]) -> list[Arc]:
    """Return the arcs, with their feet spread over the top of each GPU: those to the right on the right."""
    order = sorted(gpus, key=lambda gpu: gpus[gpu].x)
    place = {gpu: position for position, gpu in enumerate(order)}
    links = sorted(_fast(node), key=lambda link: abs(place[link.gpu_a] - place[link.gpu_b]))
    feet = {
        gpu: sorted(
            (link for link in links if gpu in (link.gpu_a, link.gpu_b)),
            # The nearest neighbours at the outer edges of their side: arcs do not cross at their feet.
            key=lambda link, gpu=gpu: _foot_key(place, gpu, link),  # type: ignore[misc] # a lambda has no annotations
        )
        for gpu in order
    }

    def foot(gpu: int, link: GpuLink) -> float:
        links_here = feet[gpu]
        return gpus[gpu].x + gpus[gpu].width * (links_here.index(link) + 1) / (len(links_here) + 1)

    arcs = []
    for link in links:
        left, right = sorted((link.gpu_a, link.gpu_b), key=lambda gpu: place[gpu])
        span = place[right] - place[left]
        arcs.append(Arc(foot(left, link), foot(right, link), gpus[left].y, _arc_height(span), link))
    return arcs


def _foot_key(place: dict[int, int], gpu: int, link: GpuLink) -> tuple[int, int]:
    other = place[link.gpu_b if link.gpu_a == gpu else link.gpu_a] - place[gpu]
    return (0, other) if other < 0 else (1, -other)
