"""The command of a shell script, with the values that its plain assignments have; no shell is run."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from typing import NamedTuple

from paraplan.errors import PlanError

_NAME = r"[A-Za-z_]\w*"
_VALUE = re.compile(rf"\$\{{({_NAME})(\[[@*0-9]+\])?(?:(:?[-=])((?:[^{{}}]|\$\{{[^{{}}]*\}})*))?\}}|\$({_NAME})|\$(\d)")
_ARITHMETIC = re.compile(r"\$\(\(([^()]*(?:\([^()]*\)[^()]*)*)\)\)|\$\(expr ([^()]*)\)")
_WORD = re.compile(r"\"[^\"]*\"?|'[^']*'?|(?:\$\(\([^\n]*?\)\)|\$\([^()\n]*\)|\$\{[^\n]*?\}+|[^\s;\"'])+")
"""A quoted part of a shell's word, or one that is not quoted."""
_MOST_ROUNDS, _MOST_SOURCED = 20, 3
_SOURCED = re.compile(r"^\s*(?:source|\.)\s+([^\n#;&|]+)", flags=re.MULTILINE)
_BRANCHES = re.compile(r"^\s*(if|case|for|while)\b", flags=re.MULTILINE)


class Command(NamedTuple):
    """The words of a script's command that has most options, and the variables that are set before it."""

    words: list[str]
    """Words of the command, the program first."""
    variables: dict[str, str]
    """Variables that the command has, with those that stand before it on its line."""
    has_branches: bool
    """Whether lines are behind `if`, `case` or a loop: all of them are read, one after the other."""
    sourced: tuple[str, ...] = ()
    """Files whose lines the script runs as its own."""

    def notes(self, source: str) -> list[str]:
        """Return what is assumed of the script."""
        notes = [f"{source} runs the lines of {name}, which are not read" for name in self.sourced]
        if self.has_branches:
            notes.append(f"{source} has branches or loops: its lines are read in order, as if all ran")
        return notes


def with_sourced(script: str, read_file: Callable[[str], str], depth: int = 0) -> str:
    """Return a script with the lines of the files that it runs as its own, those that `read_file` finds beside it."""

    def lines(found: re.Match[str]) -> str:
        name = re.sub(r"^.*[)}`]/|^\$\w+/", "", found.group(1).strip().strip("\"'"))
        if depth == _MOST_SOURCED or re.search(r"[$\s]", name) or _sets_environment(name):
            return found.group(0)
        try:
            return with_sourced(read_file(name), read_file, depth + 1)
        except PlanError:
            return found.group(0)

    return _SOURCED.sub(lines, script)


def command_of(script: str, source: str, *programs: re.Pattern[str]) -> Command:
    """Return the command of a script that has most options, first of those that are one of `programs`.

    Raises `PlanError` where its quotes do not match.

    Variables are those of plain assignments, with their defaults (`${TP:-2}`), of arrays and of whole-number sums; what
    the shell alone knows stays as it is written. Where no command has options they are those of all variables.
    """
    text = re.sub(r"\\\r?\n", " ", script.removeprefix("\ufeff"))
    variables: dict[str, str] = {}
    best, visible = list[str](), variables

    def rank(words: list[str]) -> tuple[int, ...]:
        text = " ".join(words)
        return (*(program.search(text) is not None for program in programs), _num_options(words))

    for line in _lines(text, source):
        own = dict(variables)
        rest = _assigned(line, own)
        if rest is None:
            variables = own
            continue
        words = _split(_filled(rest, own), source)
        if rank(words) > rank(best):
            best, visible = words, own
        if ";" in line.removesuffix(rest):  # else what stands before a command is the command's alone
            variables = own
    texts = [value for value in variables.values() if "--" in value]
    for value in texts if _num_options(best) else [" ".join(texts)]:
        words = _split(_filled(value, variables), source)
        if rank(words) > rank(best):
            best, visible = words, variables
    names = (found.group(1).strip() for found in _SOURCED.finditer(text))
    sourced = tuple(name for name in names if not _sets_environment(name))
    return Command(best, visible, _BRANCHES.search(text) is not None, sourced)


def _sets_environment(name: str) -> bool:
    """Return whether a file is one of those that virtual environments and toolkits come with."""
    return re.search(r"env|activate|bashrc|profile", name.lower()) is not None


def _num_options(words: list[str]) -> int:
    return sum(word.startswith("--") for word in words)


def _lines(text: str, source: str) -> list[str]:
    """Return the lines of a script without comments; those of an array or of a quoted value are one."""
    lines: list[str] = []
    waiting = ""
    for line in text.split("\n"):
        waiting = f"{waiting}\n{_uncommented(line)}" if waiting else _uncommented(line)
        if not _is_open(waiting):
            if waiting.lstrip().startswith("--") and lines:
                lines[-1] += " " + waiting
            elif waiting.strip():
                lines.append(waiting)
            waiting = ""
    if waiting:
        _split(waiting, source)
        lines.append(waiting)
    return lines


def _uncommented(line: str) -> str:
    for found in re.finditer(r"(?:^|\s)#", line):
        before = line[: found.start()]
        if before.count('"') % 2 == 0 and before.count("'") % 2 == 0:
            return before
    return line


def _is_open(text: str) -> bool:
    """Return whether a quote or an array is still open."""
    plain = re.sub(r"'[^']*'|\"(?:[^\"\\]|\\.)*\"", "", text, flags=re.DOTALL)
    if '"' in plain or "'" in plain:
        return True
    return re.match(rf"\s*(?:export\s+|local\s+)?{_NAME}\+?=\(", plain) is not None and plain.count("(") > plain.count(
        ")"
    )


def _assigned(line: str, variables: dict[str, str]) -> str | None:
    """Take the assignments at the head of a line, and return what is left of it; None where that is nothing."""
    rest = re.sub(r"^\s*(export|local|declare(\s+-\w+)*|readonly)\s+", "", line)
    start = re.compile(rf"[\s;]*(?:export\s+)?({_NAME})(\+?)=")
    while (found := start.match(rest)) is not None:
        value, rest = _value(rest[found.end() :])
        value = _filled(value, variables)
        name, adds = found.group(1), found.group(2)
        variables[name] = f"{variables.get(name, '')} {value}".strip() if adds else value
    return rest if rest.strip() else None


def _value(text: str) -> tuple[str, str]:
    """Return the value at the head of a text, without its quotes or its array's brackets, and what follows it."""
    if text.startswith("("):
        depth = 0
        for place, sign in enumerate(text):
            depth += (sign == "(") - (sign == ")")
            if depth == 0:
                return text[1:place], text[place + 1 :]
        return text[1:], ""
    parts: list[str] = []
    while (found := _WORD.match(text)) is not None and found.group(0):
        word = found.group(0)
        parts.append(word.strip(word[0]) if word[0] in "\"'" else word)
        text = text[found.end() :]
    return "".join(parts), text


def _filled(text: str, variables: dict[str, str]) -> str:
    """Return a text with the variables that are known, the defaults of the others, and sums worked out."""
    text = re.sub(rf'"(\$\{{{_NAME}\[[@*]\]\}})"', r"\1", text)  # the words of an array stay apart
    for _ in range(_MOST_ROUNDS):
        filled = _ARITHMETIC.sub(lambda found: _sum(found, variables), _VALUE.sub(lambda f: _one(f, variables), text))
        if filled == text or len(filled) > 1_000_000:
            break
        text = filled
    return text


def _one(found: re.Match[str], variables: dict[str, str]) -> str:
    name, default = found.group(1) or found.group(5), found.group(4)
    if name is not None and variables.get(name, "") != "" and f"${name}" not in variables[name]:
        return variables[name]
    if default is not None and name is not None:
        return default.strip("\"'")
    return found.group(0)


def _sum(found: re.Match[str], variables: dict[str, str]) -> str:
    words = found.group(1) or found.group(2)
    for name in sorted(variables, key=len, reverse=True):
        words = re.sub(rf"\b{name}\b", variables[name].replace("\\", ""), words)
    tokens = re.findall(r"\d+|[-+*/%()]", words)
    if not tokens or "".join(tokens) != re.sub(r"[\s\\]", "", words) or len(tokens) > 50:
        return found.group(0)
    value = _Sum(tokens).value()
    return found.group(0) if value is None else str(value)


class _Sum:
    """Whole-number arithmetic of a shell: + - * / % and brackets."""

    def __init__(self, tokens: list[str]) -> None:
        self._tokens = tokens

    def value(self) -> int | None:
        """Return what it comes to; None where it is no sum."""
        try:
            value = self._terms()
        except (IndexError, ZeroDivisionError, ValueError):
            return None
        return None if self._tokens else value

    def _terms(self) -> int:
        value = self._factors()
        while self._tokens and self._tokens[0] in "+-":
            sign = self._tokens.pop(0)
            value += self._factors() * (1 if sign == "+" else -1)
        return value

    def _factors(self) -> int:
        value = self._atom()
        while self._tokens and self._tokens[0] in "*/%":
            sign, other = self._tokens.pop(0), self._atom()
            value = value * other if sign == "*" else value // other if sign == "/" else value % other
        return value

    def _atom(self) -> int:
        first = self._tokens.pop(0)
        if first != "(":
            return int(first)
        value = self._terms()
        self._tokens.pop(0)
        return value


def _split(text: str, source: str) -> list[str]:
    try:
        return shlex.split(text, comments=False)
    except ValueError as error:
        raise PlanError(f"{source} is not a command line: {error}", hint="check its quotes") from None
