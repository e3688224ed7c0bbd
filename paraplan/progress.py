"""Progress of a long computation while it runs, and whether somebody asked it to end with what it has.

A computation says what it does wherever it stands; nobody hears it unless a program watches, as the command line does.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol


class Watcher(Protocol):
    """Who listens."""

    def show(self, text: str | None) -> None:
        """Take what is being done now, None for nothing."""

    def is_stopped(self) -> bool:
        """Whether a computation that can end early should do so."""

    @contextmanager
    def stoppable(self) -> Iterator[None]:
        """Ask for an early end, in this context, in place of interrupting."""


_watcher: ContextVar[Watcher | None] = ContextVar("watcher", default=None)


@contextmanager
def watched_by(watcher: Watcher) -> Iterator[None]:
    """Let `watcher` hear what is said in this context."""
    token = _watcher.set(watcher)
    try:
        yield
    finally:
        _watcher.reset(token)


@contextmanager
def doing(text: str) -> Iterator[None]:
    """Say what is done in this context."""
    say(text)
    try:
        yield
    finally:
        say(None)


def say(text: str | None) -> None:
    """Say how far the present work is."""
    watcher = _watcher.get()
    if watcher is not None:
        watcher.show(text)


@contextmanager
def stoppable() -> Iterator[None]:
    """Let the watcher end the work in this context early; the work asks `is_stopped` now and then."""
    watcher = _watcher.get()
    if watcher is None:
        yield
        return
    with watcher.stoppable():
        yield


def is_stopped() -> bool:
    """Whether the work should end with what it has."""
    watcher = _watcher.get()
    return watcher is not None and watcher.is_stopped()
