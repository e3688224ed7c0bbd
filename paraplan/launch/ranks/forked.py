"""What a forked rank does before its script, so that it is like a process of its own."""

from __future__ import annotations

import gc
import os
import sys

from paraplan.launch.ranks.run_state import unbuffered
from paraplan.launch.ranks.spawner import RankStart


def enter_rank(start: RankStart) -> None:
    """Give this process the environment, the streams and the random state of a fresh rank."""
    os.environ.clear()
    os.environ.update(start.environment)
    sys.stdout, sys.stderr = unbuffered(1, sys.stdout), unbuffered(2, sys.stderr)
    vars(sys).update(__stdout__=sys.stdout, __stderr__=sys.stderr)
    sys.orig_argv[:] = [sys.executable, "-u", *start.command[1 + start.command[1:].count("-u") :]]
    _forget_shared_state(start)
    gc.enable()


def _forget_shared_state(start: RankStart) -> None:
    """Undo what all ranks would share with the process they were forked from.

    Python reseeds `random` after a fork by itself. The global generators of NumPy and torch were seeded from the system
    when they were imported, and would give all ranks the same numbers. CUDA's are made when CUDA starts. torch makes
    the pool of its threads anew in a forked process when it is first asked for one, and fails where several threads do
    that at once ("Invalid thread pool!", caffe2/utils/threadpool/pthreadpool-cpp.cc): setting their number asks.
    """
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.default_generator.seed()
        torch.set_num_threads(torch.get_num_threads() if start.num_threads is None else start.num_threads)
