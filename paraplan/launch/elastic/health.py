"""`--preflight measure`: before the script, the ranks of a round measure their machines, and bad ones are named."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

from torch.distributed.elastic.multiprocessing.api import SignalException

from paraplan.errors import CheckFailedError
from paraplan.launch.elastic.records import AttemptSettings, JobRecord
from paraplan.launch.faults.failures import last_lines
from paraplan.launch.faults.report import say
from paraplan.launch.planning import search_path
from paraplan.launch.ranks.spawning import RankCommand
from paraplan.units import ranks_in_words

_MODULE = "paraplan.measure.health"
_REPORT_FILE, _AT_FILE = "health.json", "health-at-"  # as that module has them
# the most that starting, connecting and the slowest single message may take on top of the time that is asked for
_START_S = 60.0
_REAP_S = 5.0  # longer only for a rank in uninterruptible sleep, which nobody can end

_LOG_FILE = "health.log"


class LeftOutError(SignalException):
    """This host is bad, and the others can do without it. torch closes a rendezvous for all after other errors."""

    def __init__(self, text: str) -> None:
        super().__init__(text, signal.SIGTERM)
        self.text = text


@dataclass(frozen=True)
class HealthCheck:
    """A check of the ranks of this node, with what their real start gets too; `environments` are by local rank."""

    job: JobRecord
    settings: AttemptSettings
    environments: Mapping[int, Mapping[str, str]]
    folder: Path
    seconds: float
    held: Callable[[], AbstractContextManager[None]] = nullcontext
    """Has signals wait while a message goes to the spawner."""

    def run(self) -> None:
        """Measure, say what stands out, and leave where this host does and the others can do without it.

        Every node of the round calls it. Raises `LeftOutError`, and `CheckFailedError` where ranks failed or hang.
        """

        def share(name: str, make: Callable[[], str]) -> str:
            return make() if self.job.store is None else self.job.store.share_text(name, make)

        if share("preflight", lambda: str(self.job.attempts)) != "1":  # after a restart, or for a node that came later
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        began_s = time.monotonic()
        self._measure()
        text = share("health", lambda: (self.folder / _REPORT_FILE).read_text(encoding="utf-8"))
        self._judge(text, time.monotonic() - began_s)

    def _measure(self) -> None:
        words = ["--preflight", str(self.folder.absolute()), "--seconds", str(self.seconds)]
        log = str(self.folder / _LOG_FILE)
        ranks = [
            RankCommand(
                local_rank=rank,
                command=(sys.executable, "-u", "-m", _MODULE, *words),
                environment={**environment, "TORCHELASTIC_ERROR_FILE": "", **search_path(os.environ)},
                stdout=log if rank == 0 else os.devnull,
                stderr=log if rank == 0 else f"{log}.{rank}",
            )
            for rank, environment in self.environments.items()
        ]
        spawner, settings, codes = self.settings.spawner, self.settings, dict[int, int]()

        def wait(timeout_s: float, *, for_all: bool) -> None:
            deadline_s = time.monotonic() + timeout_s
            while len(codes) < len(ranks) and (for_all or not any(codes.values())) and time.monotonic() < deadline_s:
                with self.held():
                    codes.update((end.local_rank, end.code) for end in spawner.exits(timeout_s=0.1))

        try:
            with self.held():
                spawner.start(ranks, environment=os.environ, fork=settings.fork, num_threads=settings.num_threads)
            wait(self.seconds + _START_S, for_all=False)
        finally:  # a signal has the launcher end, too
            is_over, has_failed = len(codes) == len(ranks), any(codes.values())
            with self.held():
                if not is_over:
                    spawner.signal(signal.SIGKILL)
            wait(_REAP_S, for_all=True)
            with self.held():
                spawner.clear(grace_s=0.0)
        if has_failed or not is_over:
            raise self._failure(has_failed=has_failed)

    def _failure(self, *, has_failed: bool) -> CheckFailedError:
        """Return the error that names the ranks that failed or hang, and what each was at."""
        at: dict[str, list[int]] = {}
        for local, environment in self.environments.items():
            rank = int(environment.get("RANK", local))
            with suppress(OSError):
                at.setdefault((self.folder / f"{_AT_FILE}{rank}").read_text(), []).append(rank)
        where = "; ".join(f"{ranks_in_words(ranks)} at {text}" for text, ranks in at.items()) or "no rank had begun"
        words = [line for path in sorted(self.folder.glob(f"{_LOG_FILE}*")) for line in last_lines(path, 1)]
        what = "failed" if has_failed else f"was not over after {self.seconds + _START_S:.0f} s"
        said = f" ({words[-1]})" if has_failed and words else ""
        return CheckFailedError(f"the measuring before the start {what}: {where}{said}", hint=f"see {self.folder}")

    def _judge(self, text: str, took_s: float) -> None:
        from paraplan.hardware.measurement.health import HealthReport  # pydantic, as the report is

        report, store = HealthReport.model_validate_json(text), self.job.store
        tell: Callable[[str], None] = say if store is None or store.node == 0 else lambda line: None
        for finding in report.findings:
            tell(f"preflight: {finding.text}")
        if not report.findings:
            tell(f"preflight: {len(report.ranks)} ranks measured in {took_s:.0f} s, nothing stands out")
        hosts = {one.host for one in report.ranks}
        bad = [host for host in report.bad_hosts if host in hosts]
        if store is None or not store.is_elastic or not bad:
            return
        if store.num_nodes - len(bad) < store.min_nodes or len(hosts) < store.num_nodes:
            return
        tell(f"preflight: left out: host {', '.join(bad)}; the others restart without it")
        mine = socket.gethostname()
        if mine in bad:
            raise LeftOutError(next(finding.text for finding in report.findings if mine in finding.hosts))
