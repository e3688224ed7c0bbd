"""Files of an agent: texts that it gives by name, and what commands write for it, in a folder of the server."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath

from paraplan.errors import UsageError

SUFFIXES = (".json", ".yaml", ".yml", ".toml", ".sh", ".sbatch", ".txt", ".xml", ".csv", ".log", ".svg")
"""Files that are read and never run: a model in Python is run, so that it has to be on the machine already."""
MOST_CHARACTERS = 1_000_000
"""Characters of one file that is given."""
SHOWN_CHARACTERS = 30_000
"""Characters of one file that is shown whole."""


class AgentFiles:
    """The files of one server. Commands see the names that an agent uses as paths of its folder."""

    def __init__(self, folder: Path) -> None:
        """Keep files in `folder`, which the caller removes."""
        self.folder = folder.resolve() / "files"
        self.folder.mkdir()

    def keep(self, texts: object) -> None:
        """Write texts by their names. Raises `UsageError` for a name that is not a plain one, and for other values."""
        if not isinstance(texts, Mapping):
            raise UsageError("files is not an object of names and texts", hint="files={'config.yaml': '...'}")
        for name, value in texts.items():
            text = value if isinstance(value, str) else json.dumps(value)
            if len(text) > MOST_CHARACTERS:
                raise UsageError(
                    f"the file {name!r} has {len(text):,} characters, over {MOST_CHARACTERS:,}",
                    hint="give the path of a file on this machine",
                )
            path = self.place(str(name))
            path.write_text(text, encoding="utf-8")

    def place(self, name: str) -> Path:
        """Return the path of a file to write. Raises `UsageError` for a name that is not a plain one."""
        parts = PurePosixPath(name).parts
        is_plain = bool(parts) and all(part[0].isalnum() or part[0] == "_" for part in parts) and "\\" not in name
        if not is_plain or not name.endswith(SUFFIXES):
            raise UsageError(
                f"{name!r} is no name of a file that an agent gives or has written",
                hint=f"use a name like config.yaml, of {', '.join(SUFFIXES)}",
            )
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def named(self, word: str) -> str:
        """Return the path of a file of that name, the word itself where there is none."""
        return str(self.folder / word) if word in self._names() else word

    def told(self, text: str) -> str:
        """Return a text with the names of files in place of their paths."""
        return text.replace(f"{self.folder}/", "")

    def shown(self, names: Iterable[str]) -> list[str]:
        """Return files that a command has written, each under its name; of a long one its name alone."""
        found = []
        for name in names:
            path = self.folder / name
            if path.is_file():
                text = path.read_text(encoding="utf-8", errors="replace")
                found.append(
                    f"{name}:\n{text}" if len(text) <= SHOWN_CHARACTERS else f"{name}: {len(text):,} characters"
                )
        return found

    def _names(self) -> set[str]:
        return {path.relative_to(self.folder).as_posix() for path in self.folder.rglob("*") if path.is_file()}
