"""This node among those of a batch job, as SLURM, Open MPI, MPICH and their kin tell it in the environment."""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from paraplan.launch.spec import ONE_NODE, ArgumentError, LaunchSpec, NodeRange

FIRST_PORT, NUM_PORTS = 20_000, 12_000
"""The range of ports that jobs choose from: below those that Linux gives to connections (32768 and up)."""

_DEFAULT_ADDRESS = "127.0.0.1"


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

    @property
    def port(self) -> int:
        """A port that two jobs of one node are unlikely to share."""
        return FIRST_PORT + zlib.crc32(self.job.encode()) % NUM_PORTS


def find_place(environment: Mapping[str, str]) -> NodePlace | None:
    """Return this node's place; None where no batch system has started this process, or on one node only."""
    for find in (_slurm_place, _open_mpi_place, _pmi_place):
        place = find(environment)
        if place is not None:
            return place if place.num_nodes > 1 else None
    return None


def _slurm_place(environment: Mapping[str, str]) -> NodePlace | None:
    """Read the variables that srun sets for each task (man srun, OUTPUT ENVIRONMENT VARIABLES).

    A batch script that calls the launcher without srun has none of SLURM_STEP_*: it runs on one node.
    """
    if "SLURM_STEP_NUM_NODES" not in environment or "SLURM_NODEID" not in environment:
        return None
    hosts = expand_hosts(environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", ""))
    num_nodes = int(environment["SLURM_STEP_NUM_NODES"])
    return NodePlace(
        system="srun",
        num_nodes=num_nodes,
        node_rank=int(environment["SLURM_NODEID"]),
        num_tasks=int(environment.get("SLURM_STEP_NUM_TASKS", num_nodes)),
        address=hosts[0] if hosts else None,
        job=f"slurm-{environment.get('SLURM_JOB_ID', '0')}.{environment.get('SLURM_STEP_ID', '0')}",
    )


def _open_mpi_place(environment: Mapping[str, str]) -> NodePlace | None:
    """Read the variables of Open MPI's mpirun (its FAQ, "environment variables in MPI processes")."""
    names = ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE")
    if any(name not in environment for name in names):
        return None
    size, rank, local_size = (int(environment[name]) for name in names)
    job = environment.get("PMIX_NAMESPACE") or environment.get("OMPI_MCA_ess_base_jobid") or "mpirun"
    return _mpi_place(environment, size=size, rank=rank, local_size=local_size, job=f"mpi-{job}")


def _pmi_place(environment: Mapping[str, str]) -> NodePlace | None:
    """Read the variables of Hydra, the mpirun of MPICH, Intel MPI and MVAPICH."""
    names = ("PMI_SIZE", "PMI_RANK", "MPI_LOCALNRANKS")
    if any(name not in environment for name in names):
        return None
    size, rank, local_size = (int(environment[name]) for name in names)
    return _mpi_place(environment, size=size, rank=rank, local_size=local_size, job="mpi-hydra")


def _mpi_place(environment: Mapping[str, str], *, size: int, rank: int, local_size: int, job: str) -> NodePlace:
    return NodePlace(
        system="mpirun",
        num_nodes=max(1, size // max(1, local_size)),
        node_rank=rank // max(1, local_size),
        num_tasks=size,
        address=environment.get("MASTER_ADDR") or _first_of_node_file(environment),
        job=job,
    )


def _first_of_node_file(environment: Mapping[str, str]) -> str | None:
    """Return the first host in the files and lists of PBS and LSF."""
    for name in ("PBS_NODEFILE", "LSB_DJOB_HOSTFILE"):
        path = Path(environment.get(name, ""))
        if name in environment and path.is_file():
            words = path.read_text(encoding="utf-8").split()
            return words[0] if words else None
    words = environment.get("LSB_HOSTS", "").split()
    return words[0] if words else None


def expand_hosts(text: str) -> list[str]:
    """Return the hosts of SLURM's notation: `gpu[01-03,7],login` gives gpu01, gpu02, gpu03, gpu7, login."""
    hosts: list[str] = []
    for word in re.findall(r"(?:[^,\[\]]|\[[^\]]*\])+", text):
        hosts += _expand_word(word)
    return hosts


def _expand_word(word: str) -> list[str]:
    match = re.search(r"\[([^\]]*)\]", word)
    if match is None:
        return [word]
    names = []
    for part in match[1].split(","):
        low, _, high = part.partition("-")
        numbers = range(int(low), int(high or low) + 1)
        names += [f"{word[: match.start()]}{number:0{len(low)}d}" for number in numbers]
    return [name + rest for name in names for rest in _expand_word(word[match.end() :])]


def take_place(spec: LaunchSpec, place: NodePlace) -> tuple[LaunchSpec, str | None]:
    """Return `spec` with a batch system's nodes, rank and rendezvous, and a line about them.

    `spec` as it is, and None, where it has a rendezvous of its own. Raises `ArgumentError` for more than one launcher
    on a node, and where no address is known.
    """
    says_where = (
        spec.standalone
        or spec.rdzv_endpoint
        or spec.master_port is not None
        or spec.rdzv_backend != "static"
        or spec.master_addr != _DEFAULT_ADDRESS
        or spec.node_rank != 0
        or spec.nodes == ONE_NODE
    )
    if says_where:
        return spec, None
    if place.num_tasks != place.num_nodes:
        raise ArgumentError(
            f"{place.system} started {place.num_tasks} launchers on {place.num_nodes} nodes; each starts all ranks of "
            "its node",
            hint="srun --ntasks-per-node=1" if place.system == "srun" else "start one process on each node",
        )
    if place.address is None:
        raise ArgumentError(
            f"{place.system} does not say which of the {place.num_nodes} nodes is the first",
            hint="set MASTER_ADDR to the address of the node with rank 0",
        )
    nodes = spec.nodes or NodeRange(place.num_nodes, place.num_nodes)
    if nodes.min != nodes.max:
        endpoint = f"{place.address}:{place.port}"
        chosen = replace(spec, nodes=nodes, rdzv_backend="c10d", rdzv_endpoint=endpoint, rdzv_id=place.job)
    else:
        chosen = replace(
            spec, nodes=nodes, master_addr=place.address, master_port=place.port, node_rank=place.node_rank
        )
    where = f"node {place.node_rank} of {place.num_nodes}, rendezvous at {place.address}:{place.port}"
    return chosen, f"{place.system}: {where}"
