"""What plans are made for: a model, its training and the machines, modelled for one framework."""

from __future__ import annotations

from typing import Any, get_args

from paraplan.cost.framework import OWN_RUNTIME as OWN_RUNTIME
from paraplan.cost.workload import Workload as Workload
from paraplan.errors import UsageError
from paraplan.hardware.cluster import Cluster as Cluster
from paraplan.model.quantizers import quantizers as quantizers
from paraplan.model.spec import ModelSpec
from paraplan.model.trainable import parse_trainable
from paraplan.model.weight_formats import WEIGHT_FORMATS as WEIGHT_FORMATS
from paraplan.model.weight_formats import weight_format as weight_format
from paraplan.plan.stack import StackSettings as StackSettings
from paraplan.plan.task import parse_task
from paraplan.plan.training import MOST_LOAD as MOST_LOAD
from paraplan.plan.training import OptimizerName
from paraplan.plan.training import TrainingSpec as TrainingSpec
from paraplan.plan.training import optimizer_name as optimizer_name

OPTIMIZERS: tuple[str, ...] = get_args(OptimizerName)
"""Optimizers that are priced; `optimizer_name` knows more names of them."""


def trainable_words(text: str) -> str:
    """Return the words of `--train` in their usual form. Raises `PlanError` for others, with what would do."""
    return parse_trainable(text).text


def task_words(text: str) -> str:
    """Return the words of `--task` in their usual form. Raises `PlanError` for others, with what would do."""
    return parse_task(text).text


def stack_words(text: str) -> str:
    """Return the words of `--stack` in their usual form. Raises `PlanError` for others, with what would do."""
    return StackSettings.parse(text).text


def framework_names() -> list[str]:
    """Return the frameworks that plans can be made for."""
    from paraplan.cost.framework_files import FrameworkCatalog  # which plans for our own runtime do without

    return FrameworkCatalog().names()


def check_framework(name_or_path: str) -> None:
    """Raise `ProfileError` for a framework that there is no profile of."""
    from paraplan.cost.framework_files import load_framework

    load_framework(name_or_path)


def experts_beside_tensor(ep: int, *, tp: int, data_ranks: int, framework: str) -> int:
    """Return the `ep` of a plan, ranks of dp and cp alone, for a degree as a framework's own option counts it.

    `data_ranks` are dp x cp. Raises `PlanError` as `ExpertsProfile.beside_tensor` does.
    """
    from paraplan.cost.framework_files import load_framework

    profile = load_framework(framework)
    return profile.experts.beside_tensor(ep, tp=tp, data_ranks=data_ranks, title=profile.title)


def usual_choices(framework: str, *, tp: int, pp: int, data_ranks: int) -> dict[str, Any]:
    """Return the fields of a plan that a framework's own configurations set where nobody names them.

    They are `zero_stage` and `sequence_parallel`. `data_ranks` are dp x cp.
    """
    from paraplan.cost.framework_files import load_framework

    profile = load_framework(framework)
    stage = profile.data_parallel.default_zero_stages[pp > 1] if data_ranks > 1 else 0
    return {"zero_stage": stage, "sequence_parallel": tp > 1 and profile.tensor_parallel.sequence_parallel_by_default}


def framework_title(framework: str) -> str:
    """Return a framework's name in print."""
    from paraplan.cost.framework_files import load_framework

    return load_framework(framework).title


USUAL_LENGTH = 4096
"""Tokens; see `usual_length`."""


def usual_length(model: ModelSpec) -> int | None:
    """Return the tokens of a sequence where nobody says how many: the model's longest, but no more than 4,096.

    Models are trained on such sequences, and stretched to their longest at the end, if at all. None where the model
    does not say what its longest is.
    """
    return None if model.max_seq_length is None else min(model.max_seq_length, USUAL_LENGTH)


def training_of(model: ModelSpec, *, seq_length: int | None, global_batch_size: int, **fields: object) -> TrainingSpec:
    """Return the training of a model on sequences of `seq_length` tokens, by default `usual_length`.

    Raises `UsageError` where the model has no longest sequence and none is given.
    """
    length = seq_length or usual_length(model)
    if length is None:
        raise UsageError(f"{model.name} does not say how long its sequences are", hint="give --seq-len")
    values = {"global_batch_size": global_batch_size, "seq_length": length}
    return TrainingSpec.model_validate(values | fields)
