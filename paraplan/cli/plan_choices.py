"""The options that decide a plan, and what a search may choose among."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paraplan.api.plans import AXES, make_plan, micro_batches
from paraplan.api.workloads import experts_beside_tensor, framework_title, least_micro_batch, usual_choices
from paraplan.cli.options import (
    MOST_RANKS,
    PLAN_PANEL,
    OffloadName,
    RecomputeName,
    ScheduleChoice,
    count,
    one_of,
)
from paraplan.cli.terminal import show_note

if TYPE_CHECKING:
    from paraplan.api.recommendations import Constraints
    from paraplan.plan.parallel import Degree, ParallelPlan

_RANKS_OF = {axis.name: axis.ranks for axis in AXES}


def plan_count(name: str, what: str, *, least: int = 1) -> Any:
    """Return the option of a whole number that a plan has."""
    return typer.Option(
        f"--{name}", metavar="N", parser=count(least, MOST_RANKS), rich_help_panel=PLAN_PANEL, help=what
    )


def _degree(axis: Degree) -> Any:
    return plan_count(axis, _RANKS_OF[axis])


@dataclass(frozen=True, kw_only=True)
class PlanChoices:
    """A plan's fields. `estimate` takes what is not given as 1 or off; `recommend` keeps what is given."""

    dp: Annotated[int | None, _degree("dp")] = None
    tp: Annotated[int | None, _degree("tp")] = None
    pp: Annotated[int | None, _degree("pp")] = None
    cp: Annotated[int | None, _degree("cp")] = None
    ep: Annotated[int | None, _degree("ep")] = None
    zero: Annotated[
        int | None,
        typer.Option(
            "--zero", metavar="0-3", parser=count(0, 3), rich_help_panel=PLAN_PANEL, help="ZeRO stage; 0 is DDP."
        ),
    ] = None
    micro_batch: Annotated[int | None, plan_count("micro-batch", "Sequences of one micro-batch.")] = None
    recompute: Annotated[
        RecomputeName | None,
        typer.Option(
            "--recompute",
            metavar="WHAT",
            rich_help_panel=PLAN_PANEL,
            help=f"Activation checkpointing: {one_of(RecomputeName)}.",
        ),
    ] = None
    schedule: Annotated[
        ScheduleChoice | None,
        typer.Option(
            "--schedule",
            metavar="NAME",
            rich_help_panel=PLAN_PANEL,
            help=f"Pipeline schedule: {one_of(ScheduleChoice)}; 1f1b by default.",
        ),
    ] = None
    sequence_parallel: Annotated[
        bool | None,
        typer.Option(
            "--sequence-parallel/--no-sequence-parallel",
            rich_help_panel=PLAN_PANEL,
            help="Split norms and dropout over tp; --no-sequence-parallel: never.",
        ),
    ] = None
    offload: Annotated[
        OffloadName | None,
        typer.Option(
            "--offload",
            metavar="WHAT",
            rich_help_panel=PLAN_PANEL,
            help=f"What lives in host memory: {one_of(OffloadName)}.",
        ),
    ] = None

    def constraints(self) -> Constraints:
        """Return what a search has to keep."""
        from paraplan.api.recommendations import Constraints  # the search, which an estimate does without

        return Constraints(
            **{axis.name: getattr(self, axis.name) for axis in AXES},
            zero_stage=self.zero,
            micro_batch_size=self.micro_batch,
            recompute=self.recompute.value if self.recompute else None,
            schedule=self.schedule.value if self.schedule else None,
            sequence_parallel=self.sequence_parallel,
            offload=self.offload.value if self.offload else None,
        )

    def plan(self, global_batch: int | None, framework: str, task: str, **others: Any) -> ParallelPlan:
        """Return the plan, for one micro-batch a rank unless a global batch is given; `others` are more of its fields.

        The smallest micro-batch of `task` is taken where none is given.

        `ep` is as `framework` counts; its ZeRO stage and sequence parallelism are taken where none are given, with a
        note. Raises `PlanError` where they contradict each other.
        """
        degrees = {axis.name: getattr(self, axis.name) or 1 for axis in AXES}
        if self.ep is not None and degrees["tp"] > 1:
            ranks = degrees["dp"] * degrees["cp"]
            degrees["ep"] = experts_beside_tensor(self.ep, tp=degrees["tp"], data_ranks=ranks, framework=framework)
        dp, micro_batch = degrees["dp"], self.micro_batch or least_micro_batch(task)
        usual = usual_choices(framework, tp=degrees["tp"], pp=degrees["pp"], data_ranks=dp * degrees["cp"])
        given = {"zero_stage": self.zero, "sequence_parallel": self.sequence_parallel}
        self._say_usual({name: value for name, value in usual.items() if value and given[name] is None}, framework)
        chosen = usual | {name: value for name, value in given.items() if value is not None}
        schedule = self.schedule or (ScheduleChoice.one_forward_one_backward if degrees["pp"] > 1 else None)
        return make_plan(
            **degrees,
            **chosen,
            micro_batch_size=micro_batch,
            num_microbatches=micro_batches(global_batch or dp * micro_batch, dp=dp, micro_batch_size=micro_batch),
            pipeline_schedule=schedule,
            recompute=self.recompute or RecomputeName.none,
            offload=self.offload or OffloadName.none,
            **others,
        )

    def _say_usual(self, usual: dict[str, Any], framework: str) -> None:
        taken, others = [], []
        if "zero_stage" in usual:
            taken.append(f"--zero {usual['zero_stage']}")
            others.append("--zero 0")
        if "sequence_parallel" in usual:
            taken.append("--sequence-parallel")
            others.append("--no-sequence-parallel")
        if taken:
            default = f"{' and '.join(taken)}, the default of {framework_title(framework)}"
            show_note(f"{default}; without: {' '.join(others)}")
