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
    """A profile that runs, with torch.profiler's own mark around each step."""

    def __init__(self, path: str, *, seconds: float) -> None:
        import torch
        from torch.profiler import ProfilerAction, ProfilerActivity, profile

        if script_profiles():
            raise RuntimeError("the script profiles itself")
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            activities.append(ProfilerActivity.CUDA)
        self.path = path
        self.is_over = False
        self.profiler = profile(activities=activities, schedule=lambda _: ProfilerAction.RECORD)
        self.profiler.start()
        self.ends_s = time.monotonic() + seconds
        atexit.register(self.end_early)
        self.end_before_another()

    def end_before_another(self) -> None:
        """Have this profile end where the script starts one."""
        from torch.autograd import profiler

        traces: Any = profiler.profile
        self.plain = plain = traces._prepare_trace

        def prepare_trace(other: Any) -> Any:
            self.end_early()
            return plain(other)

        traces._prepare_trace = prepare_trace

    def end_step(self) -> bool:
        """Say whether the profile is over: its trace is written then. Raises what torch and the disk say."""
        if not self.is_over:
            if time.monotonic() < self.ends_s:
                self.profiler.step()
                return False
            self.stop()
        return True

    def end_early(self) -> None:
        """End the profile in the middle of a step, whatever comes of it."""
        if not self.is_over:
            with suppress(Exception):
                self.stop()

    def stop(self) -> None:
        """Stop the profiler, and write the trace. Raises what torch and the disk say."""
        from torch.autograd import profiler

        self.is_over = True
        atexit.unregister(self.end_early)
        traces: Any = profiler.profile
        traces._prepare_trace = self.plain
        self.profiler.stop()
        partial = f"{self.path}.new"
        try:
            self.profiler.export_chrome_trace(partial)
            os.replace(partial, self.path)  # noqa: PTH105 (a rank's interpreter need not import pathlib)
        except BaseException:
            with suppress(OSError):
                os.unlink(partial)  # noqa: PTH108
            raise


def script_profiles() -> bool:
    """Whether a profiler of the script runs, or has begun to warm up, which is seen from its object alone."""
    import torch
    from torch.profiler import ProfilerAction, profile

    autograd: Any = torch.autograd
    if autograd._profiler_enabled():
        return True
    found = (one for one in gc.get_objects() if issubclass(type(one), profile))
    return any(one.current_action == ProfilerAction.WARMUP and one.profiler is not None for one in found)
