"""Messages between the nodes of a job: who they are, the plan of this round, and how their ranks failed.

It uses the store of torch's rendezvous, which lives as long as the agent that hosts it.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

from torch.distributed import Store  # type: ignore[attr-defined]  # torch re-exports it from C++ unmarked

from paraplan.errors import PREEMPTED_EXIT_STATUS, ParaplanError
from paraplan.launch.faults.failures import Cause, NodeFailure
from paraplan.launch.nodes.endpoint import run_interruptibly
from paraplan.launch.nodes.job_token import Seal
from paraplan.launch.nodes.sealed_values import SealedValues, ValueLog

_POLL_S = 0.05
_FAILURES_S = 5.0
_OTHER_NODES_S = 15.0  # how long a node whose ranks have failed waits for the words of others: longer than these take
_TIMEOUT_S = 900.0  # longer than a planner may take
_SLICE = timedelta(seconds=1)
_STOP_S = 1.0  # a launcher that is to end does not wait longer for the network

RecordT = TypeVar("RecordT", "NodeFacts", "NodeFailure")


@dataclass(frozen=True)
class NodeFacts:
    """Facts that should be the same on every node of a job, and its name.

    `script` is a digest of the script's text, `address` what this node has towards the first one; "" for unknown.
    """

    host: str
    torch: str
    paraplan: str
    python: str
    script: str
    address: str = ""


class NodeStore:
    """Key-value exchange of the nodes of one rendezvous. Every method is this node's side of it; `node` is its rank.

    What nodes publish is a log that all read: `look` is one call of the store, however many nodes there are, and what
    has been read is asked of memory. A signal ends every wait for the store, also where the network to it is gone.
    `is_lost` says that its host has ended, or says nothing.
    """

    def __init__(
        self,
        store: Store,
        *,
        node: int,
        num_nodes: int,
        seal: Seal,
        is_elastic: bool = False,
        min_nodes: int = 1,
        has_lost_node: Callable[[], bool] = lambda: False,
    ) -> None:
        self.node, self.num_nodes, self.min_nodes, self.is_elastic = node, num_nodes, min_nodes, is_elastic
        self.clock_offset_s: float | None = None
        """How far the clock of node 0 is ahead of this one's; None until the nodes have exchanged facts."""
        self._others = set(range(num_nodes)) - {node}
        self._values = SealedValues(store, seal)
        self._has_lost_node = has_lost_node
        self.facts: list[NodeFacts] = []
        """The facts that the nodes have told of themselves, once they have."""
        self.stops: dict[int, str] = {}
        self._news, self._questions = ValueLog(self._values, "news"), ValueLog(self._values, "questions")
        self._told: dict[str, dict[int, Any]] = {}
        """Values that nodes have published, by the name of the value and by node."""
        self._lock = threading.Lock()
        self.is_lost = False

    def meet(self) -> None:
        """Wait until all nodes of the round have come to this call. Raises `NodeLostError` where one is lost before."""
        self.come()
        self._await("all here")

    def come(self) -> None:
        """Say that this node is here. The last one tells all."""
        if self._values.add("number here", 1) == self.num_nodes:
            self._values.set("all here", True)

    def exchange_facts(self, mine: NodeFacts) -> list[NodeFacts]:
        """Return the facts of all nodes, in their order; waits for every node. Node 0 reads them, and tells all.

        The others take how far its clock is ahead of theirs from when they get them.
        """
        self._values.set(f"facts/{self.node}", asdict(mine))
        if self._values.add("number of facts", 1) == self.num_nodes:
            self._values.set("all have facts", True)
        if self.node == 0:
            self._await("all have facts")
            facts = self._values.get([f"facts/{node}" for node in range(self.num_nodes)])
            self._values.set("facts", {"facts": facts, "time_ns": time.time_ns()})
            self.clock_offset_s = 0.0
        else:
            told = self._await("facts")
            facts = told["facts"]
            self.clock_offset_s = (int(told["time_ns"]) - time.time_ns()) / 1e9
        self.facts = [_known(NodeFacts, values) for values in facts]
        return self.facts

    def share_text(self, name: str, make: Callable[[], str]) -> str:
        """Return what `make` returns on node 0; the others wait for it. An error of `make` is raised on every node.

        The others raise `RemoteError` with its words, hint and exit status.
        """
        if self.node == 0:
            try:
                text = make()
            except Exception as error:
                hint, exit_status = getattr(error, "hint", None), getattr(error, "exit_status", 1)
                message = str(getattr(error, "message", error))
                self._values.set(name, {"error": message, "hint": hint, "exit_status": exit_status})
                raise
            self._values.set(name, {"text": text})
            return text
        answer = self._await(name)
        if "error" in answer:
            raise RemoteError(str(answer["error"]), answer.get("hint"), int(answer.get("exit_status", 1)))
        return str(answer["text"])

    def look(self) -> None:
        """Read what nodes have published since the last look."""
        with self._lock:
            try:
                news = [] if self.is_lost else self._news.read()
            except RuntimeError:  # torch's errors of a broken connection
                self.is_lost, news = True, []
            for _, one in news:
                told = self._told.setdefault(str(one["name"]), {})
                if one["name"] != "stop" or not self.has_ended(int(one["node"])):
                    told[int(one["node"])] = one["value"]

    def has_ended(self, node: int) -> bool:
        """Whether a node has said how its ranks have ended, or was stopped before, as far as has been looked."""
        return any(node in self._told.get(name, ()) for name in ("done", "failure", "stop"))

    def publish(self, name: str, value: Any) -> None:
        """Tell all nodes a value under a name. A store that is gone is noted."""
        try:
            if not self.is_lost:
                self._news.append({"name": name, "node": self.node, "value": value})
        except RuntimeError:
            self.is_lost = True

    def exchange_failures(self, mine: NodeFailure, *, timeout_s: float = _OTHER_NODES_S) -> list[NodeFailure]:
        """Return how ranks failed on every node that says so within `timeout_s`, this node's own first.

        Nodes stay until the others have read, since one of them hosts the store. A store that is gone ends the wait.
        """
        self.publish("failure", asdict(mine))
        others = self.failures_of_others(timeout_s=timeout_s)
        told = self._told
        readers = (told.get("failure", {}).keys() | told.get("done", {}).keys()) - {self.node} - self.stops.keys()
        self._wait(lambda: readers <= told.get("read", {}).keys(), timeout_s)
        return [mine, *others]

    def failures_of_others(self, *, timeout_s: float = _FAILURES_S) -> list[NodeFailure]:
        """Return how ranks failed on other nodes that say so within `timeout_s`."""
        self._wait(lambda: all(map(self.has_ended, self._others)), timeout_s)
        self.new_stops()
        self.publish("read", True)
        told = sorted(self._told.get("failure", {}).items())
        return [_failure(values) for node, values in told if node in self._others]

    def exchange_notes(self, name: str, mine: Mapping[str, Any], *, timeout_s: float) -> list[Mapping[str, Any]]:
        """Tell the other nodes `mine`, and return what those tell under this name that do so within `timeout_s`."""
        self.publish(name, dict(mine))
        told, read = self._told.setdefault(name, {}), self._told.setdefault(f"{name}-read", {})
        self._wait(lambda: self._others <= told.keys(), timeout_s)
        self.publish(f"{name}-read", True)
        readers = told.keys() & self._others
        self._wait(lambda: readers <= read.keys(), timeout_s)
        return [note for node, note in sorted(told.items()) if node in self._others]

    def gather(self, name: str, mine: Mapping[str, Any]) -> dict[int, Mapping[str, Any]]:
        """Leave `mine` for node 0, in the place of what this node told before; return there what each node told last.

        That is two calls of the store, however many nodes there are, once all have told something.
        """
        with contextlib.suppress(RuntimeError):
            if self.node != 0:
                self._values.set(f"{name}/{self.node}", mine)
                return {}
            names = {node: f"{name}/{node}" for node in range(1, self.num_nodes)}
            if names and not self._values.has(*names.values()):
                names = {node: one for node, one in names.items() if self._values.has(one)}
            told = self._values.get([*names.values()]) if names else []
            return {0: mine} | dict(zip(names, told, strict=True))
        return {0: mine} if self.node == 0 else {}

    def host_of(self, node: int) -> str:
        """Return the name of a node's host, or its number."""
        return self.facts[node].host if node < len(self.facts) else f"of node {node}"

    def ask(self, question: Mapping[str, Any]) -> int:
        """Ask all other nodes; return the number of the question. Raises RuntimeError where the store is gone."""
        return self._questions.append({"node": self.node, "question": question})

    def new_questions(self) -> list[tuple[int, Mapping[str, Any]]]:
        """Return what other nodes have asked since the last call, by the numbers of the questions.

        One thread calls it. Raises RuntimeError where the store is gone.
        """
        return [(number, one["question"]) for number, one in self._questions.read() if one["node"] != self.node]

    def answer(self, number: int, answer: Mapping[str, Any]) -> None:
        """Answer a question of another node."""
        ValueLog(self._values, f"answers/{number}").append({"node": self.node, "answer": answer})

    def answers(self, number: int, *, timeout_s: float) -> dict[int, Mapping[str, Any]]:
        """Return what the other nodes have answered within `timeout_s`, by node, and delete it from the store."""
        found: dict[int, Mapping[str, Any]] = {}
        answers = ValueLog(self._values, f"answers/{number}")
        deadline = time.monotonic() + timeout_s
        with contextlib.suppress(RuntimeError):
            while len(found) < len(self._others) and time.monotonic() < deadline:
                for at, one in answers.read():
                    found[int(one["node"])] = one["answer"]
                    self._values.delete(f"answers/{number}/{at}")
                if len(found) < len(self._others):
                    time.sleep(_POLL_S)
        return found

    def note_stop(self, signal_name: str) -> None:
        """Say that a signal ends this node's launcher, and with it its ranks."""
        self.note_end("stop", f"{signal_name} ended its launcher and its ranks")

    def note_end(self, name: str, value: object) -> None:
        """Publish a value from a launcher that a signal ends, unless that takes long."""
        with contextlib.suppress(TimeoutError):
            run_interruptibly(partial(self.publish, name, value), timeout_s=_STOP_S)

    def note_silent(self, node: int) -> None:
        """Say that a node gives no signs of life. Raises RuntimeError where the store is gone."""
        self._news.append({"name": "stop", "node": node, "value": "its launcher is gone, without a word"})

    def beat(self, node: int, number: int) -> int:
        """Add to the signs of life of a node and return them. Raises RuntimeError where the store is gone."""
        return self._values.add(f"beats/{node}", number)

    def new_stops(self) -> list[str]:
        """Return a sentence for each other node whose launcher was stopped or is gone; `stops` has all so far."""
        new = {
            node: f"host {self.host_of(node)}: {reason}"
            for node, reason in self._told.get("stop", {}).items()
            if node != self.node and node not in self.stops
        }
        self.stops |= new
        return [*new.values()]

    def nodes_at_work(self) -> list[int]:
        """Return the other nodes whose ranks have not ended well. Raises `StoreLostError`."""
        self.look()
        if self.is_lost:
            raise StoreLostError
        return sorted(self._others - self._told.get("done", {}).keys())

    def take_leave(self, *, timeout_s: float) -> None:
        """Wait until all nodes know that all are done: the store ends with the node that hosts it."""
        self.publish("left", True)
        others, left = self._others - self.stops.keys(), self._told.setdefault("left", {})
        self._wait(lambda: others - self._told.get("stop", {}).keys() <= left.keys(), timeout_s)

    def is_anyone_done(self) -> bool:
        """Whether a node has said that its ranks have ended well."""
        self.look()
        return bool(self._told.get("done"))

    def restart_elsewhere(self) -> str | None:
        """Return why another node starts the ranks again, as far as has been looked; None where none does."""
        told = self._told.get("restart", {})
        return next((f"host {self.host_of(node)}: {why}" for node, why in told.items() if node != self.node), None)

    def has_failure_elsewhere(self) -> bool:
        """Whether another node has said that its ranks have failed for good, as far as has been looked."""
        return bool(self._told.get("failure", {}).keys() & self._others)

    def lacks_node(self) -> bool:
        """Whether another node is lost, or has failed for good, as far as has been looked."""
        return bool(self.stops) or self.has_failure_elsewhere()

    def _wait(self, is_done: Callable[[], bool], timeout_s: float) -> None:
        """Look until `is_done`, for so long at most; a store that is gone ends it."""
        deadline = time.monotonic() + timeout_s
        self.look()
        while not is_done() and not self.is_lost and time.monotonic() < deadline:
            time.sleep(_POLL_S)
            self.look()

    def _await(self, name: str) -> Any:
        """Return what another node is about to write. The store itself waits a minute at most, a planner may not.

        Raises `RemoteError` where nothing comes, and `NodeLostError` where a node of this round is lost before.
        """
        deadline = time.monotonic() + _TIMEOUT_S
        while not self._values.wait(name, _SLICE):
            if self._has_lost_node():
                raise NodeLostError
            if time.monotonic() > deadline:
                silent = f"another node has not sent its {name.partition('/')[0]} for {_TIMEOUT_S:.0f} s"
                raise RemoteError(silent, "see its own messages", 1)
        return self._values.get([name])[0]


def _failure(values: Mapping[str, Any]) -> NodeFailure:
    lines = {name: tuple(map(str, values.get(name, ()))) for name in ("evidence", "places")}
    return _known(NodeFailure, {**values, **lines, "cause": Cause(values["cause"])})


class StoreLostError(ParaplanError):
    """The node that hosts the store is gone, or says nothing: no node of the job can go on without it."""

    exit_status = PREEMPTED_EXIT_STATUS

    def __init__(self) -> None:
        super().__init__(
            "the node that hosts the rendezvous is lost, and the job ends with it (status 75)",
            hint="start the job again, as its engine does: it goes on from its last checkpoint",
        )


class NodeLostError(Exception):
    """A node is lost while the others wait for what it was about to say: they meet again."""


class NodeEndedError(Exception):
    """The ranks of a node have ended well while others wait for it to start ranks anew: it never comes."""


def _known(record: type[RecordT], values: Mapping[str, Any]) -> RecordT:
    """Return a record of the values that it has fields for: another version of paraplan may have more."""
    names = {one.name for one in fields(record)}
    return record(**{name: value for name, value in values.items() if name in names})


class RemoteError(ParaplanError):
    """An error of node 0 that all nodes share."""

    def __init__(self, message: str, hint: str | None, exit_status: int) -> None:
        super().__init__(message, hint=hint)
        self.exit_status = exit_status


def differences(facts: list[NodeFacts]) -> list[str]:
    """Return a sentence for each fact in which the nodes differ: `torch is 2.13.0 on a, b and 2.12.0 on c`."""

    def some(hosts: list[str]) -> str:
        return ", ".join(hosts[:3]) + (f" and {len(hosts) - 3} more" if len(hosts) > 3 else "")

    sentences = []
    names = {"torch": "torch", "paraplan": "paraplan", "python": "Python", "script": "the script's text"}
    for field, title in names.items():
        hosts: dict[str, list[str]] = {}
        for fact in facts:
            hosts.setdefault(getattr(fact, field), []).append(fact.host)
        if len(hosts) > 1:
            parts = [f"{value} on {some(names_of)}" for value, names_of in hosts.items()]
            sentences.append(f"{title} is {' and '.join(parts)}")
    return sentences
