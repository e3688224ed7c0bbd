"""From a Vega-Lite specification to SVG that stands in a page: no script, colors by CSS, a name for every mark.

Vega-Lite is rendered by vl-convert when the report is written. The page then needs neither Vega nor any other script,
so it also opens where scripts are blocked, as artifacts of continuous integration are.
"""

from __future__ import annotations

import importlib
import itertools
import re
from collections.abc import Iterator
from contextlib import suppress
from html import escape
from typing import Any

Spec = dict[str, Any]

WIDE, HALF, NARROW = 1040, 500, 340
"""Widths of charts in CSS pixels: on a page of 1280, side by side, and on a page of 390."""

_CONFIG: Spec = {
    "background": None,
    # Of equal widths: what is laid out with one of them fits where a browser has another.
    "font": "Arial, 'Liberation Sans', Helvetica, sans-serif",
    "padding": {"left": 4, "right": 12, "top": 2, "bottom": 2},
    "view": {"stroke": None},
    "axis": {
        "labelColor": "var(--soft)",
        "titleColor": "var(--ink)",
        "gridColor": "var(--line)",
        "domainColor": "var(--edge)",
        "tickColor": "var(--edge)",
        "labelFontSize": 12,
        "titleFontSize": 12,
        "titleFontWeight": "normal",
        "labelLimit": 240,
    },
    "legend": {"orient": "top", "labelColor": "var(--ink)", "labelFontSize": 12, "title": None, "columnPadding": 16},
    "title": {"color": "var(--ink)", "fontSize": 12, "fontWeight": "normal", "anchor": "start"},
}
_MARK = re.compile(
    r'<(path|line|rect) aria-label="([^"]*)" role="graphics-symbol" aria-roledescription="([^"]*)"([^>]*?)/>'
)


class ChartRenderer:
    """Draws charts; each gets identifiers of its own. Without vl-convert a line stands in the place of each."""

    def __init__(self) -> None:
        self._convert: Any = None
        with suppress(ImportError):  # optional: 80 MB, and half a second to start
            self._convert = importlib.import_module("vl_convert")
        self._numbers: Iterator[int] = itertools.count(1)

    def render(self, spec: Spec, *, label: str, width: int, is_picture: bool = False) -> str:
        """Return a chart as an SVG element that is at most `width` wide; `label` is its name for screen readers.

        Marks carry their descriptions as names and as what a browser shows under the pointer. The marks of a picture
        are too many to be read one by one: a table stands for them.
        """
        if self._convert is None:
            return f'<p class="soft">{escape(label)}: not drawn, pip install vl-convert-python does.</p>'
        config = _CONFIG | {"legend": _CONFIG["legend"] | ({"columns": 2} if width < HALF else {})}
        whole: Spec = {"$schema": "https://vega.github.io/schema/vega-lite/v6.json", "config": config} | spec
        if "vconcat" not in spec:
            whole |= {"width": width, "autosize": {"type": "fit-x", "contains": "padding"}}
        svg = self._convert.vegalite_to_svg(whole, vl_version="6.1", allowed_base_urls=[])
        prefix = f"chart{next(self._numbers)}-"
        svg = re.sub(r'(id="|url\(#)(clip|gradient)', rf"\g<1>{prefix}\2", svg)
        svg = re.sub(r'xlink:href="[^"#]*#', 'href="#', svg)  # Vega puts a base address before the names of rows
        svg = _MARK.sub(r'<\1 aria-label="\2" role="graphics-symbol"\4><title>\2</title></\1>', svg)
        svg = re.sub(r' (?:width|height)="\d+(?:\.\d+)?"', "", svg, count=2)
        role = "img" if is_picture else "graphics-document"
        return svg.replace("<svg ", f'<svg role="{role}" aria-label="{escape(label)}" style="max-width:{width}px" ', 1)
