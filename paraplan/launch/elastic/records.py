"""With what the ranks of a job are started, and what is known of the job while it runs."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from paraplan.launch.faults.collectives import Whereabouts
from paraplan.launch.faults.failures import RankFailure
from paraplan.launch.faults.hang import HangVerdict
from paraplan.launch.goodput import JobClock
from paraplan.launch.guard import GuardVerdict
from paraplan.launch.nodes.store import NodeStore
from paraplan.launch.preemption import StopRequest
from paraplan.launch.ranks.limits import MemoryKills
from paraplan.launch.ranks.live import LiveRank
from paraplan.launch.ranks.spawning import Spares, SpawnerHandle
from paraplan.launch.run_folder import RunFolder
from paraplan.launch.spec import LaunchSpec
from paraplan.launch.stragglers.watch import Case
from paraplan.shared_memory import CopySlots, StatusPage

if TYPE_CHECKING:  # pydantic costs a tenth of a second, which a launch without a plan need not pay
    from paraplan.plan.files import PlanFile

_DEFAULT_GRACE_S = 30.0  # torchrun's


@dataclass
class AttemptSettings:
    """How ranks start and stop: as `spec` says, and as follows from it and the machine.

    `fork` starts ranks with torch imported; `num_threads` is then what torch is set to in them, None for as imported.
    `keeps_logs` copies what ranks write to files of their own, in a folder that stays; else a folder that nobody asked
    for is removed at the end. `cpus` are the CPUs that a local rank is kept on; none for all.
    """

    spec: LaunchSpec
    spawner: SpawnerHandle
    fork: bool = False
    num_threads: int | None = None
    environment: dict[str, str] = field(default_factory=dict)
    """Variables that ranks get beside this process's own."""
    keeps_logs: bool = False
    cpus: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    spares: Spares = field(default_factory=Spares)
    """Processes that stand by for ranks that start again."""

    @property
    def grace_s(self) -> float:
        """The seconds between a request to end (SIGTERM) and SIGKILL, whatever the reason for ending."""
        return _DEFAULT_GRACE_S if self.spec.shutdown_timeout is None else float(self.spec.shutdown_timeout)

    @property
    def follows_steps(self) -> str | None:
        """The module whose import has ranks note the times of their steps, by which slow ones are found."""
        if self.spec.no_straggler_watch:
            return None
        is_any = self.spec.watch_steps or self.spec.hang_timeout is not None
        return "torch" if is_any else "paraplan.runtime.engine"


@dataclass
class JobRecord:
    """A job while it runs, as far as it is known; the attempts write it, the report reads it.

    `plan` is the plan that the ranks have got, `store` where the nodes of this round write to each other,
    `folder` where the run is kept. `where` has the stacks of ranks that ran on when others had lost a connection or
    timed out. `late` are the slow ranks, links and hosts that were told. `clock` is where the time of
    the job went, `page` what its ranks tell of themselves, `stop` whether they are to save and end, `copies` the memory
    for copies of the state. `ranks` are those of this node that run, of `world_size`, for commands from outside;
    `num_questions` counts when their stacks were begun and ended to be asked for.
    """

    started_ns: int | None = None
    kills_before: MemoryKills | None = None
    failures: list[RankFailure] = field(default_factory=list)
    attempts: int = 0
    hang: HangVerdict | None = None
    apart: GuardVerdict | None = None
    plan: PlanFile | None = None
    store: NodeStore | None = None
    folder: RunFolder | None = None
    where: Whereabouts = field(default_factory=Whereabouts)
    late: list[Case] = field(default_factory=list)
    clock: JobClock = field(default_factory=JobClock)
    page: StatusPage | None = None
    stop: StopRequest = field(default_factory=StopRequest)
    copies: CopySlots | None = None
    script: str = ""
    max_nodes: int = 1
    ranks: Mapping[int, LiveRank] = field(default_factory=dict)
    world_size: int = 0
    num_questions: int = 0
    request_stacks: Callable[[Sequence[LiveRank]], None] = lambda ranks: None
    """Asks ranks of this node for their stacks, from any thread."""
    step_parts: dict[str, float] | None = None
    """Seconds of the parts of a usual step of rank 0 on its host, where it ran here and its steps were followed."""
    waits_for_ended: Callable[[], bool] = lambda: False
    """Whether this node waits in the rendezvous for one whose ranks have ended well."""
    requeued_by: str | None = None
    """The number that Slurm gives to the node that has it queue the job again; None where nobody does."""
    has_spares: bool = False
    """Whether other nodes waited for a place as the job ended."""

    @property
    def kept_folder(self) -> Path | None:
        """The folder of the run, None where it is removed at the end."""
        return None if self.folder is None or self.folder.is_temporary else self.folder.path.absolute()

    @property
    def run(self) -> str:
        """The name by which commands call this run."""
        return f"{Path(self.script).stem}-{os.getpid()}" if self.kept_folder is None else self.kept_folder.name

    def end_sharing(self) -> None:
        """Give back what ranks and launcher shared, at the end of the job. What ranks have told stays."""
        self.stop.is_over.set()
        if self.page is not None:
            self.page.forget()
        if self.copies is not None:
            self.copies.free()
