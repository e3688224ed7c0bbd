"""Output of ranks, to the console and to a log file of each: pipes or terminals, and the process that copies them.

Ranks write to a pipe, or to a terminal of their own where the launcher's console is one, so that progress bars and
colors stay as they are. The copying process ends when the last writer has closed its end.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn

_CHUNK_BYTES = 1 << 16

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)  # errors of a disk that takes no more


@dataclass
class Copy:
    """One stream of one rank: read from `source`, written to `console` and to the file `path`."""

    source: int
    console: int | None
    path: str
    log: int | None = None


def open_copy(console: int, path: str) -> tuple[Copy, int]:
    """Return a copy to the descriptor `console` and to `path`, and the descriptor that a rank is to write to."""
    source, sink = _open_terminal(console) if os.isatty(console) else os.pipe()
    return Copy(source, console, path), sink


def _open_terminal(console: int) -> tuple[int, int]:
    import pty  # only here: most launches write to no terminal
    import termios

    source, sink = pty.openpty()
    settings = termios.tcgetattr(sink)
    settings[1] &= ~termios.OPOST  # the console adds the carriage returns
    termios.tcsetattr(sink, termios.TCSANOW, settings)
    _take_size(console, sink)
    for descriptor in (source, sink):
        os.set_inheritable(descriptor, False)
    return source, sink


def _take_size(console: int, terminal: int) -> None:
    """Give `terminal` the rows and columns of `console`."""
    import fcntl
    import termios

    with contextlib.suppress(OSError):  # a console that is gone by now
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, fcntl.ioctl(console, termios.TIOCGWINSZ, bytes(8)))


def serve_copies(copies: list[Copy], *, close: list[int]) -> NoReturn:
    """Copy until all writers are gone, then end this process. `close` are descriptors that are others'.

    A log file that cannot be written, on a full disk, is given up; the console goes on, and the other way round. A
    console that is closed closes the rank's stream too, as if it had written there itself.
    """
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)  # it ends with the ranks, whose last words it carries
    for descriptor in close:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    for copy in copies:
        with contextlib.suppress(OSError):
            copy.log = os.open(copy.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    by_source = {copy.source: copy for copy in copies}
    _follow_sizes(by_source)
    poll = select.poll()
    for source in by_source:
        poll.register(source, select.POLLIN)
    while by_source:
        for source, _ in poll.poll():
            if not _copy_chunk(by_source[source]):
                poll.unregister(source)
                os.close(source)
                del by_source[source]
    os._exit(0)


def _follow_sizes(copies: Mapping[int, Copy]) -> None:
    """Have the terminals of ranks be as large as the console when that is made larger or smaller."""

    def follow(*_: object) -> None:
        for copy in copies.values():
            if copy.console is not None:
                _take_size(copy.console, copy.source)

    if any(os.isatty(source) for source in copies):
        signal.signal(signal.SIGWINCH, follow)
        follow()  # it may have changed since they were opened


def _copy_chunk(copy: Copy) -> bool:
    """Copy what is there; return False at the end of the stream."""
    data = b""
    with contextlib.suppress(OSError):  # a terminal whose last writer has closed it
        data = os.read(copy.source, _CHUNK_BYTES)
    if not data:
        return False
    try:
        if copy.log is not None:
            _write_all(copy.log, data)
    except OSError as error:
        copy.log = None
        _say_unwritable(copy.path, error)
    try:
        if copy.console is not None:
            _write_all(copy.console, data)
    except OSError as error:
        if error.errno not in _FULL:
            return False
        name = "standard output" if copy.console == 1 else "standard error"
        copy.console = None
        _say_unwritable(name, error, hint=f"; {copy.path} goes on" if copy.log is not None else "")
    return True


def _say_unwritable(name: str, error: OSError, *, hint: str = "") -> None:
    text = f"paraplan: {name} cannot be written any more: {error.strerror}{hint}\n"
    with contextlib.suppress(OSError):
        _write_all(sys.stderr.fileno(), text.encode())


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(descriptor, view) :]
        except BlockingIOError:  # the console is shared with something that does not wait for it
            select.select([], [descriptor], [])
