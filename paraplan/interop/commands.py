"""The commands that start a plan: with paraplan, and with torchrun for scripts that apply the plan themselves."""

from __future__ import annotations

import shlex

from paraplan.plan.allocators import segment_variables
from paraplan.plan.files import ClusterReference
from paraplan.plan.training import TrainingSpec


def launch_command(plan_path: str, cluster: ClusterReference, *, script: str = "train.py") -> str:
    """Return the shell command that trains `script` under a plan file; with several nodes, run it on each of them."""
    words = ["paraplan", "launch", *_rendezvous(cluster), "--plan", plan_path, script]
    return shlex.join(words)


def torchrun_command(
    cluster: ClusterReference, *, script: str = "train.py", training: TrainingSpec | None = None
) -> str:
    """Return torchrun's command for the same ranks, with the variables of torch's allocator that `training` has.

    The script has to apply the plan itself.
    """
    variables = {} if training is None else segment_variables(training.stack, {})
    words = [
        *(f"{name}={value}" for name, value in variables.items()),
        "torchrun",
        *_rendezvous(cluster),
        "--nproc-per-node",
        str(cluster.gpus_per_node),
        script,
    ]
    return shlex.join(words)


def _rendezvous(cluster: ClusterReference) -> list[str]:
    if cluster.num_nodes == 1:
        return []
    return ["--nnodes", str(cluster.num_nodes), "--rdzv-backend", "c10d", "--rdzv-endpoint", "FIRST_NODE:29500"]
