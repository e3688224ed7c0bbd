"""Launching from Python as torchrun's `torch.distributed.run` does: `main(args)` and `run(args)`.

What other launchers (accelerate's) take from there beside these is torch's own.

`python -m paraplan.launch.run`, as people call torch's, is `python -m paraplan.launch`.
"""

from __future__ import annotations

import os
import runpy
from argparse import Namespace
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

if __name__ == "__main__":  # before torch is imported: the spawner is forked first
    runpy.run_module("paraplan.launch", run_name="__main__", alter_sys=True)

from torch.distributed.run import (
    config_from_args,
    determine_local_world_size,
    get_args_parser,
    parse_min_max_nnodes,
)

from paraplan.launch.elastic.records import AttemptSettings, JobRecord
from paraplan.launch.job import Launch
from paraplan.launch.parser import parse_arguments
from paraplan.launch.ranks.spawning import open_spawner
from paraplan.launch.request import check_request, count_gpus
from paraplan.launch.spec import LaunchSpec

__all__ = [
    "config_from_args",
    "determine_local_world_size",
    "get_args_parser",
    "main",
    "parse_min_max_nnodes",
    "run",
]


def main(args: Sequence[str] | None = None) -> None:
    """Launch as the command line `args` (None: this process's) says. The same as `torch.distributed.run.main`.

    Raises torch's ChildFailedError when a rank fails, and `ArgumentError` (a ValueError) for unusable arguments.
    Ranks get interpreters of their own: a program that calls this may have threads, and such cannot be forked.
    """
    _run_spec(parse_arguments(args, os.environ))


def run(args: Namespace) -> None:
    """Launch as `args` say, parsed by torchrun's parser."""
    _run_spec(LaunchSpec.of_namespace(args))


def _run_spec(spec: LaunchSpec) -> None:
    request = check_request(spec, num_gpus=count_gpus(), current_folder=Path.cwd())
    with closing(open_spawner()) as spawner:
        Launch(request, AttemptSettings(spec, spawner), JobRecord()).run()
