"""Configurations of other tools as plans, and what would be faster than they are."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from paraplan.api.estimates import Estimate, estimate
from paraplan.cost.estimate import estimate_plan
from paraplan.cost.framework_files import load_framework
from paraplan.cost.workload import Workload
from paraplan.errors import NoPlanFitsError, PlanError
from paraplan.interop.export import TARGETS
from paraplan.interop.exported import Subject
from paraplan.interop.setup import Given, Setup
from paraplan.interop.sources.accelerate import read_accelerate
from paraplan.interop.sources.deepspeed import read_deepspeed
from paraplan.interop.sources.megatron_lm import read_megatron_lm
from paraplan.plan.files import PlanFile
from paraplan.plan.parallel import ParallelPlan
from paraplan.search.search import search

Tool = Literal["deepspeed", "accelerate", "megatron-lm"]

_MOST_CANDIDATES = 50
_WORTH_CHANGING = 1.02


@dataclass(frozen=True, eq=False)
class ImportedPlan:
    """What another tool's configuration says: its plan, and of the training what it names."""

    setup: Setup
    """The plan, precision, optimizer, framework and notes."""

    @property
    def plan(self) -> ParallelPlan:
        """The plan."""
        return self.setup.plan

    @property
    def framework(self) -> str:
        """The framework that the tool runs."""
        return self.setup.framework

    @property
    def notes(self) -> tuple[str, ...]:
        """What the configuration leaves open, and what was assumed."""
        return tuple(self.setup.notes)

    def __str__(self) -> str:
        return "\n".join([f"{self.setup.tool}: {self.plan.describe()}", *(f"note: {note}" for note in self.notes)])


def import_plan(
    source: str | Path,
    tool: Tool,
    *,
    num_gpus: int | None = None,
    micro_batch_size: int | None = None,
    global_batch_size: int | None = None,
    recompute: Literal["none", "selective", "full"] | None = None,
) -> ImportedPlan:
    """Return the plan of another tool's configuration: a file, or for Megatron-LM its arguments.

    The keywords fill in what scripts decide. Raises `PlanError` naming the file and key for what is broken.
    """
    given = Given(
        num_gpus=num_gpus,
        micro_batch_size=micro_batch_size,
        global_batch_size=global_batch_size,
        recompute=recompute,
    )
    if tool == "megatron-lm":
        return ImportedPlan(read_megatron_lm(str(source), source="--from-megatron", given=given))
    path = Path(source)
    if tool == "deepspeed":
        return ImportedPlan(read_deepspeed(_read(path), source=str(path), given=given))

    def read_beside(name: str) -> str:
        beside = path.parent / name
        return _read(beside if beside.exists() else Path(name))

    return ImportedPlan(read_accelerate(_read(path), source=str(path), given=given, read_file=read_beside))


@dataclass(frozen=True, eq=False)
class Alternatives:
    """A configuration that runs today beside what would be faster."""

    setup: Setup
    """The configuration."""
    now: Estimate
    """What it costs, modelled for the tool's framework."""
    others: dict[str, Estimate]
    """What to compare with, by a name for each: the tool's own best, and what paraplan recommends."""
    reason: str | None
    """Why there is nothing to compare with."""

    @property
    def verdict(self) -> str:
        """What the comparison says, in a sentence."""
        name, best = min(self.others.items(), key=lambda pair: pair[1].step.step_time_s)
        ratio = self.now.step.step_time_s / best.step.step_time_s
        if not self.now.fits:
            return f"The configuration does not fit; '{name}' does."
        if ratio < _WORTH_CHANGING:
            return "Nothing that was searched is predicted to be over 2 % faster than what runs today."
        return f"'{name}' is predicted to be {ratio:.2f} times as fast as what runs today."


def alternatives(imported: ImportedPlan, theirs: Workload, ours: Workload) -> Alternatives:
    """Return the estimate of an imported plan and the plans to compare with.

    `theirs` is modelled for the tool's framework, `ours` for paraplan's runtime. One plan is the tool's own best, the
    fastest that its configuration can express, left out where it is no faster than what runs; the other is what
    paraplan recommends. Raises `PlanError` where the plan does not suit the workload.
    """
    setup, now = imported.setup, estimate(theirs, imported.plan)
    if setup.plan.world_size != ours.cluster.num_gpus:
        reason = f"the configuration uses {setup.plan.world_size} of {ours.cluster.num_gpus} GPUs"
        return Alternatives(setup, now, {}, reason)
    found: dict[str, Estimate] = {}
    why: str | None = None
    try:
        best = _best_expressed(setup, theirs)
        if best is not None and (not now.fits or best.step.step_time_s < now.step.step_time_s):
            found[f"best of {setup.tool}"] = best
    except NoPlanFitsError as error:
        why = error.message
    try:
        found["recommended, paraplan"] = Estimate(ours, search(ours, num_candidates=1).best)
    except NoPlanFitsError as error:
        why = error.message
    return Alternatives(setup, now, found, None if found else why)


def _best_expressed(setup: Setup, theirs: Workload) -> Estimate | None:
    for candidate in search(theirs, num_candidates=_MOST_CANDIDATES, explains_failure=False).candidates:
        subject = Subject(file=PlanFile(plan=candidate.plan, training=theirs.training))
        if not TARGETS[setup.target].write(subject).gaps:
            return Estimate(theirs, estimate_plan(theirs, candidate.plan))
    return None


def modelled_for(workload: Workload, framework: str) -> Workload:
    """Return a workload modelled for another framework."""
    return replace(workload, framework=load_framework(framework))


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise PlanError(f"cannot read {path}: it is not text", hint="give the configuration file") from None
    except OSError as error:
        raise PlanError(f"cannot read {path}: {error.strerror}", hint="check the path") from None
