"""Models as commands name them, with a note where another release's configuration stands for one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paraplan.api.models import ModelSpec, load_model, stands_for
from paraplan.cli.terminal import show_note
from paraplan.errors import ModelError


def load_shown(reference: str, **options: Any) -> ModelSpec:
    """Return `api.models.load_model`, and say on stderr whose configuration was read where it is another release's."""
    model = load_model(reference, **options)
    bundled = stands_for(reference)
    if bundled is not None:
        show_note(f"{reference}: read as {bundled}, which is bundled and has the same layers")
    return model


def known_model(name: str | None) -> str | None:
    """Return the reference by which the model that a configuration names can be read here, None for none.

    A folder that is not on this machine is known by its name.
    """
    if name is None or "$" in name:
        return None
    for reference in dict.fromkeys([name, Path(name).name]):
        try:
            load_model(reference)
        except ModelError:
            continue
        return reference
    return None
