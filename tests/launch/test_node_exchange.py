"""Nodes that meet in one store: ranks, texts, and what is said of those that do not come."""

from __future__ import annotations

from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait

import pytest
from launching import free_port
from waiting import PATIENCE_S

from paraplan.errors import UsageError
from paraplan.launch.nodes.endpoint import Endpoint
from paraplan.launch.nodes.exchange import NodesMissingError, NodeText, exchange_texts

TOKEN = b"of this job"


def free_endpoint() -> Endpoint:
    return Endpoint("127.0.0.1", free_port())


def meet(
    nodes: list[NodeText], *, num_nodes: list[int] | None = None, timeout_s: float = PATIENCE_S
) -> list[tuple[int, list[str]] | Exception]:
    """Return what each node gets, or its error; all of them at once."""
    endpoint = free_endpoint()

    def one(position: int) -> tuple[int, list[str]] | Exception:
        count = num_nodes[position] if num_nodes else len(nodes)
        try:
            return exchange_texts(nodes[position], endpoint=endpoint, num_nodes=count, timeout_s=timeout_s, token=TOKEN)
        except (UsageError, NodesMissingError) as error:
            return error

    with ThreadPoolExecutor(len(nodes)) as pool:
        return list(pool.map(one, range(len(nodes))))


def test_every_node_gets_the_texts_of_all_by_rank() -> None:
    ranks = (2, 0, 1)
    texts = ["zero", "one", "two" * 100_000]
    answers = meet([NodeText(rank=rank, name=f"host{rank}", text=texts[rank]) for rank in ranks])
    assert answers == [(rank, texts) for rank in ranks]


def test_nodes_without_a_rank_take_free_ones_and_agree_on_the_order() -> None:
    answers = meet([NodeText(rank=None, name=name, text=name) for name in "abc"])
    assert all(isinstance(answer, tuple) for answer in answers)
    by_rank = dict(answer for answer in answers if isinstance(answer, tuple))
    assert sorted(by_rank) == [0, 1, 2]
    texts = by_rank[0]
    assert sorted(texts) == ["a", "b", "c"]
    assert all(other == texts for other in by_rank.values())


def test_a_node_that_does_not_come_is_named_by_its_rank_and_the_others_by_their_hosts() -> None:
    answers = meet(
        [NodeText(rank=0, name="gpu-a", text=""), NodeText(rank=2, name="gpu-c", text="")],
        num_nodes=[3, 3],
        timeout_s=6.0,
    )
    for answer in answers:
        assert isinstance(answer, NodesMissingError)
    assert "missing node 1; here are 0 (gpu-a), 2 (gpu-c)" in str(answers[0])


def test_a_host_that_does_not_listen_is_named_by_its_address() -> None:
    endpoint = free_endpoint()
    with pytest.raises(NodesMissingError, match=rf"node 0 is missing: nothing listens at {endpoint} after 0\.3 s"):
        exchange_texts(NodeText(rank=1, name="b", text=""), endpoint=endpoint, num_nodes=2, timeout_s=0.3, token=TOKEN)


def test_a_rank_that_two_nodes_claim_is_refused() -> None:
    endpoint = free_endpoint()

    def come(rank: int, name: str) -> tuple[int, list[str]]:
        text = NodeText(rank=rank, name=name, text=name)
        return exchange_texts(text, endpoint=endpoint, num_nodes=3, timeout_s=PATIENCE_S, token=TOKEN)

    with ThreadPoolExecutor(4) as pool:
        first, *claims = [pool.submit(come, rank, name) for rank, name in ((0, "a"), (1, "b"), (1, "c"))]
        refused, _ = wait(claims, return_when=FIRST_COMPLETED)  # the exchange lasts until node 2 comes, at the very end
        with pytest.raises(UsageError, match="--node-rank 1 is taken"):
            refused.pop().result()
        last = pool.submit(come, 2, "d")
        assert [len(node.result()[1]) for node in (first, last)] == [3, 3]


def test_nodes_that_expect_other_numbers_of_nodes_are_refused() -> None:
    answers = meet([NodeText(rank=0, name="a", text=""), NodeText(rank=1, name="b", text="")], num_nodes=[2, 3])
    assert all("--nnodes is" in str(answer) for answer in answers if isinstance(answer, Exception))
    assert [type(answer) for answer in sorted(answers, key=lambda answer: type(answer).__name__)] == [
        NodesMissingError,
        UsageError,
    ]


def test_a_rank_outside_the_nodes_is_refused_before_anything_is_opened() -> None:
    with pytest.raises(UsageError, match="--node-rank 2 is outside the 2 nodes"):
        exchange_texts(
            NodeText(rank=2, name="a", text=""), endpoint=free_endpoint(), num_nodes=2, timeout_s=1, token=TOKEN
        )


def test_node_0_says_where_it_cannot_listen() -> None:
    elsewhere = Endpoint("192.0.2.1", 29400)  # an address of documentation, RFC 5737
    with pytest.raises(UsageError, match=r"node 0 cannot listen on 192\.0\.2\.1:29400"):
        exchange_texts(NodeText(rank=0, name="a", text=""), endpoint=elsewhere, num_nodes=2, timeout_s=1, token=TOKEN)


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("gpu-a:1234", "gpu-a", 1234),
        ("gpu-a", "gpu-a", 29400),
        ("[fd00::1]:1234", "fd00::1", 1234),
        ("[fd00::1]", "fd00::1", 29400),
        ("fd00::1", "fd00::1", 29400),
    ],
)
def test_endpoints_are_read_in_each_form(text: str, host: str, port: int) -> None:
    assert Endpoint.parse(text) == Endpoint(host, port)


@pytest.mark.parametrize("text", ["", ":1234", "gpu-a:", "gpu-a:x", "gpu-a:70000", "gpu-a:0"])
def test_other_endpoints_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is not HOST:PORT"):
        Endpoint.parse(text)
