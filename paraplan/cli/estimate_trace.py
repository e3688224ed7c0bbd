"""`paraplan estimate --trace`: the runtime itself on a user's model and plan, without a GPU."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from typing import Any

from paraplan.errors import ModelError, UsageError
from paraplan.model.factory import load_factory
from paraplan.model.reader import find_config, is_factory
from paraplan.plan.parallel import ParallelPlan
from paraplan.plan.support import check_supported
from paraplan.plan.training import TrainingSpec
from paraplan.runtime.fake_run import TracedMemory, first_rank_of_stage, trace_memory

_MOST_STAGES = 4


def trace_stages(reference: str, plan: ParallelPlan, training: TrainingSpec) -> list[TracedMemory]:
    """Return the traced memory of the stages of `plan`, of a long pipeline the first, the second and the last.

    Raises `UnsupportedPlanError` for a plan that the runtime cannot execute, and `UsageError` for a configuration where
    transformers is not installed to build it.
    """
    check_supported(plan, precision=training.precision)
    build = model_builder(reference, training)
    stages = range(plan.pp) if plan.pp <= _MOST_STAGES else (0, 1, plan.pp - 1)
    return [
        trace_memory(build, plan=plan, training=training, rank=first_rank_of_stage(plan, stage), source=reference)
        for stage in stages
    ]


def model_builder(reference: str, training: TrainingSpec) -> Callable[[], Any]:
    """Return what builds the model: the user's factory, or the class of transformers that a configuration names."""
    if is_factory(reference):
        return load_factory(reference)
    if importlib.util.find_spec("transformers") is None:
        raise UsageError(
            f"--trace builds the model of {reference}, and transformers is not installed to do so",
            hint="pip install transformers, or name a factory as file.py:factory",
        )
    import transformers

    path = find_config(reference)
    fields: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    architecture = (fields.get("architectures") or [None])[0]
    model_class = getattr(transformers, str(architecture), None)
    if model_class is None:
        raise ModelError(
            f"{path}: architectures names {architecture!r}, which transformers {transformers.__version__} lacks",
            hint="code that a configuration brings is never executed; give a factory as file.py:factory",
        )
    kind = fields.pop("model_type")
    # torch's own attention takes the flash kernel where it can.
    attention = "eager" if training.attention == "eager" else "sdpa"

    def build() -> Any:
        config = transformers.AutoConfig.for_model(kind, **fields)
        config._attn_implementation = attention
        if hasattr(config, "use_cache"):
            config.use_cache = False
        return model_class(config)

    return build
