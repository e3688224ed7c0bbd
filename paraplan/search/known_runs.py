"""Who trained mixtures of experts under which kind of plan, on how many GPUs (`profiles/mixture_runs.json`)."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from typing import Literal

import numpy as np

from paraplan.cost.plan_table import Ints, Mask
from paraplan.cost.workload import Workload
from paraplan.records import Record
from paraplan.resources import profiles_folder

AS_LARGE = 2
"""A kind counts as run on so many times the GPUs of its largest run."""
_AXES = ("tp", "pp", "cp", "ep")


class MixtureRun(Record):
    """The largest published run of one kind of plan that trained a mixture of experts."""

    family: str
    """The family of frameworks, as their profiles name it."""
    axes: tuple[Literal["tp", "pp", "cp", "ep"], ...]
    """The axes in use beside dp."""
    shards: Literal["none", "optimizer", "full"]
    """State that ranks of dp shard: nothing, states of the optimizer (ZeRO-1 and 2), or parameters too (ZeRO-3)."""
    trains: Literal["full", "lora"] = "full"
    """Part of the model that the run trained."""
    gpus: int
    """How many GPUs it ran on."""
    ep: int | None = None
    """The ranks that shared out the experts in the run that spread them least, of the published runs of the kind on an
    eighth of these GPUs or more; None without."""
    experts_per_rank: int | None = None
    """The routed experts of a layer that each of these ranks held."""
    model: str
    """Model that the run trained."""
    source: str
    """Where it is published."""


@cache
def mixture_runs() -> tuple[MixtureRun, ...]:
    """Return the published runs."""
    entries = json.loads((profiles_folder() / "mixture_runs.json").read_text(encoding="utf-8"))["runs"]
    return tuple(MixtureRun.model_validate(entry) for entry in entries)


def is_known(workload: Workload, column: Callable[[str], Ints]) -> Mask:
    """Return which plans, given by their columns, are of a kind that somebody ran at such a scale.

    All plans of models without experts are, and all on one GPU. The runs of all frameworks count where the family of
    the workload's own has none so large, and for adapters those of full training where none of adapters is. A plan is
    of the kind of a run if both use the same of tp, pp, cp and ep, and both or neither sharded parameters (ZeRO-3);
    experts over ranks of `ep` are less without `tp` than beside it. A plan spreads experts over as many
    ranks as such a run, or leaves a rank no more of them: two ranks that halve 128 experts gather nearly what plain
    sharding does.
    """
    count = len(column("dp"))
    if workload.model.num_experts == 1 or workload.cluster.num_gpus == 1:
        return np.ones(count, dtype=bool)
    name = workload.framework.family or workload.framework.name
    trains = "full" if workload.training.trainable.adapter is None else "lora"
    large = [run for run in mixture_runs() if AS_LARGE * run.gpus >= workload.cluster.num_gpus]
    full = [run for run in large if run.trains == "full"]
    runs = [run for run in large if run.family == name and run.trains == trains]
    runs = runs or [run for run in full if run.family == name] or full
    known = np.zeros(count, dtype=bool)
    for run in runs:
        same = (column("zero_stage") == 3) == (run.shards == "full")
        for axis in _AXES:
            if not (axis == "tp" and {"tp", "ep"} <= set(run.axes)):
                same &= (column(axis) > 1) == (axis in run.axes)
        if run.ep is not None and run.experts_per_rank is not None:
            same &= (column("ep") >= run.ep) | (column("ep") * run.experts_per_rank >= workload.model.num_experts)
        known |= same
    return known
