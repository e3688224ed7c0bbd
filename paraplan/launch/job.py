"""The main of a job on this node: from a checked request to its exit status, with what is said of its end."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.distributed import DistError
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.launcher.api import LaunchConfig

from paraplan import shared_memory
from paraplan.errors import PREEMPTED_EXIT_STATUS, ParaplanError
from paraplan.launch import job_failure
from paraplan.launch.accelerate import drives_accelerate
from paraplan.launch.elastic.ending import FailedElsewhereError
from paraplan.launch.elastic.health import LeftOutError
from paraplan.launch.elastic.launch import make_config, run_agent
from paraplan.launch.elastic.preparation import Round, RoundPreparation
from paraplan.launch.elastic.records import AttemptSettings, JobRecord
from paraplan.launch.faults.report import say
from paraplan.launch.live.server import LiveServer
from paraplan.launch.measured import MEASURED_FILE, MEASURED_VARIABLE, Noted, note_measured
from paraplan.launch.nodes.job_token import TOKEN_VARIABLE, ForgedTextError, job_seal
from paraplan.launch.nodes.rendezvous import rendezvous_error
from paraplan.launch.nodes.store import StoreLostError
from paraplan.launch.preemption import PreemptedError, notice_reader, requeue, watch_for_notice
from paraplan.launch.preflight import gpus_of_ranks, read_node, run_preflight
from paraplan.launch.ranks import bootstrap
from paraplan.launch.ranks.bootstrap import PLAN_READ_VARIABLE, WATCHED_VARIABLE
from paraplan.launch.ranks.limits import cpus_of_ranks, threads_per_rank, usable_cores
from paraplan.launch.ranks.spawning import Spares, SpawnerHandle, SpawnerLostError
from paraplan.launch.request import METRICS_VARIABLE, PLAN_VARIABLE, LaunchRequest, check_request, count_gpus
from paraplan.launch.run_folder import RunFolder, open_run_folder
from paraplan.launch.script import imported_names, script_file
from paraplan.launch.spec import LaunchSpec
from paraplan.launch.torch_private.elastic import silence_torch_log
from paraplan.launch.torch_private.texts import IMPORTED_BY_FIRST_STEP, SAID_IN_WORDS
from paraplan.shared_memory import CopySlots, StatusPage
from paraplan.units import format_bytes

if TYPE_CHECKING:  # pydantic costs a tenth of a second, which a launch on a CPU need not pay
    from paraplan.hardware.topology import NodeTopology

_THREADS_VARIABLE = "OMP_NUM_THREADS"
_DEVICES_VARIABLE = "CUDA_VISIBLE_DEVICES"
_NO_FILE = "<N/A>"  # what torch's ProcessFailure has for a rank without an error file
_MEMORY_OF_A_SMALL_NODE = 8 << 30  # where the system does not say what is free
_ENDING_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)


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
        settings = AttemptSettings(spec, spawner, fork, keeps_logs=not spec.no_logs)
        return _run_and_note(Launch(request, settings, job, imported_threads))
    finally:
        spawner.close()
        if job.requeued_by == os.environ.get("SLURM_NODEID", "0"):
            requeue(os.environ)  # last: Slurm then ends what still runs


def _is_news(texts: tuple[str, ...], record: logging.LogRecord) -> bool:
    return not any(text in str(record.msg) for text in texts)


def _run_and_note(launch: Launch) -> int:
    """Run the job; note and say how it ended, whatever signal comes by then."""
    started, job, status = time.monotonic(), launch.job, 1
    try:
        status = _run(launch)
        return status
    except SignalException as stop:  # while its end was told
        status = 128 + int(stop.sigval)
        return status
    except ParaplanError as error:
        status = error.exit_status
        if isinstance(error, StoreLostError) and launch.request.spec.requeue:
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
        if job.folder is not None and job.kept_folder is not None and launch.settings.keeps_logs:
            _note_end(job, job.folder, status, time.monotonic() - started)


def _note_end(job: JobRecord, folder: RunFolder, status: int, elapsed_s: float) -> None:
    """Write how the job ended into its folder, and say where its time went."""
    goodput = job.clock.measure(job.page, is_done=status in (0, PREEMPTED_EXIT_STATUS))
    noted = Noted()
    if job.plan is not None:
        noted = note_measured(folder.path, job.plan, has_ended_well=status == 0, parts=job.step_parts)
    end: dict[str, Any] = {"exit_status": status, "elapsed_s": round(elapsed_s, 3), "attempts": job.attempts}
    end |= {"goodput": None if goodput is None else goodput.to_dict()}
    end |= {"late": [case.to_json() for case in job.late]} if job.late else {}
    folder.note_end(end | ({} if noted.record is None else {"measured": noted.record}))
    again = f", started {job.attempts} times" if job.attempts > 1 else ""
    if status == 0 and job.attempts:
        say(f"all ranks ended after {elapsed_s:.1f} s{again}; logs: {folder}")
    for line in [] if goodput is None else goodput.lines():
        say(line)
    if noted.sentence is not None:
        say(noted.sentence)


def _run(launch: Launch) -> int:
    """Run the job, and return the status of its end, which is said."""
    request, job = launch.request, launch.job
    try:
        if not request.spec.skip_preflight:
            launch.node = read_node()
            run_preflight(request, launch.node)
        launch.run()
    except ChildFailedError as error:
        job.failures = job.failures or job_failure.torchs_failures(error)
        return job_failure.report_failure(request, job)
    except FailedElsewhereError as error:
        return job_failure.report_elsewhere(error, job)
    except LeftOutError as left:
        say(f"this host is left out: {left.text}")
        return 1
    except PreemptedError as end:
        job.requeued_by = "0" if request.spec.requeue else None
        steps = f"{end.num_steps:,} step{'s' if end.num_steps != 1 else ''}"
        say(f"{end}: all ranks have saved after {steps} and ended; start the job again to go on (status 75)")
        return PREEMPTED_EXIT_STATUS
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
        if job.attempts or isinstance(error, ParaplanError) or not job_failure.is_about_arguments(error):
            raise
        raise job_failure.refusal(str(error), request.spec) from error
    return 0 if job.apart is None else job_failure.report_apart(job.apart, job)  # seen after all had ended


@dataclass
class Launch:
    """The ranks of this node, from their start to their end.

    `imported_threads` is the OMP_NUM_THREADS that torch was imported with, for ranks that are forked. `job` is written
    while they run. `node` are this machine's GPUs where they are known.
    """

    request: LaunchRequest
    settings: AttemptSettings
    job: JobRecord
    imported_threads: str | None = None
    node: NodeTopology | None = None

    def run(self) -> dict[int, Any]:
        """Run the ranks until all have ended; return torch's results by rank.

        Raises torch's ChildFailedError, SignalException and rendezvous errors.
        """
        request, spec, job, settings = self.request, self.request.spec, self.job, self.settings
        seal = job_seal(spec, request.nodes, os.environ)
        if request.planned_again is not None:
            say(request.planned_again)
        job.plan, job.script, job.max_nodes = request.file, spec.training_script, request.nodes.max
        job.folder = folder = self._open_folder()
        before = {name: os.environ.get(name) for name in (_THREADS_VARIABLE, _DEVICES_VARIABLE, TOKEN_VARIABLE)}
        os.environ.pop(TOKEN_VARIABLE, None)  # ranks have no use for it
        server = LiveServer(job)
        try:
            if request.gpus is not None:
                os.environ[_DEVICES_VARIABLE] = ",".join(request.gpus)
            config, program, program_arguments = self._configure(folder, before[_THREADS_VARIABLE])
            self._choose_environment(folder)
            settings.num_threads = self._threads_to_set()
            settings.cpus = self._cpus_of_ranks(config.nproc_per_node)
            settings.spares = self._spares() if spec.spare_ranks else Spares()
            if settings.keeps_logs:
                command = ["paraplan", "launch", *sys.argv[1:]]
                folder.note_start(command, environment=dict(settings.environment), plan=request.file, node=self.node)
            self._share_memory(config.nproc_per_node)
            before_start: Callable[[Round], None] | None = None
            if request.nodes.max > 1 or self._is_planned:  # else there is nothing to be agreed upon
                drives = self._is_planned and drives_accelerate(request)
                before_start = RoundPreparation(job, request.planner, settings.environment, drives)
            run_here = record(run_agent) if os.environ.get("TORCHELASTIC_ERROR_FILE") else run_agent
            how: dict[str, Any] = {"settings": settings, "job": job, "seal": seal, "before_start": before_start}
            results = run_here(config, program, program_arguments, **how) or {}
            self._say_whether_planned()
            return results
        except ChildFailedError as error:
            if folder.is_temporary:  # a caller under @record would copy error files that are gone
                for failure in error.failures.values():
                    failure.error_file = _NO_FILE
            raise
        finally:
            server.close()
            job.end_sharing()
            for name, value in before.items():
                os.environ.pop(name, None)
                os.environ.update({} if value is None else {name: value})
            if folder.is_temporary:
                shutil.rmtree(folder.path, ignore_errors=True)

    @property
    def _is_planned(self) -> bool:
        return self.request.file is not None or self.request.planner is not None

    def _open_folder(self) -> RunFolder:
        """Return the folder of this run. Error files need one even without logs."""
        spec, settings, here = self.request.spec, self.settings, Path.cwd()
        folder = open_run_folder(spec, self.request.nodes, keeps_logs=settings.keeps_logs, current_folder=here)
        if folder.is_temporary:
            settings.spawner.own(str(folder.path))
        elif not spec.log_dir and not settings.keeps_logs:
            say(f"logs in {folder.path}")
        elif not spec.log_dir and not folder.path.is_relative_to(here):
            say(f"cannot write in {here}; logs in {folder.path}")
        return folder

    def _configure(self, folder: RunFolder, threads_given: str | None) -> tuple[LaunchConfig, Any, list[str]]:
        """Return torch's configuration; threads per rank are chosen before torch would choose 1 with a banner."""
        if threads_given is None:
            os.environ[_THREADS_VARIABLE] = "1"  # only while torch counts the ranks
        config, program, program_arguments = make_config(self.request, log_dir=str(folder.path))
        if threads_given is None and config.nproc_per_node > 1:
            num_cores = usable_cores()
            threads = threads_per_rank(num_cores=num_cores, ranks_per_node=config.nproc_per_node)
            os.environ[_THREADS_VARIABLE] = str(threads)
            here = f"{num_cores} cores, {config.nproc_per_node} ranks on this node"
            say(f"{_THREADS_VARIABLE}={threads} in each rank ({here}); set OMP_NUM_THREADS to override")
        elif threads_given is None:
            del os.environ[_THREADS_VARIABLE]
        return config, program, program_arguments

    def _choose_environment(self, folder: RunFolder) -> None:
        request, spec, here, environment = (
            self.request,
            self.request.spec,
            folder.path.absolute(),
            self.settings.environment,
        )
        if request.plan_path:
            environment[PLAN_VARIABLE] = request.plan_path
        if self._is_planned:
            environment[PLAN_READ_VARIABLE] = str(here / "plan-read")
            if not folder.is_temporary:
                environment[MEASURED_VARIABLE] = str(here / MEASURED_FILE)
        if request.file is not None and request.file.training is not None:
            from paraplan.plan.allocators import segment_variables  # pydantic, which the file has loaded

            segments = segment_variables(request.file.training.stack, os.environ)
            environment.update(segments)
            for name, value in segments.items():
                say(f"{name}={value} in each rank: the plan was made for it")
        if spec.metrics:
            environment[METRICS_VARIABLE] = str(Path(spec.metrics).absolute())
        if spec.hang_timeout is not None:
            environment[WATCHED_VARIABLE] = str(spec.hang_timeout)

    def _threads_to_set(self) -> int | None:
        """Return the threads that a forked rank must set because torch was imported with another number."""
        wanted = os.environ.get(_THREADS_VARIABLE, str(usable_cores()))
        is_as_imported = os.environ.get(_THREADS_VARIABLE) == self.imported_threads
        return int(wanted) if self.settings.fork and not is_as_imported and wanted.isdigit() else None

    def _cpus_of_ranks(self, num_ranks: int) -> dict[int, tuple[int, ...]]:
        """Return the CPUs that a plan keeps each local rank on; none where the user has bound them."""
        spec = self.request.spec
        if self.node is None or not self._is_planned or spec.numa_binding or spec.no_cpu_binding:
            return {}
        allowed = os.sched_getaffinity(0)
        if len(allowed) < (os.cpu_count() or 1):  # the user, or a batch system, has chosen CPUs
            return {}
        cpus = cpus_of_ranks(gpus_of_ranks(self.node, os.environ), num_ranks=num_ranks, allowed=allowed)
        if cpus:
            say("each rank is kept on the CPUs next to its GPU; --no-cpu-binding leaves that to the kernel")
        return cpus

    def _spares(self) -> Spares:
        """Return how spares start: with what the script imports at its top, where that is not beside it."""
        spec = self.request.spec
        file = script_file(spec.training_script, is_module=spec.module)
        names = imported_names(file, folder=Path.cwd() if spec.module else None)
        modules = ("torch", "torch.distributed", *names, IMPORTED_BY_FIRST_STEP)
        if any(name.partition(".")[0] == "paraplan" for name in names):
            modules = (*modules, "paraplan.runtime.job_start")
        interpreter = os.environ.get("PYTHON_EXEC", sys.executable)
        return Spares(spec.spare_ranks, (interpreter, "-u", bootstrap.__file__, bootstrap.STAND_BY), modules)

    def _share_memory(self, num_ranks: int) -> None:
        """Make what ranks and launcher share, named in their environment; begin to look for notices."""
        spec, job, environment = self.request.spec, self.job, self.settings.environment
        every = spec.memory_checkpoint
        if shared_memory.is_available():
            job.page = StatusPage.make(num_ranks)
            environment[shared_memory.STATUS_PAGE_VARIABLE] = job.page.path
            if every is not None:
                most_bytes = (shared_memory.available_bytes() or _MEMORY_OF_A_SMALL_NODE) // 2
                steps = f"every {every} steps" if every > 1 else "every step"
                say(f"a copy of the state is kept in memory {steps}: at most {format_bytes(most_bytes)} on this node")
                has_neighbour = self.request.nodes.max > 1
                job.copies = CopySlots.make(
                    every=every, num_ranks=num_ranks, most_bytes=most_bytes, has_neighbour=has_neighbour
                )
                environment[shared_memory.COPIES_VARIABLE] = job.copies.text()
        job.stop.page, job.stop.window_s = job.page, spec.preempt_window or self.settings.grace_s
        job.stop.read_kill_wait(os.environ)
        if spec.preempt_notice is not None:
            watch_for_notice(notice_reader(spec.preempt_notice), job.stop)

    def _say_whether_planned(self) -> None:
        """Say in a line where no rank here has taken the plan that was given; of other programs nothing is known."""
        if PLAN_READ_VARIABLE not in self.settings.environment:
            return
        marker = Path(self.settings.environment[PLAN_READ_VARIABLE])
        if not self.request.spec.no_python and not marker.exists():
            runs = "paraplan.runtime.init and job.prepare run a plan, accelerate takes some of it"
            say(f"the script ran without its plan; {runs}")
        marker.unlink(missing_ok=True)
