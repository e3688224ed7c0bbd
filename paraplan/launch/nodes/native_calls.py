"""Calls that stay in C, where a signal cannot reach them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

ResultT = TypeVar("ResultT")

WAIT_S = 10.0
"""How long an answer may take before it is said that it is waited for."""

_Calls = SimpleQueue[tuple[Callable[[], Any], SimpleQueue[tuple[Any, BaseException | None]]] | None]


class CallThreads:
    """Threads that make calls which stay in C: a signal ends the wait for an answer.

    One thread serves all calls that follow each other; there are as many as have ever been made at the same time.
    """

    def __init__(self) -> None:
        self._idle: list[_Calls] = []

    def run(
        self, call: Callable[[], ResultT], *, timeout_s: float | None = None, on_wait: Callable[[], None] | None = None
    ) -> ResultT:
        """Return what `call` returns.

        `on_wait` is called once when that takes `WAIT_S`, and `timeout_s` counts from there. Raises TimeoutError after
        `timeout_s` (None: never); `call` then goes on, and nobody waits for it.
        """
        try:
            calls = self._idle.pop()
        except IndexError:
            calls = SimpleQueue()
            threading.Thread(target=_serve, args=(calls,), daemon=True, name="paraplan-calls").start()
        answers: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()
        try:
            calls.put((call, answers))
            result, error = _answer(answers, timeout_s=timeout_s, on_wait=on_wait)
        except BaseException:  # nobody waits any more: the thread ends when the call does
            calls.put(None)
            raise
        self._idle.append(calls)
        if error is not None:
            raise error
        return result  # type: ignore[no-any-return]  # what `call` has returned

    def close(self) -> None:
        """End the threads that have nothing to do."""
        for calls in self._idle:
            calls.put(None)
        self._idle = []


def _serve(calls: _Calls) -> None:
    while (one := calls.get()) is not None:
        call, answers = one
        try:
            answers.put((call(), None))
        except BaseException as error:  # raised again where it is waited for
            answers.put((None, error))
        del one, call, answers


def _answer(
    answers: SimpleQueue[tuple[Any, BaseException | None]],
    *,
    timeout_s: float | None,
    on_wait: Callable[[], None] | None,
) -> tuple[Any, BaseException | None]:
    try:
        try:
            return answers.get(timeout=timeout_s if on_wait is None else WAIT_S)
        except Empty:
            if on_wait is None:
                raise
            on_wait()
            return answers.get(timeout=timeout_s)
    except Empty:
        raise TimeoutError(f"no answer within {timeout_s:g} s") from None


def run_interruptibly(
    call: Callable[[], ResultT], *, timeout_s: float | None = None, on_wait: Callable[[], None] | None = None
) -> ResultT:
    """Return what a single `call` returns, as `CallThreads.run` does."""
    threads = CallThreads()
    try:
        return threads.run(call, timeout_s=timeout_s, on_wait=on_wait)
    finally:
        threads.close()
