"""One rank of `paraplan launch --fake`: the user's script, in a world of ranks that do not exist.

    python -m paraplan.runtime.fake_script [-m] train.py [arguments]

The variables of torchrun name the rank, PARAPLAN_PLAN the plan and PARAPLAN_FAKE the file for the report. Modules are
built without values: their parameters take no memory.
"""

from __future__ import annotations

import os
import runpy
import sys
from contextlib import ExitStack
from pathlib import Path

from paraplan.errors import ParaplanError, UsageError
from paraplan.plan.fake import FAKE_VARIABLE
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
    if not Path(os.environ[FAKE_VARIABLE]).exists():
        raise UsageError(
            f"{target} ended without a second step of an engine of paraplan.runtime, which --fake follows",
            hint="a script of plain torch is traced with paraplan estimate file.py:factory --trace-memory",
        )


def main(words: list[str]) -> int:
    """Run the script that `words` name; return the exit status."""
    silence_known_noise()
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:  # as without a launcher
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            os.environ.pop(name, None)
    import torch

    world = World(rank=rank, local_rank=0, size=size, device=torch.device("cpu"), is_distributed=size > 1)
    try:
        run_script(words, world)
    except ParaplanError as error:
        hint = f"hint: {error.hint}\n" if error.hint else ""
        sys.stderr.write(f"error: {error.message}\n{hint}")
        return error.exit_status
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
