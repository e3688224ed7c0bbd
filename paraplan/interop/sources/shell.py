"""The command of a shell script, with the values that its plain assignments have; no shell is run."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import PurePosixPath
from typing import NamedTuple

from paraplan.errors import PlanError
from paraplan.interop.sources.shell_branches import Branches, in_lines

_NAME = r"[A-Za-z_]\w*"
_VALUE = re.compile(rf"\$\{{({_NAME})(\[[@*0-9]+\])?(?:(:?[-=])((?:[^{{}}]|\$\{{[^{{}}]*\}})*))?\}}|\$({_NAME})|\$(\d)")
_ARITHMETIC = re.compile(r"\$\(\(([^()]*(?:\([^()]*\)[^()]*)*)\)\)|\$\(expr ([^()]*)\)")
_WORD = re.compile(r"\"[^\"]*\"?|'[^']*'?|(?:\$\(\([^\n]*?\)\)|\$\([^()\n]*\)|\$\{[^\n]*?\}+|[^\s;\"'])+")
"""A quoted part of a shell's word, or one that is not quoted."""
_OUTPUT = re.compile(r"\$\((?!\()[^()]*\)|`[^`]*`")
_STARTERS = ("srun", "mpirun", "mpiexec")
_PYTHON = re.compile(r"python[\d.]*|torchrun|accelerate|deepspeed")
_IS_HEAD = re.compile(r"\s*(if|elif)\b")
_MOST_ROUNDS, _MOST_SOURCED, _MOST_NESTED = 20, 3, 3
_SOURCED = re.compile(r"^\s*(?:source|\.)\s+([^\n#;&|]+)", flags=re.MULTILINE)
_DOCUMENT = re.compile(
    r"^([^\n#]*[^<\n])?<<-?[ \t]*(['\"\\\\]?)(\w+)['\"]?([^\n]*)\n(.*?)^[ \t]*\3[ \t]*$", flags=re.MULTILINE | re.DOTALL
)
_TARGET = re.compile(r">[ \t]*([^\s<>|;&]+)|\btee[ \t]+([^\s<>|;&-]+)")
_SETS = re.compile(rf"\$\{{({_NAME}):?=((?:[^{{}}]|\$\{{[^{{}}]*\}})*)\}}")


class Command(NamedTuple):
    """The words of a script's command that has most options, and the variables that are set before it."""

    words: list[str]
    """Words of the command, the program first."""
    variables: dict[str, str]
    """Variables that the command has, with those that stand before it on its line."""
    has_branches: bool
    """Whether lines are behind a condition that is not known, `case` or a loop: all are read, one after the other."""
    sourced: tuple[str, ...] = ()
    """Files whose lines the script runs as its own."""

    @property
    def num_tasks(self) -> int | None:
        """Processes that the command starts where no launcher of torch's does, None where it does not say.

        One of Python's own; of `srun` as many as the script's #SBATCH lines ask for.
        """
        names = [PurePosixPath(word).name for word in self.words]
        if "srun" in names:
            tasks = self.variables.get("SLURM_NTASKS", "")
            return int(tasks) if tasks.isdigit() else None
        is_launched = not {"torch.distributed.run", "torch.distributed.launch"}.isdisjoint(names)
        is_python = names != [] and names[0].startswith("python") and any(name.endswith(".py") for name in names)
        return 1 if is_python and not is_launched else None

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


def without_documents(script: str, source: str) -> tuple[str, dict[str, str]]:
    """Return a script without its here-documents, and the files that it writes of them, by their names.

    Where the shell would fill in variables, those of plain assignments before a document are. Raises `PlanError` where
    quotes before one do not match.
    """
    kept, written, end = "", dict[str, str](), 0
    for found in _DOCUMENT.finditer(script):
        kept += script[end : found.start()]
        end = found.end()
        target = _TARGET.search(f"{found.group(1) or ''} {found.group(4)}")
        if target is None:
            continue
        text = _joined(kept)
        variables = _slurm_variables(text)
        for line in _running(text, source, Branches(text), variables):
            _assigned(line, variables)
        name = _filled((target.group(1) or target.group(2)).strip("\"'"), variables)
        body = found.group(5)
        written[PurePosixPath(name).name] = body if found.group(2) else _filled(body, variables)
    return kept + script[end:], written


def command_of(script: str, source: str, *programs: re.Pattern[str]) -> Command:
    """Return the command of a script that has most options, first of those that are one of `programs`.

    Raises `PlanError` where its quotes do not match.

    Variables are those of plain assignments, with their defaults (`${TP:-2}`), of arrays and of whole-number sums; what
    the shell alone knows stays as it is written. Where no command has options they are those of all variables.
    """
    text = _joined(script.removeprefix("\ufeff"))
    variables = _slurm_variables(text)
    best, visible = list[str](), variables

    def rank(words: list[str]) -> tuple[int, ...]:
        text = " ".join(words)
        return (*(program.search(text) is not None for program in programs), _num_options(words))

    branches = Branches(text)
    for line in _running(text, source, branches, variables):
        own = dict(variables)
        rest = _assigned(line, own)
        if rest is None:
            variables.update(own)
            continue
        for words in map(_started, _commands(_inner(_split(_filled(rest, own), source), own, source))):
            if rank(words) > rank(best):
                best, visible = words, own
        if ";" in line.removesuffix(rest):  # else what stands before a command is the command's alone
            variables.update(own)
    texts = [value for value in variables.values() if "--" in value]
    for value in texts if _num_options(best) else [" ".join(texts)]:
        words = _split(_filled(value, variables), source)
        if rank(words) > rank(best):
            best, visible = words, variables
    names = (found.group(1).strip() for found in _SOURCED.finditer(text))
    sourced = tuple(name for name in names if not _sets_environment(name))
    return Command(best, visible, not branches.are_all_known, sourced)


def _running(text: str, source: str, branches: Branches, variables: dict[str, str]) -> Iterator[str]:
    """Yield the lines of a script that run, as far as it is known; with the `variables` before each.

    Defaults that a line gives are among them by then.
    """
    for line in (part for whole in _lines(text, source) for part in in_lines(whole)):
        runs = branches.runs(line, _filled(line, variables) if _IS_HEAD.match(line) else line)
        if runs is not None:
            _set_defaults(runs, variables)
            yield runs


def _slurm_variables(text: str) -> dict[str, str]:
    """Return what Slurm sets for a job by the script's #SBATCH lines."""
    given = dict[str, str]()
    for line in re.findall(r"^#SBATCH\s+([^#\n]*)", text, flags=re.MULTILINE):
        for name, value in re.findall(r"(--[\w-]+|-[Nn])[= ]\s*(\S+)", line):
            given[{"-N": "--nodes", "-n": "--ntasks"}.get(name, name)] = value
    gpus = given.get("--gpus-per-node") or given.get("--gres", "").removeprefix("gpu")
    found = {
        "SLURM_NNODES": given.get("--nodes"),
        "SLURM_JOB_NUM_NODES": given.get("--nodes"),
        "SLURM_NTASKS_PER_NODE": given.get("--ntasks-per-node"),
        "SLURM_NTASKS": given.get("--ntasks"),
        "SLURM_GPUS_PER_NODE": gpus.rpartition(":")[2],
        "SLURM_GPUS_ON_NODE": gpus.rpartition(":")[2],
    }
    known = {name: value for name, value in found.items() if value is not None and value.isdigit()}
    if {"SLURM_NNODES", "SLURM_NTASKS_PER_NODE"} <= known.keys():
        known.setdefault("SLURM_NTASKS", str(int(known["SLURM_NNODES"]) * int(known["SLURM_NTASKS_PER_NODE"])))
    return known


def _commands(words: list[str]) -> list[list[str]]:
    """Return the commands of a line, without what their outputs go to."""
    commands, is_target = [list[str]()], False
    for word in words:
        if word in ("|", "||", "&&", "&", ";"):
            commands.append([])
        elif not is_target and re.fullmatch(r"\d*(>>?|>&|&>|<)\S*|\d*>&\d", word) is None:
            commands[-1].append(word)
        is_target = re.fullmatch(r"\d*>>?|&>|<", word) is not None
    return commands


def _started(words: list[str]) -> list[str]:
    """Return words without the options of what starts processes on nodes (`srun --jobid 7 python ...`)."""
    names = [PurePosixPath(word).name for word in words]
    start = next((place for place, name in enumerate(names) if name in _STARTERS), None)
    if start is None:
        return words
    end = next((place for place, name in enumerate(names) if place > start and _PYTHON.fullmatch(name)), start + 1)
    return [words[start], *words[end:]]


def _inner(words: list[str], variables: dict[str, str], source: str) -> list[str]:
    """Return words with those of a command that is given to another shell (`srun bash -c '...'`) in its place."""
    for place, (shell, option) in enumerate(pairwise(words)):
        is_shell = PurePosixPath(shell).name in ("bash", "sh") and re.fullmatch(r"-\w*c", option) is not None
        if is_shell and place + 2 < len(words):
            return [*words[:place], *_split(_filled(words[place + 2], variables), source), *words[place + 3 :]]
    return words


def _sets_environment(name: str) -> bool:
    """Return whether a file is one of those that virtual environments and toolkits come with."""
    return re.search(r"env|activate|bashrc|profile", name.lower()) is not None


def _num_options(words: list[str]) -> int:
    return sum(word.startswith("--") for word in words)


def _joined(text: str) -> str:
    """Return a script with each line that goes on in the next one as one; a comment ends with its line."""
    text = re.sub(r"^([ \t]*#[^\n]*?)\\+\r?$", r"\1", text, flags=re.MULTILINE)
    return re.sub(r"\\\r?\n", " ", text)


def _lines(text: str, source: str) -> list[str]:
    """Return the lines of a script without comments; those of an array or of a quoted value are one."""
    lines: list[str] = []
    waiting = ""
    for line in text.split("\n"):
        waiting = _uncommented(line, waiting)
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


def _uncommented(line: str, before: str) -> str:
    """Return what stands `before` a line with the line behind it, but for a comment, of which quotes know none."""
    text = f"{before}\n{line}" if before else line
    for found in re.finditer(r"(?:^|\s)#", text):
        if found.start() >= len(before) and not _has_open_quote(text[: found.start()]):
            return text[: found.start()]
    return text


def _has_open_quote(text: str) -> bool:
    plain = _without_quoted(text)
    return '"' in plain or "'" in plain


def _without_quoted(text: str) -> str:
    return re.sub(r"'[^']*'|\"(?:[^\"\\]|\\.)*\"", "", text, flags=re.DOTALL)


def _is_open(text: str) -> bool:
    """Return whether a quote or an array is still open."""
    plain = _without_quoted(text)
    if '"' in plain or "'" in plain:
        return True
    return re.match(rf"\s*(?:export\s+|local\s+)?{_NAME}\+?=\(", plain) is not None and plain.count("(") > plain.count(
        ")"
    )


def _set_defaults(line: str, variables: dict[str, str]) -> None:
    """Take the defaults that a line gives to variables without a value (`: "${TP:=4}"`)."""
    for found in _SETS.finditer(line):
        if not variables.get(found.group(1)):
            variables[found.group(1)] = _filled(found.group(2).strip("\"'"), variables)


def _assigned(line: str, variables: dict[str, str]) -> str | None:
    """Take the assignments at the head of a line, and return what is left of it; None where that is nothing."""
    rest = re.sub(r"^\s*(export|local|declare(\s+-\w+)*|readonly)\s+", "", line)
    start = re.compile(rf"[\s;]*(?:export\s+)?({_NAME})(\+?)=")
    while (assigned := start.match(rest)) is not None:
        value, rest = _value(rest[assigned.end() :])
        name, adds = assigned.group(1), assigned.group(2)
        itself = re.compile(rf"\$\{{{name}\}}|\${name}\b")  # ARGS="$ARGS --more"
        before = variables.get(name, "").replace("\\", r"\\")
        value = _filled(itself.sub(before, value), variables)
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
    """Return the words of a command; what programs put out is one word, `$(...)`, as is a sum that is not known."""
    text = _ARITHMETIC.sub("\1", text)
    for _ in range(_MOST_NESTED):
        text = _OUTPUT.sub("\0", text)
    try:
        return [word.replace("\0", "$(...)").replace("\1", "$((...))") for word in shlex.split(text, comments=False)]
    except ValueError as error:
        raise PlanError(f"{source} is not a command line: {error}", hint="check its quotes") from None
