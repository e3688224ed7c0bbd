"""A plan in the words of another tool: the table of targets, and the rule for what they cannot express."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from paraplan.errors import UnsupportedPlanError, UsageError, near_names
from paraplan.interop.exported import Exported, Subject
from paraplan.interop.targets.accelerate import to_accelerate
from paraplan.interop.targets.deepspeed import to_deepspeed
from paraplan.interop.targets.hf_trainer import to_hf_trainer
from paraplan.interop.targets.kubernetes import to_jobset, to_pytorchjob, to_trainjob
from paraplan.interop.targets.megatron_bridge import to_megatron_bridge
from paraplan.interop.targets.megatron_lm import to_megatron_lm
from paraplan.interop.targets.skypilot import to_skypilot
from paraplan.interop.targets.slurm import to_slurm
from paraplan.interop.targets.torchrun import to_torchrun
from paraplan.interop.targets.torchtitan import to_torchtitan
from paraplan.interop.targets.torchtitan_python import to_torchtitan_python


class Target(NamedTuple):
    """A format: how a plan is written in it, and what it is in a few words."""

    write: Callable[[Subject], Exported]
    title: str


TARGETS: dict[str, Target] = {
    "torchrun": Target(to_torchrun, "torchrun's command"),
    "accelerate": Target(to_accelerate, "accelerate's YAML: DDP, FSDP2, parallelism_config, DeepSpeed"),
    "deepspeed": Target(to_deepspeed, "DeepSpeed's JSON"),
    "hf-trainer": Target(to_hf_trainer, "TrainingArguments of transformers, as JSON"),
    "megatron-lm": Target(to_megatron_lm, "Megatron-LM's arguments, in a script"),
    "megatron-bridge": Target(to_megatron_bridge, "YAML overrides of a Megatron-Bridge (NeMo) recipe"),
    "torchtitan": Target(to_torchtitan, "torchtitan's TOML (up to v0.2.2)"),
    "torchtitan-python": Target(to_torchtitan_python, "a function for later torchtitan's Python configuration"),
    "slurm": Target(to_slurm, "an sbatch script that starts paraplan launch"),
    "pytorchjob": Target(to_pytorchjob, "Kubernetes: a PyTorchJob of Kubeflow's Training Operator"),
    "trainjob": Target(to_trainjob, "Kubernetes: a TrainJob of Kubeflow Trainer 2"),
    "jobset": Target(to_jobset, "Kubernetes: a JobSet"),
    "skypilot": Target(to_skypilot, "SkyPilot's YAML"),
}

_KNOWN_AS = {
    **dict.fromkeys(("kubernetes", "k8s", "kubeflow"), "pytorchjob, trainjob or jobset, and --image"),
    **dict.fromkeys(("nemo", "bridge"), "megatron-bridge"),
    "megatron": "megatron-lm, or megatron-bridge for NeMo's recipes",
    **dict.fromkeys(("hf", "huggingface", "transformers", "trainer", "trainingarguments"), "hf-trainer"),
    "sbatch": "slurm",
    "sky": "skypilot",
    **dict.fromkeys(("zero", "ds"), "deepspeed"),
    "fsdp": "accelerate or torchtitan",
}
"""Targets by other words for them."""


def export_plan(subject: Subject, target: str, *, partial: bool = False) -> Exported:
    """Return the plan in the words of `target`, a name of `TARGETS`.

    Raises `UsageError` for an unknown target, and `UnsupportedPlanError` where the target cannot express all of the
    plan, unless `partial` asks for the rest.
    """
    if target not in TARGETS:
        meant = _KNOWN_AS.get(target.lower())
        raise UsageError(
            f"there is no target {target!r}", hint=f"use {meant}" if meant else near_names(target, TARGETS)
        )
    if subject.plan.devices_per_process > 1:
        raise UnsupportedPlanError(
            f"devices_per_process={subject.plan.devices_per_process}: DataParallel in one process is written for no "
            "target",
            hint="export DDP over as many ranks",
        )
    exported = TARGETS[target].write(subject)
    if exported.gaps and not partial:
        listed = "".join(f"\n  {gap}" for gap in exported.gaps)
        raise UnsupportedPlanError(
            f"{target} cannot express all of the plan {subject.path} ({subject.plan.describe()}):{listed}",
            hint="--partial writes the rest, and says in the file what is missing",
        )
    return exported
