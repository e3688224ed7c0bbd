"""A job of two hosts, and a third host on their network that does not belong to it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from host_nodes import MEETING_S, StartNode
from launching import NEVER_S, WriteScript, free_port, names_in
from nodes import Hosts

import paraplan

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(1200)]


TRAIN = """
import os, sys, time
from pathlib import Path
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
os.write(1, f"rank {dist.get_rank()} saw {int(total)} at {os.environ['MASTER_PORT']}\\n".encode())
while not Path(sys.argv[1], "stop").exists():
    time.sleep(0.1)
dist.barrier()
"""

FIND = """
import socket, sys
num_open = 0
address, ports = sys.argv[1].split(":")
for port in map(int, ports.split(",")):
    with socket.socket() as connection:
        connection.settimeout(0.5)
        num_open += connection.connect_ex((address, port)) == 0
print(num_open, "ports take connections")
"""

ATTACK = """
import base64, os, pickle, socket, struct, sys
VALIDATE = b"\\0" + struct.pack("<I", 0x3C85F7CE)


class Ran:
    def __reduce__(self):
        return os.mkdir, (sys.argv[3],)


def word(text):
    return struct.pack("<Q", len(text)) + text


def put(key, value):
    return b"\\1" + word(key) + word(value)


with socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=30) as store:
    pickled = base64.b64encode(pickle.dumps(Ran()))
    forged = put(b"/torch.rendezvous.none", pickled) + put(b"/none/1/paraplan/news/1", pickled)
    store.sendall(VALIDATE + forged + b"\\4" + word(b"/none/1/paraplan/news") + struct.pack("<q", 1))
    print("answered", len(store.recv(8)))
"""


def listening(made: Hosts, index: int) -> str:
    """Return the ports on which anything listens on a host, on any of its addresses: all that others may try."""
    command = made.command(index, "cat", "/proc/net/tcp", "/proc/net/tcp6")
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    sockets = [line.split() for line in lines if ":" in line.split()[0]]
    return ",".join(sorted({str(int(words[1].rpartition(":")[2], 16)) for words in sockets if words[3] == "0A"}))


@pytest.mark.parametrize("backend", ["c10d", "static"])
def test_from_another_host_nothing_is_run_and_nothing_that_is_forged_is_taken(
    tmp_path: Path, script: WriteScript, three_hosts: Hosts, start_node: StartNode, backend: str
) -> None:
    train, attack, pwned = script(TRAIN), script(ATTACK, "attack.py"), tmp_path / "pwned"
    port, first = free_port(), three_hosts.addresses[0]
    ways = {
        "c10d": [["--nnodes", 2, "--rdzv-backend", "c10d", "--rdzv-endpoint", f"{first}:{port}"]] * 2,
        "static": [
            ["--nnodes", 2, "--master-addr", first, "--master-port", port, "--node-rank", rank] for rank in (0, 1)
        ],
    }
    nodes = [start_node(index, *ways[backend][index], train, tmp_path) for index in range(2)]
    for index, node in enumerate(nodes):
        node.wait_for(f"rank {index} saw 2")
    command = three_hosts.command(2, sys.executable, str(attack), first, str(port), str(pwned))
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=MEETING_S)
    assert done.stdout == "answered 8\n", "who is on the network may disturb a job: " + done.stderr
    ended = [node.end() for node in nodes]
    assert all(status for status, _ in ended), ended
    key = {"c10d": "torch.rendezvous.none", "static": "news/1"}[backend]
    assert f"error: what the rendezvous holds as {key} is not a text of paraplan launch" in "".join(ended[0][1])
    assert "Traceback" not in "".join(said for _, said in ended)
    assert not pwned.exists()


def test_a_job_of_one_host_listens_for_nobody_else(
    tmp_path: Path, script: WriteScript, three_hosts: Hosts, start_node: StartNode
) -> None:
    train, find = script(TRAIN), script(FIND, "find.py")
    node = start_node(0, "--nproc-per-node", 2, train, tmp_path)
    node.wait_for("rank 1 saw 2")
    ports = listening(three_hosts, 0)
    assert ports, "ranks meet on the loopback interface"
    command = three_hosts.command(2, sys.executable, str(find), f"{three_hosts.addresses[0]}:{ports}")
    said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=MEETING_S).stdout
    assert said == "0 ports take connections\n"
    (tmp_path / "stop").touch()
    assert node.end()[0] == 0


def test_a_node_with_another_secret_is_told(
    scratch: Path, script: WriteScript, three_hosts: Hosts, start_node: StartNode
) -> None:
    train = script("")
    where = f"{three_hosts.addresses[0]}:{free_port()}"
    words = ["--nnodes", 2, "--rdzv-backend", "c10d", "--rdzv-endpoint", where, train]
    nodes = [start_node(0, *words, PARAPLAN_JOB_TOKEN="0" * 16)]
    nodes[0].wait_for("waiting at 10.231.7.1:")
    nodes.append(start_node(1, *words, PARAPLAN_JOB_TOKEN="1" * 16))
    status, said = nodes[1].end()
    assert status == 1, said
    assert "was not written with this job's token" in said
    assert "Traceback" not in said
    nodes[0].wait_for("for 1 of 2 nodes; here is ")
    nodes[0].process.send_signal(signal.SIGINT)
    assert nodes[0].end()[0] == 130
    assert names_in(scratch) == []


SHIFT = """
import copyreg, datetime, os, time
seconds = float(os.environ["SHIFTED_BY"])
wall, wall_ns, real = time.time, time.time_ns, datetime.datetime
time.time = lambda: wall() + seconds
time.time_ns = lambda: wall_ns() + int(seconds * 1e9)


class Shifted(real):
    @classmethod
    def now(cls, tz=None):
        return real.now(tz) + datetime.timedelta(seconds=seconds)


datetime.datetime = Shifted
for one in (real, Shifted):
    copyreg.pickle(one, lambda moment: (Shifted.fromisoformat, (moment.isoformat(),)))
"""


# A node that is shifted is an interpreter of its own; one says that it is told, the other way is the other sign.
@pytest.mark.parametrize("shifts", [(0, 60), pytest.param((0, -60, 60), marks=pytest.mark.with_all)], ids=len)
def test_nodes_whose_clocks_differ_train_together_and_are_told(
    shifts: tuple[int, ...], tmp_path: Path, script: WriteScript, three_hosts: Hosts, start_node: StartNode
) -> None:
    train = script(TRAIN)
    (tmp_path / "clock").mkdir()
    (tmp_path / "clock" / "sitecustomize.py").write_text(SHIFT)  # Python's clocks, in a process that is real otherwise
    (tmp_path / "stop").touch()
    where = f"{three_hosts.addresses[0]}:{free_port()}"
    rendezvous = ["--nnodes", len(shifts), "--rdzv-backend", "c10d", "--rdzv-endpoint", where]
    root = str(Path(paraplan.__file__).parent.parent)
    nodes = []
    for index, seconds in enumerate(shifts):
        path = f"{tmp_path / 'clock'}{os.pathsep}{root}"
        shifted = {"PYTHONPATH": path, "SHIFTED_BY": str(seconds), "is_forked": False} if seconds else {}
        nodes.append(start_node(index, *rendezvous, train, tmp_path, **shifted))
    ended = [node.end() for node in nodes]
    assert [status for status, _ in ended] == [0] * len(shifts), ended
    said = "".join(words for _, words in ended)
    assert all(f"rank {rank} saw {len(shifts)}" in said for rank in range(len(shifts))), said
    for index, seconds in enumerate(shifts[1:], 1):
        word = "behind" if seconds < 0 else "ahead of"
        found = re.search(rf"the clock of this node is (\S+) s {word} that of host node0", ended[index][1])
        assert found is not None, said
        assert float(found[1]) == pytest.approx(60, abs=2)


@pytest.mark.parametrize(
    ("number", "words"),
    [
        pytest.param(
            signal.SIGTERM, "host node1: SIGTERM ended its launcher and its ranks", marks=pytest.mark.with_all
        ),
        (signal.SIGKILL, "host node1: its launcher is gone, without a word"),
    ],
)
def test_a_node_that_is_stopped_is_named_by_the_other(
    tmp_path: Path,
    script: WriteScript,
    three_hosts: Hosts,
    start_node: StartNode,
    number: signal.Signals,
    words: str,
) -> None:
    train = script(TRAIN)
    rendezvous = ["--nnodes", 2, "--master-addr", three_hosts.addresses[0], "--master-port", free_port()]
    nodes = [start_node(index, *rendezvous, "--node-rank", index, train, tmp_path) for index in range(2)]
    for index, node in enumerate(nodes):
        node.wait_for(f"rank {index} saw 2")
    nodes[1].process.send_signal(number)
    nodes[0].wait_for(words)
    status, said = nodes[0].end()
    assert status == 1, said
    assert "failed first" not in said, "the ranks of the other node did nothing wrong"


HANG = """
import os, signal, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
os.write(1, f"rank {dist.get_rank()} saw {int(total)} at 0\\n".encode())
dist.barrier()
if dist.get_rank() == 3:
    os.kill(os.getpid(), signal.SIGSTOP)
dist.all_reduce(total)
"""


def test_a_hang_names_the_rank_that_never_came_on_both_hosts_and_ends_it_at_once(
    script: WriteScript, three_hosts: Hosts, start_node: StartNode
) -> None:
    train = script(HANG)
    words = ["--nnodes", 2, "--nproc-per-node", 2, "--hang-timeout", 4]
    words += ["--shutdown-timeout", NEVER_S]  # a stopped process gets none of it
    words += ["--master-addr", three_hosts.addresses[0], "--master-port", free_port()]
    nodes = [start_node(index, *words, "--node-rank", index, train) for index in range(2)]
    nodes[1].wait_for("the job hangs")
    ended = [node.end() for node in nodes]
    assert [status for status, _ in ended] == [124, 124], ended
    for _, said in ended:
        assert "never came to all_reduce number" in said, said
        assert ": rank 3 on node1" in said, said
    assert "on host node1: rank 3 is stopped, by SIGSTOP or a debugger" in ended[0][1]
