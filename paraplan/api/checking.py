"""Whether a plan, or a script, trains what one process trains, and the memory that the runtime traces."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from paraplan.errors import UsageError
from paraplan.model.config_file import load_config
from paraplan.model.factory import load_factory
from paraplan.model.reader import find_config, is_factory
from paraplan.model.transformers_model import library_factory
from paraplan.plan.check import CheckReport, CheckRequest, smaller_plan
from paraplan.plan.parallel import ParallelPlan
from paraplan.plan.support import check_supported
from paraplan.plan.training import TrainingSpec
from paraplan.resources import bundled

if TYPE_CHECKING:
    from paraplan.runtime.fake.run import TracedMemory
    from paraplan.script_check.records import ScriptReport


def check_gradients(
    model: str,
    plan: ParallelPlan,
    *,
    max_ranks: int = 8,
    num_steps: int = 3,
    max_layers: int | None = None,
    seq_length: int = 16,
    keeps_width: bool = False,
    timeout_s: float = 600.0,
    say: Callable[[str], None] = lambda text: None,
) -> CheckReport:
    """Return how losses, gradients and parameters of a small model under a plan differ from those of one process.

    `model` is a reference as `load_model` takes it, `say` is told what is run. Raises `UnsupportedPlanError` for a plan
    that the runtime does not execute, and `CheckRunError` where ranks fail.
    """
    small = smaller_plan(plan, max_ranks=max_ranks)
    check_supported(small)
    request = CheckRequest(
        model=model if is_factory(model) else str(find_config(model)),
        plan=small,
        folder="",
        max_layers=max_layers or (small.num_stages + 1 if small.num_stages > 1 else 2),
        seq_length=seq_length,
        num_steps=num_steps,
        keeps_width=keeps_width,
    )
    from paraplan.script_check.plans import check_plan

    return check_plan(request, plan, timeout_s=timeout_s, say=say).replace(model=model)


def example_script(name: str) -> Path:
    """Return a training script that comes with paraplan. Raises `ParaplanError` in a damaged installation."""
    return bundled(f"examples/{name}", f"scripts/{name}")


def check_script(
    script: str | Path,
    arguments: Sequence[str] = (),
    *,
    num_ranks: int = 4,
    num_steps: int = 2,
    is_module: bool = False,
    shrink: bool = False,
    timeout_s: float = 600.0,
    say: Callable[[str], None] = lambda text: None,
) -> ScriptReport:
    """Return whether `script`, run on CPU ranks as it is, trains what one process trains on all of their batches.

    The script may use anything that trains with torch's optimizers on gloo: DDP, FSDP, DTensors, accelerate, a Trainer,
    collectives of its own. Every gradient is compared after its last reduction and before it is clipped, the norm that
    clipping is told, and every parameter after each of `num_steps` optimizer steps. The report names the first that
    parts, on which ranks, by which factor, and what that usually means.

    `arguments` are the script's, `is_module` runs it as `python -m` does, `say` is told what is run. With `shrink`
    every model of transformers that the script builds or loads is a small one of its structure, with weights drawn:
    nothing of it is downloaded where its configuration is bundled. Raises `UsageError` for a script that is not there,
    and `CheckRunError` where it fails, or never steps an optimizer.
    """
    from paraplan.script_check.checking import check_script
    from paraplan.script_check.plans import launch_on_cpu
    from paraplan.script_check.records import ScriptRequest

    if shrink and importlib.util.find_spec("transformers") is None:
        raise UsageError(
            "smaller models are made of those of transformers, which is not installed", hint="pip install transformers"
        )
    request = ScriptRequest(
        script=str(script),
        is_module=is_module,
        arguments=tuple(arguments),
        num_steps=num_steps,
        shrink_for=num_ranks if shrink else 0,
    )
    return check_script(request, num_ranks=num_ranks, launch=partial(launch_on_cpu, timeout_s=timeout_s), say=say)


_MOST_STAGES = 4


def trace_stages(
    reference: str, plan: ParallelPlan, training: TrainingSpec, *, on_stage: Callable[[int], None]
) -> list[TracedMemory]:
    """Return the traced memory of the stages of `plan`, of a long pipeline the first, the second and the last.

    `on_stage` is told each stage before it runs. Raises `UnsupportedPlanError` for a plan that the runtime cannot
    execute, and `ModelError` for a configuration where transformers is not installed to build it.
    """
    from paraplan.runtime.fake.run import first_rank_of_stage, trace_memory  # torch, which a check's options do without

    check_supported(plan, precision=training.precision, training=training)
    build = model_builder(reference, training)
    stages = range(plan.pp) if plan.pp <= _MOST_STAGES else (0, 1, plan.pp - 1)
    traced = []
    for stage in stages:
        on_stage(stage)
        rank = first_rank_of_stage(plan, stage)
        traced.append(trace_memory(build, plan=plan, training=training, rank=rank, source=reference))
    return traced


def model_builder(reference: str, training: TrainingSpec) -> Callable[[], Any]:
    """Return what builds the model: the user's factory, or the class of transformers that a configuration names."""
    if is_factory(reference):
        return load_factory(reference)
    # torch's own attention takes the flash kernel where it can.
    attention: Literal["sdpa", "eager"] = "eager" if training.attention == "eager" else "sdpa"
    return library_factory(load_config(find_config(reference)), attention=attention)
