"""The state of an interpreter before a script runs in it, and what takes it back there afterwards.

A script that runs again in the same process is to find what it would find in a new one, but for libraries: these stay
imported, with what they have built, and with what the script has set in them. Standard library only, and importable
alone.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import gc
import io
import logging
import os
import signal
import socket
import stat
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType, ModuleType
from typing import Any, NoReturn, TextIO

_ITIMERS = ("ITIMER_REAL", "ITIMER_VIRTUAL", "ITIMER_PROF")
_ENDS_WITHIN_S = 1.0
_OUTLIVE_RUNS = ("colossalai", "deepspeed", "fairscale", "horovod", "jax", "megatron", "mpi4py", "ray", "tensorflow")
_OWN_PROCESSES = ("wandb",)
_PACKAGE = os.path.normpath(os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", ".."))  # noqa: PTH100, PTH118, PTH120
_INSTALLED = [sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")]
"""Not the whole prefix: a project may be its own virtual environment, or lie in /usr/local."""

_LIBRARIES = tuple({path + os.sep for path in (_PACKAGE, *_INSTALLED, *map(os.path.realpath, _INSTALLED))})
_PARTS = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")


def is_library(path: str | None) -> bool:
    """Whether a file is of Python, an installed package or paraplan, and not of the script; no file is too."""
    if not path or not os.path.isabs(path):  # noqa: PTH117 (such as torch.ops, which no file holds)
        return True
    return path.startswith(_LIBRARIES) or any(part in path for part in _PARTS)


def imported_libraries() -> list[str]:
    """Return the modules that are imported and not of the script, in the order in which their imports began."""
    return [name for name, module in list(sys.modules.items()) if not _is_of_script(name, module)]


def unbuffered(descriptor: int, stream: TextIO) -> TextIO:
    """Return what `python -u` has in the place of `stream`: text that is written through to a raw file."""
    raw = io.FileIO(descriptor, "wb", closefd=False)
    raw.name = stream.name
    text = io.TextIOWrapper(raw, encoding=stream.encoding, errors=stream.errors, write_through=True)
    text.mode = "w"  # type: ignore[misc]  # as the interpreter sets it
    return text


class RunState:
    """What a script may change in its interpreter, as it is now."""

    def __init__(self) -> None:
        self._path, self._argv, self._folder = list(sys.path), list(sys.argv), os.getcwd()  # noqa: PTH109
        self._hooks = {name: getattr(sys, name) for name in ("excepthook", "displayhook", "unraisablehook")}
        self._thread_hook = threading.excepthook
        self._recursion = sys.getrecursionlimit()
        self._collects, self._thresholds = gc.isenabled(), gc.get_threshold()
        self._umask = os.umask(0o022)
        os.umask(self._umask)
        self._builtins = dict(vars(builtins))
        self._handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
        self._blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        self._threads, self._modules = set(threading.enumerate()), frozenset(sys.modules) - {"__main__"}
        self._cpus = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
        self._streams = sys.stdin, sys.stdout, sys.stderr
        root = logging.getLogger()
        self._root = list(root.handlers), list(root.filters), root.level
        self._start_method = _start_method()
        self._exits: list[Callable[..., Any]] = []
        self._register = atexit.register
        vars(atexit)["register"] = self._note_exit

    def _note_exit(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Callable[..., Any]:
        """Register a function for the end of the process; keep it where it is of the run."""
        if not is_library(_file_of(function)) or _module_of(function).startswith("paraplan."):
            self._exits.append(function)
        return self._register(function, *arguments, **options)

    def refusal(self) -> str | None:
        """Return why a script cannot run again in this process as in a new one; None where it can."""
        for names, words in ((_OUTLIVE_RUNS, "keeps state of a run"), (_OWN_PROCESSES, "has a process of its own")):
            for name in names:
                if name in sys.modules:
                    return f"{name} {words}"
        return None

    def end_exits(self) -> None:
        """Run what the script has registered for the end of its process, the last first, and drop it.

        What paraplan.runtime registers tells other ranks that this one is done: it is dropped alone.
        """
        exits, self._exits = self._exits, []
        for function in reversed(exits):
            atexit.unregister(function)
            if not _module_of(function).startswith("paraplan."):
                with contextlib.suppress(Exception):
                    function()

    def drop_modules(self) -> None:
        """Empty the script and the modules that lie beside it, and have them imported again by the next run."""
        new = [(name, module) for name, module in list(sys.modules.items()) if name not in self._modules]
        own = [(name, module) for name, module in new if _is_of_script(name, module)]
        for name, module in own:
            if name != "__main__":
                sys.modules.pop(name, None)
                parent, _, child = name.rpartition(".")
                vars(sys.modules.get(parent, module)).pop(child, None)
        for _, module in own:
            empty(module)
        sys.modules["__main__"] = ModuleType("__main__")  # libraries look at its attributes
        for name in ("last_type", "last_value", "last_traceback", "last_exc"):
            vars(sys).pop(name, None)
        _drop_loggers()
        states: Any = sys.modules.get("accelerate.state")
        for kind in ("AcceleratorState", "GradientState", "PartialState"):  # which every later Accelerator would share
            getattr(getattr(states, kind, None), "_shared_state", {}).clear()

    def restore_signals(self) -> None:
        """Set handlers of signals back, and which are blocked, and stop timers."""
        for number, handler in self._handlers.items():
            if handler is not None and signal.getsignal(number) is not handler:
                with contextlib.suppress(OSError, ValueError):  # of SIGKILL, SIGSTOP and those of the C library
                    signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, self._blocked)
        for name in _ITIMERS:
            if hasattr(signal, name):
                signal.setitimer(getattr(signal, name), 0)

    def restore(self) -> None:
        """Set everything else back."""
        sys.path[:], sys.argv[:] = self._path, self._argv
        with contextlib.suppress(OSError):
            os.chdir(self._folder)
        vars(sys).update(self._hooks)
        threading.excepthook = self._thread_hook
        sys.settrace(None)
        sys.setprofile(None)
        sys.setrecursionlimit(self._recursion)
        gc.set_threshold(*self._thresholds)
        (gc.enable if self._collects else gc.disable)()
        os.umask(self._umask)
        for name in set(vars(builtins)) - set(self._builtins):
            delattr(builtins, name)
        vars(builtins).update(self._builtins)
        if self._cpus is not None:
            with contextlib.suppress(OSError):
                os.sched_setaffinity(0, self._cpus)
        sys.stdin, sys.stdout, sys.stderr = self._streams
        if _start_method() != self._start_method:  # which may be set once
            sys.modules["multiprocessing"].set_start_method(self._start_method, force=True)
        root = logging.getLogger()
        root.handlers[:], root.filters[:] = self._root[:2]
        root.setLevel(self._root[2])

    def running_thread(self) -> str | None:
        """Return which thread runs code of the script and does not end soon, in words; None where there is none."""
        deadline = time.monotonic() + _ENDS_WITHIN_S
        while True:
            frames = sys._current_frames()
            new = [thread for thread in threading.enumerate() if thread not in self._threads]
            own = [one.name for one in new if any(map(_is_of_user, _frames(frames.get(one.ident or 0))))]
            if not own or time.monotonic() > deadline:
                return f"a thread of the script, {own[0]}, does not end" if own else None
            time.sleep(0.02)


def _start_method() -> str | None:
    """Return how multiprocessing is to start processes; None where nobody has said."""
    multiprocessing: Any = sys.modules.get("multiprocessing")
    return None if multiprocessing is None else multiprocessing.get_start_method(allow_none=True)


def _is_of_user(frame: FrameType) -> bool:
    return not is_library(frame.f_code.co_filename)


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def is_importing(frame: FrameType | None) -> bool:
    """Whether a module is being imported where `frame` is: half a library cannot be imported again."""
    return any(one.f_code.co_filename == "<frozen importlib._bootstrap>" for one in _frames(frame))


def _file_of(function: Callable[..., Any]) -> str | None:
    """Return the file of a function, a method, or what wraps one."""
    while hasattr(function, "func"):  # functools.partial
        function = function.func
    code = getattr(function, "__code__", None)
    if code is not None:
        return str(code.co_filename)
    module = sys.modules.get(_module_of(function))
    return getattr(module, "__file__", None)


def _module_of(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__module__", None) or type(function).__module__)


def _is_of_script(name: str, module: object) -> bool:
    if name == "__main__":
        return isinstance(module, ModuleType)
    if not isinstance(module, ModuleType) or name == "paraplan_rank_bootstrap":
        return False
    file = vars(module).get("__file__")
    if file is not None:
        return not is_library(file)
    places = [str(path) for path in vars(module).get("__path__") or ()]  # a package without a file
    return bool(places) and not all(is_library(f"{path}{os.sep}") for path in places)


def _drop_loggers() -> None:
    """Take from loggers what the script has added to them: those that no imported package has the name of."""
    for name, logger in list(logging.Logger.manager.loggerDict.items()):
        if isinstance(logger, logging.Logger) and name.partition(".")[0] not in sys.modules:
            logger.handlers.clear()
            logger.filters.clear()
            logger.setLevel(logging.NOTSET)
            logger.propagate, logger.disabled = True, False


def empty(module: ModuleType) -> None:
    """Drop a module's objects in the order of the interpreter: names with an underscore first."""
    names = [name for name in vars(module) if name != "__builtins__"]
    for private in (True, False):
        for name in names:
            if (name.startswith("_") and not name.startswith("__")) == private:
                vars(module)[name] = None


def end_children() -> None:
    """Kill the processes that this one has started, as workers of data loaders; the spawner ends what they leave.

    They are left to be reaped by those who have started them.
    """
    deadline = time.monotonic() + _ENDS_WITHIN_S
    left = _children()
    while left and time.monotonic() < deadline:
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.002)
        left = _children()


def _children() -> list[int]:
    """Return the children of this process that run, but for the one that keeps shared memory of libraries."""
    found = []
    with contextlib.suppress(OSError):
        for thread in os.listdir("/proc/self/task"):  # noqa: PTH208
            with contextlib.suppress(OSError):
                found += _read(f"/proc/self/task/{thread}/children").split()
    return [int(word) for word in found if _is_to_end(word.decode())]


def _is_to_end(pid: str) -> bool:
    try:
        is_zombie = _read(f"/proc/{pid}/stat").rpartition(b")")[2].split()[0] == b"Z"
        return not is_zombie and b"multiprocessing.resource_tracker" not in _read(f"/proc/{pid}/cmdline")
    except OSError:
        return False


def _read(path: str) -> bytes:
    with open(path, "rb") as file:  # noqa: PTH123 (pathlib costs every rank an import)
        return file.read()


def shut_connections() -> None:
    """End all TCP connections of this process, so that what waits for a peer in native code does not any more."""
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
            with contextlib.suppress(OSError):
                if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                    continue
                with contextlib.closing(socket.socket(fileno=os.dup(int(name)))) as one:
                    if one.family in (socket.AF_INET, socket.AF_INET6) and one.type == socket.SOCK_STREAM:
                        one.getpeername()  # raises for one that listens: gloo ends the process when that fails
                        one.shutdown(socket.SHUT_RDWR)


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
            empty(module)
    gc.collect()
    flush_streams()
    os._exit(int(code or 0) & 0xFF)


def flush_streams() -> None:
    """Write out what stands in the buffers of the standard streams, as far as they still take it."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (AttributeError, ValueError, OSError):
            continue  # replaced by something else, closed, or a pipe without a reader
