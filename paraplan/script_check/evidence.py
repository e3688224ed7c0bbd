"""Evidence of a check of a script: the records of its ranks and of one process, with their tensors."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file

from paraplan.script_check.records import ProcessRecord, SourceRecord

NOISE_FACTOR = 16.0
"""How many times as much as shaken weights make is rounding."""
SMALLEST = 1e-3
"""The part of the usual size of a model's tensors that counts as the size of smaller ones."""


@dataclass(frozen=True)
class Process:
    """One process's record with its tensors."""

    record: ProcessRecord
    tensors: dict[str, torch.Tensor]

    @classmethod
    def read(cls, folder: Path, rank: int) -> Process | None:
        """Return what the process of `rank` wrote into `folder`, None where it wrote nothing."""
        path = folder / f"{rank}.json"
        if not path.exists():
            return None
        record = ProcessRecord.model_validate_json(path.read_text(encoding="utf-8"))
        return cls(record, load_file(path.with_suffix(".safetensors")))

    def of(self, kind: str) -> dict[str, torch.Tensor]:
        """Return tensors by parameter: of `start`, or `gradient/2`, say."""
        return {key[len(kind) + 1 :]: value for key, value in self.tensors.items() if key.startswith(f"{kind}/")}

    def before(self, step: int, name: str) -> torch.Tensor | None:
        """Return what a parameter held before a step."""
        earlier = self.tensors.get(f"start/{name}")
        return earlier if step == 1 else self.tensors.get(f"parameter/{step - 1}/{name}", earlier)

    def loss(self, step: int) -> float | None:
        """Return the sum of the losses of a step's micro-batches, None where there is none."""
        losses = self.record.steps[step - 1].losses
        return sum(losses) if losses else None

    def source(self, place: str) -> SourceRecord | None:
        """Return what was read at `place`, None where nothing was."""
        return next((one for one in self.record.sources if one.place == place), None)

    def reading(self, place: str, time: int) -> list[tuple[str, torch.Tensor]]:
        """Return the tensors that were read at `place` the `time`-th time, with the names of their keys."""
        source = next(one for one in self.record.sources if one.place == place)
        prefix = f"source/{source.number}/{time}/"
        leaves = sorted((int(key[len(prefix) :].split("/")[0]), key) for key in self.tensors if key.startswith(prefix))
        return [(key[len(prefix) :].split("/", 1)[1], self.tensors[key]) for _, key in leaves]


@dataclass(frozen=True)
class Sight:
    """All that is known: the ranks, one process, the same shaken, and what each rank alone would make."""

    ranks: Sequence[Process]
    alone: Process
    shaken: Process
    shares: Sequence[Process] = ()
    groups: Sequence[Sequence[int]] = ()
    """Ranks that read the same, by group."""
    num_micro_batches: int = 1
    num_parts: int = 1
    """Number of ranks that hold one whole of parameters of whose parts torch does not know."""
    passes: Process | None = None
    """One process that noted its gradients after each backward pass of the first step."""
    noted: Sequence[Process] | None = None
    """The ranks, and one process behind them, that noted what modules are given and give."""
    by_rank: Sequence[tuple[str, int]] = ()
    """Places and times at which ranks compute with values of their own, as one process could not."""
    again: Process | None = None
    """One process that ran as `alone` did once more, where rounding changes a gradient by much."""

    @property
    def axes(self) -> dict[str, set[tuple[int, ...]]]:
        """Groups of two ranks and more by the axis that they belong to; those without a name by their size."""
        found: dict[str, set[tuple[int, ...]]] = {}
        for process in self.ranks:
            for name, ranks in process.record.groups:
                if len(ranks) > 1:
                    found.setdefault(name or f"a group of {len(ranks)} ranks", set()).add(ranks)
        return found

    @property
    def sizes(self) -> dict[str, int]:
        """Numbers that a factor may be, by what they count."""
        found = {f"the size of {name}": size for name, size in self.ranks[0].record.axes.items()}
        found |= {f"the size of {name}": len(next(iter(groups))) for name, groups in self.axes.items()}
        for what, size in (
            ("the number of ranks", len(self.ranks)),
            ("the number of ranks that read unlike batches", len(self.groups)),
            ("the number of micro-batches", self.num_micro_batches),
        ):
            if size not in found.values() or "micro" in what:
                found[what] = size
        return {what: size for what, size in found.items() if size > 1}


def sizes_of(values: Mapping[str, torch.Tensor]) -> tuple[dict[str, float], float]:
    """Return the sizes of a model's tensors, as roots of their mean squares, and the smallest that counts."""
    sizes = {name: float(value.double().square().mean()) ** 0.5 for name, value in values.items()}
    return sizes, SMALLEST * statistics.median(sizes.values()) if sizes else 0.0


def distance(one: torch.Tensor, other: torch.Tensor, floor: float) -> float:
    """Return the size of a difference relative to that of `other`, which counts as `floor` where it is smaller."""
    size = max(float(other.double().norm()), floor * math.sqrt(other.numel()), 1e-30)
    return float(torch.dist(one.double(), other.double())) / size


def listed(ranks: Sequence[int]) -> str:
    """Return numbers of ranks as words."""
    return ", ".join(map(str, ranks))


def ranks_of(ranks: Sequence[int]) -> str:
    """Return `rank 1`, or `ranks 0, 1`."""
    return f"rank{'s' if len(ranks) > 1 else ''} {listed(ranks)}"
