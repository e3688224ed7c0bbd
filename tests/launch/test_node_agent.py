"""The agent of one node: a round of too few nodes is not begun."""

from __future__ import annotations

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.rendezvous.api import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from paraplan.launch.elastic.agent import NodeAgent
from paraplan.launch.elastic.records import JobRecord
from paraplan.launch.nodes.doors import Doors
from paraplan.launch.spec import NodeRange


class Rounds(RendezvousHandler):
    """A rendezvous whose rounds end with so many nodes."""

    def __init__(self, *num_nodes: int) -> None:
        self.left = list(num_nodes)

    def next_rendezvous(self) -> RendezvousInfo:
        return RendezvousInfo(HashStore(), 0, self.left.pop(0), RendezvousStoreInfo("gpu-a", 1))

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


@pytest.mark.parametrize(("minimum", "rounds", "begun"), [(2, (1, 1, 2), 2), (1, (1, 2), 1), (3, (2, 4), 4)])
def test_a_round_with_fewer_nodes_than_the_minimum_does_not_begin(
    minimum: int,
    rounds: tuple[int, ...],
    begun: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("TORCH_ELASTIC_WORKER_IDENTICAL", "1")  # torch then asks the other nodes for nothing
    handler = Rounds(*rounds)
    spec = WorkerSpec(role="default", local_world_size=1, rdzv_handler=handler, entrypoint="train.py", args=())
    agent = NodeAgent(
        spec,
        DefaultLogsSpecs(),
        before_start=lambda this_round: None,
        job=JobRecord(),
        doors=Doors(b"token"),
        nodes=NodeRange(minimum, 4),
        endpoint="gpu-a:29500",
    )
    group = agent.get_worker_group()
    agent.rendezvous(group)
    assert group.group_world_size == begun
    said = capsys.readouterr().err
    small = [number for number in rounds if number < minimum]
    assert [line.split()[1] for line in said.splitlines()] == [str(number) for number in small]
    assert said.count("waiting for the others again") == len(small)
