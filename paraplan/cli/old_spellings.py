"""Options that have become commands of their own; they go on working for one version, with a note."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from paraplan.cli.terminal import show_note
from paraplan.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class OldCheckOptions:
    """`paraplan verify` as it was spelled before."""

    check: Annotated[Path | None, typer.Option("--check", hidden=True)] = None
    tolerance: Annotated[str | None, typer.Option("--tolerance", hidden=True)] = None
    github: Annotated[bool, typer.Option("--github", hidden=True)] = False
    junit: Annotated[Path | None, typer.Option("--junit", hidden=True)] = None

    def require(self, *files: Path | None) -> None:
        """Raise `UsageError` for what only a check takes, or does not write; say how a check is spelled now."""
        given = {"--tolerance": self.tolerance, "--github": self.github or None, "--junit": self.junit}
        named = " and ".join(name for name, value in given.items() if value is not None)
        if self.check is None and named:
            raise UsageError(f"{named} reports checks, and there are none", hint="use paraplan verify PLAN")
        if self.check is not None:
            if any(file is not None for file in files):
                raise UsageError("a check writes no plan, report or trace", hint="leave out -o, --html and --trace")
            show_note(f"recommend --check is now: paraplan verify {self.check}")


@dataclass(frozen=True, kw_only=True)
class OldImportOptions:
    """`paraplan import` as it was spelled before."""

    from_deepspeed: Annotated[Path | None, typer.Option("--from-deepspeed", hidden=True)] = None
    from_accelerate: Annotated[Path | None, typer.Option("--from-accelerate", hidden=True)] = None
    from_megatron: Annotated[str | None, typer.Option("--from-megatron", hidden=True)] = None

    @property
    def is_given(self) -> bool:
        """True where a configuration is named."""
        return any(value is not None for value in vars(self).values())
