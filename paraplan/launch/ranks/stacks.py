"""Where ranks stand: the Python stack of each one's main thread, which the rank writes when it is asked by a signal."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from paraplan.launch.ranks import bootstrap
from paraplan.launch.ranks.live import LiveRank
from paraplan.launch.torch_private import step_hooks

Stack = tuple["Frame", ...]
"""The frames of a thread, innermost first."""

_FRAME = re.compile(r'^\s*File "(?P<path>.*)", line (?P<line>\d+) in (?P<name>.*)$')
_LIBRARIES = ("site-packages", "dist-packages", "/lib/python", "<frozen", f"{Path(bootstrap.__file__).parents[2]}/")
_POLL_S = 0.02
_PY_SPY_S = 10.0


@dataclass(frozen=True)
class Frame:
    """One frame of a Python stack."""

    path: str
    line: int
    name: str

    def describe(self) -> str:
        """Return `all_reduce (distributed_c10d.py:2901)`."""
        return f"{self.name} ({Path(self.path).name}:{self.line})"


def describe_place(stack: Sequence[Frame]) -> str:
    """Return the innermost call, and the line of the user's own code that led there."""
    if not stack:
        return "native code, or it does not answer"
    own = next((frame for frame in stack if not is_library(frame.path)), stack[0])
    return stack[0].describe() + (f", called from {own.describe()}" if own != stack[0] else "")


def is_library(text: str) -> bool:
    """Whether a path, or a line with one, is that of an installed package, of paraplan or of Python itself."""
    return any(part in text for part in _LIBRARIES)


def main_stack(text: str) -> Stack:
    """Return the stack of the thread that took the signal, from what `faulthandler` has written of all threads."""
    _, _, block = text.rpartition("Current thread ")
    frames = []
    for line in block.splitlines()[1:]:
        match = _FRAME.match(line)
        if match is None or match["path"] == bootstrap.__file__:  # below it is how the launcher came to the script
            break
        if match["path"] != step_hooks.__file__:  # it stands around torch's own calls
            frames.append(Frame(match["path"], int(match["line"]), match["name"]))
    return tuple(frames)


def stack_by_py_spy(pid: int, *, program: str | None = None) -> Stack:
    """Return the main thread's stack as py-spy reads it from outside; none where it is not installed or not allowed.

    A rank that does not answer a signal is read too: one that is stopped, or that ignores all signals.
    """
    py_spy = program or find_py_spy()
    if py_spy is None:
        return ()
    command = [py_spy, "dump", "--json", "--nonblocking", "--pid", str(pid)]
    try:
        done = subprocess.run(command, capture_output=True, timeout=_PY_SPY_S, check=True)
        threads = json.loads(done.stdout)
        frames = next(thread["frames"] for thread in threads if thread["os_thread_id"] == pid)
        stack = tuple(Frame(frame["filename"], int(frame["line"]), frame["name"]) for frame in frames)
    except (OSError, subprocess.SubprocessError, ValueError, KeyError, TypeError, StopIteration):
        return ()
    below = next((index for index, frame in enumerate(stack) if frame.path == bootstrap.__file__), len(stack))
    return tuple(frame for frame in stack[:below] if frame.path != step_hooks.__file__)


def find_py_spy() -> str | None:
    """Return the path of py-spy, also where it is installed beside this Python alone; None where it is not."""
    return shutil.which("py-spy") or shutil.which("py-spy", path=str(Path(sys.executable).parent))


def ask_for_stacks(
    ranks: Iterable[LiveRank], *, request_stacks: Callable[[Sequence[LiveRank]], None], timeout_s: float
) -> dict[int, Stack]:
    """Return the stacks of those of `ranks` that answer within `timeout_s`; one that has not begun is not asked."""
    files = {one: one.stack_file for one in ranks}
    asked = {one: file for one, file in files.items() if file is not None}
    if not asked:
        return {}
    for file in asked.values():
        file.write_text("")
    request_stacks([*asked])
    deadline = time.monotonic() + timeout_s
    before: dict[int, str] = {}
    while True:
        texts = {one.rank: file.read_text(errors="replace") for one, file in asked.items()}
        stacks = {rank: main_stack(text) for rank, text in texts.items()}
        is_complete = texts == before and all(stacks.values())  # not in the middle of being written
        if is_complete or time.monotonic() > deadline:
            return {rank: stack for rank, stack in stacks.items() if stack}
        before = texts
        time.sleep(_POLL_S)
