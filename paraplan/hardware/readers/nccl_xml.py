"""Reader of NCCL's and RCCL's topology XML: the files of cloud images and those that NCCL_TOPO_DUMP_FILE writes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import combinations

from paraplan.errors import TopologyError
from paraplan.hardware.architecture import LinkRates
from paraplan.hardware.pci import PciPlace, is_gpu_class, is_nic_class, is_nvswitch_class, link_between, normal_bus_id
from paraplan.hardware.readers.xml_tree import XmlElement, parse_xml
from paraplan.hardware.topology import Gpu, GpuLink, LinkType, Nic, NodeTopology

MAX_GPUS = 256

_FASTEST_NIC_BITS_PER_S = 1.6e12
"""A port of 2025 carries 0.8 Tb/s; a file that says much more has slipped a unit."""

_POWER9_CLASS = "0x068001"


@dataclass
class _Device:
    """A PCI device of the file: a GPU, a NIC, or not told."""

    bus_id: str | None
    place: PciPlace
    cpus: str | None
    element: XmlElement | None = None
    nets: list[XmlElement] = field(default_factory=list)


@dataclass
class _Found:
    gpus: list[_Device] = field(default_factory=list)
    nics: list[_Device] = field(default_factory=list)
    unnamed: list[_Device] = field(default_factory=list)
    hosts: set[str] = field(default_factory=set)


def read_nccl_xml(text: str, *, source: str) -> NodeTopology:
    """Return the machine that an NCCL or RCCL topology XML describes.

    GPUs are numbered as the file numbers them (`dev`, else `rank`, else their order). A link through NVSwitches joins
    all GPUs that have one, with as many links as the GPU with fewer. Two devices below one CPU element without a common
    switch are PHB: the file does not tell host bridges apart. Raises TopologyError where there is no GPU.
    """
    top, warnings = parse_xml(text, source=source)
    names = {element.name for element in top.children}
    if not names & {"system", "cpu", "pci"}:
        raise TopologyError(
            f"{source} is XML, but no NCCL topology: its outermost element is <{min(names, default='')}>",
            hint="give a file whose outermost element is <system>, as NCCL_TOPO_DUMP_FILE writes it",
        )
    found = _Found()
    _walk(top, found, cpu=None, switches=())
    if not found.gpus:
        _take_unnamed_for_gpus(found, warnings)
    if not found.gpus or len(found.gpus) > MAX_GPUS:
        raise TopologyError(f"{source} holds {len(found.gpus)} GPUs; a machine has 1 to {MAX_GPUS}")
    if len(found.hosts) > 1:
        warnings.append(f"the file joins {len(found.hosts)} hosts; they are shown as one machine")
    numbered = dict(zip(_indices(found.gpus), found.gpus, strict=True))
    numbered = dict(sorted(numbered.items()))
    return NodeTopology(
        source=source,
        gpus=tuple(_make_gpu(index, device) for index, device in numbered.items()),
        links=_make_links(numbered, warnings),
        nics=tuple(_make_nics(found.nics, numbered, warnings)),
        warnings=tuple(dict.fromkeys(warnings)),
    )


def _walk(parent: XmlElement, found: _Found, *, cpu: XmlElement | None, switches: tuple[str, ...]) -> None:
    """Collect the devices below an element. A PCI element with PCI elements inside is a switch."""
    for element in parent.children:
        if element.name == "system":
            _walk(element, found, cpu=None, switches=())
        elif element.name == "cpu":
            found.hosts.add(element.attributes.get("host_hash", ""))
            _walk(element, found, cpu=element, switches=())
        elif element.name == "nic":
            found.nics.append(_device(element, cpu, switches, bus_id=None))
        elif element.name == "pci":
            _take_pci(element, found, cpu=cpu, switches=switches)


def _take_pci(element: XmlElement, found: _Found, *, cpu: XmlElement | None, switches: tuple[str, ...]) -> None:
    bus_id = normal_bus_id(element.attributes.get("busid", ""))
    pci_class = element.attributes.get("class", "")
    inside = {child.name for child in element.children}
    if "gpu" in inside:
        for child in element.children:
            if child.name == "gpu":
                found.gpus.append(_device(child, cpu, switches, bus_id=bus_id))
    elif "nic" in inside:
        for child in element.children:
            if child.name == "nic":
                found.nics.append(_device(child, cpu, switches, bus_id=bus_id))
    elif "pci" not in inside and is_gpu_class(pci_class):
        found.gpus.append(_device(None, cpu, switches, bus_id=bus_id))
    elif "pci" not in inside and is_nic_class(pci_class):
        found.nics.append(_device(None, cpu, switches, bus_id=bus_id))
    elif "pci" not in inside and not pci_class:
        found.unnamed.append(_device(None, cpu, switches, bus_id=bus_id))
    if "pci" in inside:
        _walk(element, found, cpu=cpu, switches=(*switches, element.attributes.get("busid", str(id(element)))))


def _device(
    element: XmlElement | None, cpu: XmlElement | None, switches: tuple[str, ...], *, bus_id: str | None
) -> _Device:
    numa = cpu.number("numaid") if cpu else None
    place = PciPlace(
        numa_node=numa if numa is not None and numa >= 0 else None,
        host_bridge=str(id(cpu)) if cpu else (switches[0] if switches else None),
        switches=switches,
    )
    nets = [child for child in element.children if child.name == "net"] if element else []
    cpus = cpus_of_mask(cpu.attributes.get("affinity", "")) if cpu else None
    return _Device(bus_id, place, cpus, element, nets)


def _take_unnamed_for_gpus(found: _Found, warnings: list[str]) -> None:
    """Where a file gives no class, take the longest run of adjacent bus ids below each CPU for its GPUs.

    Virtual machines number devices of one kind in a row.
    """
    by_host: dict[str | None, list[_Device]] = {}
    for device in found.unnamed:
        by_host.setdefault(device.place.host_bridge, []).append(device)
    for devices in by_host.values():
        runs: list[list[_Device]] = []
        for device in sorted(devices, key=lambda device: _bus_number(device.bus_id)):
            if runs and _bus_number(device.bus_id) - _bus_number(runs[-1][-1].bus_id) == 1:
                runs[-1].append(device)
            else:
                runs.append([device])
        longest = max(runs, key=len)
        found.gpus.extend(longest)
        found.nics.extend(device for run in runs if run is not longest for device in run)
    if found.unnamed:
        warnings.append("the file does not say which PCI devices are GPUs; rows of adjacent bus ids are taken for them")


def _bus_number(bus_id: str | None) -> int:
    """Return domain, bus and device of a bus id as one number."""
    return int(bus_id.split(".")[0].replace(":", ""), 16) if bus_id else -10


def _indices(devices: list[_Device]) -> list[int]:
    for attribute in ("dev", "rank"):
        numbers = [device.element.number(attribute) if device.element else None for device in devices]
        known = [number for number in numbers if number is not None and 0 <= number < MAX_GPUS]
        if len(set(known)) == len(devices):
            return known
    return list(range(len(devices)))


def _capability(device: _Device) -> str | None:
    """Return `9.0` for sm="90". RCCL's files have the number of compute units there, beside a `gcn`."""
    sm = device.element.number("sm") if device.element and "gcn" not in device.element.attributes else None
    return f"{sm // 10}.{sm % 10}" if sm is not None and 10 <= sm < 1000 else None


def _make_gpu(index: int, device: _Device) -> Gpu:
    return Gpu(
        index=index,
        pci_bus_id=device.bus_id,
        compute_capability=_capability(device),
        numa_node=device.place.numa_node,
        cpu_affinity=device.cpus,
        nvlink_count=sum(count for _, count, _ in _fast_links(device, "nvlink")) or None,
        nvlink_to_cpu_count=sum(count for _, count, kind in _fast_links(device, "nvlink") if kind == _POWER9_CLASS)
        or None,
    )


def _fast_links(device: _Device, name: str) -> Iterator[tuple[str | None, int, str]]:
    """Yield target, number of links and class of the target for each `nvlink` or `xgmi` element of a GPU."""
    for child in device.element.children if device.element else ():
        count = child.number("count")
        if child.name == name and count is not None and 0 < count <= 1024:
            yield normal_bus_id(child.attributes.get("target", "")), count, child.attributes.get("tclass", "").lower()


@dataclass
class _FastLinks:
    """Links that bypass PCIe: those between two GPUs of the file, and how many each GPU has to NVSwitches."""

    direct: dict[tuple[int, int], tuple[LinkType, int]] = field(default_factory=dict)
    to_switch: dict[int, int] = field(default_factory=dict)


def _collect_fast_links(gpus: dict[int, _Device], warnings: list[str]) -> _FastLinks:
    by_bus_id = {device.bus_id: index for index, device in gpus.items() if device.bus_id}
    found = _FastLinks()
    for index, device in gpus.items():
        for name, link_type in (("nvlink", LinkType.NV), ("xgmi", LinkType.XGMI)):
            for target, count, kind in _fast_links(device, name):
                other = by_bus_id.get(target) if target else None
                if is_nvswitch_class(kind):
                    found.to_switch[index] = found.to_switch.get(index, 0) + count
                elif kind == _POWER9_CLASS:
                    continue
                elif other is None or other == index:
                    end = "itself" if other == index else f"{target}, which is not in the file"
                    warnings.append(f"GPU {index} has {count} {name} links to {end}")
                else:
                    pair = (min(index, other), max(index, other))
                    found.direct[pair] = (link_type, max(count, found.direct.get(pair, (link_type, 0))[1]))
    return found


def _make_links(gpus: dict[int, _Device], warnings: list[str]) -> tuple[GpuLink, ...]:
    fast = _collect_fast_links(gpus, warnings)
    # The files of cloud images hold only the PCI tree; NCCL asks the driver for NVLinks when it reads them.
    detected = any(device.element is not None for device in gpus.values())
    if not detected and len(gpus) > 1:
        warnings.append("the file has no <gpu> elements, so NVLinks are not in it: how the GPUs are linked is unknown")
    links, rates = [], LinkRates()
    for first, second in combinations(gpus, 2):
        if first in fast.to_switch and second in fast.to_switch:
            count = min(fast.to_switch[first], fast.to_switch[second])
            links.append(_link(gpus, first, second, rates, link_type=LinkType.NV, count=count))
        elif (first, second) in fast.direct:
            link_type, count = fast.direct[first, second]
            links.append(_link(gpus, first, second, rates, link_type=link_type, count=count))
        elif detected and (between := link_between(gpus[first].place, gpus[second].place)):
            links.append(GpuLink(gpu_a=first, gpu_b=second, link_type=between))
    return tuple(links)


def _link(
    gpus: dict[int, _Device], first: int, second: int, rates: LinkRates, *, link_type: LinkType, count: int
) -> GpuLink:
    each = [_link_rate(rates, gpus[index], link_type) for index in (first, second)]
    known = [rate for rate in each if rate is not None]
    return GpuLink(
        gpu_a=first,
        gpu_b=second,
        link_type=link_type,
        nvlink_count=count,
        bandwidth_bytes_per_s=min(known) * count if len(known) == 2 else None,
    )


def _link_rate(rates: LinkRates, device: _Device, link_type: LinkType) -> float | None:
    if link_type is LinkType.XGMI:
        return rates.xgmi(device.element.attributes.get("gcn", "")) if device.element else None
    return rates.nvlink(compute_capability=_capability(device))


def _make_nics(devices: list[_Device], gpus: dict[int, _Device], warnings: list[str]) -> Iterator[Nic]:
    ports: list[tuple[_Device, XmlElement | None]] = []
    for device in devices:
        ports += [(device, net) for net in device.nets] or [(device, None)]
    names = _nic_names(ports)
    for number, (device, net) in enumerate(ports):
        speed = net.number("speed") if net else None
        rate = speed * 1e6 if speed is not None and speed > 0 else None
        if rate is not None and rate > _FASTEST_NIC_BITS_PER_S:
            warnings.append(f"{names[number]} has a speed of {speed} Mb/s, which no NIC has; it is left out")
            rate = None
        yield Nic(
            name=names[number],
            rate_bytes_per_s=rate / 8 if rate is not None else None,
            numa_node=device.place.numa_node,
            pci_bus_id=device.bus_id,
            gpu_links={
                index: between for index, gpu in gpus.items() if (between := link_between(device.place, gpu.place))
            },
            nic_links={
                names[other]: between
                for other, (far, _) in enumerate(ports)
                if other != number and (between := link_between(device.place, far.place))
            },
        )


def _nic_names(ports: list[tuple[_Device, XmlElement | None]]) -> list[str]:
    """Return a name of its own for each port: that of the file, with the port's number where a name is repeated."""
    names: list[str] = []
    for number, (device, net) in enumerate(ports):
        name = (net.attributes.get("name", "")[:60] if net else "") or device.bus_id or f"NIC{number}"
        if name in names and net:
            name = f"{name}:{net.attributes.get('port', '')[:8]}"
        names.append(name if name not in names else f"{name}#{number}")
    return names


def cpus_of_mask(mask: str) -> str | None:
    """Return the CPU ranges of a mask such as `00000000,00ffffff` (highest word first), None for an empty one."""
    if not re.fullmatch(r"[0-9a-fA-F]{1,8}(?:,[0-9a-fA-F]{1,8})*", mask.strip()):
        return None
    bits = int("".join(word.zfill(8) for word in mask.strip().split(",")), 16)
    ranges = []
    position = 0
    while bits:
        skip = (bits & -bits).bit_length() - 1
        bits >>= skip
        length = ((bits + 1) & ~bits).bit_length() - 1
        first = position + skip
        ranges.append(f"{first}-{first + length - 1}" if length > 1 else str(first))
        bits >>= length
        position = first + length
    return ",".join(ranges) or None
