"""Reports in notebooks: a page in a frame of its own."""

from __future__ import annotations

from collections.abc import Callable

_HEIGHT = 640


def framed(page: Callable[[], str]) -> str:
    """Return a page in a frame of its own, whose style stays inside."""
    from html import escape  # notebooks alone

    style = f"width:100%;height:{_HEIGHT}px;border:0"
    return f'<iframe title="paraplan" style="{style}" srcdoc="{escape(page(), quote=True)}"></iframe>'
