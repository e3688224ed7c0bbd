"""The launcher's process: `python -m paraplan.launch`, and what `paraplan launch` becomes.

It imports torch once, forks the spawner while it has a single thread, and then runs torch's elastic agent. A rank comes
out of that fork with torch imported and almost nothing on its stack, and runs its script from here.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from pathlib import Path

if __name__ == "__main__":
    own_folder = Path(__file__).resolve().parent
    try:
        current = Path.cwd()
    except OSError:  # it has been removed, which `launch_here` says
        current = own_folder
    # neither the launcher nor a rank is to import from the folder that Python has put first on its path
    if sys.path and current.joinpath(sys.path[0]).resolve() in (own_folder, current) and not sys.flags.safe_path:
        first = sys.path.pop(0)
        if current.joinpath(first).resolve() == own_folder or "paraplan" not in sys.modules:
            sys.path.insert(0, str(own_folder.parent.parent))
            import paraplan  # noqa: F401 (this package is found here, installed or not, and nothing else)

            sys.path.remove(str(own_folder.parent.parent))
    from paraplan.launch.command import launch_here

    status = launch_here(sys.argv[1:])
    atexit._run_exitfuncs()  # of multiprocessing, too, which with --run-path has semaphores to give back
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(ValueError, OSError):  # closed, or a pipe without a reader
            stream.flush()
    os._exit(status)  # taking torch's modules apart would cost a quarter of a second, for nothing
