from __future__ import annotations

import signal
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
from launching import StartForked, WriteScript, free_port, names_in, read_until
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import get_method_name
from waiting import PATIENCE_S, wait_until

from paraplan.errors import PREEMPTED_EXIT_STATUS
from paraplan.launch.nodes.job_token import ForgedTextError, Seal
from paraplan.launch.nodes.rendezvous import (
    NoRendezvousError,
    rendezvous_error,
    rendezvous_warnings,
)
from paraplan.launch.nodes.static_rendezvous import StaticRendezvous
from paraplan.launch.spec import LaunchSpec, NodeRange
from paraplan.launch.torch_private.elastic import name_of_method

LONG = timedelta(seconds=120)
Come = Callable[..., object]


SEAL = Seal(b"of this job")


@pytest.fixture
def come() -> Come:
    """Come to a static rendezvous as one of its nodes."""

    def come(rank: int, port: int, *, num_nodes: int, timeout: timedelta = LONG) -> object:
        handler = StaticRendezvous("127.0.0.1", port, rank, num_nodes, "run", int(timeout.total_seconds()), seal=SEAL)
        try:
            return handler.next_rendezvous().store
        except NoRendezvousError as error:
            return error

    return come


def test_all_nodes_get_the_store_once_all_have_come(come: Come) -> None:
    port = free_port()
    with ThreadPoolExecutor(3) as pool:
        stores = list(pool.map(lambda rank: come(rank, port, num_nodes=3), range(3)))
    stores[1].set("key", "value")  # type: ignore[attr-defined]
    assert stores[2].get("key") == b"value"  # type: ignore[attr-defined]


def test_nodes_that_do_not_come_are_named_and_so_are_those_that_are_here(come: Come) -> None:
    error = come(0, free_port(), num_nodes=3, timeout=timedelta(seconds=1))
    assert isinstance(error, NoRendezvousError)
    assert f"missing nodes 1, 2; here is 0 ({socket.gethostname()})" in error.message
    assert error.hint is not None
    assert "127.0.0.1 is an address that no other node reaches" in error.hint


def test_a_rank_of_two_nodes_is_refused_with_the_one_that_came_first(come: Come) -> None:
    port = free_port()
    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(come, 0, port, num_nodes=2)
        second = pool.submit(come, 1, port, num_nodes=2)
        store, _ = first.result(), second.result()
        third = come(1, port, num_nodes=2)
    assert store is not None
    assert isinstance(third, NoRendezvousError)
    assert f"--node-rank 1 is taken at 127.0.0.1:{port} by {socket.gethostname()}" in third.message


def test_a_node_that_was_forged_is_not_taken_for_one(come: Come) -> None:
    port = free_port()
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(come, 0, port, num_nodes=2)
        stranger = TCPStore("127.0.0.1", port, is_master=False, timeout=LONG, wait_for_workers=False)
        stranger.set("paraplan/here/1", "pwned")
        stranger.add("paraplan/number that came", 1)
        with pytest.raises(ForgedTextError, match="holds as here/1 is not a text of paraplan launch"):
            first.result()


def spec(endpoint: str = "127.0.0.1:29400") -> LaunchSpec:
    return LaunchSpec(training_script="train.py", rdzv_endpoint=endpoint, rdzv_backend="c10d")


@pytest.mark.parametrize(
    ("said", "endpoint", "message"),
    [
        ("RendezvousClosedError: ", "127.0.0.1:29400", "the job at 127.0.0.1:29400 has ended: another node"),
        ("RendezvousTimeoutError: ", "127.0.0.1:29400", "fewer than 2 nodes reached 127.0.0.1:29400 in time"),
        (
            "The client socket has timed out while trying to connect",
            "127.0.0.1:29400",
            "nothing answers at 127.0.0.1:29400",
        ),
        ("anything", "no-such-host.invalid:1", "this node knows no address of no-such-host.invalid"),
        (
            "a new text.\nframes",
            "127.0.0.1:1",
            "rendezvous at 127.0.0.1:1 failed: a new text",
        ),
        ("EADDRINUSE port: 1", "127.0.0.1:29400", "port 1 of this host is taken"),
    ],
)
def test_what_torch_says_becomes_a_sentence_with_the_address_and_what_it_means(
    said: str, endpoint: str, message: str
) -> None:
    error = rendezvous_error(said, spec(endpoint), NodeRange(2, 4))
    assert error.message.startswith(message)
    assert error.hint


def test_the_nodes_that_joined_an_elastic_rendezvous_are_named() -> None:
    assert (
        "here are gpu-a, gpu-b"
        in rendezvous_error("RendezvousTimeoutError: ", spec(), NodeRange(3, 3), came=["gpu-a", "gpu-b"]).message
    )


@pytest.mark.parametrize(
    ("endpoint", "warning"),
    [
        ("no-such-host.invalid:29500", "this node knows no address of no-such-host.invalid"),
        ("127.0.0.1:2", "other machines cannot reach the rendezvous at 127.0.0.1"),
        ("192.0.2.1:2", ""),  # an address of documentation, RFC 5737
    ],
)
def test_an_endpoint_that_nodes_cannot_reach_is_said_before_it_is_waited_for(endpoint: str, warning: str) -> None:
    warnings = rendezvous_warnings(spec(endpoint))
    assert bool(warnings) is bool(warning)
    assert all(told.startswith(warning) for told in warnings)


def is_listened_on(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.ranks
def test_ctrl_c_while_other_nodes_are_waited_for_ends_the_launch_in_one_line(
    scratch: Path, script: WriteScript, start_forked: StartForked
) -> None:
    port, silent_port = free_port(), free_port()
    rendezvous = ("--nnodes", 2, "--rdzv-backend", "c10d", "--rdzv-endpoint")
    train = script("raise SystemExit(3)")
    with (
        start_forked(*rendezvous, f"127.0.0.1:{port}", train) as host,
        start_forked(*rendezvous, f"127.0.0.1:{silent_port}", "--rdzv-conf", "is_host=0", train) as guest,
    ):
        assert guest.stderr is not None
        read_until(guest.stderr, lambda text: f"waiting for 127.0.0.1:{silent_port}: connection refused" in text)
        wait_until(lambda: is_listened_on(port))
        for process in (host, guest):
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=PATIENCE_S) == 130
            said = process.stderr.read() if process.stderr else ""
            assert said.splitlines()[-1] == "paraplan: SIGINT ended the launch; no rank runs"
            assert "Traceback" not in said
            assert "frame #" not in said
    assert names_in(scratch) == []


def test_a_rendezvous_that_is_lost_while_ranks_run_is_not_one_that_nobody_has_started() -> None:
    said = "The client socket has timed out while trying to connect"
    lost = rendezvous_error(said, spec(), NodeRange(2, 2), came=["gpu-a"], has_begun=True)
    assert lost.message.startswith("the node that hosts the rendezvous is lost")
    assert lost.exit_status == PREEMPTED_EXIT_STATUS
    assert "start the same command" not in str(lost.hint)


def test_events_of_a_rendezvous_are_named_as_torch_names_them() -> None:
    def record(name: Callable[[], str]) -> str:
        return name()

    def keep_alive(name: Callable[[], str]) -> str:
        return record(name)

    assert keep_alive(get_method_name) == keep_alive(name_of_method) == "keep_alive"
