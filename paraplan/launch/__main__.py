"""The launcher's process: `python -m paraplan.launch`, and what `paraplan launch` becomes.

It imports torch once, forks the spawner while it has a single thread, and then runs torch's elastic agent. A rank comes
out of that fork with torch imported and almost nothing on its stack, and runs its script from here.
"""

from __future__ import annotations

import atexit
import os
import sys
from pathlib import Path


def _open_closed_streams() -> None:
    """Open the null device for standard streams that the caller has closed: no file of ours is to take their numbers.

    Ranks then write to it too, where torchrun's have None for such a stream.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest number that is free
            vars(sys)[name] = vars(sys)[f"__{name}__"] = os.fdopen(number, "w" if number else "r", closefd=False)


def _restore_path() -> None:
    """Take the folder that Python put first off sys.path: neither the launcher nor a rank is to import from it."""
    own_folder = Path(__file__).resolve().parent
    try:
        current = Path.cwd()
    except OSError:  # it has been removed, which `launch_here` says
        current = own_folder
    if sys.path and current.joinpath(sys.path[0]).resolve() in (own_folder, current) and not sys.flags.safe_path:
        first = sys.path.pop(0)
        if current.joinpath(first).resolve() == own_folder or "paraplan" not in sys.modules:
            _import_paraplan(own_folder.parent.parent)


def _import_paraplan(root: Path) -> None:
    """Import the package that this file is part of, installed or not, without leaving its folder on sys.path."""
    sys.path.insert(0, str(root))
    try:
        import paraplan  # noqa: F401
    finally:
        sys.path.remove(str(root))


if __name__ == "__main__":
    _open_closed_streams()
    _restore_path()
    from paraplan.launch.command import launch_here
    from paraplan.launch.ranks.forked import flush_streams

    status = launch_here(sys.argv[1:])
    atexit._run_exitfuncs()  # of multiprocessing, too, which with --run-path has semaphores to give back
    flush_streams()
    os._exit(status)  # taking torch's modules apart would cost a quarter of a second, for nothing
