"""Changes that make the recommended plan faster or smaller: other options, more nodes, other GPUs, priced."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from paraplan.cost.estimate import PlanEstimate, allocator_holds, estimate_plan, evaluate_plans, why_unsuitable
from paraplan.cost.implementations import implementations
from paraplan.cost.workload import Workload
from paraplan.errors import ParaplanError
from paraplan.plan.executor import OWN_RUNTIME, Executor, training_gap
from paraplan.plan.parallel import ParallelPlan
from paraplan.progress import is_stopped, say
from paraplan.records import Record
from paraplan.search.constraints import FREE, Constraints
from paraplan.search.levers import levers
from paraplan.search.search import search
from paraplan.search.what_fits import other_machines
from paraplan.units import format_bytes, format_seconds, gpus

MOST_SEARCHED_GPUS = 16
"""On more GPUs a change of options is priced with the plan as it is: a search for each would take too long."""
WORTH_SAYING = 0.03
"""Share of the step or of the memory below which a gain is not listed."""
TIGHT = 0.9
"""Share of usable memory above which memory is worth time."""
MOST_TIME_FOR_MEMORY = 0.5
"""Share of the step that a change may cost which saves memory where it is tight."""
MUCH_MEMORY = 0.1
"""Share of the memory that an option saves above which a faster plan is looked for in the room that it leaves."""
MOST_MACHINES = 2


class Help(Record):
    """One change, and what it gains against the recommended plan."""

    name: str
    """Usual name of the change."""
    options: str
    """The options that ask for it."""
    plan: ParallelPlan
    """The plan under the change."""
    is_same_plan: bool
    """Whether that is the recommended one."""
    step_time_s: float
    """Seconds of a step under the change."""
    saved_s: float
    """How much less that is, negative for more."""
    peak_memory_bytes: int
    """Memory of the fullest GPU."""
    saved_bytes: int
    """How much less that is, negative for more."""
    keeps_training: bool
    """Whether the same parameters train with the same arithmetic: a change of speed alone."""

    @property
    def share(self) -> float:
        """Share of the step's time that the change saves."""
        return self.saved_s / (self.step_time_s + self.saved_s)

    @property
    def costs_nothing(self) -> bool:
        """Whether it is worth its option: a gain in time that leaves the training as it is."""
        return self.keeps_training and self.share >= WORTH_SAYING

    @property
    def change_in_words(self) -> str:
        """The change of the step's time in percent, with its sign where it is not 0."""
        words = f"{-self.share:+.0%}"
        return "0%" if words in ("-0%", "+0%") else words

    @property
    def in_words(self) -> str:
        """The gain in a sentence."""
        step = f"{format_seconds(self.step_time_s)} a step, {self.share:.0%} less"
        return step if self.is_same_plan else f"{step} ({self.plan.describe()}; {format_bytes(self.peak_memory_bytes)})"


@dataclass(frozen=True)
class _Change:
    name: str
    options: str
    workload: Workload
    keeps_training: bool = False
    keeps_machine: bool = True
    plan: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the plan that it sets."""


def what_helps(
    workload: Workload,
    best: PlanEstimate,
    *,
    executor: Executor = OWN_RUNTIME,
    fixed: Constraints = FREE,
    searches: bool = False,
) -> tuple[Help, ...]:
    """Return the changes that gain at least 3 % of the recommended plan's time or memory, most time saved first.

    Where the plan takes over 90 % of the memory, what saves some may cost up to half as much time again.

    Without `searches` options alone are changed, with the plan as it is, which takes milliseconds; up to 16 GPUs
    the one that saves most memory, and leaves the training as it is, gets a plan of its own. With it all do, and other
    machines are looked at too.
    """
    with_plans = searches and workload.cluster.num_gpus <= MOST_SEARCHED_GPUS
    num_blocks = workload.model.num_blocks
    options = [
        each
        for each in _options(workload, executor)
        if training_gap(executor, each.workload.training, num_blocks) is None
    ]
    found = [_priced(each, best, executor, fixed, with_plans) for each in options]
    if not with_plans and workload.cluster.num_gpus <= MOST_SEARCHED_GPUS and _wants_memory(best):
        found = _with_the_room_used(options, found, best, executor, fixed)
    changes = list(_plan_options(workload, best.plan))
    searched = [each for each in changes if with_plans and any(getattr(fixed, name) is not None for name in each.plan)]
    found += [_priced(each, best, executor, fixed, True) for each in searched]
    found += _priced_as_they_are(workload, [each for each in changes if each not in searched], best, executor)
    if searches:
        found += [_priced(each, best, executor, fixed, True) for each in _more_nodes(workload)]
        found += _machines(workload, best, executor, fixed)
    worth = [each for each in found if each is not None and _is_worth(each, best)]
    return tuple(sorted(worth, key=lambda each: (-each.saved_s, -each.saved_bytes)))


def _wants_memory(best: PlanEstimate) -> bool:
    """Whether a plan does what it would not do with more memory: recompute, offload, split, small micro-batches."""
    plan = best.plan
    is_plain = plan.dp == plan.world_size and not plan.zero_stage and plan.offload == "none"
    is_tight = best.peak_memory_bytes > TIGHT * best.usable_memory_bytes
    return is_tight or not is_plain or plan.recompute != "none"


def _with_the_room_used(
    options: list[_Change], found: list[Help | None], best: PlanEstimate, executor: Executor, fixed: Constraints
) -> list[Help | None]:
    """Return `found` with a plan of its own for the free option that saves most memory, where that is faster."""
    enough = MUCH_MEMORY * best.peak_memory_bytes
    saving = [
        (one.saved_bytes, place)
        for place, one in enumerate(found)
        if one is not None and one.keeps_training and one.saved_bytes >= enough and one.share > -WORTH_SAYING
    ]
    if not saving:
        return found
    _, place = max(saving)
    faster = _priced(options[place], best, executor, fixed, True)
    if faster is None or not faster.costs_nothing:
        return found
    return [*found[:place], faster, *found[place + 1 :]]


def _is_worth(one: Help, best: PlanEstimate) -> bool:
    """Whether a change saves time without taking more memory than there is, or memory for no more time than it may."""
    memory = one.saved_bytes / max(1, best.peak_memory_bytes)
    is_tight = best.peak_memory_bytes > TIGHT * best.usable_memory_bytes
    return one.share >= WORTH_SAYING or (
        memory >= WORTH_SAYING and one.share > -(MOST_TIME_FOR_MEMORY if is_tight else WORTH_SAYING)
    )


def _options(workload: Workload, executor: Executor) -> Iterator[_Change]:
    """Yield the changes of options that the training has not made yet: those for speed, and the levers on memory."""
    training = workload.training
    changes: list[tuple[str, str, bool, dict[str, Any]]] = []
    if not training.compiled and workload.cluster.gpu.vendor != "cpu":
        changes.append(("torch.compile", "--compile", True, {"compiled": True}))
    if training.attention != "flash" and training.precision != "fp32":
        changes.append(("flash-attention", "--attention flash", True, {"attention": "flash"}))
    if training.optimizer == "adamw_foreach":
        changes.append(("fused AdamW", "--optimizer adamw", True, {"optimizer": "adamw"}))
    stacks = [training.stack.replace(dispatcher=name) for name in _dispatchers(workload)]
    changes += [("exchange of experts", f"--stack {one.text}", True, {"stack": one}) for one in stacks]
    if (training.linear_precision, training.precision) == ("16bit", "bf16") and (
        workload.cluster.gpu.fp8_speedup or 1
    ) > 1:
        changes.append(("products in 8 bits", "--precision fp8", False, {"linear_precision": "fp8"}))
    for name, options, same, change in changes:
        try:
            changed = workload.trained_as(training.replace(**change))
        except ParaplanError:  # what else is asked for excludes it
            continue
        yield _Change(name, options, changed, keeps_training=same)
    for lever in levers(workload, FREE, executor):
        if lever.trains_adapter and training.train == "full" and workload.cluster.num_gpus > MOST_SEARCHED_GPUS:
            continue  # on so many GPUs a model is trained, not adapted
        try:
            yield _Change(lever.name, lever.options, lever.workload(workload), keeps_training=lever.keeps_training)
        except ParaplanError:  # the model has no layers for it
            continue


def _dispatchers(workload: Workload) -> Iterator[str]:
    """Yield what else the framework may have send tokens to their experts."""
    if workload.model.num_experts > 1 and workload.training.stack.dispatcher is None:
        for name, one in implementations().dispatchers.items():
            if workload.framework.name in one.option_of and workload.cluster.gpu.architecture in one.architectures:
                yield name


def _plan_options(workload: Workload, plan: ParallelPlan) -> Iterator[_Change]:
    """Yield the changes of the plan alone: recompute, offload, a smaller micro-batch.

    The search has weighed them where they are free, so they gain time only in place of what was fixed, and memory.
    """
    changes: list[dict[str, Any]] = [{"recompute": one} for one in ("none", "selective_ops", "full")]
    if workload.cluster.gpu.vendor != "cpu":
        changes += [{"offload": one} for one in ("none", "optimizer", "parameters")]
    if plan.micro_batch_size % 2 == 0:
        changes.append({"micro_batch_size": plan.micro_batch_size // 2})
    for change in changes:
        if all(getattr(plan, name) == value for name, value in change.items()):
            continue
        options = " ".join(Constraints(**change).words)
        yield _Change(options, options, workload, keeps_training=True, plan=change)


def _more_nodes(workload: Workload) -> Iterator[_Change]:
    cluster = workload.cluster
    if cluster.network is None:
        return
    twice = cluster.replace(num_nodes=2 * cluster.num_nodes)
    name = f"{gpus(twice.num_gpus)}"
    yield _Change(name, f"--nodes {twice.num_nodes}", replace(workload, cluster=twice), keeps_machine=False)


def _machines(workload: Workload, best: PlanEstimate, executor: Executor, fixed: Constraints) -> list[Help | None]:
    """Return what as many of the next faster GPUs would do, two kinds of them."""
    found: list[Help | None] = []
    for name, other in other_machines(workload.cluster):
        change = _Change(other.gpu.title, f"--profile {name}", replace(workload, cluster=other), keeps_machine=False)
        priced = _priced(change, best, executor, fixed, True)
        if priced is not None and priced.share >= WORTH_SAYING:
            found.append(priced)
        if len(found) == MOST_MACHINES:
            break
    return found


def _priced(change: _Change, best: PlanEstimate, executor: Executor, fixed: Constraints, searches: bool) -> Help | None:
    """Return a change with its gain, None where nothing fits with it or somebody asked for an end."""
    if is_stopped():
        return None
    try:
        if searches or not change.keeps_machine or _needs_search(change, best, executor):
            say(f"pricing {change.name}")
            fixed = replace(fixed, **change.plan)
            other = search(change.workload, num_candidates=1, executor=executor, fixed=fixed)
            estimate = other.best
        elif _is_refused(change, best.plan, executor):
            return None
        else:
            estimate = estimate_plan(change.workload, best.plan)
    except ParaplanError:  # nothing fits
        return None
    return _gain(change, estimate, best)


def _priced_as_they_are(
    workload: Workload, changes: list[_Change], best: PlanEstimate, executor: Executor
) -> list[Help | None]:
    """Return changes of the plan alone with their gains, priced in one table; without those that nobody executes."""
    plans = list[tuple[_Change, ParallelPlan]]()
    for change in changes:
        try:
            plan = _changed(best.plan, change)
        except ValueError:  # its fields contradict each other
            continue
        if not _is_refused(change, plan, executor) and why_unsuitable(workload, plan) is None:
            plans.append((change, plan))
    if not plans or is_stopped():
        return []
    estimates = evaluate_plans(workload, [plan for _, plan in plans])
    return [_gain(change, estimate, best) for (change, _), estimate in zip(plans, estimates, strict=True)]


def _gain(change: _Change, estimate: PlanEstimate, best: PlanEstimate) -> Help | None:
    """Return what a change gains with the plan of `estimate`, None where that does not fit.

    Nor where torch's allocator has no room for a plan that the search has passed over for a slower one.
    """
    if not estimate.fits:
        return None
    if change.plan and not allocator_holds(change.workload, estimate):
        return None
    return Help(
        name=change.name,
        options=change.options,
        plan=estimate.plan,
        is_same_plan=estimate.plan == best.plan,
        step_time_s=estimate.step.step_time_s,
        saved_s=best.step.step_time_s - estimate.step.step_time_s,
        peak_memory_bytes=estimate.peak_memory_bytes,
        saved_bytes=best.peak_memory_bytes - estimate.peak_memory_bytes,
        keeps_training=change.keeps_training,
    )


def _is_refused(change: _Change, plan: ParallelPlan, executor: Executor) -> bool:
    """Whether a plan under a change is one that the executor cannot execute."""
    training, num_blocks = change.workload.training, change.workload.model.num_blocks
    return executor.reason_of(plan, training, num_blocks) is not None


def _needs_search(change: _Change, best: PlanEstimate, executor: Executor) -> bool:
    """Whether an option goes with another plan only, on GPUs few enough to search for it: --compile without `tp`."""
    is_few = change.workload.cluster.num_gpus <= MOST_SEARCHED_GPUS
    return is_few and not change.plan and _is_refused(change, best.plan, executor)


def _changed(plan: ParallelPlan, change: _Change) -> ParallelPlan:
    """Return the plan with a change; a smaller micro-batch keeps the global batch."""
    size = change.plan.get("micro_batch_size", plan.micro_batch_size)
    return plan.replace(**change.plan, num_microbatches=plan.num_microbatches * plan.micro_batch_size // size)
