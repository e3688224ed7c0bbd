"""The gates before a job's stores: who is let in, what is signed, and whose clock counts."""

from __future__ import annotations

import base64
import dataclasses
import errno
import json
import os
import pickle
import socket
import struct
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]
from waiting import PATIENCE_S, wait_until

from paraplan.launch.nodes.doors import Doors
from paraplan.launch.nodes.endpoint import Endpoint
from paraplan.launch.nodes.gate import Launcher
from paraplan.launch.nodes.handshake import GREETING, RefusedError, greet
from paraplan.launch.nodes.job_token import (
    PROTOCOL,
    TOKEN_VARIABLE,
    ForgedTextError,
    Seal,
    job_port,
    job_token,
    read_secret,
    secret_file,
)
from paraplan.launch.nodes.local_sockets import is_own_connection, strangers_at
from paraplan.launch.nodes.rendezvous import NoRendezvousError, find_contradiction
from paraplan.launch.nodes.rendezvous_backend import SealedBackend
from paraplan.launch.nodes.rendezvous_state import StateTranslator
from paraplan.launch.spec import ArgumentError, NodeRange
from paraplan.launch.torch_private.rendezvous_state import RoundState, pickled, unpickled

LONG = timedelta(seconds=PATIENCE_S)
PAUSE = timedelta(seconds=1)
"""So much time passes between two looks, which tells what goes on with the time from what does not."""
TOKEN = b"of this job"
VALIDATE = b"\0" + struct.pack("<I", 0x3C85F7CE)  # what torch's client sends first


class Host:
    """Doors with one store for ranks, and what they said."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.doors = Doors(TOKEN, say=self.said.append)
        self.store, self.port = self.doors.host_store_of_ranks("127.0.0.1", timeout=LONG)
        self.endpoint = Endpoint("127.0.0.1", self.port)


class SlowDoors(Doors):
    """Doors that take a while over who is here, in which a launcher may come."""

    looked = threading.Event()
    has_come = threading.Event()

    def _guests(self) -> set[Launcher]:
        here = super()._guests()
        self.looked.set()
        self.has_come.wait(0.5)
        return here


@pytest.fixture
def host() -> Iterator[Host]:
    made = Host()
    yield made
    made.doors.close()


def sent(port: int, data: bytes, *, address: str = "127.0.0.1") -> bytes | None:
    """Return what answers `data` at a port; None where the connection cannot be made."""
    try:
        with socket.create_connection((address, port), timeout=2) as connection:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            return b"".join(iter(lambda: connection.recv(4096), b""))
    except TimeoutError:
        return None
    except ConnectionError:
        return b""
    except OSError as error:
        if error.errno != errno.ENOTCONN:  # the gate has closed already
            raise
        return b""


def test_a_process_of_this_user_reaches_the_store_through_the_gate(host: Host) -> None:
    host.store.set("key", b"v" * 3_000_000)  # more than a socket takes at once
    clients = [TCPStore("127.0.0.1", host.port, is_master=False, timeout=LONG) for _ in range(20)]
    for number, client in enumerate(clients):
        client.set(f"mine{number}", str(number))
        assert len(client.get("key")) == 3_000_000
    assert [host.store.get(f"mine{number}") for number in range(20)] == [str(n).encode() for n in range(20)]


def test_the_store_behind_the_gate_takes_no_other_connection(host: Host) -> None:
    ports = {int(line.split()[1].rpartition(":")[2], 16) for line in listening_lines()} - {host.port}
    own = {port for port in ports if port_is_own(port)}
    assert own, "the store itself listens too"
    assert [sent(port, VALIDATE) for port in own] == [None] * len(own)
    assert strangers_at(host.port) == set()


def listening_lines() -> list[str]:
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    return [line for line in lines if line.split()[3] == "0A"]


def port_is_own(port: int) -> bool:
    at_port = [line for line in listening_lines() if int(line.split()[1].rpartition(":")[2], 16) == port]
    inodes = {f"socket:[{line.split()[9]}]" for line in at_port}
    return bool(inodes & {str(path.readlink()) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()})


def test_another_user_of_this_machine_is_refused_and_named(host: Host) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    child = os.fork()
    if child == 0:
        os.setresuid(65534, 65534, 65534)
        os._exit(0 if sent(host.port, VALIDATE) == b"" else 1)
    status = os.waitpid(child, 0)[1]
    # root's connections are let in; this test runs as root, and the other user is nobody
    assert os.waitstatus_to_exitcode(status) == 0
    assert host.said == ["refused a connection from 127.0.0.1: it is no rank or launcher of this job and this user"]


def test_a_connection_is_known_by_its_ends_and_its_user() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        taken, address = server.accept()
        with taken:
            assert is_own_connection(client.getsockname(), server.getsockname())
            assert is_own_connection(address, taken.getsockname())
            assert not is_own_connection(("127.0.0.1", 1), taken.getsockname())


def test_a_connection_that_ipv6_wraps_is_known_too() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as client,
    ):
        port = server.getsockname()[1]
        try:
            client.connect(("::ffff:127.0.0.1", port))
        except OSError:
            pytest.skip("this host has no IPv6")
        assert is_own_connection(("127.0.0.1", client.getsockname()[1]), ("127.0.0.1", port))


def test_a_launcher_without_the_token_is_refused_on_both_sides(host: Host) -> None:
    other = Doors(b"another token")
    with pytest.raises(RefusedError, match="it does not know this job's token"):
        other.enter(host.endpoint)
    wait_until(lambda: host.said)
    assert host.said == ["refused a connection from 127.0.0.1: it does not know this job's token"]


def test_a_launcher_that_proves_itself_learns_how_far_the_clocks_are_apart(host: Host) -> None:
    other = Doors(TOKEN)
    other.enter(host.endpoint)
    assert other.clock_offset_s == pytest.approx(0, abs=0.5)
    assert host.doors.clock_offset_s is None  # it has entered nowhere, and hosts ranks alone
    other.close()
    wait_until(lambda: host.doors.left)
    assert set(host.doors.left) == {socket.gethostname()}


def test_a_launcher_that_is_lost_is_out_of_the_round_at_once_unless_it_comes_back(host: Host) -> None:
    name, other = socket.gethostname(), Doors(TOKEN)
    other.enter(host.endpoint)
    assert not host.doors.is_gone(name, os.getpid())
    other.close()
    wait_until(lambda: host.doors.is_gone(name, os.getpid()))
    assert host.doors.is_gone(f"{name}.cluster.example", os.getpid())
    assert not host.doors.is_gone(name, os.getpid() + 1), "another launcher of the host, in its place"
    assert not host.doors.is_gone("elsewhere", os.getpid())
    mine, lost = (name, os.getpid() + 1, 0), (name, os.getpid(), 0)
    now = datetime.now(UTC)
    seen = RoundState(participants={mine: 0, lost: 1}, last_seen=dict.fromkeys((mine, lost), now))
    read = StateTranslator(host.doors.is_gone).to_state(StateTranslator().to_values(seen))
    assert now - read.last_seen[lost] > timedelta(hours=1)
    assert now - read.last_seen[mine] < timedelta(minutes=1)
    again = Doors(TOKEN)
    again.enter(host.endpoint)
    wait_until(lambda: not (host.doors.left or host.doors.gone))
    assert not host.doors.is_gone(name, os.getpid())
    assert host.doors.left == {}
    again.close()


def test_an_answer_that_is_played_back_opens_nothing(host: Host) -> None:
    nonce = b"1" * 32
    first = sent(host.port, b"%s %d %s\n" % (GREETING, PROTOCOL, nonce))
    assert first is not None
    words = first.split()
    replayed = b"%s %d %s\n%s {}\n" % (GREETING, PROTOCOL, nonce, words[3])
    answer = sent(host.port, replayed)
    assert answer is not None
    assert answer.count(b"\n") == 1  # the gate's greeting, and nothing after it


def test_another_version_of_the_protocol_is_named() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(b"%s %d nonce proof\n" % (GREETING, PROTOCOL + 1))
        with pytest.raises(RefusedError, match=rf"it speaks version {PROTOCOL + 1} of paraplan's protocol") as caught:
            greet(ours, TOKEN)
    assert "same version of paraplan" in str(caught.value.hint)


@pytest.mark.parametrize("garbage", [b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 5000, b"p" * 100_000, b"paraplan\n", b"\0"])
def test_garbage_does_not_stop_a_gate(host: Host, garbage: bytes) -> None:
    sent(host.port, garbage)
    client = TCPStore("127.0.0.1", host.port, is_master=False, timeout=LONG)
    client.set("key", "value")
    assert host.store.get("key") == b"value"


def test_the_secret_is_a_file_of_its_owner_alone_or_a_variable(tmp_path: Path) -> None:
    environment = {"HOME": str(tmp_path)}
    secret = read_secret(environment)
    path = secret_file(environment)
    assert path.stat().st_mode & 0o777 == 0o600
    assert len(secret) >= 32
    assert read_secret(environment) == secret
    assert [one.name for one in path.parent.iterdir()] == ["secret"]
    path.chmod(0o640)
    with pytest.raises(ArgumentError, match="others can read or write") as caught:
        read_secret(environment)
    assert secret.decode() not in str(caught.value)
    assert read_secret({TOKEN_VARIABLE: "x" * 16}) == b"x" * 16
    with pytest.raises(ArgumentError, match="fewer than 16 characters"):
        read_secret({TOKEN_VARIABLE: "short"})


def test_a_home_folder_that_takes_no_files_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ArgumentError, match="the nodes have no common secret") as caught:
        read_secret({"XDG_CONFIG_HOME": str(tmp_path / "file")})
    assert TOKEN_VARIABLE in str(caught.value.hint)


def test_jobs_have_tokens_and_ports_of_their_own_that_follow_from_the_secret() -> None:
    mine, other = {TOKEN_VARIABLE: "a" * 32}, {TOKEN_VARIABLE: "b" * 32}
    assert job_token(mine, job="7") == job_token(mine, job="7")
    assert len({job_token(mine, job="7"), job_token(mine, job="8"), job_token(other, job="7")}) == 3
    ports = [job_port(environment, job="slurm-7.0", first=20_000, count=12_000) for environment in (mine, mine, other)]
    assert ports[0] == ports[1] != ports[2]
    assert all(20_000 <= port < 32_000 for port in ports)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"body": '{"round": 7}'}, "was not written with this job's token"),
        ({"signature": "0" * 64}, "was not written with this job's token"),
        ({"protocol": PROTOCOL + 1}, f"speaks version {PROTOCOL + 1} of paraplan's protocol"),
        ({"a field of tomorrow": 1}, None),
    ],
)
def test_a_signed_text_is_read_as_it_was_written_or_refused_in_words(
    change: dict[str, object], words: str | None
) -> None:
    seal = Seal(TOKEN)
    text = json.dumps(json.loads(seal.close("state", {"round": 3})) | change)
    if words is None:
        assert seal.open("state", text) == {"round": 3}
        return
    with pytest.raises(ForgedTextError, match=words):
        seal.open("state", text)


def test_a_text_of_another_name_or_job_or_none_of_ours_is_refused() -> None:
    text = Seal(TOKEN).close("state", 1)
    for seal, name in ((Seal(TOKEN), "facts"), (Seal(b"another"), "state")):
        with pytest.raises(ForgedTextError):
            seal.open(name, text)
    for other in (b"\x80\x04", b"[]", b"{}", b"[" * 200_000, b"1" * 5000):
        with pytest.raises(ForgedTextError, match="is not a text of paraplan launch"):
            Seal(TOKEN).open("state", other)


class Ran:
    """What an attacker would have pickled."""

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (os.environ["PWNED"],)


def test_a_pickle_in_the_place_of_the_state_is_never_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PWNED", str(tmp_path / "pwned"))
    store = HashStore()
    backend = SealedBackend(store, "job", seal=Seal(TOKEN), nodes=NodeRange(1, 1), endpoint="here")
    for attack in (pickle.dumps(Ran()), base64.b64encode(pickle.dumps(Ran()))):
        store.set(backend.key, attack)
        with pytest.raises(ForgedTextError):
            backend.get_state()
    assert not (tmp_path / "pwned").exists()


def test_nodes_with_other_numbers_of_nodes_are_told_on_both_sides() -> None:
    store, seal = HashStore(), Seal(TOKEN)
    SealedBackend(store, "job", seal=seal, nodes=NodeRange(2, 2), endpoint="gpu-a:29500")
    with pytest.raises(NoRendezvousError, match="--nnodes is 2 on the first node that came to gpu-a:29500, and 3 here"):
        SealedBackend(store, "job", seal=seal, nodes=NodeRange(3, 3), endpoint="gpu-a:29500")
    assert find_contradiction(store, seal=seal) == f"{socket.gethostname()} came with --nnodes 3, and not 2"


NODE = ("gpu-a", 7, 0)
OTHER = ("gpu-b", 9, 0)


def test_a_state_goes_through_the_store_and_torchs_pickle_as_it_is() -> None:
    now = datetime.now(UTC)
    state = RoundState(
        round=3,
        is_complete=True,
        participants={NODE: 0, OTHER: 1},
        waiting={("gpu-c", 1, 0)},
        redundant={("gpu-d", 1, 2)},
        last_seen={NODE: now, OTHER: now},
    )
    assert unpickled(pickled(state)) == state
    values = json.loads(json.dumps(StateTranslator().to_values(state)))
    read = StateTranslator().to_state(values | {"a field of tomorrow": [1]})
    assert dataclasses.replace(read, last_seen=state.last_seen) == state
    assert set(read.last_seen) == {NODE, OTHER}


@pytest.mark.parametrize("hours", [-1, 1])
def test_a_node_lives_by_its_count_whatever_its_clock_says(hours: int) -> None:
    theirs, ours = StateTranslator(), StateTranslator()
    wrong = datetime.now(UTC) + timedelta(hours=hours)
    values = theirs.to_values(RoundState(participants={OTHER: 0}, last_seen={OTHER: wrong}))
    before = datetime.now(UTC)
    first = ours.to_state(values).last_seen[OTHER]
    after = datetime.now(UTC)
    assert before <= first <= after
    time.sleep(PAUSE.total_seconds())
    assert ours.to_state(values).last_seen[OTHER] - after < PAUSE / 2  # nothing new: it grows old
    theirs.to_state(values)
    beat = theirs.to_values(RoundState(participants={OTHER: 0}, last_seen={OTHER: wrong + timedelta(seconds=5)}))
    before = datetime.now(UTC)
    assert before <= ours.to_state(beat).last_seen[OTHER] <= datetime.now(UTC)


def test_a_deadline_is_counted_from_when_a_node_has_first_seen_it() -> None:
    theirs, ours = StateTranslator(), StateTranslator()
    began = datetime.now(UTC)
    deadline = began + timedelta(seconds=30)
    values = theirs.to_values(RoundState(deadline=deadline))
    first = ours.to_state(values)
    assert first.deadline is not None
    assert abs(first.deadline - deadline) <= datetime.now(UTC) - began
    assert ours.to_values(first)["deadline"] == values["deadline"]  # passed on as it was
    time.sleep(PAUSE.total_seconds())
    second = ours.to_state(values)
    assert second.deadline is not None
    assert abs(second.deadline - first.deadline) < PAUSE / 2


def test_a_connection_that_its_process_has_let_go_of_is_nobodys() -> None:
    """The kernel tells root's number for the user of such a socket, whoever had it."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        here, there = client.getsockname(), server.getsockname()
        taken, _ = server.accept()
        with taken:
            assert is_own_connection(here, there)
            client.sendall(b"x")
            client.close()
            assert taken.recv(1) == b"x"
            assert not is_own_connection(here, there)


def test_a_launcher_that_comes_while_its_last_connection_ends_is_not_gone() -> None:
    # As after a network that was cut: noted behind its coming, the leaving would hold for ever.
    doors, launcher = SlowDoors(TOKEN), Launcher("node0", "10.0.0.1", 17)
    leaving = threading.Thread(target=doors._note_left, args=(launcher,))
    leaving.start()
    assert doors.looked.wait(PATIENCE_S)
    doors._note_came(launcher)
    doors.has_come.set()
    leaving.join()
    assert (doors.left, doors.gone) == ({}, {})
