"""What the readers of exported files share: finding tools, and what scripts of a shell say."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

Says = dict[str, object]
"""What a tool understood, in the words of a plan."""


class MissingError(Exception):
    """A package that is not there, which one file or all of them need."""


def is_there(name: str) -> bool:
    """Return whether a module is there, without importing what holds it; `program:NAME` asks for a program."""
    if name.startswith("program:"):
        return find_program(name.removeprefix("program:")) is not None
    top, *inner = name.split(".")
    found = importlib.util.find_spec(top)
    if found is None or not inner:
        return found is not None
    folders = found.submodule_search_locations or []
    places = [Path(folder, *inner) for folder in folders]
    return any(place.is_dir() or place.with_suffix(".py").exists() for place in places)


def find_program(name: str) -> str | None:
    """Return the path of a program beside the interpreter or on PATH, None where there is none."""
    return shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)


def module(name: str) -> Any:
    """Return a module of a tool. Raises `MissingError` where one that it needs in turn is not there."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingError(f"{name} cannot be imported: {error}") from None


def versions(*packages: str) -> Callable[[], str]:
    """Return a function that names packages with their versions, and checkouts, which have none, as such."""
    return lambda: ", ".join(f"{package} {_version(package)}" for package in packages)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "(a checkout)"


@contextmanager
def words_for(path: Path, program: str) -> Iterator[tuple[list[str], dict[str, str]]]:
    """Yield the words and the environment that a script gives to `program`, as bash understands them."""
    with tempfile.TemporaryDirectory() as folder:
        stand_in = Path(folder, program)
        stand_in.write_text(
            f"#!{sys.executable}\nimport json, os, sys\nprint(json.dumps([sys.argv[1:], dict(os.environ)]))\n"
        )
        stand_in.chmod(0o755)
        environment = os.environ | {"PATH": f"{folder}:{os.environ['PATH']}"}
        shell = find_program("bash") or "bash"
        finished = subprocess.run([shell, str(path)], capture_output=True, text=True, check=True, env=environment)
        words, seen = json.loads(finished.stdout)
        yield words, seen


def shellcheck(path: Path) -> None:
    """Raise ValueError with what ShellCheck finds in a script."""
    checker = find_program("shellcheck") or "shellcheck"
    finished = subprocess.run([checker, str(path)], capture_output=True, text=True, check=False)
    if finished.returncode:
        raise ValueError(finished.stdout)


def shellcheck_version() -> str:
    """Return ShellCheck's name and version."""
    checker = find_program("shellcheck") or "shellcheck"
    shown = subprocess.run([checker, "--version"], capture_output=True, text=True, check=True).stdout
    return "ShellCheck " + next(line.split()[-1] for line in shown.splitlines() if line.startswith("version:"))
