"""Completion in a shell: names of models, machines, frameworks, targets, pages and runs. Each looks up names alone."""

from __future__ import annotations

import importlib.resources
from collections.abc import Iterable


def models(incomplete: str) -> list[str]:
    """Return the bundled models that begin so; a shell adds files by itself."""
    from paraplan.api.models import bundled_models

    return _beginning(incomplete, bundled_models())


def machines(incomplete: str) -> list[str]:
    """Return the machines that begin so; of a number of GPUs, as `8x`, the kinds of GPU."""
    number, is_number, _ = incomplete.partition("x")
    if is_number and number.isdigit():
        return _beginning(incomplete, (f"{number}x{name}" for name in _profiles("gpus")))
    return _beginning(incomplete, _profiles("machines"))


def gpus(incomplete: str) -> list[str]:
    """Return the kinds of GPU that begin so."""
    return _beginning(incomplete, _profiles("gpus"))


def networks(incomplete: str) -> list[str]:
    """Return the networks that begin so."""
    return _beginning(incomplete, _profiles("networks"))


def frameworks(incomplete: str) -> list[str]:
    """Return the frameworks that begin so."""
    from paraplan.api.workloads import framework_names

    return _beginning(incomplete, framework_names())


def optimizers(incomplete: str) -> list[str]:
    """Return the optimizers that begin so."""
    from paraplan.api.workloads import OPTIMIZERS

    return _beginning(incomplete, OPTIMIZERS)


def weight_formats(incomplete: str) -> list[str]:
    """Return the formats of frozen weights that begin so."""
    from paraplan.api.workloads import WEIGHT_FORMATS

    return _beginning(incomplete, WEIGHT_FORMATS)


def stack_settings(incomplete: str) -> list[str]:
    """Return the settings of a stack whose last name begins so, behind those that are there."""
    from paraplan.api.workloads import StackSettings

    before, comma, last = incomplete.rpartition(",")
    return [f"{before}{comma}{name}" for name in _beginning(last, tuple(StackSettings.model_fields))]


def quantizers(incomplete: str) -> list[str]:
    """Return the tools that store weights in fewer bits and begin so."""
    from paraplan.api.workloads import quantizers as known

    return _beginning(incomplete, tuple(known()))


def trained(incomplete: str) -> list[str]:
    """Return what may train that begins so, without its settings."""
    return _beginning(
        incomplete, ("full", "lora:r=16", "qlora:r=16", "dora", "rslora", "ia3", "head", "embeddings", "norms")
    )


def tasks(incomplete: str) -> list[str]:
    """Return what a step may learn from that begins so, without its settings."""
    return _beginning(
        incomplete, ("sft", "dpo", "dpo:precomputed", "orpo", "kto", "reward", "grpo", "embedding", "reranker")
    )


def targets(incomplete: str) -> list[str]:
    """Return the targets of `paraplan export` that begin so."""
    from paraplan.api.exporting import EXPORT_TARGETS

    return _beginning(incomplete, EXPORT_TARGETS)


def topics(incomplete: str) -> list[str]:
    """Return the pages of `paraplan explain` that begin so."""
    folder = importlib.resources.files("paraplan").joinpath("docs")
    pages = (path.name for path in folder.iterdir() if path.name.endswith(".md"))
    return _beginning(incomplete, (page.removesuffix(".md") for page in pages))


def runs(incomplete: str) -> list[str]:
    """Return the ids of the live runs of this user that begin so."""
    from paraplan.api.live_runs import live_runs

    return sorted(run.id for run in live_runs() if run.id.startswith(incomplete))


def schedulers(incomplete: str) -> list[str]:
    """Return the schedulers of `paraplan submit` that begin so."""
    from paraplan.api.submission import scheduler_names

    return _beginning(incomplete, scheduler_names())


def jobs(incomplete: str) -> list[str]:
    """Return the names of the jobs that were submitted and begin so."""
    from paraplan.api.submission import submitted_jobs

    return _beginning(incomplete, (job.name for job in submitted_jobs()))


def _profiles(kind: str) -> frozenset[str]:
    from paraplan.api.profiles import profile_names

    return profile_names(kind)


def _beginning(incomplete: str, names: Iterable[str]) -> list[str]:
    return sorted(name for name in names if name.startswith(incomplete.lower()))
