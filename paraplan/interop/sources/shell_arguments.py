"""The words that a shell script is started with, where it reads them: `$1`, and the loops that read its options."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

_PLACE = re.compile(r"\$\{(\d+)(?::?[-=]([^{}]*))?\}|\$(\d)")
_LOOP = re.compile(r"^[ \t]*while\b[^\n]*?(?:\$#|-n[ \t]+\"?\$1|\bgetopts\b)[^\n]*$", flags=re.MULTILINE)
"""The head of a loop over the words of a script, or over the options that `getopts` finds there."""
_CASES = re.compile(r"^[ \t]*case\b[^\n]*?\bin\b", flags=re.MULTILINE)
_ESAC = re.compile(r"^[ \t]*esac\b", flags=re.MULTILINE)
_DONE = re.compile(r"^[ \t]*done\b[^\n]*$", flags=re.MULTILINE)
_CASE = re.compile(r"^[ \t]*\(?([^\s()][^()\n]*?)\)(.*?)(?:;;|\Z)", flags=re.MULTILINE | re.DOTALL)
_SHIFT = re.compile(r"\bshift\b[ \t]*(\d*)")
_LETTERS = re.compile(r"getopts[ \t]+[\"']?:?([\w:]+)")


def with_arguments(script: str, arguments: Sequence[str]) -> str:
    """Return a script with the words that it is started with, or their defaults, in place of `$1` and `${12}`.

    A loop that reads options (`while [ $# -gt 0 ]; do case $1 in --model) MODEL=$2`) becomes what it does of the words.
    """
    kept, end, begin = "", 0, 0
    while (head := _LOOP.search(script, begin)) is not None:
        begin = head.end()
        if (cases := _CASES.search(script, begin)) is None or (esac := _ESAC.search(script, cases.end())) is None:
            break
        done = _DONE.search(script, begin)
        if done is None or done.start() < esac.end():
            continue
        lines = _options_read(head.group(0), script[cases.end() : esac.start()], arguments)
        kept += script[end : head.start()] + "\n".join(lines)
        begin = end = done.end()
    return _placed(kept + script[end:], arguments)


def _placed(text: str, arguments: Sequence[str]) -> str:
    def word(found: re.Match[str]) -> str:
        place, default = int(found.group(1) or found.group(3)), found.group(2)
        given = arguments[place - 1] if 0 < place <= len(arguments) else None
        if default is not None:
            return given or default
        return found.group(0) if given is None else given

    return _PLACE.sub(word, text)


def _options_read(head: str, cases: str, arguments: Sequence[str]) -> Iterator[str]:
    """Yield the lines that a loop runs, for one word that it knows after the other."""
    letters = _LETTERS.search(head)
    place = 0
    while place < len(arguments):
        word = arguments[place]
        body = _body_for(word.removeprefix("-") if letters is not None else word, cases)
        place += 1
        if letters is not None:
            has_value = f"{word[-1:]}:" in letters.group(1) and place < len(arguments)
            value = arguments[place] if has_value else ""
            yield body.replace("${OPTARG}", value).replace("$OPTARG", value)
            place += has_value
        elif "exit" not in body:
            steps = sum(int(found.group(1) or 1) for found in _SHIFT.finditer(body))
            body = re.sub(
                r"\$\{1#\*=\}|\$\{1##\*=\}", word.partition("=")[2].replace("\\", r"\\"), _SHIFT.sub("", body)
            )
            yield _placed(body, arguments[place - 1 :]).strip("; \t\n")
            place += max(0, steps - 1)


def _body_for(word: str, cases: str) -> str:
    """Return what a `case` does for a word; nothing where no pattern fits, as of a pattern that is not a plain one."""
    for found in _CASE.finditer(cases):
        for pattern in (part.strip().strip("\"'") for part in found.group(1).split("|")):
            if pattern in (word, "*") or (pattern.endswith("*") and word.startswith(pattern.rstrip("*"))):
                return found.group(2)
    return ""
