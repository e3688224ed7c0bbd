"""Followers of the ranks of one attempt: the watch over their steps, files beside their error files, their end."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from torch.distributed.elastic.multiprocessing.api import SignalException

from paraplan.launch.elastic.records import AttemptSettings, JobRecord
from paraplan.launch.faults.collectives import DUMP_PREFIX, DUMP_VARIABLES
from paraplan.launch.faults.report import say
from paraplan.launch.guard import GuardWatch
from paraplan.launch.ranks.bootstrap import CALLS_REQUEST, FAULT_FILE, GUARD_VARIABLE, MARKS_VARIABLE, STACK_FILE
from paraplan.launch.ranks.live import LiveRank
from paraplan.launch.ranks.step_marks import MARKS_FILE
from paraplan.launch.stragglers.watch import StragglerWatch
from paraplan.units import ranks_in_words

if TYPE_CHECKING:  # pydantic costs a tenth of a second, which a launch without a plan need not pay
    from paraplan.plan.files import PlanFile

_BACKEND = "PARAPLAN_BACKEND"  # as in paraplan.runtime.world, which loads torch


def watch_variables(settings: AttemptSettings, environment: Mapping[str, str], folder: Path | None) -> dict[str, str]:
    """Return what has a rank with this environment note its steps and sum what it holds, where it is not alone.

    NCCL's watchdog leaves its dump in `folder`, and not in the user's home folder, which is its default.
    """
    chosen: dict[str, str] = {}
    if settings.has_gpus and folder is not None and not any(name in os.environ for name in DUMP_VARIABLES):
        chosen |= dict.fromkeys(DUMP_VARIABLES, str(folder / DUMP_PREFIX))
    if int(environment.get("WORLD_SIZE", "1")) > 1:
        chosen |= {} if settings.follows_steps is None else {MARKS_VARIABLE: settings.follows_steps}
        chosen |= {} if settings.spec.guard is None else {GUARD_VARIABLE: str(settings.spec.guard)}
    return chosen


def remove_empty_files(folders: Iterable[Path]) -> None:
    """Remove what stood ready beside the error files of ranks and was not needed."""
    for folder in folders:
        with suppress(OSError):
            (folder / CALLS_REQUEST).unlink(missing_ok=True)
        with suppress(OSError):
            (folder / MARKS_FILE).unlink(missing_ok=True)
        for name in (STACK_FILE, FAULT_FILE):
            with suppress(OSError):
                if not (folder / name).stat().st_size:
                    (folder / name).unlink()


def live_ranks(
    pids: Mapping[int, int],
    *,
    envs: Mapping[int, Mapping[str, str]],
    folders: Mapping[int, Path],
    logs: Mapping[int, tuple[str, ...]],
) -> dict[int, LiveRank]:
    """Return the ranks of this node as commands from outside may see them. The arguments are by local rank."""
    ranks = {local: int(envs[local].get("RANK", local)) for local in pids}
    return {ranks[local]: LiveRank(local, pid, folders.get(local), logs[local]) for local, pid in pids.items()}


def watch_steps(
    settings: AttemptSettings, job: JobRecord, *, envs: Mapping[int, Mapping[str, str]], folders: Mapping[int, Path]
) -> StragglerWatch | None:
    """Return what follows the ranks of this node, None while none notes its steps. Both maps are by local rank."""
    if not any((folder / MARKS_FILE).exists() for folder in folders.values()):
        return None
    ranks = {local: int(environment["RANK"]) for local, environment in envs.items()}
    num_ranks = int(envs[0]["WORLD_SIZE"])
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    gpus = {
        rank: f"GPU {visible[local] if local < len(visible) and visible[local].strip().isdigit() else local}"
        for local, rank in ranks.items()
    }
    return StragglerWatch(
        {ranks[local]: folder for local, folder in folders.items()},
        host=socket.gethostname(),
        gpus=gpus if settings.has_gpus and os.environ.get(_BACKEND) != "gloo" else {},  # which then share GPUs
        num_ranks=num_ranks,
        peers=peers_of_plan(job.plan, num_ranks),
        store=job.store,
        cases=job.late,
        say=say,
    )


class RankWatches:
    """The watch over steps and the guard of one attempt, made when they first look. All maps are by local rank."""

    def __init__(
        self,
        settings: AttemptSettings,
        job: JobRecord,
        *,
        envs: Mapping[int, Mapping[str, str]],
        folders: Mapping[int, Path],
    ) -> None:
        self._settings, self._job, self._envs, self._folders = settings, job, envs, folders
        self._steps: StragglerWatch | None = None
        self._guard: GuardWatch | None = None
        self._follows_steps = settings.follows_steps is not None
        self._num_ranks = int(envs[0].get("WORLD_SIZE", "1"))
        self._is_guarded = bool(folders) and settings.spec.guard is not None and self._num_ranks > 1

    def look_for_slow_ranks(self) -> None:
        """Look for slow ranks. What ranks and other nodes have noted may be anything, and ends no job."""
        try:
            if self._steps is None and self._follows_steps:
                self._steps = watch_steps(self._settings, self._job, envs=self._envs, folders=self._folders)
            if self._steps is not None:
                self._steps.look()
        except SignalException:
            raise
        except Exception as error:
            say(f"slow ranks are looked for no more: {type(error).__name__}: {error}")
            self._steps, self._follows_steps = None, False

    def finds_ranks_apart(self, *, is_end: bool = False) -> bool:
        """Whether ranks hold unlike values that should be alike, or read the same data; which is noted in the job."""
        if self._is_guarded and self._guard is None:
            by_rank = {int(self._envs[local]["RANK"]): folder for local, folder in self._folders.items()}
            self._guard = GuardWatch(by_rank, num_ranks=self._num_ranks, store=self._job.store, say=say)
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
        stages.setdefault({str(axis): place for axis, place in grid.coordinates(rank).items()}.get("pp", 0), []).append(
            rank
        )
    return list(stages.values())


def say_who_is_waited_for(ranks: Sequence[int], number: signal.Signals, grace_s: float) -> None:
    """Say which ranks have not ended yet after a signal, and what a second one does."""
    them = "it" if len(ranks) == 1 else "them"
    say(f"waiting up to {grace_s:g} s for {ranks_in_words(ranks)} to end after {number.name}; Ctrl-C kills {them}")


def say_what_stays(left: Mapping[int, str]) -> None:
    """Say which processes, by id, go on after ranks that have ended well: they may be wanted, as an upload is."""
    if left:
        named = ", ".join(f"{pid} ({command})" for pid, command in left.items())
        say(f"the ranks have ended and leave running what they started in the background: {named}")
