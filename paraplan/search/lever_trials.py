"""Levers tried in their order: alone, then beside those before them that saved memory; what matters of them is kept."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import reduce

from paraplan.cost.estimate import PlanEstimate, estimate_plan
from paraplan.cost.loading import loading_of
from paraplan.cost.stored_weights import untrainable_notes
from paraplan.cost.workload import Workload
from paraplan.errors import ParaplanError
from paraplan.hardware.cluster import Cluster
from paraplan.plan.executor import ANYTHING, Executor
from paraplan.progress import is_stopped, say
from paraplan.search.cluster_sizes import smaller_clusters
from paraplan.search.constraints import Constraints
from paraplan.search.failure import NothingFitsError, taken
from paraplan.search.levers import Lever, lacking, levers, loaders, offloaders, with_room
from paraplan.search.offers import NO_COST, LeverOffer
from paraplan.search.results import TOLERANCE
from paraplan.search.search import search
from paraplan.search.what_fits import larger_machines, longest_sequence, more_gpus, some_plan_fits
from paraplan.units import gpus

MOST_GPUS = 64
"""On more GPUs the fewest that a lever fits are not looked for, nor levers that train otherwise where a plan fits."""
MOST_OFFERS = 3
"""So many levers that fit are offered."""
SAVES = 0.99
"""Times what is needed without it: a lever that needs more is not kept beside the next."""
LONGER = 1.1
"""Times the tokens that a sequence has without further levers: those that gain less are left out of the offer."""


Look = Callable[..., "tuple[str, Cluster] | None"]
"""Looks for machines on which a workload fits, by the options that ask for them."""


@dataclass(frozen=True)
class _Tried:
    """A lever with its offer, and what it takes of what there is: above 1 it does not fit."""

    lever: Lever
    offer: LeverOffer
    share: float


@dataclass
class LeverTrials:
    """Levers on a workload, tried in their order.

    `without` is the best plan without any; None where nothing fits. Then a lever that is not enough is kept while the
    next ones are tried, and what is offered is the least of these together that fits.
    """

    workload: Workload
    executor: Executor
    fixed: Constraints
    without: PlanEstimate | None = None
    nearest: PlanEstimate | None = None
    """Plan that comes nearest where nothing fits."""
    executors: Callable[[Workload], Executor] = lambda workload: ANYTHING
    """Returns the executor of a workload's plans."""
    leaves_room: bool = False
    """Whether only plans count that leave a tenth of the memory."""
    stays_on_gpus: bool = False
    """Whether offload, which is fixed as none, is not left free by a lever."""
    most_slowdown: float = TOLERANCE["throughput"]
    """Share of the step of the plan without the lever: a lever that costs more is not offered."""
    kept: list[Lever] = field(default_factory=list)
    """The levers that saved memory and were not enough, in their order."""
    left_out: list[Lever] = field(default_factory=list)
    """Levers that saved too little of what was needed then, which may be much of what is needed beside others."""

    def offers(self, *, looks_for_fewest: bool = False) -> tuple[LeverOffer, ...]:
        """Return up to `MOST_OFFERS` levers that fit, in their order, and those that are not enough or lacking.

        Of more, those that keep the training come before others, faster ones before slower ones, and those with more
        room before those as fast.
        """
        fitting: list[_Tried] = []
        beside: list[LeverOffer] = []
        least = _share(self.workload, self.nearest) if self.nearest is not None else float("inf")
        for lever in levers(self.workload, self.fixed, self.executor):
            if (self.without is not None or self.stays_on_gpus) and "offload" in lever.fixed:
                continue  # asked about plans that need none
            if self.leaves_room and not lever.keeps_training and self.workload.cluster.num_gpus > MOST_GPUS:
                continue  # what fits on so many is not trained otherwise for room, and each is a search of seconds
            if (
                len(fitting) >= MOST_OFFERS
                and not lever.keeps_training
                and lacking(lever, self.workload, self.executor) is None
            ):
                continue
            tried = self._try(lever)
            if tried is None:
                self.left_out.append(lever)
                continue
            if tried.offer.lacking is not None:
                beside.append(tried.offer)
                continue
            if not tried.offer.fits and not fitting:
                tried, least = self._with_kept(tried, least)
            if not tried.offer.fits:
                beside.append(tried.offer)
            elif self._is_worse(tried, fitting):
                continue
            else:
                fitting.append(tried)
        fitting = fitting or self._with_those_left_out()
        while len(fitting) > MOST_OFFERS:
            other_training = (one for one in reversed(fitting) if not one.lever.keeps_training)
            fitting.remove(next(other_training, _fullest_of_slowest(fitting)))
        offers = [one.offer for one in fitting]
        if looks_for_fewest and self.workload.cluster.num_gpus <= MOST_GPUS:
            offers = _without_contradictions([self._with_fewest(one) for one in fitting])
        return (*offers, *beside)

    def beyond(self) -> tuple[LeverOffer, ...]:
        """Return what fits where weights are loaded otherwise, with other sequences, more of the GPUs, or others.

        Levers are kept where these gain.
        """
        found = [
            self._loaded_otherwise(),
            self._offloaded_elsewhere(),
            self._shorter_sequences(),
            self._on_machine(more_gpus, None),
            self._on_machine(larger_machines, "other GPUs"),
        ]
        return tuple(one for one in found if one is not None)

    def _loaded_otherwise(self) -> LeverOffer | None:
        """Return the first other tool, or framework, that loads what does not stand on each GPU."""
        if self.nearest is None or not self.nearest.fits or loads(self.workload, self.nearest):
            return None
        return self._elsewhere(loaders(self.workload))

    def _offloaded_elsewhere(self) -> LeverOffer | None:
        """Return the first framework that offloads activations, and fuses more, under which a plan fits."""
        is_too_large = self.nearest is not None and not self.nearest.fits
        return self._elsewhere(offloaders(self.workload)) if is_too_large else None

    def _elsewhere(self, ways: Iterable[Lever]) -> LeverOffer | None:
        """Return the first of some levers, of other frameworks too, under which a plan fits."""
        for lever in ways:
            try:
                there = self.executor if lever.framework is None else self.executors(lever.workload(self.workload))
            except ParaplanError:  # it lacks the training
                continue
            found = replace(self, executor=there)._try(lever)
            if found is not None and found.offer.fits:
                return found.offer
        return None

    def _on_machine(self, look: Look, name: str | None) -> LeverOffer | None:
        """Return what fits on machines that are looked for.

        Of the levers kept those that leave the training as it was asked for are pulled that fewer GPUs need.
        """
        pulled = [one for one in self.kept if one.keeps_asked]
        for group in (pulled, []) if pulled else ([],):
            workload, fixed = self._under(_joined(group))
            machine = look(workload, executor=self.executor, fixed=fixed)
            if machine is None:
                continue
            options, cluster = machine
            on = replace(self, workload=replace(self.workload, cluster=cluster))
            lever = _joined(on._needed(group))
            there = Lever(name or gpus(cluster.num_gpus), options if name is None else f"--profile {options}")
            return self._offer_on(on.workload, lever.beside(there) if lever else there)
        return None

    def _needed(self, group: list[Lever]) -> list[Lever]:
        """Return the levers of a group that fits without which nothing fits."""
        left = list(group)
        for one in group:
            fewer = [other for other in left if other is not one]
            workload, fixed = self._under(_joined(fewer))
            if some_plan_fits(workload, executor=self.executor, fixed=fixed):
                left = fewer
        return left

    def _shorter_sequences(self) -> LeverOffer | None:
        free = _joined([one for one in self.kept if one.keeps_training])
        length, beside = 0, None
        for lever in (None, free, _joined(self.kept)):
            if lever == beside and length:
                continue
            workload, fixed = self._under(lever)
            if length:
                training = workload.training.replace(seq_length=round(LONGER * length))
                longer = replace(workload, training=training)
                if not some_plan_fits(longer, executor=self.executor, fixed=fixed):
                    continue
            longest = longest_sequence(workload, executor=self.executor, fixed=fixed) or 0
            if longest > LONGER * length:
                length, beside = longest, lever
        if not 0 < length < self.workload.training.seq_length:
            return None
        shorter = Lever("shorter sequences", f"--seq-len {length}", {"seq_length": length}, keeps_training=False)
        return self._offer_on(self.workload, beside.beside(shorter) if beside else shorter)

    def _under(self, lever: Lever | None) -> tuple[Workload, Constraints]:
        """Return the workload and what is fixed under a lever."""
        if lever is None:
            return self.workload, self.fixed
        return lever.workload(self.workload), lever.constraints(self.fixed)

    def _offer_on(self, workload: Workload, lever: Lever) -> LeverOffer | None:
        tried = replace(self, workload=workload)._try(lever)
        return None if tried is None else tried.offer

    def _with_kept(self, alone: _Tried, least: float) -> tuple[_Tried, float]:
        """Return the least of a lever and those kept that fits, else the lever alone; and the least share so far.

        What is not enough is kept where it takes less than what is kept.
        """
        left = [one for one in self.kept if not one.fields <= alone.lever.fields]
        joined = self._joined_with(left, alone.lever) if left else alone
        if joined is not None and joined.offer.fits:
            for one in list(left):
                fewer = self._joined_with([other for other in left if other is not one], alone.lever)
                if fewer is not None and fewer.offer.fits:
                    left.remove(one)
                    joined = fewer
            return joined, least
        ways = [(alone, [alone.lever])] if joined is None else [(joined, [*left, alone.lever]), (alone, [alone.lever])]
        best, group = min(ways, key=lambda way: way[0].share)
        if best.share <= SAVES * least or alone.lever.is_choice:
            self.kept, least = group, min(best.share, least)
        else:
            self.left_out.append(alone.lever)
        return alone, least

    def _with_those_left_out(self) -> list[_Tried]:
        """Return what is kept beside what was left out and costs no training, where they fit together; else nothing."""
        before = {name for one in self.kept for name in one.fields}
        free = [one for one in self.left_out if one.keeps_training and not one.is_choice and not one.fields & before]
        together = self._joined_with(free, reduce(Lever.beside, self.kept)) if self.kept and free else None
        return [together] if together is not None and together.offer.fits else []

    def _joined_with(self, others: list[Lever], lever: Lever) -> _Tried | None:
        joined = _joined([*others, lever])
        return None if joined is None else self._try(joined)

    def _is_worse(self, tried: _Tried, before: list[_Tried]) -> bool:
        """Return whether a lever is slower than the plan that it would replace, or gains nothing over one before it."""
        slowdown = tried.offer.slowdown
        if slowdown is not None and slowdown > self.most_slowdown:
            return True
        if tried.lever.is_choice or tried.offer.note is not None:
            return False
        alike = [one.offer for one in before if one.lever.trains_adapter == tried.lever.trains_adapter]
        return any(_gains_nothing(tried.offer, other) for other in alike)

    def _try(self, lever: Lever) -> _Tried | None:
        """Return a lever with its best plan, None where no plan can be had with it or somebody asked for an end."""
        found = offer_of(
            lever,
            self.workload,
            executor=self.executor,
            fixed=self.fixed,
            without=self.without,
            leaves_room=self.leaves_room,
        )
        return None if found is None else _Tried(lever, *found)

    def _with_fewest(self, tried: _Tried) -> _Tried:
        """Return an offer with the fewest GPUs of its machines on which it fits."""
        other, left = tried.lever.workload(self.workload), tried.lever.constraints(self.fixed)
        for smaller in smaller_clusters(self.workload.cluster):
            if some_plan_fits(replace(other, cluster=smaller), executor=self.executor, fixed=left):
                return replace(tried, offer=tried.offer.replace(fewest_gpus=smaller.num_gpus))
        return tried


def loads(workload: Workload, estimate: PlanEstimate) -> bool:
    """Return whether a plan can be loaded by the framework's way, as far as anybody knows that."""
    loading = loading_of(workload, estimate)
    return loading is None or loading.fits


def named_offer(lever: Lever, workload: Workload) -> LeverOffer:
    """Return the offer of a lever before it is priced."""
    return LeverOffer(
        name=lever.name,
        options=lever.options,
        keeps_training=lever.keeps_training,
        num_gpus=workload.cluster.num_gpus,
    )


def offer_of(
    lever: Lever,
    workload: Workload,
    *,
    executor: Executor,
    fixed: Constraints,
    without: PlanEstimate | None = None,
    leaves_room: bool = False,
) -> tuple[LeverOffer, float] | None:
    """Return a lever with its best plan, of those that leave room where so asked, and what it takes of what there is.

    None where no plan can be had with it or somebody asked for an end.
    """
    if is_stopped():
        return None
    offer = named_offer(lever, workload)
    reason = lacking(lever, workload, executor)
    if reason is not None:
        return offer.replace(lacking=reason), float("inf")
    say(f"pricing {lever.options}")
    try:
        other = lever.workload(workload)
        among = with_room(other) if leaves_room else other
        best = search(among, num_candidates=1, executor=executor, fixed=lever.constraints(fixed)).best
    except NothingFitsError as error:
        return priced_offer(offer, among, error.nearest), _share(among, error.nearest)
    except ParaplanError:  # the model has no layers for it, or the choices exclude each other
        return None
    if leaves_room:
        best = estimate_plan(other, best.plan)
    return priced_offer(offer, other, best, without=without), _share(other, best)


def priced_offer(
    offer: LeverOffer, workload: Workload, best: PlanEstimate, *, without: PlanEstimate | None = None
) -> LeverOffer:
    """Return an offer with the figures of its best plan, compared with the plan `without` it."""
    step, loading = best.step, loading_of(workload, best)
    unloadable = None if loading is None else loading.lacking_in_words
    return offer.replace(
        fits=best.fits and unloadable is None,
        unloadable=unloadable,
        note=next(iter(untrainable_notes(workload)), None),
        plan=best.plan.describe(),
        peak_memory_bytes=best.peak_memory_bytes,
        usable_memory_bytes=best.usable_memory_bytes,
        host_bytes_per_node=best.host_bytes_per_node,
        offloads_parameters=best.plan.offload == "parameters",
        step_time_s=step.step_time_s,
        slowdown=None if without is None else step.step_time_s / without.step.step_time_s - 1,
        tokens_per_s_per_gpu=step.tokens_per_s_per_gpu,
    )


def _share(workload: Workload, estimate: PlanEstimate) -> float:
    """Return what a plan takes of what there is: of a GPU or of the host, in a step or while weights are loaded."""
    gpu, host = estimate.usable_memory_bytes, estimate.host_memory_bytes or float("inf")
    shares = [estimate.peak_memory_bytes / gpu, estimate.host_bytes_per_node / host]
    loading = loading_of(workload, estimate)
    if loading is not None:
        shares += [loading.gpu_bytes / gpu, loading.host_bytes_per_node / host]
    return taken(*shares)


def _joined(group: list[Lever]) -> Lever | None:
    return reduce(lambda one, other: one.beside(other), group) if group else None


def _fullest_of_slowest(tried: list[_Tried]) -> _Tried:
    """Return the lever that takes most memory of those as slow as the slowest, within the error of predictions."""
    slowest = max(one.offer.step_time_s or 0.0 for one in tried)
    slow = [one for one in tried if (1 + TOLERANCE["throughput"]) * (one.offer.step_time_s or 0.0) >= slowest]
    return max(slow, key=lambda one: one.share)


def _gains_nothing(offer: LeverOffer, other: LeverOffer) -> bool:
    """Return whether an offer is neither faster nor smaller than one before it, and no closer to what was asked."""
    if offer.keeps_training and not other.keeps_training:
        return False
    faster = (offer.step_time_s or 0.0) < (1 - NO_COST) * (other.step_time_s or 0.0)
    smaller = (offer.peak_memory_bytes or 0) < (1 - NO_COST) * (other.peak_memory_bytes or 0)
    return not (faster or smaller)


def _without_contradictions(tried: list[_Tried]) -> list[LeverOffer]:
    """Return offers without adapters on narrower weights that need more GPUs than those on wider ones.

    A tool may not reach most weights, or not split them over tp.
    """
    kept = list[_Tried]()
    for one in tried:
        wider = [other for other in kept if one.lever.trains_adapter and other.lever.trains_adapter]
        if all((one.offer.fewest_gpus or 0) <= (other.offer.fewest_gpus or 0) for other in wider):
            kept.append(one)
    return [one.offer for one in kept]
