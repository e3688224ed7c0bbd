"""Faults known before ranks start: GPUs that are taken, links that are down, memory and disks that are short."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.distributed.run import determine_local_world_size

from paraplan.errors import CheckFailedError, NoGpuError
from paraplan.launch.faults.report import say
from paraplan.launch.nodes.rendezvous import rendezvous_warnings
from paraplan.launch.ranks.limits import Limits, machine_cores, raise_open_files, threads_per_rank, usable_cores
from paraplan.launch.request import LaunchRequest
from paraplan.units import format_bytes

if TYPE_CHECKING:  # pydantic costs a tenth of a second, which a launch on a CPU need not pay
    from paraplan.hardware.topology import Gpu, NodeTopology

_TAKEN_BYTES = 1 << 30  # more than a driver with ECC and an idle display server hold
_SMALL_SHM_BYTES = 64 << 20  # what containers get by default
_SMALL_DISK_BYTES = 1 << 30
# a launcher of one node held 34 open files and three for each rank, a rank of gloo 12 and up to four for each peer (2,
# 8 and 24 ranks, torch 2.13)
_FILES_OF_A_LAUNCHER, _FILES_OF_A_RANK = 40, 4
_PLENTY = 4096
# a launcher had 16 threads with 24 ranks, a rank of gloo four beside OpenMP's; NCCL and data loaders start more
_TASKS_OF_A_LAUNCHER, _TASKS_OF_A_RANK = 20, 8
_ENOUGH_LOCKED_BYTES = 1 << 30


@dataclass(frozen=True)
class Findings:
    """`problems` would end the job soon after its start; `warnings` may cost it time or end it later."""

    problems: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    hint: str = "free the GPU or make another plan"
    """The remedy of the problems."""


def check_cores(num_ranks: int, *, num_cores: int, of_machine: int, system: str | None) -> Findings:
    """Return whether the ranks of this node outnumber the cores that `system`, a batch system, or the user left."""
    if num_cores >= min(num_ranks, of_machine):
        return Findings()
    ways = {"slurm": "sbatch --exclusive, or --cpus-per-task for sbatch and for srun, gives more"}
    way = ways.get(system or "", "an affinity (taskset) or a CPU quota of the cgroup holds them back")
    cores = f"{num_cores} of this machine's {of_machine} cores"
    return Findings(warnings=(f"{num_ranks} ranks and what loads their data have {cores}: {way}",))


def check_gpus(used: Sequence[Gpu], *, peak_bytes: int | None = None) -> Findings:
    """Return what is wrong with the GPUs that the ranks of this node will use, by what the plan expects one to hold."""
    problems, warnings, needed = [], [], format_bytes(peak_bytes or 0)
    for gpu in used:
        total, taken = gpu.memory_total_bytes, gpu.memory_used_bytes
        if peak_bytes is not None and total is not None and peak_bytes > total:
            problems.append(f"the plan needs {needed} on a GPU, and GPU {gpu.index} has {format_bytes(total)}")
            break
        if taken is None or taken < _TAKEN_BYTES:
            continue
        text = f"GPU {gpu.index} is in use: {format_bytes(taken)} of its memory are used"
        if peak_bytes is not None and total is not None and peak_bytes > total - taken:
            problems.append(f"{text}, and the plan needs {needed}")
        else:
            warnings.append(text)
    most: dict[str | None, int] = {}
    for gpu in used:
        most[gpu.name] = max(most.get(gpu.name, 0), gpu.nvlink_count or 0)
    warnings += [
        f"GPU {gpu.index} has {gpu.nvlink_count or 0} of {most[gpu.name]} NVLinks up: it slows every collective"
        for gpu in used
        if gpu.nvlink_count is not None and gpu.nvlink_count < most[gpu.name]
    ]
    return Findings(tuple(problems), tuple(warnings))


def check_cuda(node: NodeTopology, *, torch_version: str, torch_cuda: str | None, is_available: bool) -> Findings:
    """Return why torch sees no GPU on a machine that has some; nothing where it sees them."""
    if is_available or not node.gpus:
        return Findings()
    has = f"this machine has {len(node.gpus)} GPUs" if len(node.gpus) > 1 else "this machine has a GPU"
    if torch_cuda is None:
        return Findings(warnings=(f"{has}, but torch {torch_version} is built without CUDA",))
    if node.cuda_version is not None and _numbers(node.cuda_version) < _numbers(torch_cuda):
        gives = f"driver {node.driver_version} gives {node.cuda_version}: training would run on the CPU"
        return Findings(warnings=(f"torch {torch_version} needs CUDA {torch_cuda}, and {gives}",))
    return Findings(warnings=(f"{has}, and torch {torch_version} can use none of them",))


def check_disks(
    folder: Path,
    *,
    num_ranks: int,
    num_parameters: int | None = None,
    shm: Path = Path("/dev/shm"),  # noqa: S108
) -> Findings:
    """Return whether `folder` is short of space for logs and checkpoints, and shared memory for ranks."""
    warnings = []
    free, size, wanted = _disk_bytes(folder, "free"), _disk_bytes(shm, "total"), _SMALL_DISK_BYTES
    if num_parameters is not None:
        from paraplan.plan.goodput import CHECKPOINT_BYTES_PER_PARAMETER  # pydantic, which a plan has imported

        wanted = max(wanted, num_parameters * CHECKPOINT_BYTES_PER_PARAMETER)
    if free is not None and free < wanted:
        reason = "a checkpoint needs" if wanted > _SMALL_DISK_BYTES else "less than"
        warnings.append(f"{format_bytes(free)} are free in {folder}, {reason} {format_bytes(wanted)}")
    if num_ranks > 1 and size is not None and size <= _SMALL_SHM_BYTES:
        warnings.append(f"{shm} holds {format_bytes(size)}: data loaders and NCCL may fail; docker run --shm-size=8g")
    return Findings(warnings=tuple(warnings))


def num_files(num_ranks: int) -> int:
    """Return how many files a process opens at least that is connected to so many ranks: a launcher, a rank of gloo."""
    return _FILES_OF_A_LAUNCHER + _FILES_OF_A_RANK * num_ranks


def check_limits(
    limits: Limits,
    *,
    num_ranks: int,
    world_size: int,
    num_threads: int,
    infiniband: Path = Path("/sys/class/infiniband"),
) -> Findings:
    """Return which limits end a job of `num_ranks` ranks on this node, `world_size` in all, or may do so."""
    files, hard = limits.files, limits.files.hard
    needed, of_world = num_files(num_ranks), num_files(world_size)
    if files.is_below(needed) or (hard is not None and hard < of_world):
        wanted = max(_PLENTY, 2 * of_world)
        held, number = (files.soft, num_ranks) if files.is_below(needed) else (hard, world_size)
        problem = f"a process may have {held} open files (ulimit -n), and {number} ranks need {num_files(number)}"
        return Findings((problem,), hint=files.way_out("-n", "nofile", wanted))
    tasks = _TASKS_OF_A_LAUNCHER + num_ranks * (_TASKS_OF_A_RANK + num_threads)
    total = limits.num_tasks + tasks
    if limits.tasks is not None and limits.tasks.is_below(total):
        problem = (
            f"this user may have {limits.tasks.soft} processes and threads (ulimit -u) and has {limits.num_tasks}: "
            f"{num_ranks} ranks need about {tasks} more"
        )
        return Findings((problem,), hint=limits.tasks.way_out("-u", "nproc", max(_PLENTY, 2 * total)))
    warnings = []
    if files.is_below(of_world):
        way_out = files.way_out("-n", "nofile", max(_PLENTY, 2 * of_world))
        warnings.append(
            f"a process may have {files.soft} open files (ulimit -n): with gloo a rank of {world_size} may need "
            f"{of_world}; {way_out}"
        )
    locked = limits.locked_bytes
    is_short = locked is not None and locked.is_below(_ENOUGH_LOCKED_BYTES) and world_size > num_ranks
    if locked is not None and is_short and any(infiniband.glob("*")):
        warnings.append(
            f"{format_bytes(locked.soft or 0)} may be locked in memory (ulimit -l), where InfiniBand has what NCCL "
            f"sends: it may fail with 'Cannot allocate memory'; {locked.way_out('-l', 'memlock', None)}"
        )
    return Findings(warnings=tuple(warnings))


def gpus_of_ranks(node: NodeTopology, environment: Mapping[str, str]) -> list[Gpu]:
    """Return the GPUs that CUDA shows under `environment`, in its order: that of the local ranks."""
    from paraplan.hardware.probe.cuda_devices import cuda_view

    by_index = {gpu.index: gpu for gpu in node.gpus}
    return [by_index[device.nvml_index] for device in cuda_view(node.gpus, environment).devices]


def has_driver(root: Path = Path("/")) -> bool:
    """Whether an NVIDIA driver is loaded here; asking it takes a while that a CPU machine need not wait."""
    return any((root / name).exists() for name in ("dev/nvidiactl", "dev/dxg", "proc/driver/nvidia"))


def _disk_bytes(folder: Path, which: str) -> int | None:
    with suppress(OSError):
        return int(getattr(shutil.disk_usage(folder), which))
    return None


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".") if part.isdecimal()]


def read_node() -> NodeTopology | None:
    """Return this machine's GPUs as NVML tells them, None without a driver."""
    if has_driver():
        from paraplan.hardware.probe.nvml import read_this_machine

        with suppress(NoGpuError):
            return read_this_machine()
    return None


def run_preflight(request: LaunchRequest, node: NodeTopology | None) -> None:
    """Say what may go wrong on this node; raise `CheckFailedError` for what will."""
    ranks = determine_local_world_size(request.nproc_per_node)
    model = request.file.model if request.file is not None else None
    system = "slurm" if "SLURM_JOB_ID" in os.environ else None
    found = [
        check_cores(ranks, num_cores=usable_cores(), of_machine=machine_cores(), system=system),
        check_limits(
            Limits.read(), num_ranks=ranks, world_size=ranks * request.nodes.min, num_threads=_threads_of_rank(ranks)
        ),
        check_disks(Path.cwd(), num_ranks=ranks, num_parameters=model.num_parameters if model is not None else None),
        Findings(warnings=rendezvous_warnings(request.spec) if request.nodes.max > 1 else ()),
    ]
    raise_open_files(num_files(ranks * request.nodes.min))
    if node is not None:
        view = dict(os.environ) | ({"CUDA_VISIBLE_DEVICES": ",".join(request.gpus)} if request.gpus else {})
        is_available, version = torch.cuda.is_available(), str(torch.__version__)
        found.append(check_cuda(node, torch_version=version, torch_cuda=torch.version.cuda, is_available=is_available))
        if is_available:
            found.append(check_gpus(gpus_of_ranks(node, view)[:ranks], peak_bytes=request.predicted_peak_bytes))
    for finding in found:
        for warning in finding.warnings:
            say(f"preflight: {warning}")
    for finding in found:
        for problem in finding.problems:
            raise CheckFailedError(problem, hint=f"{finding.hint}; --skip-preflight tries it anyway")


def _threads_of_rank(num_ranks: int) -> int:
    threads = os.environ.get("OMP_NUM_THREADS", "")
    return int(threads) if threads.isdigit() else threads_per_rank(num_cores=usable_cores(), ranks_per_node=num_ranks)
