"""The site of the documentation and its notebook: they run, and what is missing fails them."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def requires(*modules: str) -> pytest.MarkDecorator:
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, for which the notebook runs in a kernel of its own."""
    folder = tmp_path_factory.mktemp("built") / "site"
    command = [sys.executable, str(ROOT / "scripts" / "build_site.py"), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


@requires("sphinx", "myst_parser", "furo", "nbconvert", "ipykernel", "vl_convert")
def test_the_notebook_runs_in_a_kernel_and_shows_text_and_reports(site: Path) -> None:
    page = (site / "planning.html").read_text()
    frames = re.findall(r"<iframe[^>]*", page)
    assert len(frames) == 2
    assert all("&lt;svg" in frame for frame in frames)
    assert "FSDP (ZeRO-3) over 8 GPUs" in page
    assert "use --tp 1, 2, 4 or 8" in page


@requires("sphinx", "myst_parser", "furo", "nbconvert", "ipykernel")
def test_the_site_has_every_page_and_every_public_name(site: Path) -> None:
    reference = (site / "reference.html").read_text()
    assert 'id="paraplan.recommend"' in reference
    assert 'id="paraplan.Estimate.memory"' in reference
    assert (site / "memory.html").exists()
    index = (site / "index.html").read_text()
    assert 'src="http' not in index
    assert '<link rel="stylesheet" type="text/css" href="http' not in index
