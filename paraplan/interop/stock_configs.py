"""Configurations that come with tools, for scripts that name one which is not on this machine."""

from __future__ import annotations

import json
from functools import cache
from pathlib import PurePath

from paraplan.records import Record
from paraplan.resources import profiles_folder


class StockConfig(Record):
    """One file of a tool's repository, as far as its keys are read (`profiles/stock_configs.json`)."""

    tool: str
    """The tool in print."""
    folder: str
    """The folder that holds it there, under which scripts name it."""
    name: str
    """File name."""
    content: dict[str, object]
    """Keys and values."""

    @property
    def text(self) -> str:
        """The file, in JSON, which is YAML too."""
        return json.dumps(self.content)

    @property
    def note(self) -> str:
        """Note where it stands for a file that is missing."""
        return f"{self.folder}/{self.name} is not on this machine: taken as {self.tool}'s repository has it"


def stock_config(path: str) -> StockConfig | None:
    """Return the configuration that a path means by its last folder and its name, None for any other."""
    parts = PurePath(path).parts[-2:]
    return _by_path().get(parts)


@cache
def _by_path() -> dict[tuple[str, ...], StockConfig]:
    table = json.loads((profiles_folder() / "stock_configs.json").read_text(encoding="utf-8"))
    return {(one["folder"], one["name"]): StockConfig.model_validate(one) for one in table["files"]}
