"""The name of this machine's CPU."""

from __future__ import annotations

import platform
from pathlib import Path


def this_cpu(*, cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return the name of this machine's CPU, its architecture where the system tells no name."""
    try:
        lines = cpuinfo.read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
