"""How fast one core of a CPU is, by its name: what time the host takes to start kernels goes with."""

from __future__ import annotations

import platform
import re
from functools import cache
from pathlib import Path

from pydantic import Field

from paraplan.hardware.profile_json import read_object, validated
from paraplan.records import Record, SourceKind
from paraplan.resources import profiles_folder


class CpuScores(Record):
    """`profiles/cpus.json`: what one core of a CPU scores, by the name of the CPU without its vendor's marks."""

    benchmark: str
    scores: dict[str, float] = Field(min_length=1)
    source: str
    source_kind: SourceKind


def this_cpu(*, cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return the name of this machine's CPU, its architecture where the system tells no name."""
    try:
        lines = cpuinfo.read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


@cache
def one_core_score(name: str) -> float | None:
    """Return the score of the CPU that a name such as `AMD EPYC 7R13 48-Core Processor` means, None if it is unknown.

    The longest name of the table that is part of the name is taken.
    """
    words = re.sub(r"\((r|tm)\)|\b(cpu|processor)\b", " ", name.lower())
    words = f" {' '.join(words.split())} "
    scores = {known.lower(): score for known, score in load_cpu_scores().scores.items()}
    found = [known for known in scores if f" {known} " in words]
    return scores[max(found, key=len)] if found else None


@cache
def load_cpu_scores() -> CpuScores:
    """Return the bundled table. Raises `ProfileError` where it is at fault."""
    path = profiles_folder() / "cpus.json"
    return validated(CpuScores, read_object(path), where=str(path))
