"""The ranks of one attempt on this node, in the shape that torch's elastic agent expects: `RankProcesses`."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing.api import LogsSpecs, RunProcsResult, SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from paraplan.launch.elastic.following import RankWatches, remove_files, watch_variables
from paraplan.launch.elastic.health import HealthCheck
from paraplan.launch.elastic.records import AttemptSettings, JobRecord
from paraplan.launch.faults.collectives import ANSWER_S, Whereabouts, ask_for_calls, read_calls
from paraplan.launch.faults.failures import Cause, RankFailure, first_failure, read_failure
from paraplan.launch.faults.hang import HangWatch, describe_elsewhere
from paraplan.launch.faults.report import say
from paraplan.launch.nodes.store import StoreLostError
from paraplan.launch.preemption import HeldSignals, raise_signal
from paraplan.launch.ranks.bootstrap import STACK_SIGNAL, with_bootstrap
from paraplan.launch.ranks.limits import count_memory_kills
from paraplan.launch.ranks.live import LiveRank, process_state
from paraplan.launch.ranks.spawning import RankCommand, RankExit
from paraplan.launch.ranks.stacks import ask_for_stacks, stack_by_py_spy
from paraplan.launch.stragglers.steps import usual_parts
from paraplan.launch.torch_private.elastic import ProcessContext
from paraplan.units import ranks_in_words

SETTLE_S = 0.5
"""How long peers of a failed rank get to fail by themselves: the first rank to end need not be the first to fail."""

_HEALTH_S = 20.0  # for --preflight measure
_BOARD_INTERVAL_S = 0.5
# how long ranks go on after those of another node have failed: most notice by a lost connection within this time
_ALONE_S = 3.0
# how long a node that has seen a hang waits for what the others say of it: they look at other moments
_HANG_NOTES_S = 5.0
# how long the other ranks of a node get to end, once one of them has saved and ended: they save together
_SAVED_S = 10.0
_SILENT_S = 2.0  # how long ranks that are to end are waited for before the launcher says so


class RankProcesses(ProcessContext):
    """One attempt of the ranks of this node, started by a spawner and watched by torch's elastic agent."""

    def __init__(
        self,
        name: str,
        *,
        commands: dict[int, tuple[str, ...]],
        envs: dict[int, dict[str, str]],
        logs_specs: LogsSpecs,
        settings: AttemptSettings,
        job: JobRecord,
        torch_options: Mapping[str, Any],
    ) -> None:
        super().__init__(name, "ranks", commands, envs, logs_specs, **torch_options)
        self._spawner, self._settings, self._job = settings.spawner, settings, job
        self._signals = HeldSignals(lambda number: job.stop.ask(number.name, number))
        self._ranks: dict[int, LiveRank] = {}
        self._exits: dict[int, RankExit] = {}
        self._stopped: list[LiveRank] = []
        self._is_closed = False
        self._looks_at = 0.0
        self._alone_since: float | None = None
        self._hang_watch: HangWatch | None = None
        if settings.spec.hang_timeout is not None:
            self._hang_watch = HangWatch(
                timeout_s=settings.spec.hang_timeout,
                request_stacks=self._request_stacks,
                count_questions=lambda: job.num_questions,
            )

    def _request_stacks(self, ranks: Sequence[LiveRank]) -> None:
        with self._signals.held():
            self._job.request_stacks(ranks)

    def _folder(self, rank: int) -> Path | None:
        """Return the folder of the error file of a local rank; None where there is none."""
        path = self.error_files[rank]
        return Path(path).parent if path and path != os.devnull else None

    def start_processes(self) -> None:
        """Start the ranks. The base class has put torch's signal handlers in place."""
        if threading.current_thread() is threading.main_thread():
            names = os.environ.get("TORCHELASTIC_SIGNALS_TO_HANDLE", "SIGTERM,SIGINT,SIGHUP,SIGQUIT")
            if signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL:
                signal.signal(signal.SIGUSR1, raise_signal)  # of which torch makes nothing
            self._signals.wrap_handlers([*names.split(","), "SIGUSR1"])
        job, settings = self._job, self._settings
        job.stop.begin_attempt()
        job.attempts += 1
        job.clock.begin_attempt(job.page)
        job.failures, job.hang, job.apart = [], None, None
        job.where = Whereabouts()
        job.started_ns = time.time_ns()
        job.kills_before = count_memory_kills()
        if settings.spec.preflight == "measure" and job.folder is not None:
            environments = {rank: {**self.envs[rank], **settings.environment} for rank in range(self.nprocs)}
            HealthCheck(job, settings, environments, job.folder.path, _HEALTH_S, self._signals.held).run()
        has_bootstrap = not settings.fork and not settings.spec.no_python
        commands = [
            RankCommand(
                local_rank=rank,
                command=with_bootstrap(self.args[rank]) if has_bootstrap else self.args[rank],
                environment=self._environment(rank),
                stdout=self.stdouts[rank],
                stderr=self.stderrs[rank],
                cpus=settings.cpus.get(rank, ()),
                copy_stdout=self._log_file(rank, "stdout.log"),
                copy_stderr=self._log_file(rank, "stderr.log"),
            )
            for rank in range(self.nprocs)
        ]
        with self._signals.held():
            pids = self._spawner.start(
                commands,
                environment=os.environ,
                fork=settings.fork,
                num_threads=settings.num_threads,
                spares=settings.spares,
            )
            for one in commands:
                rank, logs = one.local_rank, (one.copy_stdout or one.stdout, one.copy_stderr or one.stderr)
                number = int(self.envs[rank].get("RANK", rank))
                self._ranks[rank] = LiveRank(number, rank, pids[rank], self._folder(rank), logs)
        if self._spawner.took_spares:
            some = _numbers(self._ranks[rank] for rank in sorted(self._spawner.took_spares))
            words = "begins in a spare process" if len(some) == 1 else "begin in spare processes"
            say(f"{ranks_in_words(some)} {words}")
        job.ranks = {one.rank: one for one in self._ranks.values()}
        job.request_stacks = lambda some: self._spawner.signal(STACK_SIGNAL, only=[one.pid for one in some])
        job.world_size = int(self.envs[0].get("WORLD_SIZE", self.nprocs))
        self._watches = RankWatches(settings, job)

    def _environment(self, rank: int) -> dict[str, str]:
        own = {**self.envs[rank], **self._settings.environment}
        return own | watch_variables(self._settings, own, self._folder(rank))

    def _log_file(self, rank: int, name: str) -> str:
        """Return the file that a rank's stream is copied to, where torchrun has it with --redirects; '' for none."""
        return str(Path(self.error_files[rank]).with_name(name)) if self._settings.keeps_logs else ""

    def pids(self) -> dict[int, int]:
        """Return the process ids of the ranks by local rank."""
        return {rank: one.pid for rank, one in self._ranks.items()}

    def poll_processes(self) -> RunProcsResult | None:
        """Return the result once all ranks have ended or one has failed, None before."""
        self._collect()
        self._end_saved_ranks()
        if self._is_running() and not self._failed():
            self._watches.look_for_slow_ranks()
            if not self._watches.finds_ranks_apart() and not self._hangs():
                if not self._lost_other_nodes():
                    return None
                self._ask_where_ranks_are()
            self.close()
            return self._result()
        self._wait_for_exits(SETTLE_S)
        self._ask_where_ranks_are()
        self.close()
        return self._result()

    def _end_saved_ranks(self) -> None:
        """Raise `PreemptedError` where the ranks have saved and ended because the job was to end."""
        deadline = time.monotonic() + _SAVED_S
        while self._job.stop.are_saving(self._codes()) and self._is_running() and time.monotonic() < deadline:
            self._collect(0.05)
        end = self._job.stop.check(self._codes(), num_running=len(self._running()))
        if end is not None:
            self._job.clock.end_attempt(self._job.page)
            if end.reason is not None and self._job.store is not None:
                self._job.store.note_stop(f"{end.reason}: its ranks saved, and")
            self.close()
            raise end

    def _running(self) -> list[LiveRank]:
        return [one for rank, one in self._ranks.items() if rank not in self._exits]

    def _ask_where_ranks_are(self) -> None:
        """Note where the ranks are that still run, unless a rank failed by an error of its own."""
        running = self._running()
        if not running or any(failure.cause is Cause.OWN_ERROR for failure in self._read_failures()):
            return
        stopped = self._stopped_ranks()
        answering = [one for one in running if one not in stopped]
        stacks = ask_for_stacks(answering, request_stacks=self._request_stacks, timeout_s=ANSWER_S)
        self._job.where = Whereabouts(stacks, stopped=_numbers(stopped))

    def _stopped_ranks(self) -> list[LiveRank]:
        return [one for one in self._running() if process_state(one.pid) == "stopped"]

    def _lost_other_nodes(self) -> bool:
        """Whether another node has failed for good, and the ranks of this one have not noticed for a while."""
        store, now = self._job.store, time.monotonic()
        if store is None or now < self._looks_at:
            return False
        self._looks_at = now + _BOARD_INTERVAL_S
        store.look()
        if store.is_lost and not store.has_failure_elsewhere() and not store.stops:
            self._alone_since = self._alone_since or now
            if now - self._alone_since > _ALONE_S:  # for as long they ran on: all may have been about to end
                self.close()
                raise StoreLostError
        for reason in store.new_stops():
            say(reason)
            if not store.is_elastic:
                return True
        if self._alone_since is None and store.has_failure_elsewhere():
            self._alone_since = now
        return self._alone_since is not None and now - self._alone_since > _ALONE_S

    def _hangs(self) -> bool:
        running = self._running()
        verdict = self._hang_watch.check(running) if self._hang_watch is not None else None
        if verdict is None:
            return False
        seen, calls = verdict.where.stacks, ask_for_calls(running)
        stacks = {rank: stack or stack_by_py_spy(self._job.ranks[rank].pid) for rank, stack in seen.items()}
        hang = replace(verdict, where=Whereabouts(stacks, calls, _numbers(self._stopped_ranks())))
        if self._job.store is not None:
            mine = hang.note(socket.gethostname())
            notes = self._job.store.exchange_notes("hang", mine, timeout_s=_HANG_NOTES_S)
            hang = replace(hang, elsewhere=describe_elsewhere(mine, notes))
        self._job.hang = hang
        return True

    def _is_running(self) -> bool:
        return len(self._exits) < len(self._ranks)

    def _codes(self) -> dict[int, int]:
        return {rank: end.code for rank, end in self._exits.items()}

    def _failed(self) -> bool:
        return any(self._codes().values())

    def _collect(self, timeout_s: float = 0.0) -> None:
        with self._signals.held():
            self._exits |= {end.local_rank: end for end in self._spawner.exits(timeout_s=timeout_s)}

    def _result(self) -> RunProcsResult:
        self._job.ranks = {}
        self._job.clock.end_attempt(self._job.page)
        failures = self._read_failures()
        self._job.failures = failures
        ended = [one for rank, one in self._ranks.items() if rank in self._exits and not self._exits[rank].code]
        folders = {one.rank: one.folder for one in self._ranks.values() if one.folder is not None}
        calls = {}
        if any(failure.cause is not Cause.OWN_ERROR for failure in failures):
            read = {rank: read_calls(folder) for rank, folder in folders.items()}
            calls = {rank: found for rank, found in read.items() if found is not None}
        self._job.where = replace(self._job.where, calls=calls, ended=_numbers(ended))
        if not failures and self._job.apart is None:
            self._watches.finds_ranks_apart(is_end=True)
        self._job.step_parts = usual_parts(folders[0]) if 0 in folders else None
        remove_files(folders.values())
        result = RunProcsResult(stdouts=self.stdouts, stderrs=self.stderrs)
        if not failures:
            result.return_values = dict.fromkeys(range(self.nprocs))
            return result
        first = first_failure(failures)
        for failure in failures:
            torchs = ProcessFailure(
                local_rank=failure.exit.local_rank,
                pid=failure.pid,
                exitcode=failure.exit.code,
                error_file=failure.error_file,
            )
            # torch takes the smallest timestamp for the root cause, and keeps whole seconds only
            later_ns = 0 if failure is first else max(0, first.time_ns + 1000 - failure.time_ns)
            torchs.timestamp = (failure.time_ns + later_ns) / 1e9  # type: ignore[assignment]
            result.failures[failure.exit.local_rank] = torchs
        return result

    def _read_failures(self) -> list[RankFailure]:
        return [
            read_failure(
                rank=one.rank,
                pid=one.pid,
                exit=self._exits[rank],
                error_file="" if one.folder is None else self.error_files[rank],
                was_stopped=one in self._stopped,
            )
            for rank, one in self._ranks.items()
            if rank in self._exits and self._exits[rank].code
        ]

    def close_processes(self, death_signal: signal.Signals) -> None:
        """End the ranks: `death_signal`, the grace time, SIGKILL; then what they left, unless all have ended well."""
        if self._is_closed or not self._ranks:
            return
        was_running = self._is_running()
        if self._signals.count and self._job.store is not None:
            self._job.store.note_stop(death_signal.name)
        self._stopped = self._running()
        try:
            self._job.stop.end_at_once()
            self._stop(death_signal)
        except SignalException:  # a second signal: no more patience
            self._kill()
            raise
        self._is_closed = True
        with self._signals.held():
            if was_running or self._failed():
                self._spawner.clear(grace_s=1.0)
            else:
                left = ", ".join(f"{pid} ({command})" for pid, command in self._spawner.find_left().items())
                if left:  # it may be wanted, as an upload is
                    say(f"the ranks have ended and leave running what they started in the background: {left}")

    def _stop(self, death_sig: signal.Signals) -> None:
        if self._is_running() and self._signals.count < 2:  # a second may strike before torch comes to stop the ranks
            with self._signals.held():
                self._spawner.signal(death_sig)
                stopped = self._stopped_ranks()
                if stopped:  # these act on no other signal
                    self._spawner.signal(signal.SIGKILL, only=[one.pid for one in stopped])
            grace_s = self._settings.grace_s
            self._wait_for_exits(min(_SILENT_S, grace_s))
            if self._is_running() and grace_s > _SILENT_S:
                running = _numbers(self._running())
                them = "it" if len(running) == 1 else "them"
                who = f"waiting up to {grace_s:g} s for {ranks_in_words(running)} to end"
                say(f"{who} after {death_sig.name}; Ctrl-C kills {them}")
                self._wait_for_exits(grace_s - _SILENT_S)
        if self._is_running():
            self._kill()

    def _kill(self) -> None:
        with self._signals.held():
            self._spawner.signal(signal.SIGKILL)
            self._wait_for_exits(5.0)  # longer only for a rank in uninterruptible sleep, which nobody can end

    def _wait_for_exits(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while self._is_running() and time.monotonic() < deadline:
            self._collect(min(0.1, timeout_s))


def _numbers(ranks: Iterable[LiveRank]) -> tuple[int, ...]:
    return tuple(one.rank for one in ranks)
