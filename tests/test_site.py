"""The site of the documentation and its notebook: they run, and what is missing fails them."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NOTEBOOK = ROOT / "paraplan" / "docs" / "planning.ipynb"


def requires(*modules: str) -> pytest.MarkDecorator:
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")


@requires("nbconvert", "ipykernel", "vl_convert")
def test_the_notebook_runs_in_a_kernel_and_shows_text_and_reports() -> None:
    command = [sys.executable, "-m", "nbconvert", "--to", "notebook", "--execute", "--stdout", str(NOTEBOOK)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    cells = [cell for cell in json.loads(done.stdout)["cells"] if cell["cell_type"] == "code"]
    shown = [output for cell in cells for output in cell["outputs"]]
    pages = ["".join(output["data"]["text/html"]) for output in shown if "text/html" in output.get("data", {})]
    assert len(pages) == 2
    assert all(page.startswith("<iframe") and "&lt;svg" in page for page in pages)
    text = "".join("".join(output.get("text", "")) for output in shown)
    assert "FSDP (ZeRO-3) over 8 GPUs" in text
    assert "use --tp 1, 2, 4 or 8" in text


@requires("sphinx", "myst_parser", "furo", "nbconvert", "ipykernel")
def test_the_site_has_every_page_and_every_public_name(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "scripts" / "build_site.py"), str(tmp_path / "site")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    reference = (tmp_path / "site" / "reference.html").read_text()
    assert 'id="paraplan.recommend"' in reference
    assert 'id="paraplan.Estimate.memory"' in reference
    assert (tmp_path / "site" / "planning.html").exists()
    assert (tmp_path / "site" / "memory.html").exists()
    index = (tmp_path / "site" / "index.html").read_text()
    assert 'src="http' not in index
    assert '<link rel="stylesheet" type="text/css" href="http' not in index
