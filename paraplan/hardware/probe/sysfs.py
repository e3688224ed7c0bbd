"""The machine around the GPUs by Linux: NUMA nodes, CPUs, NICs, and the PCIe tree that joins them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from paraplan.hardware.pci import PciPlace, link_between, normal_bus_id
from paraplan.hardware.topology import Gpu, GpuLink, LinkType, Nic, NodeTopology

_MAX_FILE_CHARACTERS = 4096
_VIRTUAL_FUNCTION = "physfn"


@dataclass(frozen=True)
class PciDevice:
    """A PCI device: its place on PCIe, and the CPUs near it as Linux lists them (`0-15,64-79`)."""

    place: PciPlace
    cpus: str | None


def add_host_facts(node: NodeTopology, *, root: Path = Path("/")) -> NodeTopology:
    """Return a machine with what sysfs below `root` adds: NICs, and NUMA node, CPUs and PCIe links that were unknown.

    What a reader of the GPUs already knows is kept. A machine without sysfs is returned as it is.
    """
    if not (root / "sys").is_dir():
        return node
    places = {gpu.index: find_device(gpu.pci_bus_id, root=root) for gpu in node.gpus if gpu.pci_bus_id}
    found = {index: device for index, device in places.items() if device is not None}
    gpus = tuple(_with_host_facts(gpu, found.get(gpu.index)) for gpu in node.gpus)
    known = {(link.gpu_a, link.gpu_b) for link in node.links}
    links = list(node.links)
    indices = sorted(found)
    for position, first in enumerate(indices):
        for second in indices[position + 1 :]:
            between = link_between(found[first].place, found[second].place)
            if (first, second) not in known and between is not None:
                links.append(GpuLink(gpu_a=first, gpu_b=second, link_type=between))
    links.sort(key=lambda link: (link.gpu_a, link.gpu_b))
    gpu_places = {index: device.place for index, device in found.items()}
    nics = node.nics or read_nics(root=root, gpu_places=gpu_places)
    return node.replace(gpus=gpus, links=tuple(links), nics=nics)


def _with_host_facts(gpu: Gpu, device: PciDevice | None) -> Gpu:
    if device is None:
        return gpu
    numa = gpu.numa_node if gpu.numa_node is not None else device.place.numa_node
    return gpu.replace(numa_node=numa, cpu_affinity=gpu.cpu_affinity or device.cpus)


def find_device(bus_id: str, *, root: Path) -> PciDevice | None:
    """Return the PCI device of a bus id, None where sysfs has no such device."""
    name = normal_bus_id(bus_id)
    link = root / "sys/bus/pci/devices" / name if name else None
    if link is None or not link.exists():
        return None
    return _read_device(link.resolve())


def _read_device(folder: Path) -> PciDevice:
    """Read a device from its own folder, whose path is the way to it: `pci0000:00/0000:00:01.0/0000:01:00.0`."""
    host_bridge: str | None = None
    bridges: list[str] = []
    for part in folder.parts[:-1]:
        if re.fullmatch(r"pci[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}", part):
            host_bridge, bridges = part, []
        elif host_bridge is not None and normal_bus_id(part):
            bridges.append(part)
    numa = read_number(folder / "numa_node")
    # First comes the CPU's own port, behind which two devices can only be functions of one card. A switch is a port
    # towards the CPU with ports towards its devices below; the latter tell nothing about who shares the switch.
    switches = (*bridges[:1], *bridges[1::2])
    return PciDevice(
        place=PciPlace(
            numa_node=numa if numa is not None and numa >= 0 else None, host_bridge=host_bridge, switches=switches
        ),
        cpus=read_line(folder / "local_cpulist") or None,
    )


def read_nics(*, root: Path, gpu_places: dict[int, PciPlace]) -> tuple[Nic, ...]:
    """Return the physical NICs of a machine, with the way from each to each GPU and to each other NIC.

    An adapter with RDMA is named as its RDMA device (`mlx5_0`), which is what NCCL and nvidia-smi call it. Virtual
    functions and interfaces without a PCI device are left out.
    """
    nics: list[tuple[Nic, PciPlace]] = []
    seen: set[Path] = set()
    for kind in ("infiniband", "net"):
        for entry in _entries(root / "sys/class" / kind):
            device = (entry / "device").resolve()
            if not (entry / "device").exists() or device in seen or not _is_pci_nic(device):
                continue
            seen.add(device)
            read = _read_infiniband if kind == "infiniband" else _read_ethernet
            place = _read_device(device).place
            nic = read(entry).replace(numa_node=place.numa_node, pci_bus_id=normal_bus_id(device.name))
            nics.append((nic, place))
    return tuple(_with_links(nic, place, nics, gpu_places) for nic, place in nics)


def _entries(folder: Path) -> list[Path]:
    """Return what is in a folder of sysfs, `mlx5_2` before `mlx5_10`; nothing where there is no such folder."""
    if not folder.is_dir():
        return []
    return sorted(
        folder.iterdir(),
        key=lambda entry: [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", entry.name)],
    )


def _is_pci_nic(device: Path) -> bool:
    return normal_bus_id(device.name) is not None and not (device / _VIRTUAL_FUNCTION).exists()


def _read_infiniband(entry: Path) -> Nic:
    """Read an RDMA device: the best of its ports, `400 Gb/sec (4X NDR)` and `4: ACTIVE`."""
    kind = state = None
    rate: float | None = None
    for port in _entries(entry / "ports"):
        found = re.match(r"([\d.]+)\s*Gb/sec", read_line(port / "rate"))
        port_rate = float(found[1]) * 1e9 / 8 if found else None
        port_state = read_line(port / "state").split(":")[-1].strip().lower() or None
        if state is None or (port_state == "active" and state != "active"):
            kind = read_line(port / "link_layer") or None
            state, rate = port_state, port_rate
    return Nic(name=entry.name, kind=kind, state=state, rate_bytes_per_s=rate)


def _read_ethernet(entry: Path) -> Nic:
    """Read a network interface; a speed of -1 or none is what Linux gives while the link is down."""
    speed = read_number(entry / "speed")
    return Nic(
        name=entry.name,
        kind="Ethernet",
        state=read_line(entry / "operstate") or None,
        rate_bytes_per_s=speed * 1e6 / 8 if speed is not None and speed > 0 else None,
    )


def _with_links(nic: Nic, place: PciPlace, nics: list[tuple[Nic, PciPlace]], gpu_places: dict[int, PciPlace]) -> Nic:
    to_gpus: dict[int, LinkType] = {}
    for index, gpu_place in gpu_places.items():
        if (between := link_between(place, gpu_place)) is not None:
            to_gpus[index] = between
    to_nics = {
        other.name: between
        for other, other_place in nics
        if other.name != nic.name and (between := link_between(place, other_place)) is not None
    }
    return nic.replace(gpu_links=to_gpus, nic_links=to_nics)


def read_line(path: Path) -> str:
    """Return the first line of a small file, "" where it is missing or Linux refuses to read it."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return file.read(_MAX_FILE_CHARACTERS).split("\n")[0].strip()
    except OSError:
        return ""


def read_number(path: Path) -> int | None:
    """Return the number that a small file holds, None where it is missing or something else."""
    text = read_line(path)
    return int(text) if re.fullmatch(r"-?\d{1,12}", text) else None
