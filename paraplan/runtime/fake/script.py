"""One rank of `paraplan launch --fake`: the user's script, in a world of ranks that do not exist.

The variables of torchrun name the rank, PARAPLAN_PLAN the plan and PARAPLAN_FAKE the file for the report. Modules are
built without values: their parameters take no memory.
"""

from __future__ import annotations

import ctypes
import gc
import os
import runpy
import signal
import sys
import traceback
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NoReturn

import torch

import paraplan
from paraplan.errors import ParaplanError, UsageError
from paraplan.plan.fake import FAKE_VARIABLE
from paraplan.runtime.fake.cuda import NodeGpus
from paraplan.runtime.fake.plain import PlainScript
from paraplan.runtime.fake.torch_private import DataDependentOutputException, DynamicOutputShapeException
from paraplan.runtime.fake.world import fake_world
from paraplan.runtime.world import World, silence_known_noise


def run_script(words: list[str], world: World, gpus: NodeGpus) -> None:
    """Run the script as one rank of `world`, until its steps are done. Raises `UsageError` where it does none."""
    is_module = words[0] == "-m"
    target, *arguments = words[1:] if is_module else words
    sys.argv = [target, *arguments]
    with ExitStack() as stack:
        stack.enter_context(fake_world(rank=world.rank, size=world.size, is_launched=True))
        stack.enter_context(PlainScript(world, gpus).following())
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
                sys.stderr.write(_said(target, error))
                sys.exit(1)
            raise explained from error
    if not Path(os.environ[FAKE_VARIABLE]).exists():
        raise UsageError(
            f"{target} ended without two steps of an optimizer, or of an engine of paraplan.runtime",
            hint="give it data for two steps; a model alone is traced by paraplan estimate file.py:factory --trace",
        )


def _said(target: str, error: Exception) -> str:
    """Return the traceback of `error` in the script's own files, without what torch and this package do in between."""
    frames = traceback.extract_tb(error.__traceback__)
    first = next((index for index, frame in enumerate(frames) if frame.filename.endswith(target)), 0)
    passed = [str(Path(package.__file__).parent) for package in (torch, paraplan) if package.__file__]
    own = [frame for frame in frames[first:] if not frame.filename.startswith((*passed, "<frozen"))]
    lines = traceback.format_list(own or list(frames[-1:])) + traceback.format_exception_only(error)
    return "Traceback (most recent call last):\n" + "".join(lines)


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
    if "metadata required" in words:
        return UsageError(
            f"{where}: a stage of a pipeline asks its neighbours for shapes, and they are not there",
            hint="give torch's PipelineStage input_args and output_args, tensors on meta",
        )
    if "CUDA" in words or "NVIDIA" in words:
        return UsageError(
            f"{where} asks CUDA for what no fake run has: {words}",
            hint="ask torch.cuda.is_available() first, as a script does that runs on CPUs too",
        )
    return None


def run_rank(words: list[str], gpus: NodeGpus) -> int:
    """Run the script that `words` name on one of `gpus`; return the exit status."""
    silence_known_noise()
    rank, local_rank, size = (int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
    world = World(rank=rank, local_rank=local_rank, size=size, device=torch.device("cpu"), is_distributed=True)
    try:
        run_script(words, world, gpus)
    except ParaplanError as error:
        hint = f"hint: {error.hint}\n" if error.hint else ""
        sys.stderr.write(f"error: {error.message}\n{hint}")
        return error.exit_status
    return 0


_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def run_ranks(ranks: Sequence[int], words: list[str], *, gpus: NodeGpus, folder: Path, at_once: int) -> None:
    """Run the script that `words` name as each of `ranks`, `at_once` of them beside each other."""
    gc.collect()
    gc.freeze()  # a collection in a rank would touch, and so copy, every page that the fork shares
    running: dict[int, int] = {}
    waiting = list(ranks)
    while waiting or running:
        while waiting and len(running) < at_once:
            rank = waiting.pop(0)
            process = os.fork()
            if not process:
                _be_rank(rank, words, gpus, folder)
            running[process] = rank
        process, status = os.wait()
        rank = running.pop(process)
        (folder / f"{rank}.status").write_text(str(os.waitstatus_to_exitcode(status)), encoding="ascii")


def _be_rank(rank: int, words: list[str], gpus: NodeGpus, folder: Path) -> NoReturn:
    """Run the script in this process, which is a fork, and end it."""
    status = 1
    try:
        _end_with_parent()
        said = os.open(folder / f"{rank}.err", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(said, 2)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.environ.update(_names_of_rank(rank, gpus.count) | {FAKE_VARIABLE: str(folder / f"{rank}.json")})
        status = run_rank(words, gpus)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            status = end.code or 0
        else:
            sys.stderr.write(f"{end.code}\n")
    except BaseException:  # what Python would do at the end of a process
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status & 0xFF)


def _end_with_parent() -> None:
    """Have this process end with the one that would wait for it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _names_of_rank(rank: int, per_node: int) -> dict[str, str]:
    """Return what torchrun puts in the environment of a rank."""
    numbers = {
        "RANK": rank,
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": int(os.environ["WORLD_SIZE"]),
        "LOCAL_RANK": rank % per_node,
        "LOCAL_WORLD_SIZE": per_node,
        "GROUP_RANK": rank // per_node,
        "GROUP_WORLD_SIZE": -(-int(os.environ["WORLD_SIZE"]) // per_node),
    }
    return {name: str(value) for name, value in numbers.items()} | {"TORCHELASTIC_RUN_ID": "none"}


def main(words: list[str]) -> int:
    """Run the ranks that `words` name; return 0: how each ended is in the folder."""
    _end_with_parent()
    folder, at_once, ranks, num_gpus, memory, *script = words
    run_ranks(
        [int(rank) for rank in ranks.split(",")],
        script,
        gpus=NodeGpus(int(num_gpus), int(memory)),
        folder=Path(folder),
        at_once=int(at_once),
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
