"""Other ways to train a model where full training does not fit: pure bf16 with 8-bit states, LoRA, QLoRA, priced."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from paraplan.cost.workload import Workload
from paraplan.errors import NoPlanFitsError, ParaplanError
from paraplan.plan.executor import Executor
from paraplan.plan.training import TrainingSpec
from paraplan.records import Record
from paraplan.search.constraints import Constraints
from paraplan.search.results import SearchResult
from paraplan.search.search import search
from paraplan.search.what_fits import smaller_clusters, some_plan_fits
from paraplan.units import format_bytes, format_count, gpus

MOST_GPUS = 64
"""On more machines the fewest GPUs are not looked for."""
_LORA = "lora:r=16"


class FineTuningWay(Record):
    """A way to train the same model that fits where full training does not, with its best plan."""

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


def trainings(training: TrainingSpec) -> Iterator[tuple[str, str, TrainingSpec]]:
    """Yield the ways by name and options."""
    if training.precision == "bf16":
        options = "--precision bf16-pure --optimizer adamw_8bit"
        yield "Pure bf16", options, training.replace(precision="bf16-pure", optimizer="adamw_8bit")
    yield "LoRA", f"--train {_LORA}", training.replace(train=_LORA)
    weights = f"--train {_LORA} --base-weights nf4:double"
    yield "QLoRA", weights, training.replace(train=_LORA, base_weights="nf4:double")


def fine_tuning_ways(workload: Workload, *, executor: Executor, fixed: Constraints) -> tuple[FineTuningWay, ...]:
    """Return the ways that fit the workload's machines without offload, fastest first.

    None where a part of the model trains already. Each is searched as the workload itself would be, with what is
    `fixed`.
    """
    if workload.training.train != "full" or workload.cluster.gpu.vendor == "cpu":
        return ()
    without = replace(fixed, offload="none")
    found = []
    for name, options, training in trainings(workload.training):
        try:
            other = workload.trained_as(training)
            best = _best(other, executor=executor, fixed=without)
        except ParaplanError:  # it does not fit either, or the model has no layers for it
            continue
        fewest = _fewest(other, executor=executor, fixed=without)
        found.append(
            FineTuningWay(
                name=name,
                options=options,
                plan=best.best.plan.describe(),
                peak_memory_bytes=best.best.peak_memory_bytes,
                usable_memory_bytes=best.best.usable_memory_bytes,
                tokens_per_s_per_gpu=best.best.step.tokens_per_s_per_gpu,
                num_gpus=other.cluster.num_gpus,
                fewest_gpus=fewest,
            )
        )
    return tuple(sorted(found, key=lambda way: -way.tokens_per_s_per_gpu))


def _best(workload: Workload, *, executor: Executor, fixed: Constraints) -> SearchResult:
    return search(workload, num_candidates=1, executor=executor, fixed=fixed, explains_failure=False)


def _fewest(workload: Workload, *, executor: Executor, fixed: Constraints) -> int:
    cluster = workload.cluster
    if cluster.num_gpus > MOST_GPUS:
        return cluster.num_gpus
    for smaller in smaller_clusters(cluster):
        if some_plan_fits(replace(workload, cluster=smaller), executor=executor, fixed=fixed):
            return smaller.num_gpus
    raise NoPlanFitsError("a plan that was found fits")
