"""Consoles and streams that commands print to. Names from outside have neither markup nor control characters."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Any

from paraplan.units import broken_between_words, printable

if TYPE_CHECKING:  # rich, which --json does without
    from rich.console import Console

_ENDS = re.compile(r" +((?:\x1b\[[0-9;]*m)*)(?=\n|\Z)")


_STYLED = re.compile(r"((?:\x1b\[\d+m)*)(.*?)((?:\x1b\[0m)?\n?)", re.DOTALL)
"""A text as click styles it: as a whole."""


class _PlainStream:
    """A stream that writes what would steer a terminal as "?"; a style of the whole text stays."""

    def __init__(self, stream: IO[str]) -> None:
        self.unfiltered = stream

    def write(self, text: str) -> int:
        """Write a text of a command."""
        style, inner, end = _STYLED.fullmatch(text).groups()  # type: ignore[union-attr]  # it matches every text
        self.unfiltered.write(style + printable(inner) + end)
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.unfiltered, name)


@contextmanager
def plain_streams() -> Iterator[None]:
    """Have all that is written to the standard streams in this block be plain text, but for what consoles draw."""
    streams = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = _PlainStream(streams[0]), _PlainStream(streams[1])
    try:
        yield
    finally:
        sys.stdout, sys.stderr = streams


@contextmanager
def drawn_output() -> Iterator[None]:
    """Have standard output take all in this block: what a console has drawn, for a pager."""
    filtered = sys.stdout
    sys.stdout = unfiltered(filtered)
    try:
        yield
    finally:
        sys.stdout = filtered


def unfiltered(stream: Any) -> Any:
    """Return the stream below, for what steers a terminal on purpose."""
    return getattr(stream, "unfiltered", stream)


def in_lines(text: str, stream: IO[str], *, indent: int = 0, later_indent: int = 0) -> str:
    """Return a message as it is, on a terminal broken between words; see `broken_between_words`."""
    if not stream.isatty():
        return text
    import shutil  # only on terminals

    width = shutil.get_terminal_size().columns
    first, *others = text.split("\n")
    lines = [broken_between_words(first, width=width, indent=indent, later_indent=later_indent)]
    for line in others:  # each keeps its own indent
        own = len(line) - len(line.lstrip())
        lines.append(" " * own + broken_between_words(line.lstrip(), width=width, indent=own, later_indent=own + 2))
    return "\n".join(lines)


def command_in_lines(command: str, stream: IO[str]) -> str:
    """Return a command that is printed two columns in; on a narrow terminal in lines that a shell reads as one."""
    text = in_lines(
        command.replace(" --", "\0--").replace(" ", "\1").replace("\0", " "), stream, indent=4, later_indent=4
    )
    return text.replace("\n", " \\\n").replace("\1", " ")


def show_note(text: str) -> None:
    """Write a remark on stderr."""
    sys.stderr.write(in_lines(f"note: {text}", sys.stderr, later_indent=2) + "\n")


class _WithoutEnds:
    """A stream that leaves out spaces at the ends of lines: tables fill their last column with them."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write whole lines, as rich's console gives them."""
        self._stream.write(_ENDS.sub(r"\1", text) if text.endswith("\n") else text)
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def make_console(*, stderr: bool = False, **options: Any) -> Console:
    """Return a console on standard output, or on `stderr`; `options` are rich's.

    Texts have no markup unless `print` is told so, and then values in them go through `escape`.
    """
    from rich.console import Console
    from rich.segment import Segment

    class PlainConsole(Console):
        """rich's console for texts that may come from anywhere."""

        def render(self, renderable: Any, options: Any = None) -> Iterator[Segment]:
            """Yield what is drawn, without what would steer the terminal but rich's own."""
            for segment in super().render(renderable, options):
                yield segment if segment.control else Segment(printable(segment.text), segment.style)

    stream: Any = unfiltered(sys.stderr) if stderr else _WithoutEnds(unfiltered(sys.stdout))
    return PlainConsole(highlight=False, markup=False, file=stream, **options)


def escape(value: object) -> str:
    """Return a value for a text that is printed with `markup=True`: its own brackets are text."""
    from rich.markup import escape as escape_markup

    return escape_markup(str(value))
