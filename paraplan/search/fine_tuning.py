"""What fits where full training does not: without a fixed choice, pure bf16 with 8-bit states, LoRA, QLoRA, priced."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace

from paraplan.cost.workload import Workload
from paraplan.errors import ParaplanError
from paraplan.plan.executor import Executor
from paraplan.plan.training import TrainingSpec
from paraplan.records import Record
from paraplan.search.cluster_sizes import smaller_clusters
from paraplan.search.constraints import Constraints
from paraplan.search.search import search
from paraplan.search.what_fits import some_plan_fits
from paraplan.units import format_bytes, format_count, gpus

MOST_GPUS = 64
"""On more machines the fewest GPUs are not looked for."""
_LORA = "lora:r=16"


class FineTuningWay(Record):
    """A way to train the same model that fits where what was asked for does not, with its best plan."""

    name: str
    """What people call it."""
    options: str
    """The options that ask for it."""
    plan: str
    """The plan on all GPUs, in short."""
    peak_memory_bytes: int
    """What it needs of each."""
    usable_memory_bytes: int
    """What each has."""
    tokens_per_s_per_gpu: float
    """Its speed."""
    num_gpus: int
    """The GPUs that it is for."""
    fewest_gpus: int
    """The fewest of these machines' GPUs that it fits, in steps of two."""

    @property
    def in_words(self) -> str:
        """The way in one sentence."""
        spare = format_bytes(self.usable_memory_bytes - self.peak_memory_bytes)
        rate = format_count(float(f"{self.tokens_per_s_per_gpu:.3g}"))
        also = f"; it fits {gpus(self.fewest_gpus)} too" if self.fewest_gpus < self.num_gpus else ""
        there = gpus(self.num_gpus)
        return f"{self.options}: fits {there} with {spare} to spare, {rate} tokens/s per GPU ({self.plan}){also}"


def trainings(training: TrainingSpec, *, has_experts: bool = False) -> Iterator[tuple[str, str, TrainingSpec]]:
    """Yield the ways by name and options."""
    if training.precision == "bf16":
        options = "--precision bf16-pure --optimizer adamw_8bit"
        yield "Pure bf16", options, training.replace(precision="bf16-pure", optimizer="adamw_8bit")
    yield "LoRA", f"--train {_LORA}", training.replace(train=_LORA)
    if training.linear_precision == "16bit":  # 4-bit weights are multiplied in 16 bits
        weights = f"--train {_LORA} --base-weights nf4:double"
        qlora = training.replace(train=_LORA, base_weights="nf4:double")
        yield "QLoRA", weights, qlora
        if has_experts:  # which transformers leaves in 16 bits
            tool = "axolotl"
            yield "QLoRA MoE", f"{weights} --quantizer {tool}", qlora.replace(quantizer=tool)


def fine_tuning_ways(workload: Workload, *, executor: Executor, fixed: Constraints) -> tuple[FineTuningWay, ...]:
    """Return the ways that fit the workload's machines without offload, fastest first.

    None where a part of the model trains already. Each is searched as the workload itself would be, with what is
    `fixed`.
    """
    if workload.training.train != "full" or workload.cluster.gpu.vendor == "cpu":
        return ()
    without = replace(fixed, offload="none")
    found = []
    for name, options, training in trainings(workload.training, has_experts=workload.model.num_experts > 1):
        try:
            other = workload.trained_as(training)
        except ParaplanError:  # the model has no layers for it
            continue
        found.append(_way(name, options, other, executor=executor, fixed=without))
    return _fastest_first(found)


def relaxed_ways(workload: Workload, *, executor: Executor, fixed: Constraints) -> tuple[FineTuningWay, ...]:
    """Return what fits without one of the choices that are `fixed`, fastest first."""
    found = []
    for each in fields(fixed):
        value = getattr(fixed, each.name)
        if value is not None:
            option = Constraints(**{each.name: value}).words[0]
            free = replace(fixed, **{each.name: None})
            found.append(_way(f"Without {option}", f"without {option}", workload, executor=executor, fixed=free))
    return _fastest_first(found)


def _fastest_first(ways: list[FineTuningWay | None]) -> tuple[FineTuningWay, ...]:
    return tuple(sorted((way for way in ways if way is not None), key=lambda way: -way.tokens_per_s_per_gpu))


def _way(
    name: str, options: str, workload: Workload, *, executor: Executor, fixed: Constraints
) -> FineTuningWay | None:
    """Return a way with its best plan, None where nothing fits with it either."""
    try:
        result = search(workload, num_candidates=1, executor=executor, fixed=fixed, explains_failure=False)
    except ParaplanError:
        return None
    best = result.best
    return FineTuningWay(
        name=name,
        options=options,
        plan=best.plan.describe(),
        peak_memory_bytes=best.peak_memory_bytes,
        usable_memory_bytes=best.usable_memory_bytes,
        tokens_per_s_per_gpu=best.step.tokens_per_s_per_gpu,
        num_gpus=workload.cluster.num_gpus,
        fewest_gpus=_fewest(workload, executor=executor, fixed=fixed),
    )


def _fewest(workload: Workload, *, executor: Executor, fixed: Constraints) -> int:
    cluster = workload.cluster
    if cluster.num_gpus > MOST_GPUS:
        return cluster.num_gpus
    for smaller in smaller_clusters(cluster):
        if some_plan_fits(replace(workload, cluster=smaller), executor=executor, fixed=fixed):
            return smaller.num_gpus
    return cluster.num_gpus
