"""Where the bundled files lie in a wheel, in an editable install and in a checkout."""

from __future__ import annotations

import importlib.resources
from functools import cache
from pathlib import Path

from paraplan.errors import ParaplanError


@cache
def profiles_folder() -> Path:
    """Return the folder that holds `gpus`, `machines`, `models` and `networks`; raise as `bundled` does."""
    return bundled("profiles", "profiles")


def bundled(in_package: str, in_checkout: str) -> Path:
    """Return a file or folder that a wheel carries in the package, and a checkout keeps beside it.

    Raises `ParaplanError` where neither is there: a damaged installation.
    """
    package = Path(str(importlib.resources.files("paraplan")))
    for candidate in (package / in_package, package.parent / in_checkout):
        if candidate.exists():
            return candidate
    raise ParaplanError(
        f"the bundled {in_package} is neither in {package} nor beside it",
        hint="install paraplan again: pip install . in a clone of its repository",
    )
