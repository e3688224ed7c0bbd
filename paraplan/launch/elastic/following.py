"""Followers of the ranks of one attempt: the watch over their steps, files beside their error files, their end."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.distributed.elastic.multiprocessing.api import SignalException

from paraplan.launch.elastic.records import AttemptSettings, JobRecord
from paraplan.launch.faults.collectives import DUMP_PREFIX, DUMP_VARIABLES
from paraplan.launch.faults.report import say
from paraplan.launch.guard import GuardWatch
from paraplan.launch.ranks.bootstrap import CALLS_REQUEST, FAULT_FILE, GUARD_VARIABLE, MARKS_VARIABLE, STACK_FILE
from paraplan.launch.ranks.replica_sums import LAYOUT_FILE, SUMS_FILE
from paraplan.launch.ranks.step_marks import MARKS_FILE
from paraplan.launch.stragglers.watch import StragglerWatch

if TYPE_CHECKING:  # pydantic costs a tenth of a second, which a launch without a plan need not pay
    from paraplan.plan.files import PlanFile

_BACKEND = "PARAPLAN_BACKEND"  # as in paraplan.runtime.world, which loads torch
_ALWAYS_REMOVED = (CALLS_REQUEST, MARKS_FILE, SUMS_FILE.format(slot="*"), LAYOUT_FILE.format(layout="*"))


def watch_variables(settings: AttemptSettings, environment: Mapping[str, str], folder: Path | None) -> dict[str, str]:
    """Return what has a rank with this environment note its steps and sum what it holds, where it is not alone.

    NCCL's watchdog leaves its dump in `folder`, and not in the user's home folder, which is its default.
    """
    chosen: dict[str, str] = {}
    if torch.cuda.is_available() and folder is not None and not any(name in os.environ for name in DUMP_VARIABLES):
        chosen |= dict.fromkeys(DUMP_VARIABLES, str(folder / DUMP_PREFIX))
    if int(environment.get("WORLD_SIZE", "1")) > 1:
        chosen |= {} if settings.follows_steps is None else {MARKS_VARIABLE: settings.follows_steps}
        chosen |= {} if settings.spec.guard is None else {GUARD_VARIABLE: str(settings.spec.guard)}
    return chosen


def remove_files(folders: Iterable[Path]) -> None:
    """Remove what ranks wrote for the watches, and what stood ready beside their error files and was not needed."""
    for folder in folders:
        for path in (path for name in (*_ALWAYS_REMOVED, STACK_FILE, FAULT_FILE) for path in folder.glob(name)):
            with suppress(OSError):
                if path.name not in (STACK_FILE, FAULT_FILE) or not path.stat().st_size:
                    path.unlink()


class RankWatches:
    """The watch over steps and the guard of the ranks that have started, made when they first look."""

    def __init__(self, settings: AttemptSettings, job: JobRecord) -> None:
        self._settings, self._job, self._num_ranks = settings, job, job.world_size
        self._folders = {rank: one.folder for rank, one in job.ranks.items() if one.folder is not None}
        self._steps: StragglerWatch | None = None
        self._guard: GuardWatch | None = None
        self._follows_steps = settings.follows_steps is not None
        self._is_guarded = bool(self._folders) and settings.spec.guard is not None and self._num_ranks > 1

    def look_for_slow_ranks(self) -> None:
        """Look for slow ranks. What ranks and other nodes have noted may be anything, and ends no job."""
        try:
            if self._steps is None and self._follows_steps:
                self._steps = self._watch_steps()
            if self._steps is not None:
                self._steps.look()
        except SignalException:
            raise
        except Exception as error:
            say(f"slow ranks are looked for no more: {type(error).__name__}: {error}")
            self._steps, self._follows_steps = None, False

    def _watch_steps(self) -> StragglerWatch | None:
        """Return what follows the ranks of this node, None while none notes its steps."""
        if not any((folder / MARKS_FILE).exists() for folder in self._folders.values()):
            return None
        gpus = {}
        if torch.cuda.is_available() and os.environ.get(_BACKEND) != "gloo":  # under which ranks share GPUs
            visible = dict(enumerate(os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")))
            for rank, one in self._job.ranks.items():
                number = visible.get(one.local_rank, "").strip()
                gpus[rank] = f"GPU {number if number.isdigit() else one.local_rank}"
        return StragglerWatch(
            self._folders,
            host=socket.gethostname(),
            gpus=gpus,
            num_ranks=self._num_ranks,
            peers=peers_of_plan(self._job.plan, self._num_ranks),
            store=self._job.store,
            cases=self._job.late,
            say=say,
        )

    def finds_ranks_apart(self, *, is_end: bool = False) -> bool:
        """Whether ranks hold unlike values that should be alike, or read the same data; which is noted in the job."""
        if self._is_guarded and self._guard is None:
            self._guard = GuardWatch(self._folders, num_ranks=self._num_ranks, store=self._job.store, say=say)
        self._job.apart = None if self._guard is None else self._guard.look(is_end=is_end)
        return self._job.apart is not None


def peers_of_plan(file: PlanFile | None, num_ranks: int) -> list[list[int]]:
    """Return groups of ranks that do the same work: those of a pipeline stage, all without a plan."""
    if file is None or file.plan.world_size != num_ranks:
        return [list(range(num_ranks))]
    from paraplan.plan.ranks import RankGrid  # as the plan itself, only where there is one

    grid = RankGrid.of_plan(file.plan)
    stages: dict[int, list[int]] = {}
    for rank in range(num_ranks):
        stages.setdefault(grid.coordinates(rank)["pp"], []).append(rank)
    return list(stages.values())
