"""Where devices sit on PCIe, and what lies between two of them."""

from __future__ import annotations

import re
from typing import NamedTuple

from paraplan.hardware.topology import LinkType

_BUS_ID = re.compile(r"(?:([0-9a-fA-F]{1,8}):)?([0-9a-fA-F]{1,2}):([0-9a-fA-F]{1,2})\.([0-9a-fA-F])")


class PciPlace(NamedTuple):
    """The way from a CPU to a device: NUMA node, host bridge, and the switches passed, outermost first."""

    numa_node: int | None
    host_bridge: str | None
    switches: tuple[str, ...] = ()


def link_between(first: PciPlace, second: PciPlace) -> LinkType | None:
    """Return what a transfer between two devices crosses, None where their host bridges or NUMA nodes are unknown.

    PIX: one switch; PXB: several; PHB: the host bridge of both; NODE: two host bridges of a NUMA node; SYS: two nodes.
    """
    if first.host_bridge is not None and first.host_bridge == second.host_bridge:
        shared = 0
        for a, b in zip(first.switches, second.switches, strict=False):
            if a != b:
                break
            shared += 1
        if not shared:
            return LinkType.PHB
        beyond = len(first.switches) + len(second.switches) - 2 * shared
        return LinkType.PXB if beyond else LinkType.PIX
    if first.numa_node is None or second.numa_node is None:
        return None
    return LinkType.NODE if first.numa_node == second.numa_node else LinkType.SYS


def normal_bus_id(text: str) -> str | None:
    """Return a PCI bus id as `0000:0f:00.0` with at least four digits of domain, None for any other text."""
    found = _BUS_ID.fullmatch(text.strip())
    if found is None:
        return None
    domain, bus, device, function = (int(part, 16) if part else 0 for part in found.groups())
    return f"{domain:04x}:{bus:02x}:{device:02x}.{function:x}"


def is_gpu_class(pci_class: str) -> bool:
    """Tell whether a PCI class (`0x030200`) is a display controller or a processing accelerator.

    NVIDIA's cards are 0x0302 and 0x0300, AMD's 0x0380 and, from MI300 on, 0x1200.
    """
    return pci_class.lower().startswith(("0x0300", "0x0302", "0x0380", "0x1200"))


def is_nic_class(pci_class: str) -> bool:
    """Tell whether a PCI class is an Ethernet (0x0200) or InfiniBand (0x0207) controller."""
    return pci_class.lower().startswith(("0x0200", "0x0207", "0x0280"))


def is_nvswitch_class(pci_class: str) -> bool:
    """Tell whether a PCI class is that of an NVSwitch (a bridge of kind "other", 0x068000)."""
    return pci_class.lower() == "0x068000"
