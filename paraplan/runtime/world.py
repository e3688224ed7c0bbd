"""The processes of a job: which rank this one is, on which device, and how they find each other."""

from __future__ import annotations

import logging
import os
import socket
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]  # re-exported from C++ unmarked
from torch.distributed.rendezvous import rendezvous

from paraplan.errors import UsageError
from paraplan.runtime.connections import Connections
from paraplan.runtime.torch_private import NOISY_LOGGERS, VIEW_WARNING

T = TypeVar("T")

DEFAULT_TIMEOUT_S = 600.0
BACKEND = "PARAPLAN_BACKEND"
"""Set to gloo, ranks share GPUs and talk over the CPU (`shared_gpu.py`): slow, for tests on fewer GPUs than ranks."""


_made: dict[tuple[Any, ...], Any] = {}
"""Groups and meshes by what they were made of, beside the default group whose ranks they have."""


@dataclass(frozen=True)
class World:
    """One rank among `size`. `is_distributed` is False for a process that no launcher started."""

    rank: int
    local_rank: int
    size: int
    device: torch.device
    is_distributed: bool


def read_world(environment: Mapping[str, str]) -> World:
    """Return this process's place as the variables of torchrun name it; a world of one where WORLD_SIZE is not set.

    The device is the GPU of the local rank, or the CPU where there is no GPU. Raises `UsageError` on variables that
    are missing or no numbers, and where the machine has fewer GPUs than local ranks.
    """
    if "WORLD_SIZE" not in environment:
        return World(rank=0, local_rank=0, size=1, device=_device(0, environment), is_distributed=False)
    rank, size = _number(environment, "RANK"), _number(environment, "WORLD_SIZE")
    local_rank = _number(environment, "LOCAL_RANK")
    if not 0 <= rank < size:
        raise UsageError(f"RANK={rank} is outside a world of WORLD_SIZE={size} ranks")
    device = _device(local_rank, environment)
    return World(rank=rank, local_rank=local_rank, size=size, device=device, is_distributed=True)


def join_world(
    world: World, environment: Mapping[str, str], connections: Connections, *, timeout_s: float = DEFAULT_TIMEOUT_S
) -> None:
    """Set up the default process group, with its `connections`: gloo for tensors on the CPU, NCCL for those on GPUs.

    Where the rendezvous is a loopback address the ranks listen there alone. A collective that takes longer than
    `timeout_s` ends its rank with an error.
    """
    timeout = timedelta(seconds=timeout_s)
    on_gpu = world.device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(world.device)
    host, port = environment.get("MASTER_ADDR", ""), _number(environment, "MASTER_PORT")
    if not host:
        raise UsageError("WORLD_SIZE is set but MASTER_ADDR is not", hint="start the script with paraplan launch")
    if is_loopback(host):
        _stay_on_loopback()
    by_agent = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = _store_of_job(host, port, world, timeout, by_agent=by_agent)
    with connections.noted():
        dist.init_process_group(
            _backend(world, environment),
            store=store,
            rank=world.rank,
            world_size=world.size,
            timeout=timeout,
            device_id=world.device if on_gpu and environment.get(BACKEND) != "gloo" else None,
        )


def be_alone(world: World, environment: Mapping[str, str]) -> None:
    """Set up a default process group of this process alone, which FSDP needs; it listens on no port of the network."""
    if world.device.type == "cuda":
        torch.cuda.set_device(world.device)
    _stay_on_loopback()
    dist.init_process_group(_backend(world, environment), store=HashStore(), rank=0, world_size=1)


def made_once(key: tuple[Any, ...], make: Callable[[], T]) -> T:
    """Return what `make` made of the ranks at the first call with `key`, on all ranks.

    Groups have threads and connections: a process that prepares several plans has those of each once.
    """
    default = dist.group.WORLD
    if _made.get(()) is not default:  # which code outside has left
        _made.clear()
        _made[()] = default
    if key not in _made:
        _made[key] = make()
    made: T = _made[key]
    return made


def leave_group() -> None:
    """Leave the process group, if there is one, and those made of its ranks: others see that connections end."""
    _made.clear()
    if dist.is_initialized():
        dist.destroy_process_group()


def _backend(world: World, environment: Mapping[str, str]) -> str:
    if world.device.type != "cuda":
        return "gloo"
    if environment.get(BACKEND) != "gloo":
        return "cpu:gloo,cuda:nccl"
    from paraplan.runtime import shared_gpu

    return shared_gpu.register()


def backend_of(device: torch.device) -> str:
    """Return the backend of the default group for tensors on `device`; nothing where it has none."""
    pairs = (pair.partition(":") for pair in str(dist.get_backend_config()).split(","))
    return next((backend for kind, _, backend in pairs if kind == device.type), "")


def is_loopback(host: str) -> bool:
    """Whether `host` names this machine only."""
    return host == "localhost" or host == "::1" or host.startswith("127.")


def _stay_on_loopback() -> None:
    """Bind the sockets of gloo and NCCL to the loopback interface unless the user chose another.

    Both read the environment of the process and take no argument that would reach groups made later.
    """
    interface = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    if interface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)


class _Stores:
    """The store of this process's ranks by its address, and how many jobs have used it."""

    held: ClassVar[dict[tuple[str, int], Store]] = {}
    num_jobs: ClassVar[dict[tuple[str, int], int]] = {}


def _store_of_job(host: str, port: int, world: World, timeout: timedelta, *, by_agent: bool) -> Store:
    """Return the store by which the ranks of the next job find each other.

    A script may close one job and begin another. Its ranks then use the same store, with keys of the job's own: those
    of the last one would lead to connections that are closed.
    """
    address = (host, port)
    if address not in _Stores.held:
        if is_loopback(host) and not by_agent:
            _Stores.held[address] = _loopback_store(host, port, world, timeout)
        else:
            found = rendezvous("env://", world.rank, world.size, timeout=timeout)
            _Stores.held[address] = next(found)[0]
    number = _Stores.num_jobs.get(address, 0)
    _Stores.num_jobs[address] = number + 1
    return PrefixStore(f"paraplan/job/{number}", _Stores.held[address])


def _loopback_store(host: str, port: int, world: World, timeout: timedelta) -> TCPStore:
    """Return the store of the ranks; rank 0 holds it on a socket of `host` alone (torch's own listens everywhere)."""
    if world.rank != 0:
        return TCPStore(host, port, world.size, is_master=False, timeout=timeout)
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise UsageError(
            f"rank 0 cannot listen on MASTER_ADDR={host}, MASTER_PORT={port}: {error.strerror}",
            hint="choose a free port",
        ) from None
    listener.listen()
    return TCPStore(
        host,
        port,
        world.size,
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name)
    if text is None:
        raise UsageError(f"WORLD_SIZE is set but {name} is not", hint="start the script with paraplan launch")
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"{name}={text!r} is not a number", hint="start the script with paraplan launch") from None


def _device(local_rank: int, environment: Mapping[str, str]) -> torch.device:
    backend = environment.get(BACKEND, "nccl")
    if backend not in ("nccl", "gloo"):
        raise UsageError(f"{BACKEND}={backend} is not a backend of the runtime", hint="use nccl or gloo")
    if not torch.cuda.is_available():
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if backend == "gloo":
        local_rank %= count
    if local_rank >= count:
        raise UsageError(
            f"local rank {local_rank} has no GPU: this machine has {count}",
            hint=f"start at most one rank for each GPU, or let them share one with {BACKEND}=gloo, to test a plan",
        )
    return torch.device("cuda", local_rank)


def silence_known_noise() -> None:
    """Silence, by exact message or logger, what torch says about uses that are right here.

    - FSDP2 warns when a wrapped module returns a view (a model that ends in a linear layer on 3-D input does); the
      gradients are right, and tests compare them with one process.
    - The redistribution of doubly sharded tensors logs on every rank that it takes two steps.
    - A pipeline schedule logs its whole table on every rank when one stage raises; the error itself says enough.
    """
    warnings.filterwarnings("ignore", message=VIEW_WARNING, category=UserWarning)
    for name, level in NOISY_LOGGERS.items():
        logging.getLogger(name).setLevel(level)
