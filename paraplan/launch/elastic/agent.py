"""torch's agent of one node; before each start of the ranks the nodes compare versions and get a plan."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from torch.distributed import DistStoreError
from torch.distributed.elastic.agent.server.api import RunResult, Worker, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.rendezvous import RendezvousError

from paraplan.errors import ParaplanError
from paraplan.launch.elastic.ending import FailedElsewhereError, Heartbeat, await_other_nodes, require_all_nodes
from paraplan.launch.elastic.preparation import Round
from paraplan.launch.elastic.records import JobRecord
from paraplan.launch.faults.report import describe_failures, say, write_report
from paraplan.launch.nodes.job_token import Seal
from paraplan.launch.nodes.rendezvous import SAY_AFTER_S, find_contradiction
from paraplan.launch.nodes.sealed_values import SealedValues
from paraplan.launch.nodes.static_rendezvous import StaticRendezvous
from paraplan.launch.nodes.store import NodeEndedError, NodeLostError, NodeStore
from paraplan.launch.spec import NodeRange
from paraplan.launch.torch_private import elastic as torchs
from paraplan.launch.torch_private.elastic import participants

_LOOK_INTERVAL_S = 1.0
_LOST_MEANWHILE = "a node is lost before the ranks have started: meeting again"
_NO_RESTART = "ranks of another node have ended well, and cannot start again: no restart"


class NodeAgent(torchs.ElasticAgent):
    """torch's local agent that calls `before_start` after each rendezvous, before the ranks start."""

    def __init__(
        self,
        *arguments: Any,
        before_start: Callable[[Round], None] | None,
        job: JobRecord,
        seal: Seal,
        nodes: NodeRange,
        endpoint: str,
        **options: Any,
    ) -> None:
        super().__init__(*arguments, **options)
        self._before_start = before_start
        self._job = job
        self._seal, self._nodes, self._endpoint = seal, nodes, endpoint
        self._is_restart_told = self._is_spare = self._is_meeting = False
        job.waits_for_ended = lambda: self._is_meeting and self._is_anyone_done()
        self._failed: RunResult | None = None
        self._store_of_nodes: NodeStore | None = None
        self._next_store: NodeStore | None = None
        self._heartbeat: Heartbeat | None = None
        self._looks_at = 0.0

    def run(self, *role: str) -> RunResult:
        """Run the ranks to their end. torch returns nothing for a node that the job has never needed."""
        result: RunResult | None
        try:
            result = super().run(*role)
        except NodeEndedError:  # which had not said so yet when this node began to wait for it
            say(_NO_RESTART)
            result, store = self._failed, self._store_of_nodes
            if result is None and store is not None:  # healthy ranks were stopped for a restart that cannot be
                failures = store.failures_of_others()
                store.note_stop("a restart without those that had ended well")
                said, became = "ranks of another node had ended well", "had been stopped to start again"
                raise FailedElsewhereError(said, failures, became=became) from None
        if result is None or not result.is_failed():  # after a failure the nodes have to tell each other still
            self._stop_heartbeat()
        self._job.has_spares = torchs.has_spares(self._handler)
        if result is None:
            say("the job has ended, and this node was not needed")
            return RunResult(WorkerState.SUCCEEDED)
        return result

    def monitor_workers(self, group: WorkerGroup) -> RunResult:
        """Return how the ranks are, and start them again where a node was lost."""
        result, store = super().monitor_workers(group), self._store_of_nodes
        has_failed = result.state in (WorkerState.FAILED, WorkerState.UNHEALTHY)
        self._failed = result if has_failed else None
        if result.state == WorkerState.HEALTHY and self._has_lost_nodes():
            may_go_on = len(participants(self._handler) or ()) >= int(self._handler.settings.min_nodes)
            then = "restarting the other nodes without it" if may_go_on else "waiting for it"
            self._tell_restart(f"a node is lost: {then}")
            self.restart_workers(group)  # as torch does for a node that is new: it counts as no failure
        elif result.state == WorkerState.HEALTHY and (reason := store and store.restart_elsewhere()) is not None:
            self._tell_restart(f"{reason}: restarting all ranks")
            self.restart_workers(group)
        elif has_failed and self.restarts_left > 0:
            if self._is_anyone_done():
                say(_NO_RESTART)
                self.forgo_restarts()
            elif isinstance(self._handler, StaticRendezvous) and store is not None and store.lacks_node():
                self.forgo_restarts()  # no other node can take a place in a static rendezvous
            else:
                self._tell_failure()
        return result

    @property
    def _handler(self) -> Any:
        """The rendezvous of torch."""
        return self.get_worker_group().spec.rdzv_handler

    def _tell_failure(self) -> None:
        """Say what failed, before torch starts the ranks anew."""
        for verdict in (self._job.hang, self._job.apart):
            if verdict is not None:
                write_report(verdict.render())
        group = self.get_worker_group()
        left, allowed = self.restarts_left - 1, group.spec.max_restarts
        what = describe_failures(self._job.failures, num_nodes=group.group_world_size or 1)
        self._tell_restart(f"{what}; restarting all ranks ({left} of {allowed} restarts left)")
        if self._store_of_nodes is not None:
            self._store_of_nodes.publish("restart", what)

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
        super().restart_workers(group)

    def _has_lost_nodes(self) -> bool:
        """Whether a node of an elastic job has stopped to give signs of life, and has not ended its work before.

        torch drops such a node from the state of its rendezvous, and goes on waiting for ranks that are gone.
        """
        nodes = participants(self._handler)
        now = time.monotonic()
        if nodes is None or self._store_of_nodes is None or now < self._looks_at:
            return False
        self._looks_at = now + _LOOK_INTERVAL_S
        return len(nodes) < self._store_of_nodes.num_nodes and not self._is_anyone_done()

    def _is_anyone_done(self) -> bool:
        return self._store_of_nodes is not None and self._store_of_nodes.is_anyone_done()

    def wait_for_nodes(self) -> None:
        """Tell the other nodes that this one is done, and wait for them; torch stays for 300 s, deaf to signals.

        Raises `FailedElsewhereError` where ranks of others fail, or a node is lost, meanwhile; a signal ends the wait.
        """
        if self._store_of_nodes is None:
            super().wait_for_nodes()
        else:
            try:
                await_other_nodes(self._store_of_nodes)
            except SignalException:
                self._store_of_nodes.note_end("left", True)  # nobody waits for it to leave
                raise

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
                left = f"{group.group_world_size} of {self._nodes.min} nodes are left at the end of the rendezvous"
                say(f"{left}: waiting for the others again")
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
            torchs.forget_store_of_ranks(self._handler)
            try:
                super().rendezvous(group)
                if isinstance(self._handler, StaticRendezvous):
                    port = self._handler.port_of_ranks(self._next_store)
                    group.master_port = port  # type: ignore[assignment]  # torch declares it as None
            except NodeLostError:
                say(_LOST_MEANWHILE)
            except DistStoreError:  # what torch waits for from a node that has begun to meet again
                if participants(self._handler) is None:
                    raise
                say(_LOST_MEANWHILE)
            else:
                return

    def assign_ranks(self, store: Any, node: int, num_nodes: int, spec: WorkerSpec) -> list[Worker]:
        """Return the ranks of this node once all nodes are here: torch waits for a lost one, and then ends the job."""
        self._next_store = None
        if num_nodes > 1:
            last_round = self._store_of_nodes

            def has_lost_node() -> bool:
                here = participants(self._handler)
                if here is None:
                    require_all_nodes([one for one in (last_round, nodes) if one is not None])
                return here is not None and len(here) < num_nodes

            self._next_store = nodes = NodeStore(
                store,
                node=node,
                num_nodes=num_nodes,
                seal=self._seal,
                is_elastic=self._nodes.min < self._nodes.max,
                min_nodes=self._nodes.min,
                has_lost_node=has_lost_node,
            )
            nodes.meet()
            self._stop_heartbeat()
            if participants(self._handler) is None:
                self._heartbeat = Heartbeat(nodes)
        return super().assign_ranks(store, node, num_nodes, spec)

    def _say_who_is_missing(self, is_over: threading.Event) -> None:
        """Say once who has come, if the rendezvous takes a while, and whether a node was sent away."""
        if is_over.wait(SAY_AFTER_S):
            return
        if torchs.is_spare(self._handler):
            self._is_spare = True
            say(f"the job has its {self._nodes.max} nodes: this one waits, and takes the place of one that is lost")
            return
        here = participants(self._handler) or ["this node"]
        say(describe_wait(here, self._nodes, self._endpoint))
        while not is_over.wait(SAY_AFTER_S):
            with contextlib.suppress(RuntimeError, ParaplanError):
                contradiction = find_contradiction(SealedValues(torchs.store_of(self._handler), self._seal))
                if contradiction is not None:
                    say(contradiction)
                    return

    def start_workers(self, group: WorkerGroup) -> dict[int, Any]:
        """Start the ranks, after what is done before each start; the nodes meet again where one is lost meanwhile."""
        while True:
            self._store_of_nodes = self._next_store
            this_round = Round(
                store=self._store_of_nodes,
                world_size=group.workers[0].world_size,
                ranks_per_node=group.spec.local_world_size,
                master_addr=str(group.master_addr),
            )
            try:
                if self._before_start is not None:
                    self._before_start(this_round)
            except NodeLostError:
                say(_LOST_MEANWHILE)
                self.rendezvous(group)
            else:
                return super().start_workers(group)

    def _stop_heartbeat(self) -> None:
        if self._heartbeat is not None:
            self._heartbeat.close()
            self._heartbeat = None


def describe_wait(here: Sequence[str], nodes: NodeRange, endpoint: str) -> str:
    """Return which nodes have come, and how many are missing."""
    present = f"here {'is' if len(here) == 1 else 'are'} {', '.join(here)}"
    if len(here) >= nodes.max:
        return f"waiting at {endpoint} until all {nodes.max} nodes are ready; {present}"
    return f"waiting at {endpoint} for {max(0, nodes.min - len(here)) or 'more'} of {nodes} nodes; {present}"
