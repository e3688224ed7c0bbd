"""The logs of all ranks of a live run in one place, as they grow."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from paraplan.launch.live.channel import MAX_BYTES, read_log
from paraplan.live.runs import Run, RunEndedError, RunError, ask_run, question

_BYTES_PER_LINE = 400
"""Bytes that are read of the end of a log for each line that is wanted of it: longer lines give fewer."""

_POLL_S = 0.3
_POLL_OF_NODES_S = 1.0
_END_S = 5.0
"""How long after the end of the ranks the launcher takes to note how the run ended, at most."""


_ENDS = re.compile(rb"\r?\n|\r(?!$)")
"""Ends of lines; progress bars begin anew with \\r. One at the end of what is known may be half of an end."""

_COLORS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
"""Sequences that color a text and move the cursor of a terminal (ECMA-48, control sequences)."""


def _text(line: bytes) -> str:
    return _COLORS.sub("", line.decode(errors="replace"))


class LogLine(NamedTuple):
    """A line that a rank wrote, without its end."""

    rank: int
    text: str


@dataclass
class _File:
    """How far a log was read, and the line that has no end yet."""

    offset: int
    rest: bytes = b""

    def take(self, offset: int, data: bytes, *, most_lines: int | None) -> list[str]:
        """Return the lines of new data; at first no more than `most_lines`, without one that began before."""
        began_inside = most_lines is not None and offset > len(data)
        self.offset = offset
        *lines, self.rest = _ENDS.split(self.rest + data)
        if most_lines is not None:
            lines = lines[1:] if began_inside else lines
            lines = lines[max(0, len(lines) - most_lines) :]
        return [_text(line) for line in lines]


@dataclass
class LogFollower:
    """Reads the logs of a run through its launcher, those of other nodes too, from the last `num_lines` of each on.

    At the end of the run `exit_status` is what its launcher noted, None where it ended without a word. `silent` are
    hosts that have not answered the last time.
    """

    run: Run
    num_lines: int
    ranks: frozenset[int] | None = None
    exit_status: int | None = None
    silent: tuple[str, ...] = ()
    _files: dict[int, list[_File]] = field(default_factory=dict)
    _paths: dict[int, list[str]] = field(default_factory=dict)
    _attempt: int = 0

    def follow(self) -> Iterator[LogLine]:
        """Yield lines as they come, until the run has ended. Raises `RunError` for a run that keeps no logs."""
        while True:
            try:
                found, is_more = self._read()
            except RunEndedError:
                yield from self._read_rest()
                self.exit_status = self._await_status()
                return
            yield from found
            if not is_more:
                time.sleep(_POLL_S if (self.run.num_nodes or 1) == 1 else _POLL_OF_NODES_S)

    def _read(self) -> tuple[list[LogLine], bool]:
        """Return new lines, and whether there are more to be read at once."""
        offsets = {str(rank): [one.offset for one in files] for rank, files in self._files.items()}
        first = -min(self.num_lines * _BYTES_PER_LINE, MAX_BYTES) if not self._attempt else 0
        values: dict[str, Any] = {"offsets": offsets, "default": first, "attempt": self._attempt}
        answers = ask_run(self.run, question("logs", **values))
        self.silent = answers.silent
        if (started := [node for node in answers.nodes if node["chunks"]]) and not any(
            node["keeps_logs"] for node in started
        ):
            raise RunError(f"the run {self.run.id} keeps no logs (--no-logs)", hint="its ranks write to its terminal")
        return self._take(answers.nodes)

    def _take(self, nodes: Any) -> tuple[list[LogLine], bool]:
        lines: list[LogLine] = []
        is_more = False
        attempt = max((int(node["attempt"]) for node in nodes if node["chunks"]), default=self._attempt)
        if attempt != self._attempt and self._attempt:
            lines += self._read_rest()
            self._files.clear()  # another attempt writes into files of its own
        most_lines = None if self._attempt else self.num_lines
        for node in nodes:
            for rank, chunks in node["chunks"].items() if int(node["attempt"]) == attempt else ():
                number = int(rank)
                known = number in self._files
                files = self._files.setdefault(number, [_File(0) for _ in chunks])
                self._paths[number] = list(node["logs"].get(rank, ())) if node["host"] == self.run.host else []
                for file, (offset, text) in zip(files, chunks, strict=False):
                    is_more |= known and bool(text)
                    new = file.take(int(offset), text.encode("latin-1"), most_lines=None if known else most_lines)
                    lines += [LogLine(number, line) for line in new if self._is_wanted(number)]
        self._attempt = attempt
        return lines, is_more

    def _is_wanted(self, rank: int) -> bool:
        return self.ranks is None or rank in self.ranks

    def _read_rest(self) -> Iterator[LogLine]:
        """Yield what ranks of this machine wrote at last, when the launcher answered no more."""
        for rank, files in sorted(self._files.items()):
            for file, path in zip(files, self._paths.get(rank, ()), strict=False):
                while True:
                    offset, text = read_log(path, file.offset)
                    lines = file.take(offset, text.encode("latin-1"), most_lines=None)
                    yield from (LogLine(rank, line) for line in lines if self._is_wanted(rank))
                    if not text:
                        break
                if file.rest and self._is_wanted(rank):
                    yield LogLine(rank, _text(file.rest))

    def _await_status(self) -> int | None:
        deadline = time.monotonic() + _END_S
        while self.run.folder is not None and time.monotonic() < deadline:
            status = _noted_status(self.run.folder)
            if status is not None:
                return status
            time.sleep(_POLL_S)
        return None


def _noted_status(folder: Path) -> int | None:
    try:
        values: Mapping[str, Any] = json.loads((folder / "run.json").read_text(encoding="utf-8"))
        status = values.get("exit_status")
    except (OSError, ValueError, AttributeError):
        return None
    return status if isinstance(status, int) else None
