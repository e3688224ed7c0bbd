"""The estimate of a plan for a fake launch: `paraplan estimate` in a process of its own, which imports no torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import paraplan
from paraplan.launch.planning import CPU_PROFILE, RunPython
from paraplan.plan.memory_record import MemoryParts

_PATIENCE_S = 600.0  # a model given as code imports torch and is traced


class StageEstimate(MemoryParts):
    """The predicted peak of one pipeline stage by parts, in bytes, and what offload puts in the host's memory."""

    host_bytes: int = 0


def estimate_stages(
    model: str, *, plan_path: str, profile: str | None, run: RunPython = subprocess.run
) -> tuple[Sequence[StageEstimate], str | None]:
    """Return the estimate of each pipeline stage of the plan, or none and the reason.

    Without `profile` it is made for CPUs, on which no CUDA library keeps workspaces; the parts of the model do not
    depend on the machine.
    """
    command = [sys.executable, "-P", "-m", "paraplan", "estimate", model, "--plan", plan_path, "--json"]
    command += ["--profile", profile or CPU_PROFILE]
    package_folder = str(Path(paraplan.__file__).parent.parent)
    search_path = os.pathsep.join(filter(None, [package_folder, os.environ.get("PYTHONPATH", "")]))
    try:
        done = run(
            command,
            env=dict(os.environ) | {"PYTHONPATH": search_path},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_PATIENCE_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return (), f"paraplan estimate {model} was not done after {_PATIENCE_S:.0f} s"
    try:
        rows = json.loads(done.stdout)["memory"]
    except (ValueError, KeyError):
        words = next((line for line in done.stderr.splitlines() if line.startswith("error: ")), "error: no result")
        return (), f"paraplan estimate {model}: {words.removeprefix('error: ')}"
    names = StageEstimate.model_fields
    return [StageEstimate(**{name: int(row.get(name, 0)) for name in names}) for row in rows], None
