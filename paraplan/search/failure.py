"""The error for a workload that no plan fits, or loads: the nearest plan, what it lacks, and what would help."""

from __future__ import annotations

from math import prod

from paraplan.cost.estimate import PlanEstimate, estimate_plan
from paraplan.cost.loading import LoadingEstimate
from paraplan.cost.workload import Workload
from paraplan.errors import NoPlanFitsError
from paraplan.plan.compatibility import OTHER_CONTEXT
from paraplan.plan.context_heads import mask_reason
from paraplan.plan.support import training_reason
from paraplan.plan.training import TrainingSpec
from paraplan.search.constraints import Constraints
from paraplan.search.evaluation import TooLarge
from paraplan.search.offers import MORE_MEMORY, LeverOffer, offers_in_words
from paraplan.search.space import PlanSpace
from paraplan.units import format_bytes, format_bytes_apart, gpus


class NothingFitsError(NoPlanFitsError):
    """No plan of the space fits, or none can be loaded.

    `nearest` is what the plan that comes nearest would need, `offers` what levers and machines would make of it.
    """

    offers: tuple[LeverOffer, ...] = ()
    way_out: str = MORE_MEMORY
    """Hint where nothing is offered that fits."""

    def __init__(self, message: str, *, nearest: PlanEstimate) -> None:
        super().__init__(message)
        self.nearest = nearest

    def offering(self, offers: tuple[LeverOffer, ...], *, framework: str) -> NothingFitsError:
        """Return the error with what would help, as values and as its hint."""
        self.offers = offers
        self.hint = offers_in_words(offers, framework=framework, way_out=self.way_out)
        return self


def taken(*shares: float) -> float:
    """Return one number for shares of memories that a plan takes: above 1 where one of them is, the lower the nearer.

    Where several are beyond 1 it is their product, which falls with each.
    """
    return prod(max(share, 1.0) for share in shares) if max(shares) > 1 else max(shares)


def _taken_by(estimate: PlanEstimate) -> float:
    on_host = (estimate.host_bytes_per_node or 0) / (estimate.host_memory_bytes or float("inf"))
    return taken(estimate.peak_memory_bytes / estimate.usable_memory_bytes, on_host)


def nothing_fits(workload: Workload, space: PlanSpace, too_large: TooLarge) -> NoPlanFitsError:
    """Return the error for a workload whose `space` has no plan that fits."""
    cluster = workload.cluster
    what = f"no plan fits: {workload.model.name} on {gpus(cluster.num_gpus)}"
    on_host, nearest = (
        None if plan is None else estimate_plan(workload, plan) for plan in (too_large.beyond_host, too_large.nearest)
    )
    if on_host is not None and (nearest is None or _taken_by(on_host) <= _taken_by(nearest)):
        needed, limit = format_bytes_apart(on_host.host_bytes_per_node, cluster.host_memory_bytes or 0)
        plans = "1 plan fits" if too_large.num_beyond_host == 1 else f"{too_large.num_beyond_host:,} plans fit"
        usable = format_bytes(on_host.usable_memory_bytes)
        return NothingFitsError(
            f"{what}; with offload {plans} their {usable}, but not the {limit} of a node (--host-memory): "
            f"{on_host.plan.describe()} needs {needed} there",
            nearest=on_host,
        )
    if nearest is None:
        reason = training_reason(workload.training)
        if space.executor.is_own and reason is not None:
            way_out = f"leave out {_option_of(workload.training)}, or plan for a framework that has it: --framework"
            return NoPlanFitsError(f"no plan suits {workload.model.name}: {reason}", hint=way_out)
        reasons = "; ".join(f"{count:,} plans: {reason}" for reason, count in space.rejected.most_common(3))
        return NoPlanFitsError(
            f"no plan suits {workload.model.name} on {gpus(cluster.num_gpus)}: {reasons}",
            hint=_suitable_batches(workload, space.fixed) + _other_context(workload),
        )
    fullest = max(nearest.memory, key=lambda stage: stage.total_bytes)
    lacking = format_bytes(fullest.total_bytes - nearest.usable_memory_bytes)
    needed, limit = format_bytes_apart(fullest.total_bytes, nearest.usable_memory_bytes)
    where = f" on stage {fullest.pipeline_stage}" if nearest.plan.pp > 1 else ""
    return NothingFitsError(
        f"{what} with {limit} usable each; the nearest, {nearest.plan.describe()}, needs {needed}, {lacking} too "
        f"much{where}",
        nearest=nearest,
    )


def nothing_loads(workload: Workload, best: PlanEstimate, loading: LoadingEstimate) -> NothingFitsError:
    """Return the error for a workload of which a step fits, by its best plan, but not what loads it."""
    error = NothingFitsError(
        f"no plan can be loaded: {workload.model.name} on {gpus(workload.cluster.num_gpus)}; under the best, "
        f"{best.plan.describe()}, {loading.whole_in_words}",
        nearest=best,
    )
    error.way_out = f"use {loading.way_out}"
    return error


def _option_of(training: TrainingSpec) -> str:
    """Return the option that asks for what the runtime has not."""
    settings, narrow = training.stack.of_engines, training.linear_precision
    if settings and narrow == "16bit" and not training.offloads_activations:
        return f"{next(iter(settings))} of --stack"
    return "--offload-activations" if narrow == "16bit" else f"--linear-precision {narrow} (or --precision {narrow})"


def _other_context(workload: Workload) -> str:
    """Return the way out where the framework's context parallelism does not take the attention of the model."""
    is_ruled_out = workload.framework.split_rules.causal_context
    return OTHER_CONTEXT if is_ruled_out and mask_reason(workload.model, workload.training.seq_length) else ""


def _suitable_batches(workload: Workload, fixed: Constraints) -> str:
    """Return a hint with batches that some plan of the workload's GPUs can divide."""
    if fixed.words:
        return f"leave out {'one of ' if len(fixed.words) > 1 else ''}{', '.join(fixed.words)}"
    gpus, batch = workload.cluster.num_gpus, workload.training.global_batch_size
    larger = -(-batch // gpus) * gpus
    smaller = batch // gpus * gpus
    sizes = [str(size) for size in (smaller, larger) if size and size != batch]
    return f"use a --global-batch of {' or '.join(sizes or [str(gpus)])}, which {gpus} GPUs divide, or fewer GPUs"
