"""Reports in notebooks: a page in a frame of its own."""

from __future__ import annotations

from collections.abc import Callable

from paraplan.errors import UsageError

_HEIGHT = 640


def framed(page: Callable[[], str], text: str) -> str:
    """Return a page in a frame of its own, whose style stays inside; the text alone where charts cannot be drawn."""
    from html import escape  # notebooks alone

    try:
        whole = page()
    except UsageError as error:
        return f"<pre>{escape(text)}</pre><p>{escape(error.message)}</p>"
    style = f"width:100%;height:{_HEIGHT}px;border:0"
    return f'<iframe title="paraplan" style="{style}" srcdoc="{escape(whole, quote=True)}"></iframe>'
