"""The GPUs that `nvidia-smi -L` and `nvidia-smi nvlink -s` list: name, UUID, MIG instances, active NVLinks."""

from __future__ import annotations

import re
from dataclasses import dataclass

from paraplan.hardware.topology import MigInstance

_GPU = re.compile(r"^\s*GPU\s*(\d{1,3})\s*:\s*(\S.{0,80}?)\s*(?:\(UUID:\s*(\S{1,60}?)\s*\)?)?\s*$")
_MIG = re.compile(r"^\s*MIG\s+(\S{1,30})\s+Device\s+\d+\s*:\s*\(UUID:\s*(\S{1,60}?)\s*\)?\s*$")
_LINK = re.compile(r"^\s*Link\s+(\d{1,2})\s*:\s*(?:([\d.]{1,8})\s*GB/s|<?\s*inactive)", re.IGNORECASE)
_NO_LINKS = re.compile(r"all links are inactive|does not have or support nvlink", re.IGNORECASE)


@dataclass(frozen=True)
class ListedGpu:
    """A GPU of a listing. `nvlink_count` is None where the listing says nothing of links."""

    name: str | None = None
    uuid: str | None = None
    nvlink_count: int | None = None
    mig_instances: tuple[MigInstance, ...] = ()


def read_listed_gpus(lines: list[str]) -> dict[int, ListedGpu]:
    """Return the GPUs that cleaned lines list, by index. A UUID that was masked is left out."""
    names: dict[int, tuple[str, str | None]] = {}
    counts: dict[int, int] = {}
    slices: dict[int, list[MigInstance]] = {}
    current: int | None = None
    for line in lines:
        if gpu := _GPU.match(line):
            current = int(gpu[1])
            uuid = gpu[3] if gpu[3] and re.fullmatch(r"GPU-[0-9a-fA-F\-]{4,}", gpu[3]) else None
            names.setdefault(current, (gpu[2], uuid))
        elif current is not None and (link := _LINK.match(line)):
            counts[current] = counts.get(current, 0) + (link[2] is not None)
        elif current is not None and _NO_LINKS.search(line):
            counts.setdefault(current, 0)
        elif current is not None and (mig := _MIG.match(line)):
            slices.setdefault(current, []).append(MigInstance(name=mig[1], uuid=mig[2]))
    return {
        index: ListedGpu(name, uuid, counts.get(index), tuple(slices.get(index, ())))
        for index, (name, uuid) in names.items()
    }
