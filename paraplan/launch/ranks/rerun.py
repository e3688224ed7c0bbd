"""A rank that stays when another one is lost: it leaves its script, and runs it again from the top when it is told to.

It stands by between two runs; a spare does so from its start. What belongs to a run is released by `run_state` and
`torch_private.runs`. Standard library only, and importable alone: see `bootstrap`.
"""

from __future__ import annotations

import contextlib
import gc
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Sequence
from types import FrameType
from typing import Any, NoReturn

INTERRUPT_SIGNAL = 62 if sys.platform == "linux" else 0
"""Ends a run: SIGRTMAX - 2, which a thread of the rank itself sends. Nobody else does."""

_AGAIN_S = 0.1
_NATIVE_S = 0.4
"""How long native code may wait for a peer before the connections of this process are ended."""


class RunInterruptedError(BaseException):
    """The script is to be left: another rank is lost. It is no error of the script, which is not to catch it."""

    is_interruption = True


def keep_rank(channel: Any, target: Any, bootstrap: Any, *, modules: Sequence[str] = (), is_forked: bool) -> NoReturn:
    """Run `target`, and what the launcher has this process run after it; None stands by with `modules` imported.

    `bootstrap` is the module that runs targets.
    """
    inherited = frozenset(sys.modules)
    kept = KeptRank(channel, bootstrap, is_forked=is_forked)
    try:
        if target is None:
            kept.stand_by(modules)
        kept.run(target)
    except SystemExit as end:
        if is_forked:  # for which the launcher's part of it has the end
            raise
        code = end.code
    kept.leave(code, inherited_modules=inherited)


class KeptRank:
    """One process that runs a script again and again, as the spawner says through `channel`."""

    def __init__(self, channel: Any, bootstrap: Any, *, is_forked: bool) -> None:
        signal.signal(INTERRUPT_SIGNAL, self._on_signal)
        self._channel, self._bootstrap, self._is_forked = channel, bootstrap, is_forked
        self._state_module = bootstrap.module_beside("run_state.py")
        self._torch = bootstrap.module_beside("../torch_private/runs.py")
        self._orders: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._is_running = self._is_asked = False
        self._lock = threading.Lock()
        self._main = threading.get_ident()
        self._marks: Any = None
        self._recorder: Any = None
        threading.Thread(target=self._listen, daemon=True, name="paraplan-orders").start()
        self._state = self._state_module.RunState()
        self._num_threads: int | None = None
        bootstrap.module_beside("../torch_private/step_hooks.py").after_import("torch", self._note_torch)

    def leave(self, code: object, *, inherited_modules: frozenset[str]) -> NoReturn:
        """End this process; the interpreter's own end may abort while threads of gloo or NCCL still run."""
        self._state_module.leave_process(code, inherited_modules=inherited_modules)
        raise SystemExit(code)  # which it has done itself

    def _note_torch(self) -> None:
        """Note with how many threads torch begins; leave what is imported with it out of collections."""
        self._num_threads = sys.modules["torch"].get_num_threads()
        if not self._is_forked:  # for which the launcher does so
            gc.freeze()

    def _watch(self) -> Any:
        """Return what records the failures of a run that begins."""
        before = [] if self._recorder is None else self._recorder.files
        self._recorder = self._bootstrap.FailureRecorder(os.environ.get("TORCHELASTIC_ERROR_FILE"))
        self._marks = self._bootstrap.watch_process(self._recorder, self._marks)
        if self._recorder.files:  # else those of the run before are written to still
            for descriptor in before:
                os.close(descriptor)
        return self._recorder

    def run(self, target: Any) -> NoReturn:
        """Run `target`, and what the spawner has this process run after it. Raises SystemExit at the end."""
        while True:
            self._is_asked, self._is_running = False, True
            try:
                try:
                    self._bootstrap.run_target(target, self._watch(), hold=self._hold)
                finally:
                    self._is_running = False
            except RunInterruptedError:  # which may have struck before that line
                self._is_running = False
            self._leave_run()
            target = self._wait()

    def stand_by(self, modules: Sequence[str]) -> NoReturn:
        """Import `modules`, wait for a place, and run there what it is for."""
        self._mute()
        self._import(modules)
        self.run(self._wait())

    @staticmethod
    def _import(modules: Sequence[str]) -> None:
        """Import what the script will, as far as that is possible: it is the script that says what is wrong."""
        import importlib

        for name in modules:
            if name not in sys.modules:
                with contextlib.suppress(Exception):
                    importlib.import_module(name)
        gc.collect()
        gc.freeze()  # what is imported stays: no collection needs to look at it

    def _listen(self) -> None:
        with contextlib.suppress(EOFError):  # the spawner is gone, and this process with it
            while True:
                for order in self._channel.receive():
                    if order["do"] == "tell":
                        self._channel.send(event="modules", modules=self._state_module.imported_libraries())
                    elif order["do"] != "park" or not self._is_asked_to_leave():
                        self._orders.put(order)

    def _is_asked_to_leave(self) -> bool:
        """Begin to interrupt the script; return False where none runs."""
        with self._lock:
            if not self._is_running:
                return False
            self._is_asked = True
        threading.Thread(target=self._interrupt, daemon=True, name="paraplan-interrupt").start()
        return True

    def _interrupt(self) -> None:
        """Have the main thread leave the script, whatever it does, but for imports and native code that never ends."""
        threading.Thread(target=self._torch.abort_groups, daemon=True, name="paraplan-abort").start()
        began = time.monotonic()
        is_shut = False
        while self._is_running and self._is_asked:
            signal.pthread_kill(self._main, INTERRUPT_SIGNAL)
            time.sleep(_AGAIN_S)
            if not is_shut and time.monotonic() - began > _NATIVE_S and self._is_running:
                is_shut = True
                self._state_module.shut_connections()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._is_running and self._is_asked and not self._state_module.is_importing(frame):
            raise RunInterruptedError

    def _hold(self, code: int) -> None:
        """Wait after an error that the script has not caught: for the end of this process, or to run it again."""
        with self._lock:
            self._is_running = False
        if self._is_asked:  # while the error was shown, where the interruption went unseen
            raise RunInterruptedError
        self._channel.send(event="held", code=code)
        if self._orders.get()["do"] == "park":
            raise RunInterruptedError

    def _leave_run(self) -> None:
        """Release what belongs to the run; end the process where a script cannot run again in it."""
        self._recorder.error_file = None  # what fails from here on is no failure of the rank
        if self._marks is not None:
            self._marks.end_run()
        state, torch = self._state, self._torch
        reason = state.refusal()
        if reason is None:
            state.restore_signals()
            self._state_module.end_children()
            self._state_module.shut_connections()
            try:
                groups = torch.forget_groups()
                state.end_exits()
                torch.forget_run()
                reason = state.running_thread()
                if reason is None:
                    state.drop_modules()
                    gc.collect()
                    groups.clear()
                    reason = torch.free_gpus()
                state.restore()
            except Exception as error:  # of a library that is not as it was when this was written
                reason = f"{type(error).__name__}: {error}"
        if reason is not None:
            self._channel.send(event="refused", reason=reason)
            self._flush()
            os._exit(1)
        self._mute()
        self._channel.send(event="parked")

    def _mute(self) -> None:
        """Let go of the files that the run has written to."""
        self._flush()
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        for number in (1, 2):
            os.dup2(null, number)
        os.close(null)

    @staticmethod
    def _flush() -> None:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(AttributeError, ValueError, OSError):
                stream.flush()

    def _wait(self) -> Any:
        """Wait for the next run, and return its target."""
        order = self._orders.get()
        while order["do"] == "import":
            self._import(order["modules"])
            order = self._orders.get()
        if order["do"] != "run":
            os._exit(0)
        for number in (1, 2):
            descriptor = self._channel.descriptors.pop(0)
            os.dup2(descriptor, number)
            os.close(descriptor)
        os.environ.clear()
        os.environ.update(order["environment"])
        if order["cpus"]:
            with contextlib.suppress(OSError):
                os.sched_setaffinity(0, order["cpus"])
        sys.stdout = self._state_module.unbuffered(1, sys.stdout)
        sys.stderr = self._state_module.unbuffered(2, sys.stderr)
        vars(sys).update(__stdout__=sys.stdout, __stderr__=sys.stderr)
        self._torch.seed_others()
        num_threads = self._num_threads if order["num_threads"] is None else order["num_threads"]
        self._torch.restore_settings(num_threads=num_threads, seeds_anew=self._is_forked)
        return self._bootstrap.target_of(order["command"])
