"""Machines that no profile describes, from a number of GPUs of a kind: `8xh100`, `4xrtx-3090`."""

from __future__ import annotations

import re
from typing import Any, Literal, get_args

from paraplan.errors import UsageError
from paraplan.hardware.profiles import GpuProfile

LinkKind = Literal["pcie", "nvlink-pairs", "nvswitch"]
"""How GPUs of one machine are linked: over PCIe alone, NVLink bridges between pairs, or all to all."""

HOST_MEMORY_PER_GPU = 64 * 2**30
"""Nominal, as in the profiles of workstations."""

_COUNTED = re.compile(r"(?P<count>\d{1,3}) ?x ?-?(?P<gpu>[a-z0-9].*)")
_SUFFIXED = re.compile(r"(?P<gpu>[a-z].*?)-?x(?P<count>\d{1,3})")


def split_link(name: str) -> tuple[str, LinkKind | None]:
    """Return the name of a composed machine without its links, and these where the name says them."""
    for link in get_args(LinkKind):
        if name.endswith(f"-{link}"):
            return name.removesuffix(f"-{link}"), link
    return name, None


def counted_gpus(name: str) -> tuple[int, str] | None:
    """Return the number and the kind of GPU of a name such as `8xH100`, `4 x RTX 3090` or `rtx-3090-x4`, else None."""
    words = name.strip().lower().replace("_", "-")
    found = _COUNTED.fullmatch(words) or _SUFFIXED.fullmatch(words)
    if found is None or int(found["count"]) < 1:
        return None
    return int(found["count"]), re.sub(r"[ -]+", "-", found["gpu"].removeprefix("nvidia ").strip())


def plain_name(name: str) -> str:
    """Return the name of a cloud's machine without the words that its price list and its API put before it."""
    words = name.strip().lower().replace("_", "-")
    return words.removeprefix("standard-").removeprefix("ml.")


def usual_link(gpu: GpuProfile) -> LinkKind:
    """Return how GPUs of a kind are linked unless somebody says otherwise: cards with bridges go without them."""
    return "nvswitch" if gpu.nvlink_count and not gpu.nvlink_bridge else "pcie"


def composed_machine(gpu: GpuProfile, num_gpus: int, link: LinkKind | None = None) -> dict[str, Any]:
    """Return the content of a machine file: `num_gpus` GPUs of a kind in one machine, 10-gigabit Ethernet beside it.

    Raises `UsageError` for links that the GPU does not have.
    """
    link = link or usual_link(gpu)
    if link not in get_args(LinkKind):
        raise UsageError(f"there is no link {link!r}", hint=f"use {', '.join(get_args(LinkKind))}")
    if link != "pcie" and not gpu.nvlink_count:
        raise UsageError(f"{gpu.title} has no NVLink", hint="leave --link out, or use --link pcie")
    if link == "nvswitch" and gpu.nvlink_bridge:
        raise UsageError(
            f"{gpu.title} has NVLink over bridges between cards alone", hint="use --link nvlink-pairs or --link pcie"
        )
    every = {"link_type": "NV", "nvlink_count": gpu.nvlink_count}
    links: list[dict[str, Any]] = [{"link_type": "PHB", "groups": "all"}]
    if link == "nvswitch":
        links = [every | {"groups": "all"}]
    elif link == "nvlink-pairs":
        links = [every | {"groups": [[first, first + 1] for first in range(0, num_gpus - 1, 2)]}, *links]
    return {
        "name": f"{num_gpus}x{gpu.name}" + ("" if link == usual_link(gpu) else f"-{link}"),
        "title": f"{num_gpus} x {gpu.title}, {link}",
        "gpu": gpu.name,
        "num_gpus": num_gpus,
        "links": links if num_gpus > 1 else [],
        "network": "ethernet-10g",
        "host_memory_bytes": num_gpus * HOST_MEMORY_PER_GPU,
        "source": "composed from the number of GPUs; links as usual, host memory and network are nominal",
        "source_kind": "assumed",
    }
