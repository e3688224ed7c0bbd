"""Launches in a process that is forked with torch imported: for tests of what a launch says, not of how it starts.

Each Python that a launch starts imports torch for seconds. Tests of processes, streams and signals start real ones.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

from rank_harness import RankHarness


@dataclass(frozen=True)
class Ended:
    """How a launch ended, and what it wrote."""

    returncode: int
    stdout: str
    stderr: str


def launch_forked(ranks: RankHarness, folder: Path, *words: str, environment: Mapping[str, str] | None = None) -> Ended:
    """Return how `paraplan launch` of `words` ends, run in `folder`; ranks of `--fake` are forked too."""
    status = ranks.run_alone(_launch, str(folder), words, dict(environment or {}), is_fresh=True)
    stdout, stderr = (folder / "said" / name for name in ("stdout", "stderr"))
    return Ended(status, stdout.read_text(), stderr.read_text())


def run_program_forked(ranks: RankHarness, program: Path, *, environment: Mapping[str, str]) -> Ended:
    """Return how `python PROGRAM` ends in its folder, with this environment, where the program ends well."""
    ranks.run_alone(_run_program, str(program), dict(environment), is_fresh=True)
    stdout, stderr = (program.parent / "said" / name for name in ("stdout", "stderr"))
    return Ended(0, stdout.read_text(), stderr.read_text())


def _run_program(program: str, environment: Mapping[str, str]) -> None:
    os.environ.clear()
    tempfile.tempdir = None  # it is looked up anew: the folder is another one here
    _be_program(str(Path(program).parent), [program], environment)
    sys.path.insert(0, str(Path(program).parent))
    runpy.run_path(program, run_name="__main__")
    sys.stdout.flush()
    sys.stderr.flush()


def _launch(folder: str, words: Sequence[str], environment: Mapping[str, str]) -> int:
    _be_program(folder, ["paraplan", *words], environment)
    try:
        return launch_words(words)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def _be_program(folder: str, argv: Sequence[str], environment: Mapping[str, str]) -> None:
    """Be a program of these words, whose streams are files in the folder `said`."""
    os.environ.update(environment)
    os.chdir(folder)
    multiprocessing.current_process().daemon = False  # ranks may have children: workers of data loaders,
    multiprocessing.set_start_method(None, force=True)  # started as in a Python of their own,
    vars(resource_tracker._resource_tracker).update(_fd=None, _pid=None)  # with what counts semaphores there
    sys.argv = [*argv]  # as the launcher sees its own, which it keeps
    said = Path("said")
    said.mkdir(exist_ok=True)
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(said / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), number)


def launch_words(words: Sequence[str]) -> int:
    """Launch as `words` say in this process; ranks of `--fake` are forked from it too. Return the exit status."""
    from paraplan.launch.command import launch_here

    return _launch_fake(words) if "--fake" in words else launch_here([*words])


def _launch_fake(words: Sequence[str]) -> int:
    from paraplan.errors import ParaplanError
    from paraplan.launch.fake.ranks import show_fake_launch
    from paraplan.launch.faults.report import render_error, write_report
    from paraplan.launch.parser import parse_arguments

    try:
        return show_fake_launch(parse_arguments([*words], os.environ), run=_run_forked)
    except ParaplanError as error:
        write_report(render_error(error))
        return error.exit_status


def _run_forked(command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """Be for a fake launch what starts its ranks, and plans for them: a fork in place of a new Python."""
    from paraplan.runtime.fake import script

    if script.__name__ not in command:
        return run_forked(command, **options)
    words, environment = command[command.index(script.__name__) + 1 :], options["env"]
    process = os.fork()
    if not process:
        status = 1
        try:
            os.environ.clear()
            os.environ.update(environment)
            status = script.main([*words])
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    _, status = os.waitpid(process, 0)
    return subprocess.CompletedProcess([*words], os.waitstatus_to_exitcode(status), "", "")


def run_forked(
    command: Sequence[str],
    *,
    env: Mapping[str, str],
    **options: Any,
) -> subprocess.CompletedProcess[str]:
    """Be `subprocess.run` for `python -P -m MODULE WORDS` and `python SCRIPT WORDS`, which run in a fork."""
    _, *words = command
    is_module = words[:2] == ["-P", "-m"]
    name, *words = words[2:] if is_module else words
    with (
        tempfile.TemporaryFile("w+") as asked,
        tempfile.TemporaryFile("w+") as said,
        tempfile.TemporaryFile("w+") as told,
    ):
        asked.write(options.get("input", ""))
        asked.flush()
        process = os.fork()
        if not process:
            status = 1
            try:
                os.environ.clear()
                os.environ.update(env)
                os.lseek(asked.fileno(), 0, os.SEEK_SET)
                for number, file in enumerate((asked, said, told)):
                    os.dup2(file.fileno(), number)
                sys.stdin, sys.argv = os.fdopen(0), [name, *words]
                if is_module:
                    runpy.run_module(name, run_name="__main__")
                else:
                    sys.path.insert(0, str(Path(name).parent))
                    runpy.run_path(name, run_name="__main__")
                status = 0
            except SystemExit as end:
                status = int(end.code or 0)
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
        _, status = os.waitpid(process, 0)
        said.seek(0)
        told.seek(0)
        return subprocess.CompletedProcess([*command], os.waitstatus_to_exitcode(status), said.read(), told.read())
