"""The work of a forked rank before and after its script, so that it is like a process of its own."""

from __future__ import annotations

import atexit
import gc
import io
import os
import sys
import threading
from types import ModuleType
from typing import NoReturn, TextIO

from paraplan.launch.ranks.spawner import RankStart


def enter_rank(start: RankStart) -> None:
    """Give this process the environment, the streams and the random state of a fresh rank."""
    os.environ.clear()
    os.environ.update(start.environment)
    sys.stdout, sys.stderr = _unbuffered(1, sys.stdout), _unbuffered(2, sys.stderr)
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


def _unbuffered(descriptor: int, stream: TextIO) -> TextIO:
    """Return what `python -u` has in the place of `stream`: text that is written through to a raw file."""
    raw = io.FileIO(descriptor, "wb", closefd=False)
    raw.name = stream.name
    text = io.TextIOWrapper(raw, encoding=stream.encoding, errors=stream.errors, write_through=True)
    text.mode = "w"  # type: ignore[misc]  # as the interpreter sets it
    return text


def leave_process(code: object, *, inherited_modules: frozenset[str]) -> NoReturn:
    """End this process as `sys.exit(code)` does, without taking apart what it shares with the launcher.

    Python takes all modules apart at its end: with torch in them that is a quarter of a second for each rank, and
    copies every page that the ranks have shared. Here threads are joined, exit functions run, and the script's own
    modules are emptied, so that open files are written and finalizers called; those of `inherited_modules` are left
    alone. Once CUDA has started, Python's own end is taken: tools that watch CUDA write their results from there.
    """
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        sys.exit(code)  # type: ignore[arg-type]
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)  # noqa: T201 (as the interpreter does with the words of a SystemExit)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]  # what the interpreter, too, calls first
    atexit._run_exitfuncs()
    flush_streams()
    for name, module in reversed(list(sys.modules.items())):
        if isinstance(module, ModuleType) and (name == "__main__" or name not in inherited_modules):
            _empty(module)
    gc.collect()
    flush_streams()
    os._exit(int(code or 0) & 0xFF)


def _empty(module: ModuleType) -> None:
    """Drop a module's objects in the order of the interpreter: names with an underscore first."""
    names = [name for name in vars(module) if name != "__builtins__"]
    for private in (True, False):
        for name in names:
            if (name.startswith("_") and not name.startswith("__")) == private:
                vars(module)[name] = None


def flush_streams() -> None:
    """Write out what stands in the buffers of the standard streams, as far as they still take it."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (AttributeError, ValueError, OSError):
            continue  # replaced by something else, closed, or a pipe without a reader
