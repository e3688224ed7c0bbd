"""The error of a command line that cannot be used, apart from the parser because that imports torch."""

from __future__ import annotations

from paraplan.errors import UsageError


class ArgumentError(UsageError, ValueError):
    """An argument that cannot be used. A ValueError too: callers of torchrun's API expect one."""
