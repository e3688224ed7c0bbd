from __future__ import annotations

from pathlib import Path

import pytest

from paraplan.launch.script import read_traits


@pytest.mark.parametrize(
    ("text", "variables"),
    [
        ('import os\nos.environ["OMP_NUM_THREADS"] = "4"\nimport torch', ("OMP_NUM_THREADS",)),
        ('from os import environ\nenviron["TORCH_LOGS"] = "all"', ("TORCH_LOGS",)),
        ('import os\nos.environ.setdefault("MKL_NUM_THREADS", "1")', ("MKL_NUM_THREADS",)),
        (
            'import os\nos.environ.update({"KMP_AFFINITY": "x"}, OMP_WAIT_POLICY="y")',
            ("KMP_AFFINITY", "OMP_WAIT_POLICY"),
        ),
        ('import os\nos.putenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")', ("TORCH_DISTRIBUTED_DEBUG",)),
        ('def main():\n    import os\n    os.environ["OMP_NUM_THREADS"] = "2"', ("OMP_NUM_THREADS",)),
        ('import os\nos.environ["CUDA_VISIBLE_DEVICES"] = os.environ["LOCAL_RANK"]', ()),
        ('import os\nprint(os.environ["OMP_NUM_THREADS"], os.environ.get("TORCH_LOGS"))', ()),
        ('settings = {}\nsettings["OMP_NUM_THREADS"] = "4"\nsettings.update(TORCH_LOGS="x")', ()),
    ],
)
def test_variables_that_libraries_read_at_import_are_found(
    tmp_path: Path, text: str, variables: tuple[str, ...]
) -> None:
    (tmp_path / "train.py").write_text(text)
    assert read_traits(tmp_path / "train.py").early_variables == variables


@pytest.mark.parametrize(
    ("text", "uses"),
    [("from paraplan import runtime", True), ("import torch", False), ("import paraplan.runtime", True)],
)
def test_a_script_for_our_runtime_is_recognised(tmp_path: Path, text: str, uses: bool) -> None:
    (tmp_path / "train.py").write_text(text)
    assert read_traits(tmp_path / "train.py").uses_runtime is uses


@pytest.mark.parametrize(
    ("text", "alone"),
    [
        ("import os, json\nfrom pathlib import Path", True),
        ("print(1)", True),
        ("import __main__", True),
        ("import os.path, xml.etree.ElementTree as tree", True),
        ("import torch", False),
        ("def main():\n    from train import loop", False),
        ("from . import loop", False),
        ("import importlib\nimportlib.import_module('torch')", False),
        ("__import__('torch')", False),
        ("import subprocess", False),
    ],
)
def test_a_script_that_needs_nothing_but_the_standard_library_is_recognised(
    tmp_path: Path, text: str, alone: bool
) -> None:
    (tmp_path / "train.py").write_text(text)
    assert read_traits(tmp_path / "train.py").is_self_contained is alone


@pytest.mark.parametrize("data", [b"\x00\xff", b"1 +", b"# -*- coding: nonsense -*-\n"])
def test_what_is_no_python_has_no_traits(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "train.py").write_bytes(data)
    for path in (tmp_path / "train.py", tmp_path, tmp_path / "none.py"):
        assert read_traits(path).early_variables == ()
