"""The rendezvous of an elastic job, which moves to another node when the one that hosts it is lost."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

from torch.distributed import DistError
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
)

from paraplan.errors import ParaplanError
from paraplan.launch.faults.report import say
from paraplan.launch.nodes.doors import Doors
from paraplan.launch.nodes.election import Member, Survey, choose_leader, is_enough, survey
from paraplan.launch.nodes.endpoint import Endpoint
from paraplan.launch.nodes.moved_job import some_of
from paraplan.launch.nodes.rendezvous import SAY_AFTER_S, NoRendezvousError, join_store, open_store
from paraplan.launch.nodes.store import NodeFacts
from paraplan.launch.torch_private.elastic import (
    forget_store_of_ranks,
    handler_at,
    launchers,
    set_last_call,
    stop_heartbeats,
    store_of,
)

_SURVEY_S = 0.3
_LOOK_S = 0.5
_TOLD_S = 3.0
"""How long nodes that begin a job wait to be told that it is elsewhere: twice what that takes."""
_ENDING_S = 3.0
"""How long ranks go on without a store: they may be about to end, as all ranks of a job do that is preempted."""
_MOST_ASKED = 8
_LEARN_S = 2.0
_SAY_AGAIN_S = 60.0
_LONGEST_CALL_S = 30.0  # torch's default


class MovableRendezvous(RendezvousHandler):
    """torch's dynamic rendezvous, at the node that holds its store now. `inner` is torch's own.

    The job goes on at another node where more than half of those of its last round that may still run have lost the
    store, by `election`. With `may_move` False an end of the store is the end of the job.
    """

    def __init__(
        self,
        handler: Any,
        *,
        doors: Doors,
        endpoint: Endpoint,
        make_backend: Callable[[Any, str], Any],
        store_timeout: timedelta,
        silence_s: float,
    ) -> None:
        """Take torch's rendezvous, what makes its backend of a store and a job's name, and how patient calls are."""
        self.inner = handler
        self.may_move = True
        self._doors, self._endpoint, self._make_backend = doors, endpoint, make_backend
        self._store_timeout, self._silence_s = store_timeout, silence_s
        self._run_id = handler.get_run_id()
        self._members: tuple[Member, ...] = ()
        self._term_of_members = 0
        self._past = {str(endpoint)}
        self._known = {*doors.others_at(Endpoint.parse(doors.standing.leader or str(endpoint))), *doors.elsewhere}
        self._last_call_s: float = handler.settings.timeout.last_call.total_seconds()
        self._num_futile = 0
        """Rounds since ranks have last started that have come to nothing."""
        self._lost_s: float | None = None
        self._left = ""
        """Why the nodes do not meet where they did, in words."""
        self._is_waiting = False
        self._is_over = threading.Event()
        self._opened_s = time.monotonic()
        doors.open_own_door(endpoint, timeout=store_timeout)
        if doors.standing.term:  # of a job that is elsewhere already
            self._be_at(store_of(handler), term=doors.standing.term, leader=doors.standing.leader)
        threading.Thread(target=self._look_about, daemon=True, name="paraplan-lookout").start()

    @property
    def place(self) -> str:
        """Where the nodes meet."""
        return self._doors.standing.leader or str(self._endpoint)

    def get_backend(self) -> str:
        """See torch's class."""
        return str(self.inner.get_backend())

    @property
    def use_agent_store(self) -> bool:
        """See torch's class."""
        return bool(self.inner.use_agent_store)

    def get_run_id(self) -> str:
        """See torch's class."""
        return str(self._run_id)

    def is_closed(self) -> bool:
        """See torch's class."""
        return bool(self.inner.is_closed())

    def set_closed(self) -> None:
        """See torch's class."""
        self.inner.set_closed()

    def shutdown(self) -> bool:
        """See torch's class."""
        self._is_over.set()
        return bool(self.inner.shutdown())

    def num_nodes_waiting(self) -> int:
        """Return how many nodes wait; 0 while the store is lost, which `reason_to_move` tells."""
        try:
            return int(self.inner.num_nodes_waiting())
        except RendezvousConnectionError:
            self.note_lost()
            return 0

    def note_lost(self) -> None:
        """Take note that a call of the store has failed."""
        if self._lost_s is None:
            self._lost_s = time.monotonic()

    def reason_to_move(self) -> str | None:
        """Return why the ranks are to start again elsewhere; None where they are not."""
        if self._doors.standing.newer is not None:
            return "the job goes on at another node: restarting the ranks there"
        if self.may_move and self._lost_s is not None and time.monotonic() - self._lost_s > _ENDING_S:
            return "the node with the rendezvous is lost: restarting the other nodes without it"
        return None

    def begin_round(self, facts: Sequence[NodeFacts]) -> None:
        """Take note of the nodes of a round that starts its ranks; `facts` are by node, none for one that is alone."""
        standing, names = self._doors.standing, launchers(self.inner)
        self._num_futile = 0
        if not facts:
            self._members = (Member(standing.door, standing.launcher, "this host", names[0]),)
        elif len(facts) == len(names):
            self._members = tuple(
                Member(fact.door, fact.launcher, fact.host, name) for fact, name in zip(facts, names, strict=True)
            )
        self._term_of_members = standing.term
        standing.others = tuple(member.door for member in self._members if member.door)

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for the other nodes, at another node's store where the one before is lost or the job has moved.

        Raises torch's errors, and `NoRendezvousError` where the job is not found again.
        """
        deadline = time.monotonic() + self.inner.settings.timeout.join.total_seconds()
        is_said = False
        self._is_waiting = True
        try:
            while True:
                try:
                    if self._lost_s is not None or self._doors.standing.newer is not None:
                        self._find_job(deadline)
                    forget_store_of_ranks(self.inner)
                    set_last_call(self.inner, self._wait_for_more_s())
                    self._num_futile += 1
                    info: RendezvousInfo = self.inner.next_rendezvous()
                    if self._is_told_of_another():
                        continue
                except (RendezvousConnectionError, DistError):
                    if not self.may_move:
                        raise
                    if self._doors.standing.newer is None:
                        self.note_lost()
                    continue
                missing = self._missing_quorum()
                if missing is None:
                    return info
                if not is_said:
                    say(f"{missing}: waiting for the others")
                is_said = True
                if time.monotonic() > deadline:
                    raise _not_found_error(missing)
        finally:
            self._is_waiting = False

    def _wait_for_more_s(self) -> float:
        """Return how long a round waits for more nodes: longer each time that one has come to nothing.

        Some may look too seldom to come to a short one, and would be missing again and again.
        """
        return max(self._last_call_s, min(self._last_call_s * 2.0 ** min(self._num_futile, 9), _LONGEST_CALL_S))

    def _is_told_of_another(self) -> bool:
        """Whether the job is at another node, as those of it tell a host of the endpoint that starts again.

        Who has come to that host is not told: its store is closed to it.
        """
        standing = self._doors.standing
        is_new = not self._members and standing.term == 0
        says_at = time.monotonic() + SAY_AFTER_S
        while is_new and standing.newer is None:
            members = self._doors.members_at()  # they have lost this host's launcher, and are about to move
            if not members and time.monotonic() > self._opened_s + _TOLD_S:
                break
            if time.monotonic() > says_at:
                says_at += _SAY_AGAIN_S
                say(f"nodes of the job as it was are here ({', '.join(members)}): waiting until they go on")
            time.sleep(_SURVEY_S / 3)
        return standing.newer is not None

    def _missing_quorum(self) -> str | None:
        """Return None where enough nodes of the last round are here, else why the nodes do not go on."""
        standing, here = self._doors.standing, launchers(self.inner)
        absent = [member for member in self._members if member.name not in here]
        present = len(self._members) - len(absent)
        is_same = standing.term == self._term_of_members
        absent = [member for member in absent if not self._doors.is_gone(*member.name)]
        if absent and not is_enough(present, possible=present + len(absent), is_same_term=is_same):
            found = self._survey([member.door for member in absent if member.door])
            absent = [member for member in absent if not found.has_ended(member)]
        if not self._members or is_enough(present, possible=present + len(absent), is_same_term=is_same):
            return None
        hosts = ", ".join(member.host for member in absent)
        return f"{present} of {present + len(absent)} nodes are left, and those of {hosts} may go on without them"

    def _find_job(self, deadline: float) -> None:
        """Go where the job goes on, and be the node at which it does where that is this one."""
        standing = self._doors.standing
        lost, reason, says_at = standing.leader, "", deadline
        if self._lost_s is None:  # it is there still, for all that this node knows
            self._left = "the job goes on elsewhere"
        else:
            self._left = f"the node with the rendezvous, {self._host_of(lost)}, is gone"
        self._doors.cut_line()  # its heartbeat may wait for the store
        stop_heartbeats(self.inner)
        standing.leader = ""
        while True:
            newer = standing.newer
            if newer is not None:
                standing.newer = None
                if self._is_joined(newer.leader, newer.term, lost):
                    return
            elif not self._members:
                self._come_anew(deadline)
                if standing.newer is None:
                    return
            else:
                found = self._survey([member.door for member in self._others() if member.door])
                choice = choose_leader(standing, self._members, found)
                if standing.newer is not None:
                    continue
                if choice.leader and self._is_joined(choice.leader, choice.term, lost):
                    return
                if choice.reason != reason:
                    reason, says_at = choice.reason, time.monotonic() + SAY_AFTER_S
                elif reason and time.monotonic() > says_at:
                    says_at = deadline + SAY_AFTER_S  # once
                    say(f"the node with the rendezvous is lost ({self._host_of(lost)}): {reason}")
            if time.monotonic() > deadline:
                raise _not_found_error(reason or "the node with the rendezvous is lost")
            time.sleep(_SURVEY_S)

    def _others(self) -> list[Member]:
        return [member for member in self._members if member.launcher != self._doors.standing.launcher]

    def _survey(self, doors: Collection[str], **options: float) -> Survey:
        return survey(doors, token=self._doors.token, standing=self._doors.standing, **options)

    def _host_of(self, door: str) -> str:
        return next((member.host for member in self._members if member.door == door), door)

    def _come_anew(self, deadline: float) -> None:
        """Find the job as a node that was in no round: at the nodes that it knows, or by the endpoint's host."""
        host, port = self._endpoint.host, self._endpoint.port
        say("the node with the rendezvous is lost before this one was in a round: coming again")
        while self._known and self._doors.standing.newer is None and time.monotonic() < deadline:
            found = self._survey({*some_of(sorted(self._known), but=self._doors.standing.door), str(self._endpoint)})
            job = max(found.answers.values(), key=lambda answer: (answer.term, bool(answer.leader)), default=None)
            if job is not None and job.leader and self._is_joined(job.leader, job.term, ""):
                return
            time.sleep(_SURVEY_S)
        if self._doors.standing.newer is not None:
            return
        store = open_store(
            host, port, is_master=False, timeout=self._store_timeout, doors=self._doors, silence_s=self._silence_s
        )
        self._be_at(store, term=self._doors.standing.term, leader=self._doors.standing.leader)

    def _is_joined(self, door: str, term: int, lost: str) -> bool:
        """Be at the door of a leader; return whether it could be reached."""
        standing = self._doors.standing
        is_here = door == standing.door
        if is_here:
            self._doors.clock_offset_s = 0.0
            store = self._doors.own_store
        else:
            try:
                store = join_store(
                    Endpoint.parse(door), self._doors, timeout=self._store_timeout, silence_s=self._silence_s
                )
            except ParaplanError:
                return False
        is_new = term > standing.term
        try:
            self._be_at(store, term=term, leader=door)
        except (RendezvousConnectionError, DistError):
            return False
        self._past |= {lost} - {"", door}
        if is_new:
            host = "this host" if is_here else self._host_of(door)
            say(f"{self._left}: the nodes meet at {door}{f', on {host},' if host != door else ''} now")
        return True

    def _be_at(self, store: Any, *, term: int, leader: str) -> None:
        """Meet at a store from now on. Each term has keys of its own in it."""
        standing = self._doors.standing
        run_id = f"{self._run_id}.{term}" if term else self._run_id
        self.inner = handler_at(self.inner, store, self._make_backend(store, run_id), run_id=run_id)
        standing.move(term, leader)
        self._lost_s = None
        self._doors.retire(but=leader)
        if leader != standing.door:
            self._doors.drop_guests()  # they look for the job, and find it

    def _look_about(self) -> None:
        """Tell launchers at places where the job was before where it is, and hear of it while this node waits."""
        asks_at = time.monotonic() + _LEARN_S
        while not self._is_over.wait(_LOOK_S):
            standing = self._doors.standing
            doors: set[str] = set()
            if standing.term and standing.leader == standing.door:
                doors |= self._past
            if self._is_waiting and self._lost_s is None:
                doors |= {member.door for member in self._others()[:_MOST_ASKED]}
            is_alone = self._is_waiting and not self._members and time.monotonic() > asks_at
            if is_alone:  # a spare: it needs to know whom to ask when the leader is lost
                asks_at = time.monotonic() + _LEARN_S
                doors |= {standing.leader}
            with suppress(OSError, RuntimeError):  # no more threads
                found = self._survey(sorted(doors - {"", standing.door}), patience_s=2 * _LOOK_S)
                if is_alone and standing.leader in found.answers:
                    self._known = {*found.answers[standing.leader].others, *self._doors.elsewhere}


def _not_found_error(reason: str) -> NoRendezvousError:
    return NoRendezvousError(
        f"the job was not found again: {reason}", hint="start the job again: it goes on from its last checkpoint"
    )
