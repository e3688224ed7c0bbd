from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest
from launching import NEVER_S
from torch.distributed import HashStore  # type: ignore[attr-defined]
from waiting import PATIENCE_S

from paraplan.errors import PlanError
from paraplan.launch.faults.failures import Cause, NodeFailure, first_node_failure
from paraplan.launch.nodes.job_token import Seal
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
        assert first_node_failure(found) == told[1]


def test_a_node_that_says_nothing_is_not_waited_for_for_ever() -> None:
    first, second = stores(2)
    assert not second.has_failure_elsewhere()
    mine = failure("a", Cause.OWN_ERROR, 1)
    assert first.exchange_failures(mine, timeout_s=0.2) == [mine]
    assert second.has_failure_elsewhere()
    assert not first.has_failure_elsewhere()


def test_a_node_that_was_stopped_or_whose_ranks_have_ended_well_is_not_waited_for() -> None:
    first, stopped, done = stores(3)
    stopped.note_stop("SIGTERM")
    done.note_done()
    mine = failure("a", Cause.OWN_ERROR, 1)
    calls: list[Callable[[], list[NodeFailure]]] = [
        lambda: first.exchange_failures(mine, timeout_s=NEVER_S),
        lambda: done.failures_of_others(timeout_s=NEVER_S),
    ]
    assert at_once(calls) == [[mine], [mine]]
    assert [*first.stops] == [*done.stops] == [1]
    first.note_done()
    at_once([lambda: first.take_leave(timeout_s=NEVER_S), lambda: done.take_leave(timeout_s=NEVER_S)])


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
