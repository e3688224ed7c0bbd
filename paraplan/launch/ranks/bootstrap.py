"""The code around a rank's script: it runs the script as `python script` would and records how it failed.

Standard library only, and importable alone: with `--start-method exec` the interpreter of a rank runs this file itself,
and that interpreter (PYTHON_EXEC) may have no paraplan. A forked rank calls `run_command` of the imported module.
A failure is written to TORCHELASTIC_ERROR_FILE in torchrun's format, with the time in nanoseconds added.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from types import ModuleType, TracebackType
from typing import Any, NoReturn

STACK_FILE = "stacks.txt"
"""Name of the file beside the error file that gets the stacks of all threads when the launcher asks for them."""

STACK_SIGNAL = 63 if sys.platform == "linux" else 0
"""Asks a rank for its stacks: SIGRTMAX - 1, for which scripts have no use; 0 where a system has none."""

CALLS_FILE = "collectives.json"
"""Name of the file beside the error file with the collectives that a rank made last, as torch's flight recorder has."""

CALLS_REQUEST = "collectives.ask"
"""Name of the pipe beside the error file through which the launcher asks for `CALLS_FILE`."""

WATCHED_VARIABLE = "PARAPLAN_HANG_TIMEOUT"
"""Environment variable of ranks that are watched for a hang: they have a thread that answers such requests."""

PLAN_READ_VARIABLE = "PARAPLAN_PLAN_READ"
"""Names the file that a rank makes once it has taken its plan; `paraplan.runtime` makes it too."""

_MAX_CALLS = 200
_OWN_FOLDER = os.path.normpath(f"{os.path.dirname(os.path.abspath(__file__))}/..") + os.sep  # noqa: PTH100, PTH120

MARKS_VARIABLE = "PARAPLAN_STEP_MARKS"
"""Environment variable of ranks that note the times of their steps, see `step_marks`: the module whose import says that
the script is one whose steps are noted."""

GUARD_VARIABLE = "PARAPLAN_GUARD"
"""Environment variable of ranks that sum what ranks hold alike, see `replica_sums`: every how many steps."""

STAND_BY = "--stand-by"
"""First argument of a process that waits for a place; the others are the descriptor where, and modules to import."""

FAULT_FILE = "fault.txt"
"""Name of the file beside the error file that gets the Python stacks of a crash (SIGSEGV, SIGABRT, ...)."""


class FailureRecorder:
    """Writes how this process failed, once, to `error_file`; None writes nothing. Forked children write nothing."""

    def __init__(self, error_file: str | None) -> None:
        self.error_file = error_file
        self._pid = os.getpid()

    def record(
        self, error: BaseException, traceback: TracebackType | None, *, exit_code: int, in_thread: bool = False
    ) -> bool:
        """Write `error`; say whether it was written. A record of `@record` is kept and gets the time added.

        A thread's error may be harmless: it is overwritten by an error of the main thread, and never the other way.
        """
        if not self.error_file or os.getpid() != self._pid:
            return False
        import json  # not at the top: only a failing rank pays for it

        now_ns = time.time_ns()
        extra: dict[str, Any] = {
            "timestamp": str(now_ns // 10**9),
            "timestamp_ns": str(now_ns),
            "exit_code": str(exit_code),
            "exception_type": type(error).__name__,
            "in_thread": in_thread,
        }
        try:
            earlier = self._earlier_record()
            if earlier is not None and in_thread:
                return False
            if earlier is not None and not earlier["message"]["extraInfo"].get("in_thread", False):
                earlier["message"]["extraInfo"] = extra | earlier["message"]["extraInfo"]
                record = earlier
            else:
                record = {"message": {"message": _headline(error), "extraInfo": extra | _details(error, traceback)}}
            partial = f"{self.error_file}.{self._pid}"
            with open(partial, "w") as file:  # noqa: PTH123 (pathlib costs every rank an import)
                json.dump(record, file)
            os.replace(partial, self.error_file)  # noqa: PTH105
        except OSError:  # a full disk must not replace the error of the script
            return False
        if not in_thread:
            note_collectives(os.path.dirname(self.error_file))  # noqa: PTH120
        return True

    def _earlier_record(self) -> dict[str, Any] | None:
        import json

        try:
            with open(str(self.error_file)) as file:  # noqa: PTH123
                earlier = json.load(file)
            is_torchs = isinstance(earlier["message"]["extraInfo"], dict)
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return earlier if is_torchs else None


def _headline(error: BaseException) -> str:
    try:
        text = str(error)
    except Exception:  # the __str__ of the script's own exception may raise anything
        text = "<its text cannot be made>"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _details(error: BaseException, traceback: TracebackType | None) -> dict[str, str]:
    from traceback import format_exception

    details = {"py_callstack": "".join(format_exception(type(error), error, traceback))}
    if _is_user_error(error):
        details["user_message"] = str(getattr(error, "message", error))
        details["user_hint"] = str(getattr(error, "hint", None) or "")
    step = _step_of(traceback)
    if step is not None:
        details["step"] = str(step)
    if isinstance(error, SystemExit):
        details["exit_message"] = "" if isinstance(error.code, int) else str(error.code)
    return details


def _step_of(traceback: TracebackType | None) -> int | None:
    """Return the step in which an engine of paraplan.runtime was; None where there is none in the traceback."""
    engines = sys.modules.get("paraplan.runtime.engine")
    while engines is not None and traceback is not None:
        for value in list(traceback.tb_frame.f_locals.values()):
            if isinstance(value, engines.Engine):
                return int(value.num_steps) + 1
        traceback = traceback.tb_next
    return None


def _is_user_error(error: BaseException) -> bool:
    errors = sys.modules.get("paraplan.errors")
    return errors is not None and isinstance(error, errors.ParaplanError)


def watch_process(recorder: FailureRecorder) -> None:
    """Record errors of threads, note the times of steps, and write the stacks of a crash beside the error file."""
    import faulthandler

    previous = threading.excepthook

    def record_thread(failure: threading.ExceptHookArgs) -> None:
        if failure.exc_value is not None and failure.exc_type is not SystemExit:
            traceback = _without_own_frames(failure.exc_value)
            recorder.record(failure.exc_value, traceback, exit_code=1, in_thread=True)
        previous(failure)

    threading.excepthook = record_thread
    if recorder.error_file:
        folder = os.path.dirname(recorder.error_file)  # noqa: PTH120
        faulthandler.enable(file=_open_to_append(folder, FAULT_FILE), all_threads=True)
        if STACK_SIGNAL:
            stack_file = os.path.join(folder, STACK_FILE)  # noqa: PTH118
            stacks = _open_to_append(folder, f"{STACK_FILE}.new")
            faulthandler.register(STACK_SIGNAL, file=stacks, all_threads=True, chain=False)
            os.replace(f"{stack_file}.new", stack_file)  # noqa: PTH105 (that it is there says that a signal may come)
        if WATCHED_VARIABLE in os.environ:
            threading.Thread(target=_answer_requests, args=(folder,), daemon=True, name="paraplan").start()
        if MARKS_VARIABLE in os.environ:
            hooks = module_beside("../torch_private/step_hooks.py")
            hooks.after_import(os.environ[MARKS_VARIABLE], lambda: _mark_steps(folder, hooks))
        if GUARD_VARIABLE in os.environ:
            module_beside("../torch_private/step_hooks.py").after_import("torch", lambda: _guard(folder))


def _mark_steps(folder: str, hooks: Any) -> None:
    with suppress(Exception):  # a disk that is full, another system or torch: the script runs all the same
        steps = module_beside("step_marks.py")
        path = os.path.join(folder, steps.MARKS_FILE)  # noqa: PTH118
        marks = steps.StepMarks(path, load_profiling=lambda: module_beside("../torch_private/profiling.py"))
        try:
            hooks.mark_steps(marks)
        except Exception:
            marks.is_on = False


def _guard(folder: str) -> None:
    replicas = module_beside("../torch_private/replicas.py")
    module_beside("replica_sums.py").ReplicaSums(folder, int(os.environ[GUARD_VARIABLE]), replicas).start()


def module_beside(name: str) -> Any:
    """Return a module of this package, which an interpreter that runs this file alone may not have."""
    from importlib.util import module_from_spec, spec_from_file_location

    path = os.path.normpath(os.path.join(os.path.dirname(os.path.abspath(__file__)), name))  # noqa: PTH100, PTH118, PTH120
    spec: Any = spec_from_file_location(f"paraplan_{os.path.basename(name)[:-3]}", path)  # noqa: PTH119
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def note_collectives(folder: str) -> None:
    """Write which collectives this process has made last, where torch has recorded them, into `folder`."""
    c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
    if c10d is None or not c10d.is_initialized():
        return
    import json

    native: Any = sys.modules["torch._C._distributed_c10d"]
    try:
        entries: dict[str, Any] = {}
        for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
            dump = getattr(native, name, None)
            found = json.loads(dump(True, False)).get("entries") or [] if dump is not None else []
            entries |= {f"{entry['process_group']} {entry['record_id']}": entry for entry in found}
        groups = {name: c10d.get_process_group_ranks(group) for group, name in c10d._world.pg_names.items()}
        path = os.path.join(folder, CALLS_FILE)  # noqa: PTH118
        with open(f"{path}.new", "w") as file:  # noqa: PTH123
            json.dump({"entries": list(entries.values())[-_MAX_CALLS:], "groups": groups}, file)
        os.replace(f"{path}.new", path)  # noqa: PTH105
    except Exception:  # another torch may record otherwise, and the script's own error must not be replaced by this one
        return


def _answer_requests(folder: str) -> None:
    """Note the collectives whenever the launcher opens the pipe, also while the main thread waits for one."""
    path = os.path.join(folder, CALLS_REQUEST)  # noqa: PTH118
    try:
        os.mkfifo(path)
        while True:
            with open(path, "rb") as request:  # noqa: PTH123
                request.read()
            note_collectives(folder)
    except OSError:  # a folder that takes no pipes, or is gone
        return


def _open_to_append(folder: str, name: str) -> int:
    path = os.path.join(folder, name)  # noqa: PTH118
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)


def run_command(command: Sequence[str]) -> NoReturn:
    """Run `python -u [-m] NAME ARGUMENTS...` as the `__main__` of this process, then end it as Python would.

    Uncaught errors are recorded and printed without the frames of this file; a `ParaplanError` is left to the
    launcher, which prints its message and hint once for all ranks.
    """
    recorder = FailureRecorder(os.environ.get("TORCHELASTIC_ERROR_FILE"))
    watch_process(recorder)
    main = ModuleType("__main__")
    main.__dict__.update(__annotations__={}, __builtins__=sys.modules["builtins"], __cached__=None)
    # dropped, its globals would be cleared under us
    sys.modules.setdefault("paraplan_rank_bootstrap", sys.modules["__main__"])
    sys.modules["__main__"] = main
    try:
        _run_as_main([*command[1:]], main)
    except SystemExit as error:
        _note_accelerate()
        if error.code not in (None, 0):
            code = error.code if isinstance(error.code, int) else 1
            recorder.record(error, _without_own_frames(error), exit_code=code & 0xFF)
        raise
    except KeyboardInterrupt as error:
        traceback, show = _without_own_frames(error), sys.excepthook
        recorder.record(error, traceback, exit_code=130)
        sys.excepthook = lambda kind, value, _: show(kind, value.with_traceback(traceback), traceback)
        raise  # the interpreter prints it, and ends by SIGINT itself
    except BaseException as error:  # this frame stands where the interpreter's own handler stands
        sys.exit(_show_uncaught(error, recorder))
    _note_accelerate()
    sys.exit(0)


def _note_accelerate() -> None:
    """Say that this rank has taken its plan, if the script has used accelerate, which takes it from variables."""
    name = os.environ.get(PLAN_READ_VARIABLE)
    state = getattr(sys.modules.get("accelerate.state"), "PartialState", None)
    if name and getattr(state, "_shared_state", None):
        with suppress(OSError):
            open(name, "a").close()  # noqa: PTH123 (what is not imported yet stays so)


def _show_uncaught(error: BaseException, recorder: FailureRecorder) -> int:
    traceback = _without_own_frames(error)
    is_user_error = _is_user_error(error)
    exit_code = int(getattr(error, "exit_status", 1)) if is_user_error else 1
    recorded = recorder.record(error, traceback, exit_code=exit_code)
    if not (is_user_error and recorded):
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, traceback
        sys.excepthook(type(error), error.with_traceback(traceback), traceback)
    return exit_code


def _without_own_frames(error: BaseException) -> TracebackType | None:
    """Take the launcher's frames out of the tracebacks of `error` and of its causes; return the one of `error`."""
    rest: list[BaseException | None] = [error]
    seen = set[int]()
    while rest:
        one = rest.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            one.__traceback__ = frame = _first_of_others(one.__traceback__)
            while frame is not None:
                frame.tb_next = later = _first_of_others(frame.tb_next)
                frame = later
            rest += [one.__cause__, one.__context__, *getattr(one, "exceptions", ())]
    return error.__traceback__


def _first_of_others(traceback: TracebackType | None) -> TracebackType | None:
    while traceback is not None and traceback.tb_frame.f_code.co_filename.startswith(_OWN_FOLDER):
        traceback = traceback.tb_next
    return traceback


def _run_as_main(words: list[str], main: ModuleType) -> None:
    """Run `[-u] [-m] NAME ARGUMENTS...`, the words that an interpreter gets."""
    import runpy
    from importlib.machinery import SourceFileLoader, SourcelessFileLoader

    options = set()
    while words[0] in ("-u", "-m"):
        options.add(words.pop(0))
    if "-m" in options:
        _enter(["-m", *words[1:]], os.getcwd())  # noqa: PTH109
        runpy._run_module_as_main(words[0])  # type: ignore[attr-defined]  # what `python -m` itself calls
        return
    path = os.path.join(os.getcwd(), words[0])  # noqa: PTH109, PTH118 (as the interpreter, not normalised)
    if os.path.isdir(path) or _is_archive(path):  # noqa: PTH112
        _enter(words, path)
        runpy._run_module_as_main("__main__", alter_argv=False)  # type: ignore[attr-defined]
        return
    _enter(words, os.path.dirname(os.path.realpath(path)))  # noqa: PTH120
    loader: Any = (SourcelessFileLoader if path.endswith(".pyc") else SourceFileLoader)("__main__", path)
    main.__dict__.update(__file__=path, __loader__=loader)
    if path.endswith(".pyc"):
        code = loader.get_code("__main__")
    else:
        with open(path, "rb") as file:  # noqa: PTH123
            code = compile(file.read(), path, "exec", dont_inherit=True)
    exec(code, main.__dict__)  # noqa: S102 (to run the user's script is this file's purpose)


def _enter(arguments: list[str], first_path: str) -> None:
    sys.argv[:] = arguments
    if not getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, first_path)


def _is_archive(path: str) -> bool:
    if not os.path.isfile(path):  # noqa: PTH113 (a pipe, as /dev/stdin, can be read once)
        return False
    with open(path, "rb") as file:  # noqa: PTH123
        if file.read(2) == b"PK":
            from zipfile import is_zipfile

            return is_zipfile(path)
    return False


def with_bootstrap(command: tuple[str, ...]) -> tuple[str, ...]:
    """Return an interpreter's command with this file before the script: `python -u bootstrap.py train.py ...`."""
    index = command.index("-u") + 1 if "-u" in command else 1
    return (*command[:index], __file__, *command[index:])


def main() -> NoReturn:
    """Run `bootstrap.py [-m] NAME ARGUMENTS...` in a rank with an interpreter of its own.

    `bootstrap.py --stand-by DESCRIPTOR MODULES...` imports these, and waits there for what to run.
    """
    own_folder = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120
    if sys.path and sys.path[0] == own_folder:
        del sys.path[0]
    sys.orig_argv[:] = [argument for argument in sys.orig_argv if argument != __file__]
    command = sys.argv[1:]
    if command[0] == STAND_BY:
        import socket

        start = module_beside("spares.py").stand_by(socket.socket(fileno=int(command[1])), command[2:])
        os.environ.clear()
        os.environ.update(start["environment"])
        command = [word for word in start["command"][1:] if word != __file__]
    run_command(["python", *command])


if __name__ == "__main__":
    main()
