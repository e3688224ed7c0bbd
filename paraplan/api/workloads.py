"""Workloads that plans are made for: a model, its training and the machines, modelled for one framework."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

from paraplan.api.machines import LinkKind, load_cluster
from paraplan.api.models import load_model
from paraplan.api.models import usual_length as usual_length
from paraplan.cost.framework import OWN_RUNTIME as OWN_RUNTIME
from paraplan.cost.workload import Workload as Workload
from paraplan.errors import UsageError
from paraplan.hardware.cluster import Cluster as Cluster
from paraplan.model.freezing import in_layers_of
from paraplan.model.quantizers import quantizers as quantizers
from paraplan.model.spec import ModelSpec
from paraplan.model.trainable import parse_trainable, without_qlora
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
    plain = without_qlora(text)
    words = parse_trainable(plain).text  # which names an adapter first
    return words if plain == text.strip() else f"q{words}"


def task_words(text: str) -> str:
    """Return the words of `--task` in their usual form. Raises `PlanError` for others, with what would do."""
    return parse_task(text).text


def least_micro_batch(task: str) -> int:
    """Return the sequences of the smallest micro-batch of a task: one, or the two of a pair."""
    return parse_task(task).group


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


SEQUENCES_PER_GPU = 8
"""Default sequences per GPU when no global batch is given: enough to accumulate or to fill a pipeline."""


def load_workload(
    model: str | Path | ModelSpec | Callable[[], Any],
    profile: str | Path | Cluster | None = None,
    *,
    seq_length: int | None = None,
    global_batch_size: int | None = None,
    framework: str = OWN_RUNTIME,
    num_nodes: int | None = None,
    gpus_per_node: int | None = None,
    network: str | None = None,
    link: LinkKind | None = None,
    host_memory_bytes: int | None = None,
    **training: Any,
) -> Workload:
    """Return a workload in one call, with the defaults of the command line.

    `model` is what `load_model` takes, or its result; `profile` what `load_cluster` takes, None for this machine.
    `training` are more fields of a `TrainingSpec`. By default sequences have the model's length, at most 4,096 tokens,
    a step has 8 of them for each GPU, and GPUs without bf16 compute in fp16.
    """
    cluster = (
        profile
        if isinstance(profile, Cluster)
        else load_cluster(
            profile,
            num_nodes=num_nodes,
            gpus_per_node=gpus_per_node,
            network=network,
            link=link,
            host_memory_bytes=host_memory_bytes,
        )
    )
    spec = model if isinstance(model, ModelSpec) else load_model(model, seq_length=seq_length)
    batch = SEQUENCES_PER_GPU * cluster.num_gpus if global_batch_size is None else global_batch_size
    training = {"precision": usual_precision(cluster)} | training
    asked = training_of(spec, seq_length=seq_length, global_batch_size=batch, **training)
    return Workload.of(spec, asked, cluster, framework=framework)


def usual_precision(cluster: Cluster) -> str:
    """Return the precision where nobody names one: bf16, or fp16 where the GPUs have no bf16."""
    peaks = cluster.gpu.peak_flops_per_s
    return "fp16" if "bf16" not in peaks and "fp16" in peaks else "bf16"


def training_of(model: ModelSpec, *, seq_length: int | None, global_batch_size: int, **fields: object) -> TrainingSpec:
    """Return the training of a model on sequences of `seq_length` tokens, by default `usual_length`.

    Raises `UsageError` where the model has no longest sequence and none is given.
    """
    length = seq_length or usual_length(model)
    if length is None:
        raise UsageError(f"{model.name} does not say how long its sequences are", hint="give --seq-len")
    values = {"global_batch_size": global_batch_size, "seq_length": length}
    if isinstance(train := fields.get("train"), str):
        fields["train"] = in_layers_of(model, train)
    return TrainingSpec(**values | fields)
