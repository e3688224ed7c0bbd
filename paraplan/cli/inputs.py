"""From the values of options to the records that the public API takes."""

from __future__ import annotations

import os
from pathlib import Path

import typer

from paraplan.errors import UsageError


def options_given(ctx: typer.Context) -> frozenset[str]:
    """Return the names of the parameters that the command line gave, those left at their defaults not."""
    sources = {name: ctx.get_parameter_source(name) for name in ctx.params}
    return frozenset(name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE")


def require_folder(*paths: Path | None) -> None:
    """Raise `UsageError` where a path that is to be written later is in no folder, or is one: before long work."""
    for path in paths:
        if path is not None and (path.is_dir() or not path.parent.is_dir()):
            reason = "it is a folder" if path.is_dir() else "there is no such folder"
            raise UsageError(f"cannot write {path}: {reason}", hint="choose a folder that exists and is yours")


def write_beside_and_rename(path: Path, text: str | bytes) -> None:
    """Write a whole file or nothing; raise `UsageError` where the path cannot be written."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        beside.write_bytes(text.encode(errors="replace") if isinstance(text, str) else text)
        beside.replace(path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise UsageError(
            f"cannot write {path}: {error.strerror}", hint="choose a folder that exists and is yours"
        ) from None
