"""Traced memory: the runtime itself on a user's model and plan, without a GPU or values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from paraplan.model.config_file import load_config
from paraplan.model.factory import load_factory
from paraplan.model.reader import find_config, is_factory
from paraplan.model.transformers_model import library_factory
from paraplan.plan.parallel import ParallelPlan
from paraplan.plan.support import check_supported
from paraplan.plan.training import TrainingSpec
from paraplan.runtime.fake.run import TracedMemory, first_rank_of_stage, trace_memory

_MOST_STAGES = 4


def trace_stages(
    reference: str, plan: ParallelPlan, training: TrainingSpec, *, on_stage: Callable[[int], None]
) -> list[TracedMemory]:
    """Return the traced memory of the stages of `plan`, of a long pipeline the first, the second and the last.

    `on_stage` is told each stage before it runs. Raises `UnsupportedPlanError` for a plan that the runtime cannot
    execute, and `ModelError` for a configuration where transformers is not installed to build it.
    """
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
