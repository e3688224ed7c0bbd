"""Machines that no profile describes, from a number of GPUs of a kind: `8xh100`, `4xrtx-3090`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any, Literal, get_args

from paraplan.errors import UsageError
from paraplan.hardware.link_speed import load_link_speeds
from paraplan.hardware.profiles import GpuProfile

LinkKind = Literal["pcie", "nvlink-pairs", "nvswitch", "no-p2p"]
"""How GPUs of one machine are linked: over PCIe alone, NVLink bridges between pairs, all to all, or not at all.

Without P2P each copy goes through the memory of the host, as slowly as somebody measured it.
"""

HOST_MEMORY_PER_GPU = 64 * 2**30
"""Nominal, as in the profiles of workstations."""

LONGEST_NAME = 200
"""Characters of a name of GPUs or machines; what is longer is none."""

_COUNTED = re.compile(r"(?P<count>\d{1,3}|\d{4,5}(?= ?[x* ] ?-?[a-z]))(?: ?[x*] ?-?| )(?P<gpu>[a-z0-9].*)")  # 3090x2
_SUFFIXED = re.compile(r"(?P<gpu>[a-z].*?)(?:[ -]?x|:)(?P<count>\d{1,5})")  # SkyPilot's too
_COUNTED_FILE = re.compile(r"(?P<count>[1-9]\d{0,2}) ?x ?(?P<gpu>.+\.json)")


def split_link(name: str) -> tuple[str, LinkKind | None]:
    """Return the name of a composed machine without its links, and these where the name says them."""
    for link in get_args(LinkKind):
        if name.endswith(f"-{link}"):
            return name.removesuffix(f"-{link}"), link
    return name, None


def counted_gpus(name: str) -> tuple[int, str] | None:
    """Return the number and the kind of GPU of a name such as `8xH100`, `4 RTX 3090` or `H100:8`, else None."""
    words = name.strip().lower().replace("_", "-")
    found = None if len(words) > LONGEST_NAME else _COUNTED.fullmatch(words) or _SUFFIXED.fullmatch(words)
    if found is None or int(found["count"]) < 1:
        return None
    return int(found["count"]), re.sub(r"[ -]+", "-", found["gpu"].removeprefix("nvidia ").strip())


def counted_file(name: str) -> re.Match[str] | None:
    """Return the `count` and the path of the `gpu` in `4xgpu.json`; None for other names, and where a file has it."""
    found = _COUNTED_FILE.fullmatch(name)
    return None if found is None or Path(name).exists() else found


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
    if link.startswith("nv") and not gpu.nvlink_count:
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
    elif link == "no-p2p":
        links[0]["bandwidth_bytes_per_s"] = load_link_speeds().speed("pcie-host").pair_bytes_per_s
    pairs = combinations(range(num_gpus), 2) if link == "no-p2p" else ()
    return {
        "name": f"{num_gpus}x{gpu.name}" + ("" if link == usual_link(gpu) else f"-{link}"),
        "title": f"{num_gpus} x {gpu.title}, {link}",
        "gpu": gpu.name,
        "num_gpus": num_gpus,
        "links": links if num_gpus > 1 else [],
        "peer_access": [{"gpu_a": first, "gpu_b": second, "unnamed": "NS"} for first, second in pairs],
        "network": "ethernet-10g",
        "host_memory_bytes": num_gpus * HOST_MEMORY_PER_GPU,
        "source": "composed from the number of GPUs; links as usual, host memory and network are nominal",
        "source_kind": "assumed",
    }


def mixed_machine(kinds: Sequence[tuple[int, GpuProfile]], link: LinkKind | None = None) -> dict[str, Any]:
    """Return the content of a machine file: numbers of several kinds of GPU in one machine, over PCIe.

    Its kind is the one with the least matmul peak, by which plans count all; each GPU has its own memory. Raises
    `UsageError` for links that they do not have.
    """
    if link not in (None, "pcie", "no-p2p"):
        raise UsageError(f"--link {link} does not join GPUs of several kinds", hint="use --link pcie or no-p2p")
    slowest = min((gpu for _, gpu in kinds), key=lambda gpu: gpu.peak("bf16") or gpu.peak("fp16") or 0.0)
    every = [gpu for count, gpu in kinds for _ in range(count)]
    has_access = all(gpu.peer_access is not False for gpu in every)
    rate = min(gpu.pcie_bandwidth_bytes_per_s for gpu in every)
    content = composed_machine(slowest, len(every), link or ("pcie" if has_access else None))
    for rule in content["links"]:
        rule.setdefault("bandwidth_bytes_per_s", rate)
    if not has_access:
        pairs = combinations(range(len(every)), 2)
        content["peer_access"] = [{"gpu_a": first, "gpu_b": second, "unnamed": "NS"} for first, second in pairs]
    return content | {
        "name": "+".join(f"{count}x{gpu.name}" for count, gpu in kinds) + ("-no-p2p" if link == "no-p2p" else ""),
        "title": " and ".join(f"{count} x {gpu.title}" for count, gpu in kinds),
        "gpus": [
            {
                "index": index,
                "name": gpu.title,
                "memory_total_bytes": gpu.memory_bytes,
                "compute_capability": gpu.compute_capability,
            }
            for index, gpu in enumerate(every)
        ],
    }
