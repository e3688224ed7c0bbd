"""Calls that stay in C, where a signal cannot reach them, and what torch writes from there on the launcher's stderr."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import TypeVar

from paraplan.launch.torch_private.native_log import silence_native_log

ResultT = TypeVar("ResultT")

WAIT_S = 10.0
"""How long an answer may take before it is said that it is waited for."""

_LOG_VARIABLES = ("TORCH_CPP_LOG_LEVEL", "TORCH_DISTRIBUTED_DEBUG", "TORCH_SHOW_CPP_STACKTRACES")


def run_interruptibly(
    call: Callable[[], ResultT], *, timeout_s: float | None = None, on_wait: Callable[[], None] | None = None
) -> ResultT:
    """Return what `call` returns, from a thread: a signal ends the wait for it, however long `call` stays in C.

    `on_wait` is called once when that takes `WAIT_S`, and `timeout_s` counts from there. Raises TimeoutError after
    `timeout_s` (None: never); `call` then goes on, and nobody waits for it.
    """
    answers: SimpleQueue[tuple[ResultT | None, BaseException | None]] = SimpleQueue()

    def run() -> None:
        try:
            answers.put((call(), None))
        except BaseException as error:  # raised again where it is waited for
            answers.put((None, error))

    threading.Thread(target=run, daemon=True, name="paraplan-call").start()
    try:
        try:
            result, error = answers.get(timeout=timeout_s if on_wait is None else WAIT_S)
        except Empty:
            if on_wait is None:
                raise
            on_wait()
            result, error = answers.get(timeout=timeout_s)
    except Empty:
        raise TimeoutError(f"no answer within {timeout_s:g} s") from None
    if error is not None:
        raise error
    return result  # type: ignore[return-value]  # None only where `call` returns it


def silence_torch_log(environment: Mapping[str, str] = os.environ) -> None:
    """Have this process, and none that it has forked, write nothing of torch's C++ log but what ends it.

    A store that is gone makes torch's agent write its C++ frames for every message; the launcher says it in a sentence.
    A user who asks torch for more in the environment gets it. A torch without this flag writes as ever.
    """
    if any(name in environment for name in _LOG_VARIABLES):
        return
    with suppress(OSError, ValueError):
        silence_native_log()
