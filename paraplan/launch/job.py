"""A job on this node from its arguments to its exit status, with what is said about its end."""

from __future__ import annotations

import logging
import os
import signal
import time
import traceback
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.distributed import DistError
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.run import determine_local_world_size

from paraplan.errors import PREEMPTED_EXIT_STATUS, CheckFailedError, ParaplanError
from paraplan.launch.elastic.ending import FailedElsewhereError
from paraplan.launch.elastic.health import LeftOutError
from paraplan.launch.elastic.launch import make_config
from paraplan.launch.elastic.records import JobRecord
from paraplan.launch.faults.failures import RankFailure, read_failure
from paraplan.launch.faults.report import (
    say,
)
from paraplan.launch.job_failure import report_apart, report_elsewhere, report_failure
from paraplan.launch.measured import Noted, note_measured
from paraplan.launch.nodes.job_token import ForgedTextError, job_seal
from paraplan.launch.nodes.rendezvous import rendezvous_error, rendezvous_warnings
from paraplan.launch.nodes.store import StoreLostError
from paraplan.launch.preemption import PreemptedError, requeue
from paraplan.launch.preflight import (
    Findings,
    Needs,
    check_cores,
    check_cuda,
    check_disks,
    check_gpus,
    check_limits,
    gpus_of_ranks,
    num_files,
    read_node,
)
from paraplan.launch.ranks.limits import Limits, machine_cores, raise_open_files, threads_per_rank, usable_cores
from paraplan.launch.ranks.spawning import RankExit, SpawnerHandle, SpawnerLostError
from paraplan.launch.request import LaunchRequest, check_request
from paraplan.launch.run import count_gpus, run_job
from paraplan.launch.spec import ArgumentError, LaunchSpec
from paraplan.launch.torch_private.native_log import silence_torch_log
from paraplan.launch.torch_private.texts import SAID_IN_WORDS

if TYPE_CHECKING:
    from paraplan.hardware.topology import NodeTopology


def supervise(spec: LaunchSpec, spawner: SpawnerHandle, *, fork: bool, imported_threads: str | None) -> int:
    """Run the job, close the spawner, and return the job's exit status, with the reason of a failure on stderr.

    `fork` starts ranks with torch imported; `imported_threads` is the OMP_NUM_THREADS that it was imported with. Raises
    `ParaplanError` for what the user can mend before ranks start.
    """
    job = JobRecord()
    try:
        request = check_request(spec, num_gpus=count_gpus(), current_folder=Path.cwd())
        for name, texts in SAID_IN_WORDS.items():
            logging.getLogger(name).addFilter(partial(_is_news, texts))
        if not spec.run_path:  # whose ranks come from this process
            silence_torch_log()
        return _run_and_note(request, job, spawner=spawner, fork=fork, imported_threads=imported_threads)
    finally:
        spawner.close()
        if job.requeued_by == os.environ.get("SLURM_NODEID", "0"):
            requeue(os.environ)  # last: Slurm then ends what still runs


_ENDING_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)


def _run_and_note(
    request: LaunchRequest, job: JobRecord, *, spawner: SpawnerHandle, fork: bool, imported_threads: str | None
) -> int:
    """Run the job; note and say how it ended, whatever signal comes by then."""
    started = time.monotonic()
    status = 1
    try:
        status = _run(request, job, spawner=spawner, fork=fork, imported_threads=imported_threads)
        return status
    except SignalException as stop:  # while its end was told
        status = 128 + int(stop.sigval)
        return status
    except ParaplanError as error:
        status = error.exit_status
        if isinstance(error, StoreLostError) and request.spec.requeue:
            job.requeued_by = "1"  # node 0 is the one that is lost
        raise
    except KeyboardInterrupt:
        status = 128 + signal.SIGINT
        raise
    finally:
        for number in _ENDING_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        for case in job.late:
            say(case.at_end())
        if job.folder is not None and job.kept_folder is not None and not request.spec.no_logs:
            elapsed_s = time.monotonic() - started
            goodput = job.clock.measure(job.page, is_done=status in (0, PREEMPTED_EXIT_STATUS))
            told = None if goodput is None else goodput.to_dict()
            late = [case.to_json() for case in job.late]
            noted = (
                Noted() if job.plan is None else note_measured(job.folder.path, job.plan, has_ended_well=status == 0)
            )
            job.folder.note_end(
                exit_status=status,
                elapsed_s=elapsed_s,
                attempts=job.attempts,
                late=late,
                goodput=told,
                measured=noted.record,
            )
            if status == 0 and job.attempts:
                _say_summary(job, elapsed_s)
            for line in [] if goodput is None else goodput.lines():
                say(line)
            if noted.sentence is not None:
                say(noted.sentence)


def _is_news(texts: tuple[str, ...], record: logging.LogRecord) -> bool:
    return not any(text in str(record.msg) for text in texts)


def _say_summary(job: JobRecord, elapsed_s: float) -> None:
    again = f", started {job.attempts} times" if job.attempts > 1 else ""
    say(f"all ranks ended after {elapsed_s:.1f} s{again}; logs: {job.folder}")


def _run(
    request: LaunchRequest, job: JobRecord, *, spawner: SpawnerHandle, fork: bool, imported_threads: str | None
) -> int:
    keeps_logs = not request.spec.no_logs
    try:
        node = None
        if not request.spec.skip_preflight:
            node = read_node()
            _preflight(request, node)
        run_job(
            request,
            spawner=spawner,
            job=job,
            seal=job_seal(request.spec, request.nodes, os.environ),
            fork=fork,
            imported_threads=imported_threads,
            keeps_logs=keeps_logs,
            node=node,
        )
    except ChildFailedError as error:
        job.failures = job.failures or _torchs_failures(error)
        return report_failure(request, job)
    except FailedElsewhereError as error:
        return report_elsewhere(error, job)
    except LeftOutError as left:
        say(f"this host is left out: {left.text}")
        return 1
    except PreemptedError as end:
        job.requeued_by = "0" if request.spec.requeue else None
        return _say_preempted(end)
    except SignalException as stop:
        say(f"{stop.sigval.name} ended the job; all ranks have been stopped")
        return 128 + int(stop.sigval)
    except SpawnerLostError as error:
        say(f"{error}, and the ranks with it; the host may be out of memory")
        return 128 + signal.SIGKILL
    except ForgedTextError:
        raise
    except (RendezvousError, DistError) as error:
        said, came = f"{type(error).__name__}: {error}", getattr(error, "__notes__", ())
        has_begun = job.attempts > 0
        raise rendezvous_error(said, request.spec, request.nodes, came=came, has_begun=has_begun) from error
    except (ValueError, AssertionError, OSError) as error:
        if job.attempts or isinstance(error, ParaplanError) or not _is_about_arguments(error):
            raise
        raise _refusal(str(error), request.spec) from error
    return 0 if job.apart is None else report_apart(job.apart, job)  # seen after all had ended


def _say_preempted(end: PreemptedError) -> int:
    steps = f"{end.num_steps:,} step{'s' if end.num_steps != 1 else ''}"
    say(f"{end}: all ranks have saved after {steps} and ended; start the job again to go on (status 75)")
    return PREEMPTED_EXIT_STATUS


def _torchs_failures(error: ChildFailedError) -> list[RankFailure]:
    """Return the failures of ranks that torch itself has started, as it does with --run-path."""
    return [
        read_failure(
            global_rank=rank,
            pid=failure.pid,
            exit=RankExit(
                local_rank=failure.local_rank,
                code=failure.exitcode,
                time_ns=int(failure.timestamp) * 10**9,
                max_rss_bytes=0,
            ),
            error_file=failure.error_file,
            was_stopped=False,
        )
        for rank, failure in error.failures.items()
    ]


_ARGUMENT_FILES = (
    "/torch/distributed/run.py",
    "/torch/distributed/launcher/",
    "/torch/distributed/elastic/rendezvous/",
    "/torch/distributed/elastic/multiprocessing/api.py",
    "/torch/numa/",
)
"""Where torch looks at the arguments of a launch."""


def _is_about_arguments(error: BaseException) -> bool:
    """Whether torch refused the arguments: by a check of its own, or while it made the configuration of them."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    if any(frame.f_code.co_name == make_config.__name__ for frame in frames):
        return True
    last = Path(frames[-1].f_code.co_filename).as_posix()
    return not isinstance(error, OSError) and any(part in last for part in _ARGUMENT_FILES)


def _refusal(said: str, spec: LaunchSpec) -> ArgumentError:
    """Return what torch said against the arguments, before any rank was started."""
    if f"'{spec.rdzv_backend}' is not registered" in said:
        unknown = f"there is no --rdzv-backend {spec.rdzv_backend}"
        return ArgumentError(unknown, hint="torch has static, c10d, etcd and etcd-v2")
    return ArgumentError(said.rstrip("."), hint="paraplan launch --help lists the options")


def _preflight(request: LaunchRequest, node: NodeTopology | None) -> None:
    """Say what may go wrong on this node; raise `CheckFailedError` for what will."""
    ranks = determine_local_world_size(request.nproc_per_node)
    model = request.file.model if request.file is not None else None
    needs = Needs(
        num_ranks=ranks,
        peak_bytes=request.predicted_peak_bytes,
        num_parameters=model.num_parameters if model is not None else None,
    )
    system = "slurm" if "SLURM_JOB_ID" in os.environ else None
    found = [
        check_cores(ranks, num_cores=usable_cores(), of_machine=machine_cores(), system=system),
        _check_limits(ranks, ranks * request.nodes.min),
        check_disks(needs, folder=Path.cwd()),
        Findings(warnings=rendezvous_warnings(request.spec) if request.nodes.max > 1 else ()),
    ]
    if node is not None:
        view = dict(os.environ) | ({"CUDA_VISIBLE_DEVICES": ",".join(request.gpus)} if request.gpus else {})
        is_available = torch.cuda.is_available()
        version = str(torch.__version__)
        found.append(check_cuda(node, torch_version=version, torch_cuda=torch.version.cuda, is_available=is_available))
        if is_available:
            found.append(check_gpus(gpus_of_ranks(node, view), needs))
    for finding in found:
        for warning in finding.warnings:
            say(f"preflight: {warning}")
    for finding in found:
        for problem in finding.problems:
            raise CheckFailedError(problem, hint=f"{finding.hint}; --skip-preflight tries it anyway")


def _check_limits(num_ranks: int, world_size: int) -> Findings:
    """Return which limits of this process end the job; have it open as many files as it needs where it may."""
    threads = os.environ.get("OMP_NUM_THREADS", "")
    cores = usable_cores()
    num_threads = int(threads) if threads.isdigit() else threads_per_rank(num_cores=cores, ranks_per_node=num_ranks)
    found = check_limits(Limits.read(), num_ranks=num_ranks, world_size=world_size, num_threads=num_threads)
    raise_open_files(num_files(world_size))
    return found
