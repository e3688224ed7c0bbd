"""This node among those of a batch job, as SLURM, Open MPI, MPICH and their kin tell it in the environment."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path

from paraplan.launch.nodes.job_token import job_port
from paraplan.launch.spec import ONE_NODE, ArgumentError, LaunchSpec, NodeRange
from paraplan.units import one_line

FIRST_PORT, NUM_PORTS = 20_000, 12_000
"""The range of ports that jobs choose from: below those that Linux gives to connections (32768 and up)."""

_SAY_WHERE = ("standalone", "rdzv_endpoint", "master_port", "rdzv_backend", "master_addr", "node_rank")
_NO_ID = "none"  # torchrun's --rdzv-id of a job without one
_MAX_DIGITS = 9
_NAME_THE_FIRST = "set MASTER_ADDR to the address of the node with rank 0"
_LAST_PORT = 65_535
_HOST = re.compile(r"(?:[\w.-]|\[\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*\])+(?=,|\Z)")  # in SLURM's notation


@dataclass(frozen=True)
class NodePlace:
    """One node of a batch job. `address` is that of the first node, `job` a name that all nodes have alike.

    `num_tasks` is the number of processes that the batch system has started over all nodes.
    """

    system: str
    num_nodes: int
    node_rank: int
    num_tasks: int
    address: str | None
    job: str
    port: int | None = None
    """The port that the environment names, None where it leaves the choice."""


def find_place(environment: Mapping[str, str]) -> NodePlace | None:
    """Return this node's place; None where no batch system has started this process."""
    return _slurm_place(environment) or _mpi_place(environment)


def _slurm_place(environment: Mapping[str, str]) -> NodePlace | None:
    """Read the variables that srun sets for each task (man srun, OUTPUT ENVIRONMENT VARIABLES).

    A batch script that calls the launcher without srun has none of SLURM_STEP_*: it runs on one node.
    """
    if "SLURM_STEP_NUM_NODES" not in environment or "SLURM_NODEID" not in environment:
        return None
    num_nodes = _number(environment, "SLURM_STEP_NUM_NODES")
    return NodePlace(
        system="srun",
        num_nodes=num_nodes,
        node_rank=_number(environment, "SLURM_NODEID"),
        num_tasks=_number(environment, "SLURM_STEP_NUM_TASKS") if "SLURM_STEP_NUM_TASKS" in environment else num_nodes,
        address=first_host(environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")),
        job=f"slurm-{environment.get('SLURM_JOB_ID', '0')}.{environment.get('SLURM_STEP_ID', '0')}",
    )


# variables that Open MPI's mpirun sets (its FAQ), and Hydra, the mpirun of MPICH, Intel MPI and MVAPICH
_MPI_VARIABLES = (
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_SIZE", "PMI_RANK", "MPI_LOCALNRANKS"),
)


def _mpi_place(environment: Mapping[str, str]) -> NodePlace | None:
    """Read the variables that an mpirun sets for each process."""
    names = next((names for names in _MPI_VARIABLES if all(name in environment for name in names)), None)
    if names is None:
        return None
    size, rank, local_size = (_number(environment, name) for name in names)
    job = environment.get("PMIX_NAMESPACE") or environment.get("OMPI_MCA_ess_base_jobid")
    # without a name of mpirun's, what tells this job from others of the same user
    job = job or "-".join(environment[name] for name in _JOB_VARIABLES if name in environment) or "mpirun"
    port = _number(environment, "MASTER_PORT") if "MASTER_PORT" in environment else None
    if port is not None and port > _LAST_PORT:
        raise ArgumentError(f"MASTER_PORT={port} is not a port", hint=f"give one up to {_LAST_PORT:,}, or unset it")
    return NodePlace(
        system="mpirun",
        num_nodes=-(-size // max(1, local_size)),  # nodes may have unlike numbers, which is refused later
        node_rank=rank // max(1, local_size),
        num_tasks=size,
        address=environment.get("MASTER_ADDR") or _first_of_node_file(environment),
        job=f"mpi-{job}",
        port=port,
    )


_JOB_VARIABLES = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "JOB_ID", "PMI_KVS", "HYDRA_JOBID")


def _number(environment: Mapping[str, str], name: str) -> int:
    """Return a variable that counts. Raises `ArgumentError` for any other text."""
    text = environment[name].strip()
    if not (text.isascii() and text.isdigit()) or len(text) > _MAX_DIGITS:
        raise ArgumentError(
            f"{name}={one_line(text)[:40]!r} is not a number",
            hint="the batch system sets it: unset it to start without, and give --nnodes and --rdzv-endpoint",
        )
    return int(text)


def _first_of_node_file(environment: Mapping[str, str]) -> str | None:
    """Return the first host in the files and lists of PBS and LSF. Raises `ArgumentError` for one that is no text."""
    for name in ("PBS_NODEFILE", "LSB_DJOB_HOSTFILE"):
        try:
            words = Path(environment[name]).read_text(encoding="utf-8").split() if environment.get(name) else []
        except (FileNotFoundError, IsADirectoryError):  # of another node, or of a job that has ended
            continue
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not a text"
            unreadable = f"{name}={one_line(environment[name])[:60]} cannot be read: {reason}"
            raise ArgumentError(unreadable, hint=_NAME_THE_FIRST) from None
        if words:
            return words[0]
    return next(iter(environment.get("LSB_HOSTS", "").split()), None)


def first_host(text: str) -> str | None:
    """Return the first host of SLURM's notation, None for an empty list: `gpu[01-03,7],login` begins with gpu01.

    Raises `ArgumentError` for what is not such a list.
    """
    if not text.strip():
        return None
    match = _HOST.match(text.strip())
    if match is None:
        raise ArgumentError(
            f"{one_line(text)[:60]!r} is not a list of hosts as SLURM writes it",
            hint="unset SLURM_STEP_NODELIST, and give --rdzv-endpoint",
        )
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", match[0])


def slurm_seconds(limit: str) -> int | None:
    """Return the seconds of a time of Slurm: `3`, `3:30`, `1:00:00`, `1-0`, `1-0:30`; None for other words."""
    if not re.fullmatch(r"(\d+-\d+(:\d+){0,2})|(\d+(:\d+){0,2})", limit):
        return None
    days, dash, rest = limit.rpartition("-")
    numbers = [int(number) for number in rest.split(":")]
    if dash or len(numbers) == 3:
        hours, minutes, seconds = [*numbers, 0, 0][:3]
    else:
        hours, (minutes, seconds) = 0, [*numbers, 0][:2]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def take_place(spec: LaunchSpec, place: NodePlace, environment: Mapping[str, str]) -> tuple[LaunchSpec, str | None]:
    """Return `spec` with a batch system's nodes, rank and rendezvous, and a line about them.

    The port follows from the secret of the job's user in `environment`: others cannot tell it from the job's number.
    `spec` as it is, and None, where it has a rendezvous of its own. A node that is alone gets one node and no line;
    several launchers on it have a job each, of which the line is then. Raises `ArgumentError` for more than one
    launcher on one of several nodes, for a node beyond their number, and where no address is known.
    """
    asked = {name: getattr(spec, name) for name in _SAY_WHERE}
    if spec.nodes == ONE_NODE or any(asked[one.name] != one.default for one in fields(spec) if one.name in asked):
        return spec, None
    started = f"{place.system} started {place.num_tasks} launchers on"
    one = "srun --ntasks-per-node=1" if place.system == "srun" else "start one process on each node"
    if place.num_nodes == 1:
        alone = replace(spec, nodes=spec.nodes or ONE_NODE)  # of a plan for more nodes, too
        line = f"{started} this node, and each runs a job of its own; for one job: {one}"
        return alone, None if place.num_tasks == 1 else line
    if place.num_tasks != place.num_nodes:
        raise ArgumentError(f"{started} {place.num_nodes} nodes; each starts all ranks of its node", hint=one)
    if place.node_rank >= place.num_nodes:
        raise ArgumentError(
            f"{place.system} says that this is node {place.node_rank}, counted from 0, of {place.num_nodes} nodes",
            hint="its variables are of another job: unset them, and give --nnodes and --rdzv-endpoint",
        )
    if place.address is None:
        unknown = f"{place.system} does not say which of the {place.num_nodes} nodes is the first"
        raise ArgumentError(unknown, hint=_NAME_THE_FIRST)
    nodes = spec.nodes or NodeRange(place.num_nodes, place.num_nodes)
    port = place.port or job_port(environment, job=place.job, first=FIRST_PORT, count=NUM_PORTS)
    if nodes.min != nodes.max:
        endpoint = f"{place.address}:{port}"
        chosen = replace(spec, nodes=nodes, rdzv_backend="c10d", rdzv_endpoint=endpoint, rdzv_id=place.job)
    else:
        chosen = replace(
            spec,
            rdzv_id=place.job if spec.rdzv_id == _NO_ID else spec.rdzv_id,
            nodes=nodes,
            master_addr=place.address,
            master_port=port,
            node_rank=place.node_rank,
        )
    where = f"node {place.node_rank} of {place.num_nodes}, rendezvous at {place.address}:{port}"
    return chosen, f"{place.system}: {where}"
