"""Who a process is among its ranks, and how they find each other."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from rank_harness import RankHarness, RanksFailedError

from paraplan import runtime
from paraplan.errors import UsageError
from paraplan.plan.parallel import ParallelPlan
from paraplan.runtime.connections import Connections
from paraplan.runtime.world import is_loopback, join_world, read_world

RANK_3_OF_4 = {
    "RANK": "3",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "4",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}


def test_a_process_that_no_launcher_started_is_a_world_of_one() -> None:
    world = read_world({"PATH": "/bin", "RANK": "5"})
    assert (world.rank, world.size, world.is_distributed) == (0, 1, False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="looks at the device of a machine without GPUs")
def test_torchruns_variables_name_the_rank() -> None:
    world = read_world(RANK_3_OF_4)
    assert (world.rank, world.local_rank, world.size, world.is_distributed) == (3, 1, 4, True)
    assert world.device == torch.device("cpu")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"RANK": None}, "RANK is not"),
        ({"LOCAL_RANK": None}, "LOCAL_RANK is not"),
        ({"WORLD_SIZE": "four"}, "WORLD_SIZE='four' is not a number"),
        ({"RANK": "4"}, "RANK=4 is outside a world of WORLD_SIZE=4"),
    ],
)
def test_variables_that_no_launcher_sets_are_refused(changes: dict[str, str | None], words: str) -> None:
    variables = {name: value for name, value in {**RANK_3_OF_4, **changes}.items() if value is not None}
    with pytest.raises(UsageError, match=words):
        read_world(variables)


@pytest.mark.parametrize("missing", ["MASTER_ADDR", "MASTER_PORT"])
def test_a_rendezvous_without_an_address_is_refused(missing: str) -> None:
    variables = {name: value for name, value in RANK_3_OF_4.items() if name != missing}
    with pytest.raises(UsageError, match=f"{missing} is not"):
        join_world(read_world(variables), variables, Connections())


def test_only_names_of_this_machine_are_loopback() -> None:
    assert all(is_loopback(host) for host in ("localhost", "127.0.0.1", "127.0.1.1", "::1"))
    assert not any(is_loopback(host) for host in ("node-1", "10.0.0.127", "0.0.0.0"))  # noqa: S104 (only a name here)


def _sockets() -> set[str]:
    links = [str(path.readlink()) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    return {link.removeprefix("socket:[").rstrip("]") for link in links if link.startswith("socket:[")}


def _listening_addresses() -> list[str]:
    inherited = _sockets()  # of the process that this one was forked from
    runtime.init()
    dist.barrier()
    sockets = _sockets() - inherited
    addresses = []
    for table in ("tcp", "tcp6"):
        path = Path("/proc/self/net") / table
        for line in path.read_text().splitlines()[1:] if path.exists() else []:
            local, state, inode = (line.split()[index] for index in (1, 3, 9))
            if state == "0A" and inode in sockets:
                addresses.append(local.partition(":")[0])
    return addresses


@pytest.mark.ranks
@pytest.mark.skipif(not Path("/proc/self/net/tcp").exists(), reason="reads Linux's table of sockets")
def test_ranks_of_one_machine_listen_on_the_loopback_interface_alone(ranks: RankHarness) -> None:
    first, second = ranks.run(_listening_addresses, size=2)
    assert len(first) >= 2  # the store of the ranks, and gloo
    # 127.0.0.1 as the kernel writes it, in host byte order.
    assert set(first + second) == {"0100007F"}


def _join_a_port(port: int) -> None:
    os.environ["MASTER_PORT"] = str(port)
    runtime.init()


@pytest.mark.ranks
def test_a_port_in_use_is_named(ranks: RankHarness) -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(RanksFailedError, match=f"cannot listen on MASTER_ADDR=127.0.0.1, MASTER_PORT={port}"):
            ranks.run(_join_a_port, port, size=1)


def _coordinates(plan: ParallelPlan) -> tuple[int, int, list[int], list[int]]:
    mesh = runtime.init(plan).mesh
    groups = [dist.get_process_group_ranks(mesh.group(axis)) for axis in ("dp", "pp")]
    return mesh.coordinate("dp"), mesh.coordinate("pp"), groups[0], groups[1]


@pytest.mark.ranks
@pytest.mark.parametrize("order", [("pp", "dp", "cp", "tp"), ("dp", "pp", "cp", "tp")])
def test_process_groups_are_those_of_the_rank_grid(order: tuple[str, ...], ranks: RankHarness) -> None:
    from paraplan.plan.ranks import RankGrid

    plan = ParallelPlan(dp=2, pp=2, pipeline_schedule="gpipe", rank_order=order)
    grid = RankGrid.of_plan(plan)
    for rank, found in enumerate(ranks.run(_coordinates, plan, size=4)):
        place = grid.coordinates(rank)
        assert found == (place["dp"], place["pp"], grid.group("dp", rank), grid.group("pp", rank))
