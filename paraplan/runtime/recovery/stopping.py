"""Ending in time: the state is saved at the end of a step that all ranks agree on, and the process ends by itself."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from paraplan.errors import PREEMPTED_EXIT_STATUS
from paraplan.runtime.recovery.status import RankStatus

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
_WORD_TRAVELS_S = 1.0
"""How long a rank that got a signal waits for its launcher, which got it too, to ask for a saved end."""
_LOOK_S = 0.01


def stop_here(save: Callable[[Path], None], folder: Path, status: RankStatus, *, num_steps: int) -> NoReturn:
    """Save to `folder` and end this rank with the status that says so. Every rank comes here after the same step."""
    save(folder)
    status.set("stopped_at", num_steps)
    sys.exit(PREEMPTED_EXIT_STATUS)


def outlive_signals(status: RankStatus) -> None:
    """Have this rank live on, to save, where a batch system sends the signal for its launcher to all processes.

    Slurm does. Without a launcher that asks for it, or where it ends its ranks, the signal ends the process as always.
    A script with handlers of its own keeps them.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if status.page is None or not is_main or any(signal.getsignal(number) for number in _STOP_SIGNALS):
        return
    got, tell = os.pipe()
    os.set_blocking(tell, False)
    if signal.set_wakeup_fd(tell, warn_on_full_buffer=False) != -1:  # somebody's event loop
        os.close(got)
        os.close(tell)
        return
    owner = os.getpid()

    def handle(number: int, _: object) -> None:
        if os.getpid() != owner:  # a worker of a data loader
            _end_by(number)

    _keep_from_children()
    for number in _STOP_SIGNALS:
        signal.signal(number, handle)
    threading.Thread(target=_judge, args=(got, status), daemon=True, name="paraplan-signals").start()


def _keep_from_children() -> None:
    """Have signals to a child wait until it has left this process's pipe, which would be told as if this one got them.

    A child may get one before any code of Python runs in it: a data loader that ends the workers that it has begun.
    """
    masks = threading.local()

    def hold() -> None:
        masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)

    def let_go() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, masks.before)

    def leave_pipe() -> None:
        signal.set_wakeup_fd(-1)
        let_go()

    os.register_at_fork(before=hold, after_in_parent=let_go, after_in_child=leave_pipe)


def _judge(got: int, status: RankStatus) -> None:
    """Read the numbers of signals, also while the main thread is in a collective, and end the process by them."""
    while True:
        for number in os.read(got, 64):
            until = time.monotonic() + _WORD_TRAVELS_S
            while status.stop_by == 0 and time.monotonic() < until:
                time.sleep(_LOOK_S)
            if number in _STOP_SIGNALS and status.stop_by <= 0:
                _end_by(number)


def _end_by(number: int) -> None:
    """End this process by a signal; Python itself sets handlers in the main thread alone."""
    libc = ctypes.CDLL(None)
    libc.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
    libc.signal(number, None)
    os.kill(os.getpid(), number)
