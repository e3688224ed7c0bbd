"""What several tests of files of other tools take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paraplan.api.imported import Tool, import_plan
from paraplan.interop.setup import Setup


@pytest.fixture
def read(tmp_path: Path) -> Any:
    """Return what reads a text as a file."""

    def read_text(text: str, name: str = "config.yaml", *, tool: Tool | None = None, **given: Any) -> Setup:
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return import_plan(path, tool, **given).setup

    return read_text
