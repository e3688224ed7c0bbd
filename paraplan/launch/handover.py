"""From the process of the command line to the launcher's: what `paraplan launch` imports, and nothing more."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from paraplan.errors import UsageError

ENTRY = Path(__file__).with_name("__main__.py")
"""The file that the launcher's process runs."""


def become_launcher(
    arguments: Sequence[str],
    *,
    find_module: Callable[[str], object | None] = importlib.util.find_spec,
    platform: str = sys.platform,
) -> NoReturn:
    """Replace this process by the launcher, a fresh interpreter with the same process id. Raises `UsageError`.

    Ranks are forked from the launcher: what the command line of paraplan has imported must not be in them.
    """
    if platform == "win32":
        raise UsageError(
            "paraplan launch starts ranks on Linux, and this is Windows: NCCL has no Windows build",
            hint="run it in WSL 2 (paraplan explain windows); recommend, estimate and export with --profile run here",
        )
    if find_module("torch") is None:
        raise UsageError("paraplan launch needs torch, which is not installed", hint="pip install torch")
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # Python has None for one that is closed
            stream.flush()
    os.execv(sys.executable, [sys.executable, "-u", str(ENTRY), *arguments])  # noqa: S606 (no shell is wanted)
