"""A job under torch's elastic agent: rendezvous, restarts and membership are torch's, processes are ours."""

from __future__ import annotations

import re
import socket
import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

from torch.distributed.elastic.multiprocessing import PContext, SignalException, Std
from torch.distributed.elastic.multiprocessing import start_processes as start_torchs_processes
from torch.distributed.launcher.api import LaunchConfig, launch_agent
from torch.distributed.run import config_from_args

from paraplan.launch.elastic.agent import NodeAgent
from paraplan.launch.elastic.preparation import Round
from paraplan.launch.elastic.processes import RankProcesses
from paraplan.launch.elastic.records import AttemptSettings, JobRecord
from paraplan.launch.nodes.endpoint import address_towards, addresses_of, host_of, host_store
from paraplan.launch.nodes.job_token import Seal
from paraplan.launch.nodes.rendezvous import open_store
from paraplan.launch.nodes.rendezvous_backend import SealedBackend
from paraplan.launch.nodes.static_rendezvous import StaticRendezvous
from paraplan.launch.request import LaunchRequest
from paraplan.launch.spec import DEFAULT_MASTER_PORT, LaunchSpec, NodeRange
from paraplan.launch.torch_private.elastic import bound_to_numa, made_of, set_streams

_LOOPBACK = "127.0.0.1"
_READS_THE_END_S = 2.5  # torch's rendezvous reads the state of a job once a second
_STORE_PATIENCE = timedelta(seconds=300)  # torch's default for a store


def with_rendezvous(spec: LaunchSpec, nodes: NodeRange) -> LaunchSpec:
    """Return `spec` with the rendezvous that torchrun chooses where none is asked for.

    `--standalone`, and one node without an endpoint or a port, get a store of their own on a free port.
    """
    is_unasked = spec.rdzv_backend == "static" and not spec.rdzv_endpoint and spec.master_port is None
    chosen = replace(spec, master_port=DEFAULT_MASTER_PORT if spec.master_port is None else spec.master_port)
    if nodes.max == 1 and (spec.standalone or is_unasked):  # which meets nobody: torch has a c10d rendezvous for it
        endpoint, run_id = f"{spec.local_addr or _LOOPBACK}:0", str(uuid.uuid4())
        alone = replace(chosen, rdzv_backend="static", rdzv_endpoint=endpoint, rdzv_id=run_id, node_rank=0)
        return replace(alone, standalone=False)  # with which torch's launcher asks for c10d
    host = host_of(spec.rdzv_endpoint)
    address = address_towards(host) if spec.rdzv_backend == "c10d" and not addresses_of(socket.gethostname()) else None
    if address is None:
        return chosen
    # torch's rendezvous would look up this host's name, which is unknown
    is_host = [] if "is_host" in spec.rdzv_conf else [f"is_host={str(address in addresses_of(host)).lower()}"]
    rdzv_conf = ",".join(filter(None, [spec.rdzv_conf, *is_host]))
    return replace(chosen, local_addr=spec.local_addr or address, rdzv_conf=rdzv_conf)


def streams_by_rank(value: str) -> dict[int, Std] | None:
    """Return what `10:3,11:1` says for local ranks of two digits, which torch does not read; None for what it reads."""
    if not re.search(r"\d\d:", value):
        return None
    pairs = [part.split(":") for part in value.split(",")]
    return {int(rank): Std(int(streams)) for rank, streams in pairs}


def make_config(request: LaunchRequest, *, log_dir: str) -> tuple[LaunchConfig, Callable[..., Any] | str, list[str]]:
    """Return torch's configuration of the job, and the program of a rank with its arguments.

    Raises what torch raises for arguments that it refuses: ValueError, AssertionError, RuntimeError, OSError.
    """
    asked = with_rendezvous(request.spec, request.nodes)
    completed = replace(asked, nodes=request.nodes, nproc_per_node=request.nproc_per_node, log_dir=log_dir)
    namespace = completed.to_namespace()
    streams = {option: streams_by_rank(getattr(asked, option)) for option in ("redirects", "tee")}
    vars(namespace).update({option: "0" for option, by_rank in streams.items() if by_rank is not None})
    config, program, program_arguments = config_from_args(namespace)
    for option, by_rank in streams.items():
        if by_rank is not None:
            set_streams(config.logs_specs, option, by_rank)
    return config, program, program_arguments


def run_agent(
    config: LaunchConfig,
    program: Callable[..., Any] | str,
    program_arguments: list[str],
    *,
    settings: AttemptSettings,
    job: JobRecord,
    before_start: Callable[[Round], None] | None,
    seal: Seal,
) -> dict[int, Any]:
    """Run the job on this node under torch's elastic agent, until all ranks have ended.

    `seal` signs what its nodes tell each other. `before_start` is called after each rendezvous, before the ranks start.
    Raises torch's ChildFailedError for a failed rank, its SignalException for a signal, and its rendezvous errors.
    """
    nodes = NodeRange(config.min_nodes, config.max_nodes)
    here: dict[str, Any] = {"seal": seal, "nodes": nodes, "endpoint": config.rdzv_endpoint}
    with made_of(
        open_store=open_store,
        static=partial(StaticRendezvous, seal=seal),
        backend=partial(SealedBackend, waits_for_ended=lambda: job.waits_for_ended(), **here),
        start_processes=partial(_start_ranks, settings=settings, job=job),
        open_store_of_ranks=lambda address: host_store(address, 0, timeout=_STORE_PATIENCE),
        agent=partial(NodeAgent, before_start=before_start, job=job, **here),
    ):
        try:
            return launch_agent(config, program, program_arguments)
        finally:
            if job.has_spares:  # they read that the job has ended, from a store that one of its nodes hosts
                time.sleep(_READS_THE_END_S)


def _start_ranks(
    name: str,
    entrypoint: Callable[..., Any] | str,
    args: dict[int, tuple[str, ...]],
    envs: dict[int, dict[str, str]],
    logs_specs: Any,
    log_line_prefixes: dict[int, str] | None = None,
    start_method: str = "spawn",
    numa_options: Any = None,
    *,
    settings: AttemptSettings,
    job: JobRecord,
    **torch_options: Any,
) -> PContext:
    """Start the ranks of one attempt; the signature is that of torch's `start_processes`."""
    if not isinstance(entrypoint, str):  # --run-path: functions go through torch.multiprocessing
        for env in envs.values():
            env.update(settings.environment)
        return start_torchs_processes(
            name=name,
            entrypoint=entrypoint,
            args=args,
            envs=envs,
            logs_specs=logs_specs,
            log_line_prefixes=log_line_prefixes,
            start_method=start_method,
            numa_options=numa_options,
            **torch_options,
        )
    commands = {rank: (entrypoint, *map(str, arguments)) for rank, arguments in args.items()}
    if numa_options is not None:
        commands = {rank: bound_to_numa(command, rank, numa_options) for rank, command in commands.items()}
    processes = RankProcesses(
        name,
        commands=commands,
        envs=envs,
        logs_specs=logs_specs,
        settings=settings,
        job=job,
        torch_options={"log_line_prefixes": log_line_prefixes, **torch_options},
    )
    try:
        processes.start()
    except BaseException as error:
        # A signal that comes meanwhile reaches the ranks as it does later on: as itself.
        processes.close(error.sigval if isinstance(error, SignalException) else None)
        raise
    return processes
