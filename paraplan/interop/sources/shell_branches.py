"""Branches of a shell script: which of an `if`'s lines run, by the values that its plain assignments have."""

from __future__ import annotations

import operator
import re
import shlex
from typing import Literal

_HEAD = re.compile(r"(if|elif)\s+(.*?)(?:\s*;\s*then\b\s*(.*)|\s*)$", flags=re.DOTALL)
_TEST = re.compile(r"\[\[?\s+(.*)\s+\]\]?|\(\((.*)\)\)", flags=re.DOTALL)
_TEXTS = {"==": operator.eq, "=": operator.eq, "!=": operator.ne}
_NUMBERS = {"-eq": operator.eq, "-ne": operator.ne, "-lt": operator.lt, "-le": operator.le, "-gt": operator.gt}
_NUMBERS |= {"-ge": operator.ge, "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}
_NEXT = re.compile(r";\s*(?=(?:elif|else|fi)\b)")
_ALONE = re.compile(r"\s*(\[\[?\s[^&|]*\s\]\]?)\s*&&\s*([A-Za-z_]\w*\+?=.*)", flags=re.DOTALL)
_UNDECIDED = re.compile(r"^\s*(case|for|while)\b", flags=re.MULTILINE)

_State = Literal["runs", "waits", "is over", "may run"]


class Branches:
    """Follows the lines of a script, and says which of them run.

    Where a condition cannot be told, the lines of all its branches are read, one after the other.
    """

    def __init__(self, script: str) -> None:
        self.are_all_known = _UNDECIDED.search(script) is None
        """Whether it is known of every line whether it runs, and how often."""
        self._states: list[_State] = []

    def runs(self, line: str, filled: str) -> str | None:
        """Return what of a line runs, None for nothing. `filled` is the line with the values of variables."""
        text = line.strip()
        found, known = _HEAD.match(text), _HEAD.match(filled.strip())
        if found is not None and known is not None:
            self._begin(found.group(1), known.group(2))
            return found.group(3) if self._runs else None
        if (word := re.match(r"(then|else|fi)\b\s*(.*)$", text, flags=re.DOTALL)) is None or not self._states:
            return line if self._runs else None
        if word.group(1) == "fi":
            self._states.pop()
        elif word.group(1) == "else":
            following: dict[_State, _State] = {"runs": "is over", "waits": "runs"}
            self._states[-1] = following.get(self._states[-1], self._states[-1])
        return word.group(2).lstrip("; ") or None if self._runs else None

    @property
    def _runs(self) -> bool:
        return all(state in ("runs", "may run") for state in self._states)

    def _begin(self, word: str, condition: str) -> None:
        if word == "if":
            self._states.append("waits" if self._runs else "is over")
        elif not self._states:
            return
        elif self._states[-1] == "runs":
            self._states[-1] = "is over"
        if self._states[-1] == "waits":
            holds = _holds(condition)
            self.are_all_known &= holds is not None
            self._states[-1] = "may run" if holds is None else "runs" if holds else "waits"


def in_lines(line: str) -> list[str]:
    """Return the lines that a line of a script stands for: each part of an `if` is one, and so is `[ ... ] && A=1`."""
    if (alone := _ALONE.fullmatch(line)) is not None:
        return [f"if {alone.group(1)}; then {alone.group(2)}", "fi"]
    lines, end = list[str](), 0
    for found in _NEXT.finditer(line):
        before = line[: found.start()]
        if before.count('"') % 2 == 0 and before.count("'") % 2 == 0:
            lines.append(line[end : found.start()])
            end = found.end()
    return [*lines, line[end:]]


def _holds(condition: str) -> bool | None:
    """Return whether a condition holds, None where its text does not say."""
    found = _TEST.fullmatch(condition.strip())
    if found is None:
        return None
    try:
        words = shlex.split(found.group(1) or found.group(2))
    except ValueError:
        return None
    if len(words) == 2 and words[0] in ("-z", "-n") and re.fullmatch(r"\$\{?[A-Za-z_]\w*\}?", words[1]):
        return words[0] == "-z"  # of the environment, which a plain start leaves unset
    if any(re.search(r"[$`*?()]", word) for word in words):
        return None
    if len(words) == 2 and words[0] in ("-z", "-n"):
        return (words[1] == "") == (words[0] == "-z")
    if len(words) != 3:
        return None
    first, sign, second = words
    is_number = all(re.fullmatch(r"-?\d+", word) for word in (first, second))
    if sign in _NUMBERS and is_number:
        return bool(_NUMBERS[sign](int(first), int(second)))
    return bool(_TEXTS[sign](first, second)) if sign in _TEXTS else None
