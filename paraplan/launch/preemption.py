"""Ending a job in time: ranks of `paraplan.runtime` save at the end of a step, and the launcher ends with status 75."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from torch.distributed.elastic.multiprocessing import SignalException

from paraplan.errors import PREEMPTED_EXIT_STATUS
from paraplan.launch.faults.report import say
from paraplan.launch.nodes.batch_systems import slurm_seconds
from paraplan.launch.spec import ArgumentError
from paraplan.shared_memory import StatusPage
from paraplan.units import one_line

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
"""Signals that batch systems send before they end a job: SIGTERM, and SIGUSR1 where sbatch --signal asks for it."""

_LOOK_S = 1.0
_ANSWER_S = 2.0
_SCONTROL_S = 30.0
# the share of the time until Slurm kills ranks that they may take: their launcher ends after them
_SHARE_OF_KILL_WAIT = 0.8
# answers of a metadata service that say that nothing is planned; Azure's is an object with an empty list of Events
_NO_NOTICE = {"", "false", "none", "null", "{}", "[]"}
# without them Google's and Azure's services refuse to answer; others do not mind
_HEADERS = {"Metadata-Flavor": "Google", "Metadata": "true"}


class PreemptedError(SignalException):
    """The ranks have saved their state and ended, because the job was to end; torch leaves it as for a signal."""

    def __init__(self, reason: str | None, *, num_steps: int, sigval: signal.Signals) -> None:
        super().__init__(reason or "another node is to end", sigval=sigval)
        self.reason, self.num_steps = reason, num_steps


@dataclass
class StopRequest:
    """Whether the ranks of this node are to save and end. `window_s` is how long they may take for it."""

    window_s: float = 30.0
    page: StatusPage | None = None
    kill_wait_s: float | None = None
    """Seconds that the batch system leaves between SIGTERM and SIGKILL, None where it does not say."""
    reason: str | None = None
    """In words, once it was asked for."""
    sigval: signal.Signals = signal.SIGTERM
    """The signal that ends ranks which did not come to it."""
    is_over: threading.Event = field(default_factory=threading.Event)
    """Set at the end of the job: nobody looks for a notice any more."""
    _lock: threading.RLock = field(default_factory=threading.RLock)  # a signal may strike in the handler of another

    def ask(self, reason: str, number: signal.Signals) -> bool:
        """Ask the ranks to save and end; return whether they will. They do not if they were asked before."""
        page = self.page
        with self._lock:
            if page is None or self.reason is not None:
                return False
            if not all(page.get(rank, "can_stop") for rank in range(page.num_ranks)):
                return False
            self.reason, self.sigval = reason, number
            kills_first = number == signal.SIGTERM and (self.kill_wait_s or math.inf) <= self.window_s
            if kills_first and self.kill_wait_s is not None:
                self.window_s = self.kill_wait_s * _SHARE_OF_KILL_WAIT
            page.stop_by = time.time() + self.window_s
        why = f", since Slurm kills all {self.kill_wait_s:g} s after SIGTERM (KillWait)" if kills_first else ""
        say(f"{reason}: the ranks end their step and save; they get {self.window_s:g} s for it{why}")
        return True

    def read_kill_wait(self, environment: Mapping[str, str]) -> None:
        """Read what Slurm leaves of a job after SIGTERM, in a thread: its controller may be slow to answer."""
        if "SLURM_JOB_ID" in environment and shutil.which("scontrol") is not None:

            def read() -> None:
                self.kill_wait_s = kill_wait_s(_scontrol("show", "config")[0])

            threading.Thread(target=read, daemon=True, name="paraplan-kill-wait").start()

    def end_at_once(self) -> None:
        """Tell the ranks that a signal from now on is to end them."""
        if self.page is not None:
            self.page.stop_by = -1.0

    def begin_attempt(self) -> None:
        """Tell the ranks of another attempt that they may go on. Raises SignalException where the job is to end."""
        if self.reason is not None:
            say("the job is to end, and its ranks did not save: they are not started again")
            raise SignalException(self.reason, sigval=self.sigval)
        if self.page is not None:
            self.page.stop_by = 0.0

    def are_saving(self, codes: Mapping[int, int]) -> bool:
        """Whether ranks have saved and begun to end because the job was to; `codes` are those of local ranks.

        A script may end with the same status for reasons of its own.
        """
        page = self.page
        if page is None or not codes:
            return False
        return all(code == PREEMPTED_EXIT_STATUS and page.get(rank, "stopped_at") for rank, code in codes.items())

    def check(self, codes: Mapping[int, int], *, num_running: int) -> PreemptedError | None:
        """Return the end of ranks that have saved, by the exit codes of local ranks; None while they have not.

        Raises SignalException where they took too long.
        """
        page = self.page
        if page is None:
            return None
        if num_running == 0 and self.are_saving(codes):
            return PreemptedError(self.reason, num_steps=int(page.get(0, "stopped_at")), sigval=self.sigval)
        if num_running and self.reason is not None and time.time() > page.stop_by:
            say(f"the ranks have not saved within {self.window_s:g} s")
            raise SignalException(self.reason, sigval=self.sigval)
        return None


def notice_reader(source: str) -> Callable[[], str | None]:
    """Return what looks for a notice: a file that comes to be, a URL that answers, `command:` one that succeeds.

    Each returns the notice in words, None while there is none. Raises `ArgumentError` for what is none of them.
    """
    kind, _, rest = source.partition(":")
    if kind in ("http", "https"):
        if not rest.startswith("//") or len(rest) < len("//h"):
            raise ArgumentError(f"--preempt-notice {source} is no URL", hint="write http://HOST/PATH")
        return lambda: _read_url(source)
    if kind == "command":
        if not rest.strip():
            raise ArgumentError("--preempt-notice command: names no command", hint="write 'command:test -e FILE'")
        return lambda: _run_command(rest)
    if not source.strip():
        raise ArgumentError("--preempt-notice names nothing", hint="name a file, a URL, or command:COMMAND")
    return lambda: f"there is {source}" if Path(source).exists() else None


def _read_url(url: str) -> str | None:
    import http.client  # these take longer to import than a launch takes to look at its arguments
    import urllib.error
    import urllib.request

    request = urllib.request.Request(url, headers=_HEADERS)  # noqa: S310 (the scheme was looked at)
    try:
        with urllib.request.urlopen(request, timeout=_ANSWER_S) as answer:  # noqa: S310
            text = answer.read(4096).decode("utf-8", "replace").strip()
    # 404 is the usual answer, and a service may be away
    except (urllib.error.URLError, http.client.HTTPException, OSError, ValueError):
        return None
    value = None
    with suppress(ValueError, RecursionError):
        value = json.loads(text)
    is_none = text.lower() in _NO_NOTICE or (isinstance(value, dict) and value.get("Events") == [])
    return None if is_none else f"{url} says {one_line(text)[:80]}"


def _run_command(command: str) -> str | None:
    try:
        ended = subprocess.run(  # noqa: S602 (the user's own command)
            command, shell=True, timeout=_ANSWER_S * 5, capture_output=True, text=True, check=False, errors="replace"
        )
    except (subprocess.TimeoutExpired, OSError):
        return None
    return None if ended.returncode else f"'{one_line(command)[:60]}' says {one_line(ended.stdout)[:80] or 'so'}"


def watch_for_notice(read: Callable[[], str | None], stop: StopRequest) -> None:
    """Look for a notice from a thread until the job is over.

    Ranks that cannot save are ended by SIGTERM, as a batch system would.
    """

    def look() -> None:
        while not stop.is_over.wait(_LOOK_S):
            notice = read()
            if notice is None:
                continue
            if not stop.ask(notice, signal.SIGTERM) and stop.reason is None:
                say(f"{notice}: ending the job; its ranks have named no folder to save to (engine.resume does)")
                os.kill(os.getpid(), signal.SIGTERM)
            return

    threading.Thread(target=look, daemon=True, name="paraplan-notice").start()


def check_requeue(environment: Mapping[str, str]) -> None:
    """Raise `ArgumentError` where this is no job that Slurm can start again."""
    if not environment.get("SLURM_JOB_ID", "").isdecimal():
        raise ArgumentError("--requeue, and this is no job of Slurm (SLURM_JOB_ID is not set)", hint="leave it out")
    if shutil.which("scontrol") is None:
        raise ArgumentError("--requeue needs scontrol, which is not in PATH", hint="leave it out")


def requeue(environment: Mapping[str, str]) -> None:
    """Have Slurm start this job again, unless its user has canceled it; say what came of it.

    Slurm then ends this process by SIGTERM.
    """
    job = environment["SLURM_JOB_ID"]
    text = _scontrol("show", "job", "--oneliner", job)[0]
    if was_queued_again(text, restart=environment.get("SLURM_RESTART_COUNT", "0")):
        say(f"job {job} is queued again: Slurm itself has done so, as after the loss of a node")
        return
    if was_canceled(text):
        say(f"job {job} was canceled: it is not queued again")
        return
    _, words = _scontrol("requeue", job)
    say(f"job {job} is queued again" if words is None else f"scontrol requeue {job} failed: {words}")


def was_queued_again(text: str, *, restart: str) -> bool:
    """Whether Slurm has queued again a job that `scontrol show job` prints; `restart`: how often it was before."""
    found = re.search(r"\bRestarts=(\d+)", text)
    return found is not None and restart.isdecimal() and int(found[1]) > int(restart)


def was_canceled(text: str) -> bool:
    """Whether a job that `scontrol show job` prints was ended by its user: it has, or is about to, before its time."""
    fields = dict(re.findall(r"(\w+)=(\S*)", text))
    ran_s, limit_s = (slurm_seconds(fields.get(name, "")) for name in ("RunTime", "TimeLimit"))
    is_in_time = limit_s is None or (ran_s is not None and ran_s < limit_s)
    return fields.get("JobState") in ("CANCELLED", "COMPLETING") and is_in_time


def kill_wait_s(text: str) -> float | None:
    """Return KillWait in what `scontrol show config` prints, `KillWait                = 30 sec`; None without it."""
    found = re.search(r"^KillWait\s*=\s*(\d{1,5})\b", text, re.MULTILINE)
    return None if found is None or int(found[1]) == 0 else float(found[1])


def _scontrol(*words: str) -> tuple[str, str | None]:
    """Return what scontrol prints, and why it failed, None where it did not."""
    try:
        program = shutil.which("scontrol") or "scontrol"
        ended = subprocess.run(
            [program, *words], capture_output=True, text=True, check=False, errors="replace", timeout=_SCONTROL_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", one_line(str(error))
    if ended.returncode:
        return "", one_line(ended.stderr) or f"status {ended.returncode}"
    return ended.stdout, None


def raise_signal(number: int, frame: FrameType | None) -> None:
    """End the job as torch's own handlers do."""
    raise SignalException(f"got {signal.Signals(number).name}", sigval=signal.Signals(number))


class HeldSignals:
    """torch's signal handlers raise wherever they strike; inside `held` they wait, so that no message is torn.

    `count` is the number of signals so far.
    """

    def __init__(self, ask_to_stop: Callable[[signal.Signals], bool]) -> None:
        self._ask_to_stop = ask_to_stop
        self._depth = 0
        self.count = 0
        self._pending: list[tuple[Callable[[int, FrameType | None], Any], int]] = []

    def wrap_handlers(self, names: Sequence[str]) -> None:
        """Put this object before the Python handlers of the signals `names`."""
        known = signal.Signals.__members__  # torch has warned of other names
        for number in (known[name.strip()] for name in names if name.strip() in known):
            handler = signal.getsignal(number)
            if callable(handler) and handler is not signal.default_int_handler:
                signal.signal(number, self._holding(handler))

    def _holding(self, handler: Callable[[int, FrameType | None], Any]) -> Callable[[int, FrameType | None], Any]:
        def handle(number: int, frame: FrameType | None) -> None:
            if number in STOP_SIGNALS and self._ask_to_stop(signal.Signals(number)):
                return
            self.count += 1
            if self._depth:
                self._pending.append((handler, number))
            else:
                handler(number, frame)

        return handle

    @contextmanager
    def held(self) -> Iterator[None]:
        """Let signals wait until the end of this block."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
        if self._pending and not self._depth:
            handler, number = self._pending.pop(0)
            self._pending.clear()
            handler(number, None)
