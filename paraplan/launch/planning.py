"""Plans made for the machines that a launch finds, and made again when their number changes.

The planner is `paraplan recommend` in a process of its own: ranks are forked from the launcher, and must not find the
planner's modules and threads in themselves.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import paraplan
from paraplan.errors import PlanError

AUTO = "auto"
"""The value of --plan that asks for a plan for the machines found."""

CPU_PROFILE = "cpu"
"""The hardware profile that plans are made for where there is no GPU."""

_PATIENCE_S = 600.0  # a model given as code imports torch and is traced


@dataclass(frozen=True)
class PlannerRequest:
    """What is to be trained: MODEL and the options of `paraplan recommend` that describe the training.

    `profile` is a hardware profile in place of this machine's GPUs, None for these.
    """

    model: str
    options: tuple[str, ...]
    profile: str | None = None


def make_plan(
    request: PlannerRequest,
    *,
    num_nodes: int,
    ranks_per_node: int,
    environment: dict[str, str],
    patience_s: float = _PATIENCE_S,
) -> str:
    """Return the text of a plan file for `num_nodes` machines like this one with `ranks_per_node` GPUs each.

    Raises `PlanError` with the planner's own words and its exit status where it finds none.
    """
    with tempfile.TemporaryDirectory(prefix="paraplan_") as folder:
        path = Path(folder) / "plan.json"
        command = [sys.executable, "-P", "-m", "paraplan", "recommend", request.model, *request.options]
        command += ["--nodes", str(num_nodes), "--gpus-per-node", str(ranks_per_node), "--json", "-o", str(path)]
        if request.profile is not None:
            command += ["--profile", request.profile]
        package_folder = str(Path(paraplan.__file__).parent.parent)
        search_path = os.pathsep.join(filter(None, [package_folder, environment.get("PYTHONPATH", "")]))
        try:
            done = subprocess.run(
                command,
                env=environment | {"PYTHONPATH": search_path},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=patience_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise PlanError(f"no plan was found within {patience_s:.0f} s", hint="give a plan file") from None
        if done.returncode or not path.exists():
            raise _planner_error(done.stderr, done.returncode, num_ranks=num_nodes * ranks_per_node)
        return path.read_text(encoding="utf-8")


def _planner_error(said: str, status: int, *, num_ranks: int) -> PlanError:
    """Return what the planner `said` as an error of this launch."""
    lines = said.strip().splitlines()
    message = next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), None)
    hint = next((line.removeprefix("hint: ") for line in lines if line.startswith("hint: ")), None)
    if message is None:
        message = lines[-1] if lines else f"the planner ended with status {status}"
    error = PlanError(f"no plan for {num_ranks} ranks: {message}", hint=hint)
    error.exit_status = status or 1
    return error
