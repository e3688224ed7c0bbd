"""The script that lays the cost model beside measured kernels, on the files that come with the project."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from paraplan.errors import UsageError
from tests.script_module import load_script

SCRIPT = Path(__file__).parents[2] / "scripts" / "check_kernels.py"
FILES = sorted((SCRIPT.parents[1] / "profiles" / "measured").glob("kernels-*.json"))


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("check_kernels")


@pytest.fixture(scope="module")
def compared(script: ModuleType) -> dict[str, list[Any]]:
    return {path.name: script.compare(path) for path in FILES}


def test_both_gpus_were_measured() -> None:
    assert {path.name.split("-")[2] for path in FILES} >= {"h100", "h200"}


@pytest.mark.parametrize(
    ("part", "least_size", "bound"),
    [
        ("product", 2048, 0.115),
        ("attention", 1024, 0.07),
        ("experts", 256, 0.10),
        ("training: product", 0, 0.11),
        ("training: attention", 0, 0.09),
        ("training: rest", 0, 0.13),
    ],
)
def test_mean_errors_stay_within_bounds(
    compared: dict[str, list[Any]], part: str, least_size: int, bound: float
) -> None:
    """In-sample: constants of the cost model were fitted to these files."""
    found = {
        name: [abs(one.error) for one in each if one.part == part and one.size >= least_size]
        for name, each in compared.items()
    }
    measured = {name: errors for name, errors in found.items() if errors}
    assert len(measured) == (1 if part == "experts" else len(FILES))  # experts were measured on an H200 alone
    for name, errors in measured.items():
        assert len(errors) > 10, name
        assert sum(errors) / len(errors) < bound, name


def test_products_during_which_the_host_is_in_the_way_are_left_out(script: ModuleType) -> None:
    row = {"precision": "bf16", "m": 512, "n": 768, "k": 768, "pass": "output"}
    rows = [row | {"seconds": seconds} for seconds in (24e-6, 26e-6)]
    assert [one.measured_s for one in script.compare_products("dgx-h200", rows)] == [26e-6]


def test_operators_are_told_apart_by_name(script: ModuleType) -> None:
    operators = {
        "aten::mm": (1, 1.0),
        "aten::_grouped_mm": (1, 2.0),
        "aten::_cudnn_attention_backward": (1, 4.0),
        "aten::_foreach_add_": (1, 8.0),
        "aten::_fused_adamw_": (1, 16.0),
        "aten::mul": (1, 32.0),
    }
    assert script.operator_seconds(operators) == {"product": 3.0, "attention": 4.0, "rest": 32.0}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("no JSON", "Expecting value"),
        ("[]", "list indices"),
        ("{}", "no field 'gpu'"),
        ('{"gpu": "NVIDIA H200", "rows": [{"what": "product", "m": 1}]}', "'product' has no 'precision'"),
        ('{"gpu": "NVIDIA H200", "rows": [{"what": "move"}]}', "no row of a kind that is compared"),
        ('{"gpu": "a GPU", "rows": [{"what": "training", "error": "out of memory"}]}', "no row of a kind"),
    ],
)
def test_a_file_of_another_format_is_told_in_a_sentence(
    script: ModuleType, tmp_path: Path, content: str, reason: str
) -> None:
    path = tmp_path / "other.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(UsageError, match=r"other\.json") as raised:
        script.read_rows(path)
    assert reason in str(raised.value)


def test_a_gpu_without_a_profile_is_named(script: ModuleType, tmp_path: Path) -> None:
    content = json.loads(FILES[0].read_text(encoding="utf-8")) | {"gpu": "a GPU"}
    path = tmp_path / "other.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(UsageError, match="measured on 'a GPU'"):
        script.read_rows(path)


def test_a_file_of_another_format_ends_with_status_2(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text(json.dumps({"rows": []}), encoding="utf-8")
    done = subprocess.run([sys.executable, str(SCRIPT), str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "changes", [{"pass": "x"}, {"n": "many"}, {"precision": "int3"}, {"m": 0, "seconds": 1.0}, {"seconds": "1 s"}]
)
def test_rows_that_mean_nothing_are_refused_in_one_sentence(
    script: ModuleType, tmp_path: Path, changes: dict[str, Any]
) -> None:
    row = {"what": "product", "precision": "bf16", "m": 512, "n": 768, "k": 768, "pass": "output", "seconds": 26e-6}
    path = tmp_path / "rows.json"
    path.write_text(json.dumps({"gpu": "NVIDIA H200", "rows": [row | changes]}))
    if changes == {"precision": "int3"}:
        assert script.compare(path) == []  # kinds of products that the model does not price are left out
        return
    with pytest.raises(UsageError, match=r"rows\.json") as raised:
        script.compare(path)
    assert "\n" not in raised.value.message
