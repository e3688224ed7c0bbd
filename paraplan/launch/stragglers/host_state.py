"""Counters of this machine's kernel for its CPUs, its memory and its network, and their growth."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path

MIN_STEAL = 0.05
"""The share of CPU time that a hypervisor gave to others from which on it is worth a word."""

MIN_SWAPPED_PAGES = 200
"""Pages that came back from swap between two looks (0.8 MiB of 4 KiB pages) from which on they are."""

MIN_RESENT_SEGMENTS = 20


@dataclass(frozen=True)
class HostState:
    """Counters since the machine was started; 0 where the kernel has none.

    `steal_s` is CPU time that a hypervisor gave to other machines, `cpu_s` all CPU time. `throttled_s` is the time in
    which the CPU quota of this process's group was used up, `swapped_in` pages, `resent` TCP segments sent again.
    """

    steal_s: float = 0.0
    cpu_s: float = 0.0
    throttled_s: float = 0.0
    swapped_in: float = 0.0
    resent: float = 0.0

    def since(self, before: HostState) -> HostState:
        """Return what the counters grew by."""
        return HostState(**{one.name: getattr(self, one.name) - getattr(before, one.name) for one in fields(self)})

    def describe(self) -> list[str]:
        """Return what of this may slow down the ranks of this machine: `CPU steal 12 %`."""
        found = []
        if self.cpu_s and self.steal_s / self.cpu_s >= MIN_STEAL:
            found.append(f"CPU steal {self.steal_s / self.cpu_s * 100:.0f} %")
        if self.throttled_s >= MIN_STEAL:
            found.append("the CPU quota is used up")
        if self.swapped_in >= MIN_SWAPPED_PAGES:
            found.append("memory is swapped")
        return found

    @classmethod
    def of_json(cls, values: dict[str, float]) -> HostState:
        """Return the counters that are known here."""
        names = {one.name for one in fields(cls)}
        return cls(**{name: float(value) for name, value in values.items() if name in names})


def read_host(root: Path = Path("/")) -> HostState:
    """Return the counters of this machine: /proc/stat, /proc/vmstat, /proc/net/snmp, the CPU controller's cpu.stat.

    All are 0 where the kernel writes them otherwise.
    """
    with suppress(ValueError, IndexError):
        return _read_counters(root)
    return HostState()


def _read_counters(root: Path) -> HostState:
    stat = _words(root / "proc/stat", "cpu ")
    ticks = [float(word) for word in stat[1:9]]  # proc(5): user nice system idle iowait irq softirq steal
    per_s = os.sysconf("SC_CLK_TCK")
    names_and_values = _lines(root / "proc/net/snmp", "Tcp:")  # a line of names, and one of values under it
    tcp = dict(zip(*names_and_values[:2], strict=False)) if len(names_and_values) > 1 else {}
    group = _words(root / "sys/fs/cgroup/cpu.stat", "throttled_usec ")
    return HostState(
        steal_s=ticks[7] / per_s if len(ticks) > 7 else 0.0,
        cpu_s=sum(ticks) / per_s,
        throttled_s=float(group[1]) / 1e6 if group else 0.0,
        swapped_in=float((_words(root / "proc/vmstat", "pswpin ") or ["", "0"])[1]),
        resent=float(tcp.get("RetransSegs", "0")),
    )


def _words(path: Path, start: str) -> list[str]:
    return next(iter(_lines(path, start)), [])


def _lines(path: Path, start: str) -> list[list[str]]:
    with suppress(OSError):
        return [line.split() for line in path.read_text(encoding="utf-8").splitlines() if line.startswith(start)]
    return []
