"""Launching from Python as torchrun's `torch.distributed.run` does: `main(args)`, `run(args)`, and the job itself.

What other launchers (accelerate's) take from there beside these is torch's own.

`python -m paraplan.launch.run`, as people call torch's, is `python -m paraplan.launch`.
"""

from __future__ import annotations

import os
import runpy
import shutil
import sys
from argparse import Namespace
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __name__ == "__main__":  # before torch is imported: the spawner is forked first
    runpy.run_module("paraplan.launch", run_name="__main__", alter_sys=True)

import torch
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record
from torch.distributed.launcher.api import LaunchConfig
from torch.distributed.run import (
    config_from_args,
    determine_local_world_size,
    get_args_parser,
    parse_min_max_nnodes,
)

from paraplan import shared_memory
from paraplan.launch.accelerate import drives_accelerate
from paraplan.launch.elastic.launch import make_config, run_agent, with_bootstrap
from paraplan.launch.elastic.preparation import RoundPreparation
from paraplan.launch.elastic.records import AttemptSettings, JobRecord
from paraplan.launch.faults.report import say
from paraplan.launch.live.server import LiveServer
from paraplan.launch.measured import MEASURED_FILE, MEASURED_VARIABLE
from paraplan.launch.nodes.job_token import TOKEN_VARIABLE, Seal, job_seal
from paraplan.launch.parser import parse_arguments
from paraplan.launch.preemption import notice_reader, watch_for_notice
from paraplan.launch.preflight import gpus_of_ranks
from paraplan.launch.ranks import bootstrap
from paraplan.launch.ranks.bootstrap import PLAN_READ_VARIABLE, WATCHED_VARIABLE
from paraplan.launch.ranks.limits import cpus_of_ranks, threads_per_rank, usable_cores
from paraplan.launch.ranks.spawning import Spares, SpawnerHandle, open_spawner
from paraplan.launch.request import METRICS_VARIABLE, PLAN_VARIABLE, LaunchRequest, check_request
from paraplan.launch.run_folder import RunFolder, open_run_folder
from paraplan.launch.script import imported_names, script_file
from paraplan.launch.spec import LaunchSpec
from paraplan.launch.torch_private.texts import IMPORTED_BY_FIRST_STEP
from paraplan.shared_memory import CopySlots, StatusPage
from paraplan.units import format_bytes

if TYPE_CHECKING:  # pydantic costs a tenth of a second, which a launch on a CPU need not pay
    from paraplan.hardware.topology import NodeTopology

__all__ = [
    "config_from_args",
    "determine_local_world_size",
    "get_args_parser",
    "main",
    "parse_min_max_nnodes",
    "run",
    "run_job",
]

_HEALTH_S = 20.0  # for --preflight measure
_DEFAULT_GRACE_S = 30.0  # torchrun's
_THREADS_VARIABLE = "OMP_NUM_THREADS"
_DEVICES_VARIABLE = "CUDA_VISIBLE_DEVICES"
_NO_FILE = "<N/A>"  # what torch's ProcessFailure has for a rank without an error file


def main(args: Sequence[str] | None = None) -> None:
    """Launch as the command line `args` (None: this process's) says. The same as `torch.distributed.run.main`.

    Raises torch's ChildFailedError when a rank fails, and `ArgumentError` (a ValueError) for unusable arguments.
    Ranks get interpreters of their own: a program that calls this may have threads, and such cannot be forked.
    """
    _run_spec(parse_arguments(args, os.environ))


def run(args: Namespace) -> None:
    """Launch as `args` say, parsed by torchrun's parser."""
    _run_spec(LaunchSpec.of_namespace(args))


def _run_spec(spec: LaunchSpec) -> None:
    request = check_request(spec, num_gpus=count_gpus(), current_folder=Path.cwd())
    seal = job_seal(spec, request.nodes, os.environ)
    with closing(open_spawner()) as spawner:
        run_job(request, spawner=spawner, job=JobRecord(), seal=seal, fork=False)


def count_gpus() -> int:
    """Return the number of CUDA devices that this process may use; 0 without any. It may start CUDA's driver."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def run_job(
    request: LaunchRequest,
    *,
    spawner: SpawnerHandle,
    job: JobRecord,
    seal: Seal,
    fork: bool,
    imported_threads: str | None = None,
    keeps_logs: bool = False,
    node: NodeTopology | None = None,
) -> dict[int, Any]:
    """Run the ranks of this node until all have ended; return torch's results by rank.

    `imported_threads` is the OMP_NUM_THREADS that torch was imported with, for ranks that are forked. `job` is written
    while the job runs; `seal` signs what its nodes tell each other. `keeps_logs` copies what ranks write to files, in
    a folder that stays; else a folder that nobody asked for is removed at the end. `node` are this machine's GPUs where
    they are known.
    Raises torch's ChildFailedError, SignalException and rendezvous errors.
    """
    spec = request.spec
    job.plan, job.script, job.max_nodes = request.file, spec.training_script, request.nodes.max
    if request.planned_again is not None:
        say(request.planned_again)
    job.folder = folder = _open_log_folder(request, spawner, keeps_logs=keeps_logs)
    before = {name: os.environ.get(name) for name in (_THREADS_VARIABLE, _DEVICES_VARIABLE, TOKEN_VARIABLE)}
    os.environ.pop(TOKEN_VARIABLE, None)  # ranks have no use for it
    server = LiveServer(job)
    try:
        if request.gpus is not None:
            os.environ[_DEVICES_VARIABLE] = visible_devices(request.gpus, before[_DEVICES_VARIABLE])
        config, program, program_arguments = _configure(request, folder, before[_THREADS_VARIABLE])
        extra_environment = _extra_environment(request, folder)
        prepare = _preparation(request, job, folder=folder, environment=extra_environment)
        settings = replace(
            _settings(request, extra_environment, fork=fork, imported_threads=imported_threads),
            keeps_logs=keeps_logs,
            cpus=_cpus_of_ranks(request, node, config.nproc_per_node),
        )
        if keeps_logs:
            _note_start(folder, request, node, environment=extra_environment)
        _share_memory(request, job, extra_environment, settings, num_ranks=config.nproc_per_node)
        run_here = record(run_agent) if os.environ.get("TORCHELASTIC_ERROR_FILE") else run_agent
        run_with = partial(run_here, spawner=spawner, settings=settings, job=job, before_start=prepare, seal=seal)
        results = run_with(config, program, program_arguments) or {}
        _say_whether_planned(extra_environment, has_bootstrap=not spec.no_python)
        return results
    except ChildFailedError as error:
        if folder.is_temporary:
            _forget_error_files(error)
        raise
    finally:
        server.close()
        job.end_sharing()
        for name, value in before.items():
            _restore(name, value)
        if folder.is_temporary:
            shutil.rmtree(folder.path, ignore_errors=True)


def _settings(
    request: LaunchRequest,
    environment: dict[str, str],
    *,
    fork: bool,
    imported_threads: str | None,
) -> AttemptSettings:
    """Return how ranks start and stop, as far as the request says so."""
    spec = request.spec
    return AttemptSettings(
        grace_s=_DEFAULT_GRACE_S if spec.shutdown_timeout is None else float(spec.shutdown_timeout),
        fork=fork,
        num_threads=_threads_to_set(imported_threads) if fork else None,
        extra_environment=environment,
        wrap_command=(lambda command: command) if spec.no_python else with_bootstrap,
        hang_timeout_s=spec.hang_timeout,
        has_gpus=torch.cuda.is_available(),
        follows_steps=_followed(spec),
        guard_steps=spec.guard,
        health_s=_HEALTH_S if spec.preflight == "measure" else None,
        spares=_spares(spec) if spec.spare_ranks else Spares(),
    )


def _followed(spec: LaunchSpec) -> str | None:
    """Return the module whose import says that a script is one whose steps are noted; None for no script."""
    if spec.no_straggler_watch:
        return None
    return "torch" if spec.watch_steps or spec.hang_timeout is not None else "paraplan.runtime.engine"


def _spares(spec: LaunchSpec) -> Spares:
    """Return how spares start: with what the script imports at its top, where that is not beside it."""
    file = script_file(spec.training_script, is_module=spec.module)
    names = imported_names(file, folder=Path.cwd() if spec.module else None)
    modules = ("torch", "torch.distributed", *names, IMPORTED_BY_FIRST_STEP)
    if any(name.partition(".")[0] == "paraplan" for name in names):
        modules = (*modules, "paraplan.runtime.job_start")
    interpreter = os.environ.get("PYTHON_EXEC", sys.executable)
    return Spares(spec.spare_ranks, (interpreter, "-u", bootstrap.__file__, bootstrap.STAND_BY), modules)


def _forget_error_files(error: ChildFailedError) -> None:
    """Name no error files: a caller under @record would copy files that are gone."""
    for failure in error.failures.values():
        failure.error_file = _NO_FILE


def _share_memory(
    request: LaunchRequest,
    job: JobRecord,
    environment: dict[str, str],
    settings: AttemptSettings,
    *,
    num_ranks: int,
) -> None:
    """Make what ranks and launcher share, named in `environment`; begin to look for notices."""
    spec = request.spec
    if shared_memory.is_available():
        job.page = StatusPage.make(num_ranks)
        environment[shared_memory.STATUS_PAGE_VARIABLE] = job.page.path
        if spec.memory_checkpoint is not None:
            job.copies = _slots(spec.memory_checkpoint, num_ranks, has_neighbour=request.nodes.max > 1)
            environment[shared_memory.COPIES_VARIABLE] = job.copies.text()
    job.stop.page, job.stop.window_s = job.page, spec.preempt_window or settings.grace_s
    job.stop.read_kill_wait(os.environ)
    if spec.preempt_notice is not None:
        watch_for_notice(notice_reader(spec.preempt_notice), job.stop)


def _slots(every: int, num_ranks: int, *, has_neighbour: bool) -> CopySlots:
    """Return memory for copies of the state of so many ranks; say how much it may be."""
    most_bytes = (shared_memory.available_bytes() or _MEMORY_OF_A_SMALL_NODE) // 2
    steps = f"every {every} steps" if every > 1 else "every step"
    say(f"a copy of the state is kept in memory {steps}: at most {format_bytes(most_bytes)} on this node")
    return CopySlots.make(every=every, num_ranks=num_ranks, most_bytes=most_bytes, has_neighbour=has_neighbour)


_MEMORY_OF_A_SMALL_NODE = 8 << 30
"""Where the system does not say what is free."""


def _preparation(
    request: LaunchRequest, job: JobRecord, *, folder: RunFolder, environment: dict[str, str]
) -> RoundPreparation:
    """Return what is done before each start of the ranks; it writes the plan into their `environment`."""
    return RoundPreparation(
        job=job,
        planner=request.planner,
        script=request.spec.training_script,
        folder=folder.path,
        plan_variable=PLAN_VARIABLE,
        environment=environment,
        drives_accelerate=_is_planned(request) and drives_accelerate(request),
    )


def _note_start(
    folder: RunFolder, request: LaunchRequest, node: NodeTopology | None, *, environment: dict[str, str]
) -> None:
    folder.note_start(["paraplan", "launch", *sys.argv[1:]], environment=dict(environment))
    if request.file is not None:
        folder.note_plan(request.file.to_json())
    if node is not None:
        folder.note_topology(node.to_json())


def _is_planned(request: LaunchRequest) -> bool:
    return request.file is not None or request.planner is not None


def _cpus_of_ranks(request: LaunchRequest, node: NodeTopology | None, num_ranks: int) -> dict[int, tuple[int, ...]]:
    """Return the CPUs that a plan keeps each local rank on; none where the user has bound them or nothing is gained."""
    if node is None or not _is_planned(request) or request.spec.numa_binding or request.spec.no_cpu_binding:
        return {}
    allowed = os.sched_getaffinity(0)
    if len(allowed) < (os.cpu_count() or 1):  # the user, or a batch system, has chosen CPUs
        return {}
    cpus = cpus_of_ranks(gpus_of_ranks(node, os.environ), num_ranks=num_ranks, allowed=allowed)
    if cpus:
        say("each rank is kept on the CPUs next to its GPU; --no-cpu-binding leaves that to the kernel")
    return cpus


def _say_whether_planned(environment: dict[str, str], *, has_bootstrap: bool) -> None:
    """Say in a line where no rank here has taken the plan that was given; of other programs nothing is known."""
    if PLAN_READ_VARIABLE not in environment:
        return
    marker = Path(environment[PLAN_READ_VARIABLE])
    if has_bootstrap and not marker.exists():
        say(
            "the script ran without its plan; paraplan.runtime.init and job.prepare run a plan, "
            "accelerate takes some of it"
        )
    marker.unlink(missing_ok=True)


def _extra_environment(request: LaunchRequest, folder: RunFolder) -> dict[str, str]:
    extra = {PLAN_VARIABLE: request.plan_path} if request.plan_path else {}
    if _is_planned(request):
        extra[PLAN_READ_VARIABLE] = str(folder.path.absolute() / "plan-read")
        if not folder.is_temporary:
            extra[MEASURED_VARIABLE] = str(folder.path.absolute() / MEASURED_FILE)
    if request.spec.metrics:
        extra[METRICS_VARIABLE] = str(Path(request.spec.metrics).absolute())
    if request.spec.hang_timeout is not None:
        extra[WATCHED_VARIABLE] = str(request.spec.hang_timeout)
    return extra


def visible_devices(gpus: Sequence[str], visible_before: str | None) -> str:
    """Return CUDA_VISIBLE_DEVICES for the chosen `gpus`; indices count among those that were visible before."""
    before = [device.strip() for device in visible_before.split(",")] if visible_before else None
    return ",".join(before[int(gpu)] if before and gpu.isdigit() else gpu for gpu in gpus)


def _restore(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


def _configure(
    request: LaunchRequest, folder: RunFolder, threads_given: str | None
) -> tuple[LaunchConfig, Any, list[str]]:
    """Return torch's configuration; threads per rank are chosen before torch would choose 1 with a banner."""
    if threads_given is None:
        os.environ[_THREADS_VARIABLE] = "1"  # only while torch counts the ranks
    config, program, program_arguments = make_config(request, log_dir=str(folder.path))
    if threads_given is None and config.nproc_per_node > 1:
        num_cores = usable_cores()
        threads = threads_per_rank(num_cores=num_cores, ranks_per_node=config.nproc_per_node)
        os.environ[_THREADS_VARIABLE] = str(threads)
        say(
            f"{_THREADS_VARIABLE}={threads} in each rank ({num_cores} cores, {config.nproc_per_node} ranks on this "
            "node); set OMP_NUM_THREADS to override"
        )
    elif threads_given is None:
        del os.environ[_THREADS_VARIABLE]
    return config, program, program_arguments


def _threads_to_set(imported_threads: str | None) -> int | None:
    """Return the threads that a forked rank must set because torch was imported with another number."""
    wanted = os.environ.get(_THREADS_VARIABLE)
    if wanted == imported_threads:
        return None
    if wanted is None:
        return usable_cores()
    return int(wanted) if wanted.isdigit() else None


def _open_log_folder(request: LaunchRequest, spawner: SpawnerHandle, *, keeps_logs: bool) -> RunFolder:
    """Return the folder of this run. Error files need one even without logs."""
    folder = open_run_folder(request.spec, request.nodes, keeps_logs=keeps_logs, current_folder=Path.cwd())
    if folder.is_temporary:
        spawner.own(str(folder.path))
    elif not request.spec.log_dir and not keeps_logs:
        say(f"logs in {folder.path}")
    elif not request.spec.log_dir and not folder.path.is_relative_to(Path.cwd()):
        say(f"cannot write in {Path.cwd()}; logs in {folder.path}")
    return folder
