"""The agent of one node: a round of too few nodes is not begun, and one that loses a node is begun again."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.rendezvous.api import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from paraplan.launch.elastic.agent import NodeAgent, describe_wait
from paraplan.launch.elastic.preparation import Round
from paraplan.launch.elastic.records import JobRecord
from paraplan.launch.nodes.job_token import Seal
from paraplan.launch.nodes.store import NodeFacts, NodeStore
from paraplan.launch.spec import NodeRange


class Rounds(RendezvousHandler):
    """A rendezvous whose rounds end with so many nodes, of which the last `num_silent` die without a word."""

    def __init__(self, *num_nodes: int, num_silent: int = 0) -> None:
        self.left, self.num_silent = list(num_nodes), num_silent
        self.begun = 0
        self._state_holder = SimpleNamespace(state=SimpleNamespace(participants=[]))

    def next_rendezvous(self) -> RendezvousInfo:
        count, store = self.left.pop(0), HashStore()
        self.begun += 1
        here = range(count - self.num_silent)
        self.num_silent = 0
        self._state_holder.state.participants = [SimpleNamespace(addr=f"gpu-{node}") for node in here]
        for node in here[1:]:
            NodeStore(store, node=node, num_nodes=count, seal=Seal(b"token")).come()
        return RendezvousInfo(store, 0, count, RendezvousStoreInfo("gpu-a", 1))

    def get_backend(self) -> str:
        return "test"

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        raise AssertionError

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return "run"

    def shutdown(self) -> bool:
        return True


def agent_of(
    handler: RendezvousHandler, minimum: int, before_start: Callable[[Round], None] = lambda this_round: None
) -> NodeAgent:
    spec = WorkerSpec(role="default", local_world_size=1, rdzv_handler=handler, entrypoint="train.py", args=())
    return NodeAgent(
        spec,
        DefaultLogsSpecs(),
        before_start=before_start,
        job=JobRecord(),
        seal=Seal(b"token"),
        nodes=NodeRange(minimum, 4),
        endpoint="gpu-a:29500",
    )


@pytest.mark.parametrize(("minimum", "rounds", "begun"), [(2, (1, 1, 2), 2), (1, (1, 2), 1), (3, (2, 4), 4)])
def test_a_round_with_fewer_nodes_than_the_minimum_does_not_begin(
    minimum: int,
    rounds: tuple[int, ...],
    begun: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("TORCH_ELASTIC_WORKER_IDENTICAL", "1")  # torch then asks the other nodes for nothing
    agent = agent_of(Rounds(*rounds), minimum)
    group = agent.get_worker_group()
    agent.rendezvous(group)
    assert group.group_world_size == begun
    said = capsys.readouterr().err
    small = [number for number in rounds if number < minimum]
    assert [line.split()[1] for line in said.splitlines()] == [str(number) for number in small]
    assert said.count("waiting for the others again") == len(small)


def test_a_node_that_dies_while_the_nodes_meet_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCH_ELASTIC_WORKER_IDENTICAL", "1")
    handler = Rounds(3, 2, num_silent=1)
    agent = agent_of(handler, 1)
    agent.rendezvous(agent.get_worker_group())
    assert (agent.get_worker_group().group_world_size, handler.begun) == (2, 2)
    assert capsys.readouterr().err.count("a node is lost before the ranks have started: meeting again") == 1


def test_a_node_that_dies_before_it_says_what_it_runs_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_ELASTIC_WORKER_IDENTICAL", "1")
    handler = Rounds(2, 1)

    def before_start(this_round: Round) -> None:
        if this_round.store is not None:
            handler._state_holder.state.participants.pop()
            facts = NodeFacts(host="a", torch="2.13.0", paraplan="1", python="3.11.4", script="0123")
            this_round.store.exchange_facts(facts)
        raise StopIteration  # the ranks would be started

    agent = agent_of(handler, 1, before_start)
    agent.rendezvous(agent.get_worker_group())
    with pytest.raises(StopIteration):
        agent.start_workers(agent.get_worker_group())
    assert (agent.get_worker_group().group_world_size, handler.begun) == (1, 2)


@pytest.mark.parametrize(
    ("here", "nodes", "said"),
    [
        (["a"], NodeRange(2, 2), "for 1 of 2 nodes; here is a"),
        (["a", "b"], NodeRange(1, 4), "for more of 1:4 nodes; here are a, b"),
        (["a", "b"], NodeRange(1, 2), "until all 2 nodes are ready; here are a, b"),
    ],
)
def test_a_node_waits_for_more_only_where_more_may_come(here: list[str], nodes: NodeRange, said: str) -> None:
    assert describe_wait(here, nodes, "gpu-a:29500") == f"waiting at gpu-a:29500 {said}"
