from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import pytest
from launching import NEVER_S
from torch.distributed import HashStore  # type: ignore[attr-defined]
from waiting import PATIENCE_S, wait_until

from paraplan.errors import PlanError
from paraplan.launch.elastic.ending import Heartbeat
from paraplan.launch.faults.failures import Cause, NodeFailure, first_failure
from paraplan.launch.nodes.job_token import ForgedTextError, Seal
from paraplan.launch.nodes.store import NodeFacts, NodeStore, RemoteError, differences

T = TypeVar("T")
FACTS = NodeFacts(host="a", torch="2.13.0", paraplan="1", python="3.11.4", script="0123")


def stores(number: int) -> list[NodeStore]:
    store = HashStore()
    return [NodeStore(store, node=node, num_nodes=number, seal=Seal(b"token")) for node in range(number)]


def failure(host: str, cause: Cause, time_ns: int) -> NodeFailure:
    return NodeFailure(
        host=host, rank=0, cause=cause, time_ns=time_ns, exit_status=1, what="x", evidence=("y",), places=("z",)
    )


def at_once(calls: list[Callable[[], T]]) -> list[T]:
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]


def test_every_node_reads_the_failures_of_all_and_names_the_same_first_one() -> None:
    told = [failure("a", Cause.COMMUNICATION, 1), failure("b", Cause.OWN_ERROR, 5), failure("c", Cause.STOPPED, 0)]
    nodes = stores(3)
    calls = [lambda node=node: nodes[node].exchange_failures(told[node], timeout_s=PATIENCE_S) for node in range(3)]
    for found in at_once(calls):
        assert {item.host for item in found} == {"a", "b", "c"}
        assert first_failure(found) == told[1]


def test_a_node_that_says_nothing_is_not_waited_for_for_ever() -> None:
    first, second = stores(2)
    second.look()
    assert not second.has_failure_elsewhere()
    mine = failure("a", Cause.OWN_ERROR, 1)
    assert first.exchange_failures(mine, timeout_s=0.2) == [mine]
    second.look()
    assert second.has_failure_elsewhere()
    assert not first.has_failure_elsewhere()


def test_a_node_that_was_stopped_or_whose_ranks_have_ended_well_is_not_waited_for() -> None:
    first, stopped, done = stores(3)
    stopped.note_stop("SIGTERM")
    done.publish("done", True)
    mine = failure("a", Cause.OWN_ERROR, 1)
    calls: list[Callable[[], list[NodeFailure]]] = [
        lambda: first.exchange_failures(mine, timeout_s=NEVER_S),
        lambda: done.failures_of_others(timeout_s=NEVER_S),
    ]
    assert at_once(calls) == [[mine], [mine]]
    assert [*first.stops] == [*done.stops] == [1]
    first.publish("done", True)
    at_once([lambda: first.take_leave(timeout_s=NEVER_S), lambda: done.take_leave(timeout_s=NEVER_S)])


def test_a_node_that_a_signal_ends_after_its_ranks_is_not_waited_for_at_the_end() -> None:
    first, signalled = stores(2)
    for one in (first, signalled):
        one.publish("done", True)
    signalled.note_end("left", True)
    first.take_leave(timeout_s=NEVER_S)


def test_what_node_0_makes_reaches_all_and_so_does_its_error() -> None:
    nodes = stores(2)
    calls = [lambda node=node: node.share_text("plan", lambda: "text") for node in nodes]
    assert at_once(calls) == ["text", "text"]

    def fail() -> str:
        raise PlanError("nothing fits", hint="more GPUs")

    with pytest.raises(PlanError):
        nodes[0].share_text("other", fail)
    with pytest.raises(RemoteError, match="nothing fits") as caught:
        nodes[1].share_text("other", fail)
    assert (caught.value.hint, caught.value.exit_status) == ("more GPUs", 2)


def test_nodes_that_differ_are_named_with_what_they_have() -> None:
    others = [NodeFacts(**(vars(FACTS) | {"host": host, "torch": "2.12.0"})) for host in "bcdef"]
    assert differences([FACTS, *others]) == ["torch is 2.13.0 on a and 2.12.0 on b, c, d and 2 more"]
    nodes = stores(2)
    changed = NodeFacts(**(vars(FACTS) | {"host": "b", "script": "4567"}))
    told = at_once([lambda: nodes[0].exchange_facts(FACTS), lambda: nodes[1].exchange_facts(changed)])
    assert told[0] == told[1] == [FACTS, changed]
    assert differences(told[0]) == ["the script's text is 0123 on a and 4567 on b"]


class Counted:
    """A store of the test that counts the calls to it."""

    def __init__(self) -> None:
        self.store, self.num_calls = HashStore(), 0

    def __getattr__(self, name: str) -> Any:
        self.num_calls += name != "has_extended_api"
        return getattr(self.store, name)


@pytest.mark.parametrize("num_nodes", [2, 256])
def test_a_look_is_one_call_and_no_thread_whatever_the_number_of_nodes(num_nodes: int) -> None:
    counted = Counted()
    store, other = (NodeStore(counted, node=node, num_nodes=num_nodes, seal=Seal(b"token")) for node in (0, 1))  # type: ignore[arg-type]
    store.look()
    before, threads = counted.num_calls, threading.active_count()
    for _ in range(10):
        store.look()
        assert not store.new_stops()
        assert not store.has_failure_elsewhere()
    assert (counted.num_calls - before, threading.active_count()) == (10, threads)
    other.note_stop("SIGTERM")
    before = counted.num_calls
    store.look()
    assert counted.num_calls - before == 3, "is there any, is it written, what is it"
    assert store.new_stops() == ["host of node 1: SIGTERM ended its launcher and its ranks"]


def test_news_that_a_node_is_still_writing_come_later_and_hold_up_no_others() -> None:
    raw = HashStore()
    first, second, third = (NodeStore(raw, node=node, num_nodes=3, seal=Seal(b"token")) for node in range(3))
    number = raw.add("paraplan/news", 1)  # it has a number, and no text yet
    second.publish("done", True)
    first.look()
    assert first.nodes_at_work() == [2]
    raw.set(f"paraplan/news/{number}", raw.get(f"paraplan/news/{number + 1}"))
    with pytest.raises(ForgedTextError, match=f"news/{number} was not written with this job's token"):
        third.look()


def test_a_node_without_signs_of_life_is_named_by_the_one_behind_it_unless_it_has_ended() -> None:
    nodes = stores(4)
    nodes[3].publish("done", True)
    nodes[0].look()
    hearts = [Heartbeat(nodes[node], silence_s=0.5, interval_s=0.05) for node in (0, 2)]
    wait_until(lambda: nodes[2].look() or nodes[2].new_stops())  # type: ignore[func-returns-value]
    wait_until(lambda: nodes[0].look() or 1 in nodes[0].new_stops() or nodes[0].stops)  # type: ignore[func-returns-value]
    for heart in hearts:
        heart.close()
    assert nodes[0].stops == {1: "host of node 1: its launcher is gone, without a word"}
