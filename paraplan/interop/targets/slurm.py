"""Slurm: a batch script that starts one launcher on each node. Options of sbatch and srun as in Slurm's manual."""

from __future__ import annotations

from paraplan.interop.exported import Exported, Subject, launch_words, remarks, runtime_gap
from paraplan.interop.quoting import comment

_WARNING_S = 120
"""How long before the end of its time a job is told to save."""


def to_slurm(subject: Subject) -> Exported:
    """Return an sbatch script: one task per node, each a `paraplan launch` that starts the node's ranks.

    Launchers read nodes, their numbers and the first of them from what srun sets.
    """
    gaps, layout = runtime_gap(subject), subject.layout
    notes = [
        "account, partition and time limit: add the #SBATCH lines of your site",
        "whole nodes are asked for (--exclusive): a task has one core otherwise. Where nodes are shared, write "
        "--cpus-per-task for sbatch and for srun in its place",
        f"{subject.script} goes on after a requeue where it calls engine.resume(folder)",
    ]
    options = {
        "job-name": subject.name,
        "nodes": layout.num_nodes,
        "ntasks-per-node": 1,
        **({"gpus-per-node": layout.gpus_per_node} if subject.needs_gpus else {}),
        "exclusive": None,
        "mem": 0,
        "requeue": None,
        "signal": f"USR1@{_WARNING_S}",
        "output": "%x-%j.log",
        "open-mode": "append",
    }
    lines = [f"#SBATCH --{name}" + (f"={value}" if value is not None else "") for name, value in options.items()]
    ranks = "" if subject.plans_again else f"--nproc-per-node {layout.gpus_per_node} "
    launch = [
        f"srun --kill-on-bad-exit=1 paraplan launch --requeue --preempt-window {_WARNING_S * 3 // 4}",
        ranks + launch_words(subject, plan_path=subject.path),
    ]
    body = "set -euo pipefail\n" + " \\\n  ".join(launch) + "\n"
    head = "#!/bin/bash\n" + "".join(f"{line}\n" for line in lines)
    text = head + comment(remarks(subject, gaps, notes)) + body
    return Exported(target="slurm", text=text, gaps=tuple(gaps), notes=tuple(notes))
