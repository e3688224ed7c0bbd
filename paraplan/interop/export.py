"""A plan in the words of another tool: the table of targets, and the rule for what they cannot express."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from paraplan.errors import UnsupportedPlanError, UsageError, near_names
from paraplan.interop.exported import Exported, Gap, Subject
from paraplan.interop.targets.accelerate import accelerate_gaps, to_accelerate
from paraplan.interop.targets.axolotl import axolotl_gaps, to_axolotl
from paraplan.interop.targets.deepspeed import deepspeed_gaps, to_deepspeed
from paraplan.interop.targets.hf_trainer import hf_trainer_gaps, to_hf_trainer
from paraplan.interop.targets.kubernetes import to_jobset, to_pytorchjob, to_trainjob
from paraplan.interop.targets.megatron_bridge import to_megatron_bridge
from paraplan.interop.targets.megatron_lm import megatron_gaps, to_megatron_lm
from paraplan.interop.targets.nemo_automodel import nemo_automodel_gaps, to_nemo_automodel
from paraplan.interop.targets.ray import to_ray
from paraplan.interop.targets.skypilot import to_skypilot
from paraplan.interop.targets.slurm import to_slurm
from paraplan.interop.targets.torchrun import to_torchrun
from paraplan.interop.targets.torchtitan import to_torchtitan, torchtitan_gaps
from paraplan.interop.targets.torchtitan_python import to_torchtitan_python, torchtitan_python_gaps
from paraplan.interop.targets.torchtune import to_torchtune, torchtune_gaps
from paraplan.interop.targets.transformers import to_transformers, transformers_gaps
from paraplan.interop.targets.trl import to_trl, trl_gaps
from paraplan.plan.files import ModelReference, PlanFile
from paraplan.plan.parallel import ParallelPlan
from paraplan.plan.training import TrainingSpec

GapsOf = Callable[[Subject], "list[Gap]"]


class Target(NamedTuple):
    """A format: how a plan is written in it, and what it is in a few words."""

    write: Callable[[Subject], Exported]
    title: str
    gaps: GapsOf | None = None
    """Parts of a plan that its configuration cannot express, for targets that run plans themselves."""


TARGETS: dict[str, Target] = {
    "torchrun": Target(to_torchrun, "torchrun's command"),
    "accelerate": Target(
        to_accelerate, "accelerate's YAML: DDP, FSDP2, parallelism_config, DeepSpeed", accelerate_gaps
    ),
    "deepspeed": Target(to_deepspeed, "DeepSpeed's JSON", deepspeed_gaps),
    "hf-trainer": Target(to_hf_trainer, "TrainingArguments of transformers, as JSON", hf_trainer_gaps),
    "megatron-lm": Target(to_megatron_lm, "Megatron-LM's arguments, in a script", megatron_gaps),
    "megatron-bridge": Target(to_megatron_bridge, "YAML overrides of a Megatron-Bridge (NeMo) recipe", megatron_gaps),
    "nemo-automodel": Target(to_nemo_automodel, "the YAML of a NeMo AutoModel recipe", nemo_automodel_gaps),
    "torchtitan": Target(to_torchtitan, "torchtitan's TOML (up to v0.2.2)", torchtitan_gaps),
    "torchtitan-python": Target(
        to_torchtitan_python, "a function for later torchtitan's Python configuration", torchtitan_python_gaps
    ),
    "transformers": Target(
        to_transformers, "transformers' DistributedConfig in Python: the Trainer and a plain loop", transformers_gaps
    ),
    "trl": Target(to_trl, "TRL: a script with accelerate's configuration and trl sft, dpo, reward or grpo", trl_gaps),
    "axolotl": Target(to_axolotl, "axolotl's YAML", axolotl_gaps),
    "torchtune": Target(to_torchtune, "the YAML of torchtune's recipes", torchtune_gaps),
    "slurm": Target(to_slurm, "an sbatch script that starts paraplan launch"),
    "pytorchjob": Target(to_pytorchjob, "Kubernetes: a PyTorchJob of Kubeflow's Training Operator"),
    "trainjob": Target(to_trainjob, "Kubernetes: a TrainJob of Kubeflow Trainer 2"),
    "jobset": Target(to_jobset, "Kubernetes: a JobSet"),
    "skypilot": Target(to_skypilot, "SkyPilot's YAML"),
    "ray": Target(to_ray, "a program for ray job submit, whose TorchTrainer starts the ranks"),
}

_LEARNS_FROM_MORE = "trl"
"""The target that knows tasks beside training on given sequences."""
_BENEATH_TRL = (_LEARNS_FROM_MORE, "accelerate", "hf-trainer", "deepspeed")
"""Targets whose plans TRL runs: its trainers are those of transformers, under accelerate."""
_OFFLOADS_ACTIVATIONS = ("trl", "axolotl", "hf-trainer", "torchtune", "deepspeed")
"""Targets whose files say that activations wait on the host."""

_SHARD_OVER_RANKS = (
    *("megatron-lm", "megatron-bridge", "nemo-automodel", "torchtitan", "torchtitan-python", "torchtune"),
    "transformers",
)
"""Targets whose tools shard and offload parameters over several ranks, and not in one process."""

_KNOWN_AS = {
    **dict.fromkeys(("kubernetes", "k8s", "kubeflow"), "pytorchjob, trainjob or jobset, and --image"),
    "bridge": "megatron-bridge",
    "nemo": "megatron-bridge or nemo-automodel",
    "automodel": "nemo-automodel",
    "megatron": "megatron-lm, or megatron-bridge for NeMo's recipes",
    **dict.fromkeys(("hf", "huggingface", "trainer", "trainingarguments"), "hf-trainer"),
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
    if subject.training is not None and not subject.training.learns_from.is_run_by_trl:
        raise UnsupportedPlanError(
            f"paraplan writes no file for --task {subject.training.task}",
            hint="give the plan's degrees and sizes to the tool that trains so",
        )
    task = subject.training.task if subject.training is not None else "sft"
    if task != "sft" and target != _LEARNS_FROM_MORE:
        raise UnsupportedPlanError(
            f"{target} has no words for --task {task}: its file trains on given sequences",
            hint=f"use --to {_LEARNS_FROM_MORE}, or plan without --task",
        )
    if subject.training is not None and subject.training.offloads_activations and target not in _OFFLOADS_ACTIVATIONS:
        raise UnsupportedPlanError(
            f"paraplan writes no --offload-activations for {target}",
            hint=f"use --to {', '.join(_OFFLOADS_ACTIVATIONS)}, or plan without it",
        )
    if subject.plan.gathers_alone and target in _SHARD_OVER_RANKS:
        raise UnsupportedPlanError(
            f"zero_stage=3, offload=parameters in one process: {target} shards over several ranks alone",
            hint="use --to deepspeed, accelerate, hf-trainer or axolotl, or more GPUs",
        )
    exported = TARGETS[target].write(subject)
    if exported.gaps and not partial:
        listed = "".join(f"\n  {gap}" for gap in exported.gaps)
        raise UnsupportedPlanError(
            f"{target} cannot express all of the plan {subject.path} ({subject.plan.describe()}):{listed}",
            hint="paraplan recommend --framework makes plans that a framework can run",
        )
    return exported


def spreads_experts(target: str) -> bool:
    """Return whether the configuration of a target can spread experts over ranks."""
    gaps_of = TARGETS[target].gaps
    assert gaps_of is not None, f"{target} runs no plans itself"
    plan = ParallelPlan(dp=2, ep=2, zero_stage=3)
    return not any(gap.part == "ep=2" for gap in gaps_of(Subject(file=PlanFile(plan=plan))))


def why_inexpressible(target: str, plan: ParallelPlan, training: TrainingSpec, num_blocks: int) -> str | None:
    """Return what the configuration of a target cannot say of a plan, None where it says all."""
    if training.task != "sft" and target not in _BENEATH_TRL:
        return f"--task {training.task}: {target}'s file trains on given sequences"
    if training.offloads_activations and target not in (*_BENEATH_TRL, *_OFFLOADS_ACTIVATIONS):
        return f"--offload-activations: paraplan writes none for {target}"
    if plan.gathers_alone and target in _SHARD_OVER_RANKS:
        return f"zero_stage=3 in one process: {target} shards over several ranks alone"
    told = _LEARNS_FROM_MORE if target == "deepspeed" and training.task != "sft" else target  # which writes both files
    gaps_of = TARGETS[told].gaps
    assert gaps_of is not None, f"{target} runs no plans itself"
    file = PlanFile(plan=plan, training=training, model=ModelReference(name="model", num_blocks=num_blocks))
    found = gaps_of(Subject(file=file, made_for=target))
    return str(found[0]) if found else None
