"""Several ranks of a fake launch, forked from one process that has imported torch.

    python -m paraplan.runtime.fake.ranks FOLDER AT_ONCE RANK[,RANK...] GPUS MEMORY [-m] train.py [arguments]

Each node has so many GPUs, each of so many bytes. WORLD_SIZE says how many ranks there are, PARAPLAN_PLAN the plan.
Each rank leaves in FOLDER its report, RANK.json, what it said on stderr, RANK.err, and its exit status, RANK.status.
What a rank prints is dropped.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from paraplan.plan.fake import FAKE_VARIABLE
from paraplan.runtime.fake import script as fake_script
from paraplan.runtime.fake.script import NodeGpus

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
        status = fake_script.main(words, gpus)
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
