"""How a job has failed: the report of the ranks of this node or another, and the status that follows."""

from __future__ import annotations

import shutil
import socket
import time
import traceback
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from paraplan.launch.elastic.ending import FailedElsewhereError
from paraplan.launch.elastic.launch import make_config
from paraplan.launch.elastic.records import JobRecord
from paraplan.launch.faults.failures import (
    Cause,
    NodeFailure,
    RankFailure,
    first_failure,
    read_failure,
)
from paraplan.launch.faults.hang import HANG_EXIT_STATUS
from paraplan.launch.faults.report import (
    ReportContext,
    as_node_failure,
    render_failure_elsewhere,
    render_failures,
    say,
    write_report,
)
from paraplan.launch.guard import GUARD_EXIT_STATUS, GuardVerdict
from paraplan.launch.nodes.store import StoreLostError
from paraplan.launch.ranks.limits import count_memory_kills, new_memory_kill
from paraplan.launch.ranks.spawning import RankExit
from paraplan.launch.request import LaunchRequest
from paraplan.launch.spec import ArgumentError, LaunchSpec


def report_elsewhere(error: FailedElsewhereError, job: JobRecord) -> int:
    """Say why the job has failed though the ranks of this node have not; return the status."""
    if not error.failures:
        say(f"the job ends: {error.reason}; the ranks of this node {error.became}")
        return 1
    first = first_failure(error.failures)
    folder = _shown_logs(job)
    context = ReportContext(hostname=socket.gethostname(), log_folder=folder, became=error.became)
    write_report(render_failure_elsewhere(first, [], context))
    return first.exit_status


def report_failure(request: LaunchRequest, job: JobRecord) -> int:
    """Say which rank failed first, of all nodes, and why; return the status."""
    if job.hang is not None:
        write_report(job.hang.render())
        return HANG_EXIT_STATUS
    if job.apart is not None:
        return report_apart(job.apart, job)
    first, estimate, free_bytes = first_failure(job.failures), job.plan and job.plan.estimate, None
    if job.folder is not None:
        with suppress(OSError):
            free_bytes = shutil.disk_usage(job.folder.path).free
    context = ReportContext(
        hostname=socket.gethostname(),
        elapsed_s=max(0.0, (first.time_ns - (job.started_ns or time.time_ns())) / 1e9),
        coordinates=_coordinates(job, first.rank),
        log_folder=_shown_logs(job),
        memory_kill=new_memory_kill(job.kills_before, count_memory_kills()) if job.kills_before else None,
        predicted_peak_bytes=estimate.peak_memory_bytes if estimate else None,
        smaller_plan=estimate.smaller_plan if estimate else None,
        num_nodes=request.nodes.max,
        where=job.where,
        free_bytes=free_bytes,
    )
    mine = as_node_failure(job.failures, context)
    of_all = [mine]
    if job.store is not None:
        # by the clock of the node that hosts the rendezvous, as the other nodes' times are
        mine = replace(mine, time_ns=mine.time_ns + int((job.store.clock_offset_s or 0.0) * 1e9))
        of_all = job.store.exchange_failures(mine)
        if job.store.is_lost and len(of_all) == 1 and not job.store.stops and mine.cause is not Cause.OWN_ERROR:
            raise StoreLostError
        context = replace(context, is_host_gone=job.store.is_lost, stops=tuple(job.store.stops.values()))
    first_of_all = first_failure(of_all)
    places = tuple(f"host {node.host}: {place}" for node in of_all if node is not mine for place in node.places)
    context = replace(context, places_elsewhere=places)
    if first_of_all is mine:
        context = replace(context, num_nodes=1 if len(of_all) > 1 else context.num_nodes)
        write_report(render_failures(job.failures, context))
    else:
        write_report(render_failure_elsewhere(first_of_all, job.failures, context))
    is_end_of_another = first_of_all.cause is Cause.STOPPED and bool(context.stops)
    return 1 if is_end_of_another else first_of_all.exit_status


def report_apart(verdict: GuardVerdict, job: JobRecord) -> int:
    """Say which ranks are apart, to the other nodes too; return the status."""
    logs = _shown_logs(job)
    write_report(verdict.render() + (f"  logs: {logs}\n" if logs else ""))
    if job.store is not None and job.store.num_nodes > 1:
        mine = NodeFailure(
            host=socket.gethostname(),
            rank=verdict.ranks[0],
            cause=Cause.OWN_ERROR,
            time_ns=0,  # before what follows of it
            exit_status=GUARD_EXIT_STATUS,
            what=verdict.text,
        )
        job.store.exchange_failures(mine)
    return GUARD_EXIT_STATUS


def _shown_logs(job: JobRecord) -> str | None:
    """Return the folder of the logs as a user would type it here; None where none is kept."""
    return None if job.kept_folder is None else str(job.folder)


def _coordinates(job: JobRecord, rank: int) -> dict[str, int]:
    if job.plan is None:
        return {}
    from paraplan.plan.ranks import RankGrid  # as the plan itself, only where there is one

    return {str(axis): position for axis, position in RankGrid.of_plan(job.plan.plan).coordinates(rank).items()}


def torchs_failures(error: ChildFailedError) -> list[RankFailure]:
    """Return the failures of ranks that torch itself has started, as it does with --run-path."""
    return [
        read_failure(
            rank=rank,
            pid=failure.pid,
            exit=RankExit(failure.local_rank, failure.exitcode, int(failure.timestamp) * 10**9, max_rss_bytes=0),
            error_file=failure.error_file,
            was_stopped=False,
        )
        for rank, failure in error.failures.items()
    ]


# where torch looks at the arguments of a launch
_ARGUMENT_FILES = (
    "/torch/distributed/run.py",
    "/torch/distributed/launcher/",
    "/torch/distributed/elastic/rendezvous/",
    "/torch/distributed/elastic/multiprocessing/api.py",
    "/torch/numa/",
)


def is_about_arguments(error: BaseException) -> bool:
    """Whether torch refused the arguments: by a check of its own, or while it made the configuration of them."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    if any(frame.f_code.co_name == make_config.__name__ for frame in frames):
        return True
    last = Path(frames[-1].f_code.co_filename).as_posix()
    return not isinstance(error, OSError) and any(part in last for part in _ARGUMENT_FILES)


def refusal(said: str, spec: LaunchSpec) -> ArgumentError:
    """Return what torch said against the arguments, before any rank was started."""
    if f"'{spec.rdzv_backend}' is not registered" in said:
        hint = "torch has static, c10d, etcd and etcd-v2"
        return ArgumentError(f"there is no --rdzv-backend {spec.rdzv_backend}", hint=hint)
    return ArgumentError(said.rstrip("."), hint="paraplan launch --help lists the options")
