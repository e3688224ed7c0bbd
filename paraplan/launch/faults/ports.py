"""Who listens on a port of this host, as Linux tells it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

_LISTENING = "0A"  # the state TCP_LISTEN in /proc/net/tcp
_NUM_READS = 5


def find_listener(port: int, *, proc: Path = Path("/proc")) -> str | None:
    """Return the process that listens on TCP `port` as `python (pid 812)`; None where nobody does or it is hidden.

    Processes of other users and of other containers cannot be seen.
    """
    # the kernel may leave out sockets of its table while others are opened and closed
    sockets = next(filter(None, (_listening_sockets(port, proc) for _ in range(_NUM_READS))), None)
    if sockets is None:
        return None
    for folder in sorted(proc.glob("[0-9]*"), key=lambda folder: int(folder.name)):
        if any(name in sockets for name in _open_files(folder / "fd")):
            with contextlib.suppress(OSError):
                return f"{(folder / 'comm').read_text().strip()} (pid {folder.name})"
    return None


def _open_files(folder: Path) -> Iterator[str]:
    """Yield what the descriptors of a process are open on; some, such as the one that lists them, are gone by then."""
    with contextlib.suppress(OSError):
        for descriptor in list(folder.iterdir()):
            with contextlib.suppress(OSError):
                yield descriptor.readlink().name


def _listening_sockets(port: int, proc: Path) -> set[str]:
    """Return the names `socket:[inode]` of sockets that listen on `port`."""
    names = set()
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in (proc / "net" / table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTENING and int(fields[1].rpartition(":")[2], 16) == port:
                    names.add(f"socket:[{fields[9]}]")
    return names
