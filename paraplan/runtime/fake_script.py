"""One rank of `paraplan launch --fake`: the user's script, in a world of ranks that do not exist.

The variables of torchrun name the rank, PARAPLAN_PLAN the plan and PARAPLAN_FAKE the file for the report. Modules are
built without values: their parameters take no memory.
"""

from __future__ import annotations

import os
import runpy
import sys
import traceback
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from paraplan.errors import ParaplanError, UsageError
from paraplan.plan.fake import FAKE_VARIABLE
from paraplan.runtime.fake_plain import PlainScript
from paraplan.runtime.fake_world import fake_world, modules_that_stay
from paraplan.runtime.noise import silence_known_noise
from paraplan.runtime.weightless import without_weights
from paraplan.runtime.world import World


def run_script(words: list[str], world: World) -> None:
    """Run the script as one rank of `world`, until its steps are done. Raises `UsageError` where it does none."""
    is_module = words[0] == "-m"
    target, *arguments = words[1:] if is_module else words
    sys.argv = [target, *arguments]
    with ExitStack() as stack:
        stack.enter_context(fake_world(rank=world.rank, size=world.size))
        stack.enter_context(without_weights())
        stack.enter_context(modules_that_stay())
        stack.enter_context(PlainScript(world).following())
        try:
            if is_module:
                sys.path.insert(0, "")
                runpy.run_module(target, run_name="__main__", alter_sys=True)
            else:
                sys.path.insert(0, str(Path(target).resolve().parent))
                runpy.run_path(target, run_name="__main__")
        except SystemExit as end:
            if end.code not in (None, 0):
                raise
        except ParaplanError:
            raise
        except Exception as error:  # the user's script, which may do anything
            explained = _explained(target, error)
            if explained is None:
                said = traceback.format_exception(type(error), error, _from_script(target, error))
                sys.stderr.write("".join(said))
                sys.exit(1)
            raise explained from error
    if not Path(os.environ[FAKE_VARIABLE]).exists():
        raise UsageError(
            f"{target} ended without two steps of an engine of paraplan.runtime, or of an optimizer under "
            "DistributedDataParallel, which --fake follows",
            hint="give it data for two steps; a model alone is traced by paraplan estimate file.py:factory --trace",
        )


def _from_script(target: str, error: Exception) -> TracebackType | None:
    """Return the traceback of `error` from the script's own first line on."""
    step = error.__traceback__
    while step is not None and not step.tb_frame.f_code.co_filename.endswith(target):
        step = step.tb_next
    return step or error.__traceback__


def _explained(target: str, error: Exception) -> UsageError | None:
    """Return what it means that a script failed by what a fake run lacks; None where that is not known."""
    lines = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.endswith(target)]
    where = f"{target}, line {lines[-1].lineno}" if lines else target
    words = str(error).splitlines()[0] if str(error) else type(error).__name__
    if isinstance(error, DataDependentOutputException | DynamicOutputShapeException):
        return UsageError(
            f"{where} reads values, which a fake run does not have: {words}",
            hint="leave that out where PARAPLAN_FAKE is set in the environment",
        )
    if "meta" in words:
        return UsageError(
            f"{where} runs a model that is neither under an engine of paraplan.runtime nor DistributedDataParallel, "
            f"which --fake follows: {words}",
            hint="a model alone is traced by paraplan estimate file.py:factory --trace",
        )
    if "CUDA" in words or "NVIDIA" in words:
        return UsageError(
            f"{where} asks CUDA for what no fake run has: {words}",
            hint="ask torch.cuda.is_available() first, as a script does that runs on CPUs too",
        )
    return None


def main(words: list[str]) -> int:
    """Run the script that `words` name; return the exit status."""
    silence_known_noise()
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:  # as without a launcher
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            os.environ.pop(name, None)
    world = World(rank=rank, local_rank=0, size=size, device=torch.device("cpu"), is_distributed=size > 1)
    try:
        run_script(words, world)
    except ParaplanError as error:
        hint = f"hint: {error.hint}\n" if error.hint else ""
        sys.stderr.write(f"error: {error.message}\n{hint}")
        return error.exit_status
    return 0
