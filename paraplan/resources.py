"""Where the bundled data lies: `profiles/` in a wheel, in an editable install and in a checkout."""

from __future__ import annotations

import importlib.resources
from functools import cache
from pathlib import Path

from paraplan.errors import ParaplanError


@cache
def profiles_folder() -> Path:
    """Return the folder that holds `gpus`, `machines`, `models` and `networks`.

    A wheel carries it inside the package; an editable install and a checkout keep it beside the package.
    Raises ParaplanError where neither is there (a damaged installation).
    """
    package = Path(str(importlib.resources.files("paraplan")))
    for candidate in (package / "profiles", package.parent / "profiles"):
        if candidate.is_dir():
            return candidate
    raise ParaplanError(
        f"the bundled profiles are neither in {package} nor beside it",
        hint="install paraplan again: pip install . in a clone of its repository",
    )
