"""Which node holds the store of an elastic job: what its nodes say of it to each other, and who is the next.

The members of a job are the nodes of its last round. When those that go on have lost the node with the store, they meet
at the first of them. They go on only where they are more than half of the members that may still run, so that two
halves of a network never do so both. Each such move begins a term, and the latest term is where the job is.
"""

from __future__ import annotations

import contextlib
import queue
import secrets
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from paraplan.errors import ParaplanError
from paraplan.launch.nodes.endpoint import Endpoint
from paraplan.launch.nodes.handshake import ask

_ANSWER_S = 2.0
_MOST_OTHERS = 16


@dataclass(frozen=True)
class Member:
    """A node of the last round."""

    door: str
    """Where others reach a store of this node; "" for none, as nodes of another version have."""
    launcher: str
    host: str
    name: tuple[str, int]
    """Address and process, as torch's rendezvous has them."""


@dataclass(frozen=True)
class Answer:
    """What a launcher says of its job."""

    term: int
    leader: str
    """The door at which its job meets; "" while it looks for one."""
    launcher: str
    door: str
    others: tuple[str, ...] = ()
    """Doors of other nodes of its last round."""

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Answer:
        """Return what a launcher has said. Fields that are not known are left out. Raises ValueError and TypeError."""
        words = {name: str(values.get(name, "")) for name in ("leader", "launcher", "door")}
        others = values.get("others", ())
        doors = tuple(str(door) for door in others if door) if isinstance(others, list) else ()
        return cls(term=int(values.get("term", 0)), others=doors[:_MOST_OTHERS], **words)


@dataclass
class Standing:
    """What this launcher knows of the leader of its job. `newer` is a later one that it was told of.

    Before the first round the leader is the endpoint's host. Gates answer from their own threads.
    """

    launcher: str = field(default_factory=lambda: secrets.token_hex(8))
    door: str = ""
    term: int = 0
    leader: str = ""
    newer: Answer | None = None
    others: tuple[str, ...] = ()

    def words(self) -> dict[str, Any]:
        """Return this as others get it, such as `Answer.read` reads it."""
        own = {"term": self.term, "leader": self.leader, "launcher": self.launcher, "door": self.door}
        return own | {"others": list(self.others[:_MOST_OTHERS])}

    def reply(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Return what to say to a launcher of the job that says this of itself."""
        if asked.get("asks"):
            self.hear(Answer.read(asked))
        return self.words()

    def hear(self, said: Answer) -> None:
        """Take note of what a launcher of this job has said."""
        is_later = said.term > max(self.term, self.newer.term if self.newer is not None else 0)
        has_my_leader_another = said.door == self.leader != said.leader and said.term >= self.term
        if said.leader and said.launcher != self.launcher and (is_later or has_my_leader_another):
            self.newer = said

    def move(self, term: int, leader: str) -> None:
        """Be of this term and leader."""
        self.term, self.leader = term, leader
        if self.newer is not None and self.newer.term <= term:
            self.newer = None


@dataclass(frozen=True)
class Survey:
    """What launchers have answered, by their doors. At `refused` doors none listens: those launchers have ended."""

    answers: Mapping[str, Answer]
    refused: frozenset[str]

    def has_ended(self, member: Member) -> bool:
        """Whether a member's launcher is known to have ended; one that is silent may run."""
        found = self.answers.get(member.door)
        return member.door in self.refused or (found is not None and found.launcher != member.launcher)


def survey(doors: Collection[str], *, token: bytes, standing: Standing, patience_s: float = _ANSWER_S) -> Survey:
    """Ask the launchers at these doors where their job is; tell them, and take note of, what is newer."""
    said: queue.SimpleQueue[tuple[str, Answer | Exception]] = queue.SimpleQueue()

    def ask_one(door: str) -> None:
        try:
            endpoint = Endpoint.parse(door)
            words = {"asks": True, **standing.words()}
            said.put((door, Answer.read(ask((endpoint.host, endpoint.port), token, words, timeout_s=_ANSWER_S))))
        except (OSError, ParaplanError, ValueError, TypeError, KeyError) as error:
            said.put((door, error))

    for door in doors:  # a name service that says nothing keeps none of the others waiting
        threading.Thread(target=ask_one, args=(door,), daemon=True, name="paraplan-survey").start()
    answers, refused = {}, set()
    deadline = time.monotonic() + patience_s
    with contextlib.suppress(queue.Empty):
        for _ in doors:
            door, found = said.get(timeout=max(0.0, deadline - time.monotonic()))
            if isinstance(found, ConnectionRefusedError):
                refused.add(door)
            elif isinstance(found, Answer) and found.launcher:
                answers[door] = found
                standing.hear(found)
    return Survey(answers, frozenset(refused))


@dataclass(frozen=True)
class Choice:
    """Where the members meet: at the door `leader`, in this term. "" and `reason` where they cannot tell yet."""

    leader: str = ""
    term: int = 0
    reason: str = ""


def choose_leader(standing: Standing, members: Sequence[Member], found: Survey) -> Choice:
    """Return where a member that has lost its leader goes on, by what the others have answered."""
    searching, ended = [], 0
    for member in members:
        answer = found.answers.get(member.door)
        if member.launcher == standing.launcher:
            searching.append(member)
        elif found.has_ended(member):
            ended += 1
        elif answer is not None and answer.leader:
            if answer.leader == member.door:  # it holds the store, and can be reached: it was the connection
                return Choice(member.door, standing.term)
            if answer.term == standing.term:
                return Choice(reason=f"{member.host} still reaches the node with the rendezvous")
        elif answer is not None:
            searching.append(member)
    num_possible = len(members) - ended
    if 2 * len(searching) <= num_possible:
        return Choice(
            reason=f"{len(searching)} of the {num_possible} nodes that may still run "
            f"{'is' if len(searching) == 1 else 'are'} here, and the others may go on: it takes more than half"
        )
    able = [member for member in searching if member.door]
    return Choice(able[0].door, standing.term + 1) if able else Choice(reason="no node has a door")


def is_enough(present: int, *, possible: int, is_same_term: bool) -> bool:
    """Whether so many of the members that may still run go on: half of them where these hold the store already."""
    return 2 * present >= possible if is_same_term else 2 * present > possible
