"""torch.profiler in a rank, started and stopped between two steps because that was asked for from outside.

It runs in ranks, without this package where their interpreters have none. It is imported when a profile is asked for.
Of torch 2.13: a second profiler in a process breaks the first one, and a process that ends with a profiler running
crashes. So a profile ends before the script starts its own, and before the process ends.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys
import time
from contextlib import suppress
from typing import Any


def start_profile(path: str, *, seconds: float) -> Any:
    """Start to profile; return what `end_step` is called of at the end of each step, by the same thread.

    Raises RuntimeError where the script profiles itself.
    """
    dynamo: Any = sys.modules.get("torch._dynamo")
    if dynamo is None:
        return Profile(path, seconds=seconds)
    started = dynamo.disable(lambda: Profile(path, seconds=seconds))()  # torch.compile is to trace none of it
    started.end_step = dynamo.disable(started.end_step)
    return started


class Profile:
    """A profile that runs, with a mark around each step as torch.profiler's own schedule makes it."""

    def __init__(self, path: str, *, seconds: float) -> None:
        import torch
        from torch.profiler import ProfilerActivity, profile

        if _script_profiles():
            raise RuntimeError("the script profiles itself")
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            activities.append(ProfilerActivity.CUDA)
        self._path = path
        self._num_steps = 0
        self._mark: Any = None
        self._is_over = False
        self._profiler = profile(activities=activities)
        self._profiler.start()
        self._ends_s = time.monotonic() + seconds
        atexit.register(self._end)
        self._end_before_another()
        self._begin_step()

    def _end_before_another(self) -> None:
        """Have this profile end where the script starts one."""
        from torch.autograd import profiler

        traces: Any = profiler.profile
        self._plain = plain = traces._prepare_trace

        def prepare_trace(other: Any) -> Any:
            self._end()
            return plain(other)

        traces._prepare_trace = prepare_trace

    def _begin_step(self) -> None:
        from torch.profiler import record_function

        self._mark = record_function(f"ProfilerStep#{self._num_steps}")
        self._mark.__enter__()
        self._num_steps += 1

    def end_step(self) -> bool:
        """Say whether the profile is over: its trace is written then. Raises what torch and the disk say."""
        if not self._is_over:
            self._mark.__exit__(None, None, None)
            if time.monotonic() < self._ends_s:
                self._begin_step()
                return False
            self._stop()
        return True

    def _end(self) -> None:
        """End the profile in the middle of a step, whatever comes of it."""
        if not self._is_over:
            with suppress(Exception):
                self._mark.__exit__(None, None, None)
                self._stop()

    def _stop(self) -> None:
        from torch.autograd import profiler

        self._is_over = True
        atexit.unregister(self._end)
        traces: Any = profiler.profile
        traces._prepare_trace = self._plain
        self._profiler.stop()
        partial = f"{self._path}.new"
        try:
            self._profiler.export_chrome_trace(partial)
            os.replace(partial, self._path)  # noqa: PTH105 (a rank's interpreter need not import pathlib)
        except BaseException:
            with suppress(OSError):
                os.unlink(partial)  # noqa: PTH108
            raise


def _script_profiles() -> bool:
    """Whether a profiler of the script runs, or has begun to warm up, which is seen from its object alone."""
    import torch
    from torch.profiler import ProfilerAction, profile

    autograd: Any = torch.autograd
    if autograd._profiler_enabled():
        return True
    found = (one for one in gc.get_objects() if issubclass(type(one), profile))
    return any(one.current_action == ProfilerAction.WARMUP and one.profiler is not None for one in found)
