"""torch's agent of one node; before each start of the ranks the nodes compare versions and get a plan."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from torch.distributed import DistError, DistStoreError
from torch.distributed.elastic.agent.server.api import (
    DEFAULT_ROLE,
    RunResult,
    Worker,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.rendezvous import RendezvousError

from paraplan.errors import ParaplanError
from paraplan.launch.elastic.ending import await_other_nodes, end_without_restart
from paraplan.launch.elastic.movable import MovableRendezvous
from paraplan.launch.elastic.preparation import Round
from paraplan.launch.elastic.records import JobRecord
from paraplan.launch.faults.report import describe_failures, say, write_report
from paraplan.launch.nodes.doors import Doors
from paraplan.launch.nodes.rendezvous import SAY_AFTER_S, find_contradiction
from paraplan.launch.nodes.store import NodeEndedError, NodeLostError, NodeStore
from paraplan.launch.spec import NodeRange
from paraplan.launch.torch_private.elastic import (
    ElasticAgent,
    forget_store_of_ranks,
    is_spare,
    participants,
    spares,
    store_of,
)

_LOOK_INTERVAL_S = 1.0
_LOST_MEANWHILE = "a node is lost before the ranks have started: meeting again"
_NO_RESTART = "ranks of another node have ended well, and cannot start again: no restart"


class NodeAgent(ElasticAgent):
    """torch's local agent that calls `before_start` after each rendezvous, before the ranks start."""

    def __init__(
        self,
        *arguments: Any,
        before_start: Callable[[Round], None],
        job: JobRecord,
        doors: Doors,
        nodes: NodeRange,
        endpoint: str,
        movable: Callable[[Any], MovableRendezvous] | None = None,
        **options: Any,
    ) -> None:
        """Take torch's arguments, `before_start`, the record of the job, and how nodes meet.

        `movable` makes torch's rendezvous one that moves to another node; None for a job that ends with its store.
        """
        super().__init__(*arguments, **options)
        spec = self.get_worker_group().spec
        self._movable = None if movable is None else movable(spec.rdzv_handler)
        if self._movable is not None:
            spec.rdzv_handler = self._movable
        self._before_start = before_start
        self._job = job
        self._doors, self._nodes, self._endpoint = doors, nodes, endpoint
        self._is_restart_told = self._is_spare = self._is_restarting = self._is_meeting = False
        job.waits_for_ended = lambda: self._is_meeting and self._is_anyone_done()
        self._failed: RunResult | None = None
        self._store_of_nodes: NodeStore | None = None
        self._looks_at = 0.0

    def run(self, role: str = DEFAULT_ROLE) -> RunResult:
        """Run the ranks to their end. torch returns nothing for a node that the job has never needed."""
        result: RunResult | None
        try:
            result = super().run(role)
        except NodeEndedError:  # which had not said so yet when this node began to wait for it
            say(_NO_RESTART)
            if self._failed is None:
                assert self._store_of_nodes is not None
                raise end_without_restart(self._store_of_nodes) from None
            result = self._failed
        self._doors.spares = spares(self._handler)
        if result is None:
            say("the job has ended, and this node was not needed")
            return RunResult(WorkerState.SUCCEEDED)
        return result

    def monitor_workers(self, group: WorkerGroup) -> RunResult:
        """Return how the ranks are, and start them again where a node was lost."""
        result = super().monitor_workers(group)
        has_failed = result.state in (WorkerState.FAILED, WorkerState.UNHEALTHY)
        self._failed = result if has_failed else None
        reason = self._reason_to_move()
        if result.state == WorkerState.HEALTHY and reason is not None:
            self._tell_restart(reason)
            self.restart_workers(group)
        elif result.state == WorkerState.HEALTHY and self._has_lost_nodes():
            then = "restarting the other nodes without it" if self._may_go_on_without() else "waiting for it"
            self._tell_restart(f"a node is lost: {then}")
            self.restart_workers(group)  # as torch does for a node that is new: it counts as no failure
        elif has_failed and self.restarts_left > 0:
            if self._is_anyone_done():
                say(_NO_RESTART)
                self.forgo_restarts()
            else:
                self._tell_failure()
        return result

    @property
    def _handler(self) -> Any:
        """The rendezvous of torch, wherever it is now."""
        return self.get_worker_group().spec.rdzv_handler if self._movable is None else self._movable.inner

    def _reason_to_move(self) -> str | None:
        """Return why the ranks are to start again at another node's store; None where they are not.

        A job whose nodes have begun to end, well or not, does not move.
        """
        if self._movable is None:
            return None
        store = self._store_of_nodes
        if store is not None and store.is_ending:
            self._movable.may_move = False
        return self._movable.reason_to_move()

    def _tell_failure(self) -> None:
        """Say what failed, before torch starts the ranks anew."""
        if self._job.hang is not None:
            write_report(self._job.hang.render())
        group = self.get_worker_group()
        left, allowed = self.restarts_left - 1, group.spec.max_restarts
        what = describe_failures(self._job.failures, num_nodes=group.group_world_size or 1)
        self._tell_restart(f"{what}; restarting all ranks ({left} of {allowed} restarts left)")

    def _tell_restart(self, reason: str) -> None:
        self._is_restart_told = True
        say(reason)

    def restart_workers(self, group: WorkerGroup) -> None:
        """Start all ranks again, and say why; not for a node that joins when others have begun to end well."""
        if not self._is_restart_told:  # torch does so for no other reason
            if self._is_anyone_done():
                return
            say("a node joined: restarting all ranks")
        self._is_restart_told = False
        self._is_restarting = True
        try:
            super().restart_workers(group)
        finally:
            self._is_restarting = False

    def _has_lost_nodes(self) -> bool:
        """Whether a node of an elastic job has stopped to give signs of life, and has not ended its work before.

        torch drops such a node from the state of its rendezvous, and goes on waiting for ranks that are gone.
        """
        nodes = participants(self._handler)
        now = time.monotonic()
        if nodes is None or self._store_of_nodes is None or now < self._looks_at:
            return False
        self._looks_at = now + _LOOK_INTERVAL_S
        is_lost = len(nodes) < self._store_of_nodes.num_nodes
        if self._movable is None:
            return is_lost and not self._store_of_nodes.is_anyone_done()
        try:
            return not self._store_of_nodes.is_anyone_done() and is_lost
        except DistError:
            self._movable.note_lost()
            return False

    def _is_anyone_done(self) -> bool:
        with contextlib.suppress(RuntimeError):  # a store that is gone
            return self._store_of_nodes is not None and self._store_of_nodes.is_anyone_done()
        return False

    def _may_go_on_without(self) -> bool:
        """Whether the nodes that are left are as many as --nnodes asks for at least."""
        return len(participants(self._handler) or ()) >= int(self._handler.settings.min_nodes)

    def wait_for_nodes(self) -> None:
        """Tell the other nodes that this one is done, and wait for them; torch stays for 300 s, deaf to signals.

        Raises `FailedElsewhereError` where ranks of others fail, or a node is lost, meanwhile.
        """
        if self._store_of_nodes is None:
            super().wait_for_nodes()
        else:
            await_other_nodes(self._store_of_nodes)

    def rendezvous(self, group: WorkerGroup) -> None:
        """Wait for the other nodes; an error says which have come.

        Raises `NodeEndedError` where ranks of one of the last round end well meanwhile: it does not come.
        """
        # torch's dynamic rendezvous keeps where the ranks' store is from its first round on: a node that comes later
        # is never told, and one that stays looks for a store on a node that may be gone.
        is_over = threading.Event()
        if participants(self._handler) is not None and self._nodes.max > 1:
            threading.Thread(target=self._say_who_is_missing, args=(is_over,), daemon=True).start()
        began_s = time.monotonic()
        self._is_meeting = True
        try:
            self._meet(group)
            while (group.group_world_size or 0) < self._nodes.min:
                say(
                    f"{group.group_world_size} of {self._nodes.min} nodes are left at the end of the rendezvous: "
                    "waiting for the others again"
                )
                self._meet(group)
        except RendezvousError as error:
            for address in participants(self._handler) or ():
                error.add_note(address)  # for the report
            raise
        else:
            if self._is_spare:
                say("this node takes the place of one that is lost")
            self._is_spare = False
        finally:
            self._is_meeting = False
            self._job.clock.waiting_s += time.monotonic() - began_s
            is_over.set()

    def _meet(self, group: WorkerGroup) -> None:
        """Wait for the other nodes; again where one of them is lost before all have said that they are here."""
        while True:
            forget_store_of_ranks(self._handler)
            try:
                super().rendezvous(group)
            except NodeLostError:
                say(_LOST_MEANWHILE)
            except DistStoreError:  # what torch waits for from a node that has begun to meet again
                if participants(self._handler) is None:
                    raise
                say(_LOST_MEANWHILE)
            except DistError as error:
                self._move_or_raise(error)
            else:
                return

    def _move_or_raise(self, error: DistError) -> None:
        """Have the next meeting be at another node's store; raise the store's error where there is none."""
        if self._movable is None or not self._movable.may_move:
            raise error
        self._movable.note_lost()

    def assign_ranks(self, store: Any, node: int, num_nodes: int, spec: WorkerSpec) -> list[Worker]:
        """Return the ranks of this node once all nodes are here: torch waits for a lost one, and then ends the job."""
        if num_nodes > 1:
            self._store_of(store, node, num_nodes).meet()
        return super().assign_ranks(store, node, num_nodes, spec)

    def _store_of(self, store: Any, node: int, num_nodes: int) -> NodeStore:
        def has_lost_node() -> bool:
            here = participants(self._handler)
            return here is not None and len(here) < num_nodes

        return NodeStore(
            store,
            node=node,
            num_nodes=num_nodes,
            seal=self._doors.seal,
            clock_offset_s=self._doors.clock_offset_s or 0.0,
            is_elastic=self._nodes.min < self._nodes.max,
            min_nodes=self._nodes.min,
            left=self._doors.left,
            has_lost_node=has_lost_node,
        )

    def _say_who_is_missing(self, is_over: threading.Event) -> None:
        """Say once who has come, if the rendezvous takes a while, and whether a node was sent away."""
        if is_over.wait(SAY_AFTER_S):
            return
        if is_spare(self._handler):
            self._is_spare = True
            say(f"the job has its {self._nodes.max} nodes: this one waits, and takes the place of one that is lost")
            return
        here = participants(self._handler) or ["this node"]
        endpoint = self._endpoint if self._movable is None else self._movable.place
        say(describe_wait(here, self._nodes, endpoint))
        while not is_over.wait(SAY_AFTER_S):
            with contextlib.suppress(RuntimeError, ParaplanError):
                contradiction = find_contradiction(store_of(self._handler), seal=self._doors.seal)
                if contradiction is not None:
                    say(contradiction)
                    return

    def start_workers(self, group: WorkerGroup) -> dict[int, Any]:
        """Start the ranks, after what is done before each start; the nodes meet again where one is lost meanwhile."""
        while True:
            node, num_nodes = group.group_rank, group.group_world_size
            assert node is not None
            assert num_nodes is not None
            store = self._store_of(group.store, node, num_nodes)
            self._store_of_nodes = store if num_nodes > 1 else None
            this_round = Round(
                store=store,
                world_size=group.workers[0].world_size,
                ranks_per_node=group.spec.local_world_size,
                master_addr=str(group.master_addr),
                door=self._doors.standing.door,
                launcher=self._doors.standing.launcher,
            )
            try:
                self._before_start(this_round)
            except NodeLostError:
                say(_LOST_MEANWHILE)
                self.rendezvous(group)
            except DistError as error:
                self._move_or_raise(error)
                self.rendezvous(group)
            else:
                if self._movable is not None:
                    self._movable.begin_round(store.facts)
                return super().start_workers(group)


def describe_wait(here: Sequence[str], nodes: NodeRange, endpoint: str) -> str:
    """Return which nodes have come, and how many are missing."""
    present = f"here {'is' if len(here) == 1 else 'are'} {', '.join(here)}"
    if len(here) >= nodes.max:
        return f"waiting at {endpoint} until all {nodes.max} nodes are ready; {present}"
    wanted = str(nodes.min) if nodes.min == nodes.max else str(nodes)
    return f"waiting at {endpoint} for {max(0, nodes.min - len(here)) or 'more'} of {wanted} nodes; {present}"
