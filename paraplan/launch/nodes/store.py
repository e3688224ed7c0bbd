"""What the nodes of a job tell each other: who they are, the plan of this round, and how their ranks failed.

It uses the store of torch's rendezvous, which lives as long as the agent that hosts it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from functools import partial
from typing import Any, TypeVar

from torch.distributed import Store  # type: ignore[attr-defined]  # torch re-exports it from C++ unmarked

from paraplan.launch.faults.failures import Cause, NodeFailure
from paraplan.launch.nodes.clocks import LARGE_SKEW_S, describe_skew
from paraplan.launch.nodes.job_token import Seal
from paraplan.launch.nodes.native_calls import run_interruptibly

_POLL_S = 0.05
_TIMEOUT_S = 900.0  # longer than a planner may take
_PREFIX = "paraplan"
_STOP_S = 1.0  # a launcher that is to end does not wait longer for the network

RecordT = TypeVar("RecordT", "NodeFacts", "NodeFailure")


@dataclass(frozen=True)
class NodeFacts:
    """What should be the same on every node of a job, and its name.

    `script` is a digest of the script's text, `address` what this node has towards the first one; "" for unknown.
    """

    host: str
    torch: str
    paraplan: str
    python: str
    script: str
    address: str = ""
    clock_offset_s: float = 0.0
    """How far the clock of the node that hosts the rendezvous is ahead of this node's."""
    door: str = ""
    """Where others reach a store of this node, should the one that hosts the rendezvous be lost."""
    launcher: str = ""
    """A random name of its launcher."""


class NodeStore:
    """Key-value exchange of the nodes of one rendezvous. Every method is this node's side of it; `node` is its rank.

    A signal ends every wait for the store, also where the network to it is gone. `is_lost` says that its host has
    ended.
    """

    def __init__(
        self,
        store: Store,
        *,
        node: int,
        num_nodes: int,
        seal: Seal,
        clock_offset_s: float = 0.0,
        is_elastic: bool = False,
        min_nodes: int = 1,
        left: Mapping[str, float] | None = None,
        has_lost_node: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self._store = store
        self.node = node
        self.num_nodes = num_nodes
        self.clock_offset_s = clock_offset_s
        self._seal = seal
        self.is_elastic = is_elastic
        self.min_nodes = min_nodes
        self._left = {} if left is None else left
        self._has_lost_node = has_lost_node
        self.facts: list[NodeFacts] = []
        """What the nodes have said of themselves, once they have."""
        self.stops: dict[int, str] = {}
        self._num_questions = 0
        self._clock = clock
        self._pause = pause
        self.is_lost = False
        self.is_ending = False
        """Whether a node was seen to have ended well, or to have failed for good."""

    def meet(self) -> None:
        """Wait until all nodes of the round have come to this call. Raises `NodeLostError` where one is lost before."""
        self.tell("here", {})
        for node in range(self.num_nodes):
            self._await(f"here/{node}")

    def exchange_facts(self, mine: NodeFacts) -> list[NodeFacts]:
        """Return the facts of all nodes, in their order; waits for every node."""
        self._set(f"facts/{self.node}", asdict(mine))
        self.facts = [_known(NodeFacts, self._await(f"facts/{node}")) for node in range(self.num_nodes)]
        return self.facts

    def share_text(self, name: str, make: Callable[[], str]) -> str:
        """Return what `make` returns on node 0; the others wait for it. An error of `make` is raised on every node.

        The others raise `RemoteError` with its words, hint and exit status.
        """
        if self.node == 0:
            try:
                text = make()
            except Exception as error:
                self._set(
                    name,
                    {
                        "error": str(getattr(error, "message", error)),
                        "hint": getattr(error, "hint", None),
                        "exit_status": getattr(error, "exit_status", 1),
                    },
                )
                raise
            self._set(name, {"text": text})
            return text
        answer = self._await(name)
        if "error" in answer:
            raise RemoteError(
                error=str(answer["error"]), hint=answer.get("hint"), exit_status=int(answer.get("exit_status", 1))
            )
        return str(answer["text"])

    def exchange_failures(self, mine: NodeFailure, *, timeout_s: float) -> list[NodeFailure]:
        """Return how ranks failed on every node that says so within `timeout_s`, this node's own first.

        Nodes stay until the others have read, since one of them hosts the store. A store that is gone ends the wait.
        """
        found = {self.node: mine}
        try:
            self._set(f"failure/{self.node}", asdict(mine))
            self._wait(lambda: self._is_told_of_all(found), timeout_s)
            self._set(f"read/{self.node}", True)
            done = {node for node in range(self.num_nodes) if self._has(f"done/{node}")}
            readers = [f"read/{node}" for node in found.keys() | done if node not in self.stops]
            self._wait(lambda: self._has(*readers), timeout_s)
        except RuntimeError:  # torch's errors of a broken connection: the host has ended before this node
            self.is_lost = True
        return [mine, *(failure for node, failure in sorted(found.items()) if node != self.node)]

    def _is_told_of_all(self, found: dict[int, NodeFailure]) -> bool:
        self._read_failures(found)
        self.new_stops()
        silent = set(range(self.num_nodes)) - {self.node} - found.keys() - self.stops.keys()
        return all(self._has(f"done/{node}") for node in silent)

    def exchange_notes(self, name: str, mine: Mapping[str, Any], *, timeout_s: float) -> list[Mapping[str, Any]]:
        """Tell the other nodes `mine`, and return what those tell under this name that do so within `timeout_s`."""
        found: dict[int, Mapping[str, Any]] = {}

        def read() -> bool:
            for node in range(self.num_nodes):
                if node != self.node and node not in found and self._has(f"{name}/{node}"):
                    found[node] = self._get(f"{name}/{node}")
            return len(found) == self.num_nodes - 1

        try:
            self._set(f"{name}/{self.node}", mine)
            self._wait(read, timeout_s)
            self._set(f"{name}-read/{self.node}", True)
            self._wait(lambda: self._has(*(f"{name}-read/{node}" for node in found)), timeout_s)
        except RuntimeError:
            self.is_lost = True
        return [found[node] for node in sorted(found)]

    def tell(self, name: str, mine: Mapping[str, Any]) -> None:
        """Leave `mine` for the other nodes, in the place of what this node told under this name before."""
        with contextlib.suppress(RuntimeError):
            self._set(f"{name}/{self.node}", mine)

    def told(self, name: str, node: int) -> Mapping[str, Any] | None:
        """Return what a node told last under this name, None for nothing."""
        with contextlib.suppress(RuntimeError):
            if self._has(f"{name}/{node}"):
                found: Mapping[str, Any] = self._get(f"{name}/{node}")
                return found
        return None

    def host_of(self, node: int) -> str:
        """Return the name of a node's host, or its number."""
        return self.facts[node].host if node < len(self.facts) else f"of node {node}"

    def ask(self, question: Mapping[str, Any]) -> int:
        """Ask all other nodes; return the number of the question. Raises RuntimeError where the store is gone."""
        number = int(run_interruptibly(lambda: self._store.add(f"{_PREFIX}/questions", 1)))
        self._set(f"question/{number}", {"node": self.node, "question": question})
        return number

    def new_questions(self) -> list[tuple[int, Mapping[str, Any]]]:
        """Return what other nodes have asked since the last call, by the numbers of the questions.

        One thread calls it. Raises RuntimeError where the store is gone.
        """
        last = int(run_interruptibly(lambda: self._store.add(f"{_PREFIX}/questions", 0)))
        found = []
        while self._num_questions < last:
            number = self._num_questions + 1
            is_there = self._has(f"question/{number}")
            if not is_there and number == last:  # it is being written
                break
            self._num_questions = number
            asked: Mapping[str, Any] = self._get(f"question/{number}") if is_there else {}
            if asked.get("node", self.node) != self.node:
                found.append((number, asked["question"]))
        return found

    def answer(self, number: int, answer: Mapping[str, Any]) -> None:
        """Answer a question of another node."""
        self._set(f"answer/{number}/{self.node}", answer)

    def answers(self, number: int, *, timeout_s: float) -> dict[int, Mapping[str, Any]]:
        """Return what the other nodes have answered within `timeout_s`, by node, and delete it from the store."""
        found: dict[int, Mapping[str, Any]] = {}

        def read() -> bool:
            for node in range(self.num_nodes):
                if node != self.node and node not in found and self._has(f"answer/{number}/{node}"):
                    found[node] = self._get(f"answer/{number}/{node}")
                    with contextlib.suppress(RuntimeError, NotImplementedError):  # etcd's store deletes nothing
                        run_interruptibly(partial(self._store.delete_key, f"{_PREFIX}/answer/{number}/{node}"))
            return len(found) == self.num_nodes - 1

        with contextlib.suppress(RuntimeError):
            self._wait(read, timeout_s)
        return found

    def note_stop(self, signal_name: str) -> None:
        """Say that a signal ends this node's launcher, and with it its ranks."""
        if self.num_nodes > 1:
            with contextlib.suppress(RuntimeError, TimeoutError):
                text = self._seal.close(f"stop/{self.node}", f"{signal_name} ended its launcher and its ranks")
                run_interruptibly(lambda: self._store.set(f"{_PREFIX}/stop/{self.node}", text), timeout_s=_STOP_S)

    def new_stops(self) -> list[str]:
        """Return a sentence for each other node whose launcher was stopped or is gone; `stops` has all so far.

        The node that hosts the rendezvous sees launchers go, and tells the others.
        """
        new = []
        try:
            for node in range(self.num_nodes):
                if node == self.node or node in self.stops:
                    continue
                host = self.host_of(node)
                is_alone = sum(fact.host == host for fact in self.facts) == 1
                is_gone = host in self._left and is_alone and not self._has(f"failure/{node}")
                if self._has(f"stop/{node}"):
                    self.stops[node] = f"host {host}: {self._get(f'stop/{node}')}"
                elif is_gone and not self._has(f"done/{node}"):
                    self._set(f"stop/{node}", "its launcher is gone, without a word")
                    self.stops[node] = f"host {host}: its launcher is gone, without a word"
                else:
                    continue
                new.append(self.stops[node])
        except RuntimeError:
            self.is_lost = True
        return new

    def note_done(self) -> None:
        """Say that this node's ranks have ended well, and that it may leave."""
        with contextlib.suppress(RuntimeError):
            self._set(f"done/{self.node}", True)
            self._set("done", True)

    def nodes_at_work(self) -> list[int]:
        """Return the other nodes whose ranks have not ended well. Raises RuntimeError where the store is gone."""
        return [node for node in range(self.num_nodes) if node != self.node and not self._has(f"done/{node}")]

    def failures_of_others(self, *, timeout_s: float) -> list[NodeFailure]:
        """Return how ranks failed on other nodes that say so within `timeout_s`; those of this one have not failed."""
        found: dict[int, NodeFailure] = {}
        try:
            self._wait(lambda: self._is_told_of_all(found), timeout_s)
            self._set(f"read/{self.node}", True)
        except RuntimeError:
            self.is_lost = True
        return [failure for _, failure in sorted(found.items())]

    def take_leave(self, *, timeout_s: float) -> None:
        """Wait until all nodes know that all are done: the store ends with the node that hosts it."""
        with contextlib.suppress(RuntimeError):
            self._set(f"left/{self.node}", True)
            others = [node for node in range(self.num_nodes) if node not in (self.node, *self.stops)]
            self._wait(
                lambda: all(self._has(f"left/{node}") or self.host_of(node) in self._left for node in others),
                timeout_s,
            )

    def is_anyone_done(self) -> bool:
        """Whether a node has said that its ranks have ended well."""
        is_done = self._has("done")
        self.is_ending = self.is_ending or is_done
        return is_done

    def has_failure_elsewhere(self) -> bool:
        """Whether another node has said that its ranks have failed for good."""
        if self.is_lost:
            return False
        try:
            has_failure = any(self._has(f"failure/{node}") for node in range(self.num_nodes) if node != self.node)
            self.is_ending = self.is_ending or has_failure
            return has_failure
        except RuntimeError:  # the host of the store has ended; its ranks' peers will notice
            self.is_lost = True
            return False

    def _read_failures(self, found: dict[int, NodeFailure]) -> int:
        for node in range(self.num_nodes):
            if node not in found and self._has(f"failure/{node}"):
                values = self._get(f"failure/{node}")
                lines = {name: tuple(map(str, values.get(name, ()))) for name in ("evidence", "places")}
                found[node] = _known(NodeFailure, values | lines | {"cause": Cause(values["cause"])})
        return len(found)

    def _wait(self, is_done: Callable[[], bool], timeout_s: float) -> None:
        deadline = self._clock() + timeout_s
        while not is_done() and self._clock() < deadline:
            self._pause(_POLL_S)

    def _set(self, name: str, value: object) -> None:
        text = self._seal.close(name, value)
        run_interruptibly(lambda: self._store.set(f"{_PREFIX}/{name}", text))

    def _await(self, name: str) -> Any:
        """Return what another node is about to write. The store itself waits a minute at most, a planner may not.

        Raises `RemoteError` where nothing comes, and `NodeLostError` where a node of this round is lost before.
        """
        self._wait(lambda: self._has(name) or self._has_lost_node(), _TIMEOUT_S)
        if not self._has(name):
            if self._has_lost_node():
                raise NodeLostError
            raise RemoteError(
                error=f"another node has not sent its {name.partition('/')[0]} for {_TIMEOUT_S:.0f} s",
                hint="see its own messages",
                exit_status=1,
            )
        return self._get(name)

    def _get(self, name: str) -> Any:
        return self._seal.open(name, run_interruptibly(lambda: self._store.get(f"{_PREFIX}/{name}")))

    def _has(self, *names: str) -> bool:
        return bool(run_interruptibly(lambda: self._store.check([f"{_PREFIX}/{name}" for name in names])))


class NodeLostError(Exception):
    """A node is lost while the others wait for what it was about to say: they meet again."""


class NodeEndedError(Exception):
    """The ranks of a node have ended well while others wait for it to start ranks anew: it never comes."""


def _known(record: type[RecordT], values: Mapping[str, Any]) -> RecordT:
    """Return a record of the values that it has fields for: another version of paraplan may have more."""
    names = {one.name for one in fields(record)}
    return record(**{name: value for name, value in values.items() if name in names})


class RemoteError(Exception):
    """An error of node 0 that all nodes share."""

    def __init__(self, *, error: str, hint: str | None, exit_status: int) -> None:
        super().__init__(error)
        self.message, self.hint, self.exit_status = error, hint, exit_status


def differences(facts: list[NodeFacts]) -> list[str]:
    """Return a sentence for each fact in which the nodes differ: `torch is 2.13.0 on a, b and 2.12.0 on c`."""
    sentences = []
    names = {"torch": "torch", "paraplan": "paraplan", "python": "Python", "script": "the script's text"}
    for field, title in names.items():
        hosts: dict[str, list[str]] = {}
        for fact in facts:
            hosts.setdefault(getattr(fact, field), []).append(fact.host)
        if len(hosts) > 1:
            parts = [f"{value} on {_some(names_of)}" for value, names_of in hosts.items()]
            sentences.append(f"{title} is {' and '.join(parts)}")
    offsets = {fact.host: fact.clock_offset_s for fact in facts}
    if max(offsets.values()) - min(offsets.values()) > LARGE_SKEW_S:
        sentences += [
            f"the clock of {host} is {describe_skew(-offset)} that of the node which hosts the rendezvous"
            for host, offset in offsets.items()
            if abs(offset) > LARGE_SKEW_S
        ]
    return sentences


def _some(hosts: list[str]) -> str:
    return ", ".join(hosts[:3]) + (f" and {len(hosts) - 3} more" if len(hosts) > 3 else "")
