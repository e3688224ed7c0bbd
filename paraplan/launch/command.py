"""The command `paraplan launch`: from the words of the command line to an exit status."""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.util
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from paraplan.errors import ParaplanError
from paraplan.launch import script
from paraplan.launch.faults.report import render_error, say, write_report
from paraplan.launch.nodes.batch_systems import find_place, take_place
from paraplan.launch.parser import parse_arguments
from paraplan.launch.ranks.limits import threads_per_rank, usable_cores
from paraplan.launch.ranks.spawner import RankStart
from paraplan.launch.request import check_script, forks_ranks, likely_ranks_per_node
from paraplan.launch.script import ScriptTraits, own_interpreters_reason, read_traits, shadowed_modules
from paraplan.launch.spec import END_WITH_STDIN, ArgumentError, LaunchSpec
from paraplan.launch.torch_private.texts import IMPORTED_BY_FIRST_STEP

if TYPE_CHECKING:  # torch is imported by none of these names before its number of threads is known
    from paraplan.launch.ranks.spawning import SpawnerHandle

_THREADS_VARIABLE = "OMP_NUM_THREADS"


def launch_here(arguments: Sequence[str]) -> int:
    """Launch as `arguments` say and return the exit status of the job. Ranks never return from here."""
    launcher = os.getpid()
    _open_closed_streams()
    try:
        return _launch(arguments)
    except KeyboardInterrupt:  # while torch is imported, or nodes are waited for: no handler of torch's is there yet
        if os.getpid() != launcher:
            raise  # the script's own, in a rank
        say("SIGINT ended the launch; no rank runs")
        return 128 + signal.SIGINT
    except ParaplanError as error:
        write_report(render_error(error))
        return error.exit_status
    except Exception:
        if os.getpid() != launcher:
            raise  # of a rank
        import traceback  # for errors alone

        write_report(traceback.format_exc())
        say("this is an error of the launcher itself; please report it with the lines above")
        return 1


def _open_closed_streams() -> None:
    """Open the null device for standard streams that the caller has closed: no file of ours is to take their numbers.

    Ranks then write to it too, where torchrun's have None for such a stream.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest number that is free
            vars(sys)[name] = vars(sys)[f"__{name}__"] = os.fdopen(number, "w" if number else "r", closefd=False)


def _launch(arguments: Sequence[str]) -> int:
    _require_folder()
    gc.disable()  # next to all that the imports make stays: collections would look through it again and again
    ends_with_stdin = os.environ.pop(END_WITH_STDIN, None) is not None
    if ends_with_stdin:
        from paraplan.launch.nodes.hosts import take_variables

        take_variables(os.environ)
    spec = parse_arguments(list(arguments), os.environ)
    if spec.fake is not None:
        from paraplan.launch.fake.ranks import show_fake_launch  # imports pydantic, which other launches do without

        return show_fake_launch(spec)
    if spec.hostfile is not None and not ends_with_stdin and not spec.dry_run:
        from paraplan.launch.nodes.hosts import launch_on_hosts

        return launch_on_hosts(Path(spec.hostfile), words=arguments, port=spec.master_port, environment=os.environ)
    place = find_place(os.environ)
    spec, line = take_place(spec, place, os.environ) if place is not None else (spec, None)
    if spec.dry_run:
        from paraplan.launch.dry_run import show_dry_run  # imports pydantic too

        return show_dry_run(spec)
    _refuse_preview_options(spec)
    check_script(spec, Path.cwd())  # what is wrong with the script can be said before torch is imported
    return _start(spec, line, ends_with_stdin=ends_with_stdin)


def _require_folder() -> None:
    try:
        Path.cwd()
    except OSError as error:
        raise ArgumentError(
            f"the current folder cannot be used: {(error.strerror or str(error)).lower()}",
            hint="it was removed, perhaps: change to one that is there",
        ) from None


def _start(spec: LaunchSpec, line: str | None, *, ends_with_stdin: bool) -> int:
    """Fork the spawner and run the job; say `line` before it."""
    file = script.script_file(spec.training_script, is_module=spec.module)
    traits = read_traits(file, folder=Path.cwd() if spec.module else None)
    own = own_interpreters_reason(traits, os.environ) if forks_ranks(spec) else None
    fork = forks_ranks(spec) and own is None
    with_torch = fork and not traits.is_self_contained
    shadowed = shadowed_modules(traits.folder, sys.modules)
    spawner = None if with_torch else _fork()  # without torch in it: it, and what it forks, stay small
    if isinstance(spawner, RankStart):
        _run_rank(spawner)
    is_chosen = _choose_import_threads(spec)
    imported_threads = os.environ.get(_THREADS_VARIABLE)
    try:
        from paraplan.launch.job import supervise  # imports torch
    except KeyboardInterrupt:
        if spawner is not None:
            spawner.close()
        raise
    if is_chosen:
        del os.environ[_THREADS_VARIABLE]
    if spawner is None:
        shadowed = shadowed_modules(traits.folder, sys.modules)
        spawner = _fork(preload=_imported_by_ranks(spec, traits))
    if isinstance(spawner, RankStart):
        _run_rank(spawner)
    if fork and shadowed:
        own = f"{', '.join(shadowed)} beside the script has the name of a module that is imported already"
    gc.enable()
    if line is not None:
        say(line)
    if own is not None:
        say(f"each rank starts an interpreter of its own (--start-method exec): {own}")
    if ends_with_stdin:
        from paraplan.launch.nodes.hosts import end_with_stdin

        end_with_stdin()
    return supervise(spec, spawner, fork=fork and not shadowed, imported_threads=imported_threads)


def _refuse_preview_options(spec: LaunchSpec) -> None:
    """Raise `ArgumentError` for options that a launch of real ranks would leave out in silence."""
    if spec.fake_rank is not None:
        raise ArgumentError(f"--fake-rank {spec.fake_rank} without --fake", hint="add --fake and the number of ranks")
    for option, is_given in (("--json", spec.json), ("--profile", spec.profile and spec.model is None)):
        if is_given:
            raise ArgumentError(
                f"{option} changes nothing without --dry-run or --fake",
                hint="add one of them; options of the script come after the script",
            )


def _choose_import_threads(spec: LaunchSpec) -> bool:
    """Set OMP_NUM_THREADS for the import of torch as ranks will have it; return whether it was set here."""
    ranks = likely_ranks_per_node(spec)
    if _THREADS_VARIABLE in os.environ or ranks is None or ranks < 2:
        return False
    os.environ[_THREADS_VARIABLE] = str(threads_per_rank(num_cores=usable_cores(), ranks_per_node=ranks))
    return True


def _imported_by_ranks(spec: LaunchSpec, traits: ScriptTraits) -> list[str]:
    """Return the modules that ranks import first: the runtime, and those that a module of this package asks for."""
    names = ["paraplan.runtime.job_start"] if traits.uses_runtime or spec.plan else []
    if spec.module and spec.training_script.startswith("paraplan."):
        found = importlib.util.find_spec(spec.training_script)
        if found is not None and found.origin is not None:
            names += [*script.imported_names(Path(found.origin)), IMPORTED_BY_FIRST_STEP]
    return names


def _fork(*, preload: Sequence[str] = ()) -> SpawnerHandle | RankStart:
    from paraplan.launch.ranks.spawning import fork_spawner

    for name in preload:  # once here, where every rank would pay for it
        with contextlib.suppress(ImportError):  # a name that is none of a module; others the rank says
            importlib.import_module(name)
    gc.freeze()  # a collection in a rank would touch, and so copy, every page that the fork shares
    return fork_spawner()


def _run_rank(start: RankStart) -> NoReturn:
    from paraplan.launch.ranks import bootstrap
    from paraplan.launch.ranks.forked import enter_rank, leave_process

    inherited = frozenset(sys.modules)
    if start.place is not None:
        from paraplan.launch.ranks.spares import stand_by

        given = stand_by(start.place, start.modules)
        start = RankStart(tuple(given["command"]), given["environment"], given["num_threads"])
    enter_rank(start)
    try:
        bootstrap.run_command(start.command)
    except SystemExit as end:
        code = end.code
    leave_process(code, inherited_modules=inherited)
