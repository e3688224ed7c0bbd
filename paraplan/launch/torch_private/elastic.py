"""torch's elastic agent, which is made to be run and not to be followed: its steps, what it is made of, its log."""

from __future__ import annotations

import ctypes
import inspect
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed.elastic.agent.server.local_elastic_agent as local_agent
import torch.distributed.elastic.rendezvous.c10d_rendezvous_backend as c10d_rendezvous
import torch.distributed.elastic.rendezvous.dynamic_rendezvous as dynamic_rendezvous
import torch.distributed.elastic.rendezvous.static_tcp_rendezvous as static_rendezvous
import torch.distributed.launcher.api as launcher_api
from torch.distributed.elastic.agent.server.api import RunResult, Worker, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import PContext, Std
from torch.distributed.elastic.multiprocessing.api import RunProcsResult
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.numa.binding import _maybe_wrap_command_args_with_numa_binding

LIBRARY = "lib/libc10.so"
LOG_LEVEL = "FLAGS_caffe2_log_level"
"""The level in c10/util/Logging.cpp. It is set from TORCH_CPP_LOG_LEVEL when torch is imported, and nowhere later."""

FATAL = 3
_VARIABLES = ("TORCH_CPP_LOG_LEVEL", "TORCH_DISTRIBUTED_DEBUG", "TORCH_SHOW_CPP_STACKTRACES")


class ElasticAgent(LocalElasticAgent):
    """torch's agent of one node with its steps in public. It has no events for them."""

    monitor_workers: Callable[..., RunResult] = LocalElasticAgent._monitor_workers
    """Return how the ranks are; called again and again while they run."""
    restart_workers: Callable[..., None] = LocalElasticAgent._restart_workers
    """Stop all ranks of this node, wait for the other nodes again, and start them anew."""
    rendezvous: Callable[..., None] = LocalElasticAgent._rendezvous
    """Wait for the other nodes. torch's dynamic rendezvous then has a store for the ranks."""
    assign_ranks: Callable[..., list[Worker]] = LocalElasticAgent._assign_worker_ranks
    """Return the ranks of this node, as all nodes of a round agree by its store: each waits for the others."""
    start_workers: Callable[..., dict[int, Any]] = LocalElasticAgent._start_workers
    """Start the ranks after the rendezvous; return their ids by local rank."""
    wait_for_nodes: Callable[..., None] = LocalElasticAgent._exit_barrier
    """Wait for the other nodes after the ranks of this one have ended well."""

    @property
    def restarts_left(self) -> int:
        """How often the ranks of this node may fail still."""
        return int(self._remaining_restarts)

    def forgo_restarts(self) -> None:
        """Have the ranks of this node not start again."""
        self._remaining_restarts = 0

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        return self.monitor_workers(worker_group)

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        self.restart_workers(worker_group)

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        self.rendezvous(worker_group)

    def _assign_worker_ranks(
        self, store: Any, group_rank: int, group_world_size: int, spec: WorkerSpec
    ) -> list[Worker]:
        return self.assign_ranks(store, group_rank, group_world_size, spec)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        return self.start_workers(worker_group)

    def _exit_barrier(self) -> None:
        self.wait_for_nodes()


class ProcessContext(PContext):
    """The processes of one attempt as torch's agent wants them: it has no public class to derive from but this."""

    start_processes: Callable[..., None]
    """Start them. torch's signal handlers are in place."""
    poll_processes: Callable[..., RunProcsResult | None]
    """Return the result once all have ended or one has failed, None before."""
    close_processes: Callable[..., None]
    """End those that run by this signal. torch passes a time too, its own default on some paths."""

    def _start(self) -> None:
        self.start_processes()

    def _poll(self) -> RunProcsResult | None:
        return self.poll_processes()

    def _close(self, death_sig: signal.Signals, timeout: int = 30) -> None:
        self.close_processes(death_sig)


class StoreBackend(C10dRendezvousBackend):
    """torch's c10d rendezvous with its calls of the store in public: they stay in C, and have no timeout."""

    @property
    def key(self) -> str:
        """The key of the state in the store."""
        return str(self._key)

    @property
    def no_state(self) -> str:
        """The value that the store holds before there is a state."""
        return str(self._NULL_SENTINEL)

    def call_store(self, operation: str, *arguments: Any, **options: Any) -> Any:
        """Return what the store answers."""
        return super()._call_store(operation, *arguments, **options)

    def _call_store(self, store_op: str, *args: Any, **kwargs: Any) -> Any:
        return self.call_store(store_op, *args, **kwargs)


def participants(handler: Any) -> list[str] | None:
    """Return the addresses of the nodes that torch's dynamic rendezvous counts; None for a static one."""
    holder = getattr(handler, "_state_holder", None)
    return None if holder is None else [str(node.addr) for node in holder.state.participants]


def is_spare(handler: Any) -> bool:
    """Whether this node waits for a place in torch's dynamic rendezvous, which has as many nodes as it may."""
    holder = getattr(handler, "_state_holder", None)
    return holder is not None and handler._this_node in holder.state.redundancy_list


def has_spares(handler: Any) -> bool:
    """Whether nodes wait for a place in torch's dynamic rendezvous."""
    holder = getattr(handler, "_state_holder", None)
    return holder is not None and bool(holder.state.redundancy_list)


def store_of(handler: Any) -> Any:
    """Return the store of torch's dynamic rendezvous."""
    return handler._store


def forget_store_of_ranks(handler: Any) -> None:
    """Have the next round of a dynamic rendezvous look for the ranks' store, which it keeps from its first round on."""
    if getattr(handler, "_bootstrap_store_info", None) is not None:
        vars(handler)["_bootstrap_store_info"] = None


def set_streams(logs_specs: Any, option: str, streams: dict[int, Std]) -> None:
    """Set "redirects" or "tee" by local rank: the public text of it takes local ranks of one digit alone."""
    vars(logs_specs)[f"_{option}"] = streams


def bound_to_numa(command: tuple[str, ...], rank: int, numa_options: Any) -> tuple[str, ...]:
    """Return a rank's command with what binds it to CPUs, as --numa-binding asks. torch has no public name for it."""
    return _maybe_wrap_command_args_with_numa_binding(command, gpu_index=rank, numa_options=numa_options)


@contextmanager
def made_of(
    *,
    open_store: Callable[..., Any],
    static: Callable[..., Any],
    backend: Callable[..., Any],
    start_processes: Callable[..., PContext],
    open_store_of_ranks: Callable[[str], Any],
    agent: Callable[..., Any],
) -> Iterator[None]:
    """Have torch's launcher use these in this context.

    `open_store_of_ranks` gets the name of this node, and returns something with the `port` at which ranks are to find
    their store there.

    It makes its agent, the agent starts its processes and a rendezvous makes its store by names in their modules; none
    has an argument for it. Binding these names keeps all else torch's own, with all that a new torch adds to it.
    """
    with (
        _bound(c10d_rendezvous, "TCPStore", open_store),
        _bound(c10d_rendezvous, "C10dRendezvousBackend", backend),
        _bound(static_rendezvous, "StaticTCPRendezvous", static),
        _bound(
            dynamic_rendezvous.DynamicRendezvousHandler,
            "_create_tcp_store_server",
            lambda handler, address, port: open_store_of_ranks(address),
        ),
        _bound(dynamic_rendezvous, "get_method_name", name_of_method),
        _bound(local_agent, "start_processes", start_processes),
        _bound(launcher_api, "LocalElasticAgent", agent),
    ):
        yield


def name_of_method(depth: int = 2) -> str:
    """Return the name of the method that records an event of a dynamic rendezvous, as torch's function does.

    torch's asks `inspect.stack()`, which looks for the source of every frame in every module that is imported: with
    torch among them that is some hundredths of a second for each event, and every heartbeat is one.
    """
    frame = inspect.currentframe()
    for _ in range(depth):
        frame = frame and frame.f_back
    return frame.f_code.co_name if frame else "no_method_name"


@contextmanager
def _bound(owner: ModuleType | type, name: str, ours: Callable[..., Any]) -> Iterator[None]:
    torchs = vars(owner).get(name)
    setattr(owner, name, ours)
    try:
        yield
    finally:
        if torchs is None:
            delattr(owner, name)
        else:
            setattr(owner, name, torchs)


def silence_torch_log(environment: Mapping[str, str] = os.environ) -> None:
    """Have C++ write nothing but what ends this process; processes that were forked before write on.

    A store that is gone makes torch's agent write its C++ frames for every message; the launcher says it in a sentence.
    A user who asks torch for more in the environment gets it. A torch without this flag writes as ever.
    """
    if not any(name in environment for name in _VARIABLES):
        with suppress(OSError, ValueError):
            library = ctypes.CDLL(str(Path(torch.__file__).parent / LIBRARY))
            ctypes.c_int.in_dll(library, LOG_LEVEL).value = FATAL
