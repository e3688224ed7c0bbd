"""Cheap levers on memory, before other machines: one ordered list, each tried and priced as a search of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from paraplan.cost.estimate import PlanEstimate
from paraplan.cost.stored_weights import untrainable_notes, wider_quantizers
from paraplan.cost.workload import Workload
from paraplan.errors import ParaplanError
from paraplan.plan.executor import Executor, training_gap
from paraplan.plan.support import rule_of
from paraplan.plan.training import TrainingSpec
from paraplan.progress import is_stopped, say
from paraplan.search.cluster_sizes import smaller_clusters
from paraplan.search.constraints import Constraints
from paraplan.search.failure import NothingFitsError
from paraplan.search.offers import LeverOffer
from paraplan.search.results import SPARE
from paraplan.search.search import search
from paraplan.search.what_fits import larger_machines, longest_sequence, more_gpus, some_plan_fits
from paraplan.units import gpus

MOST_GPUS = 64
"""On more GPUs the fewest that a lever fits are not looked for."""
LORA = "lora:r=16"
QLORA = "nf4:double"


@dataclass(frozen=True)
class Lever:
    """One change of a training, or of what is fixed of its plan, that saves memory."""

    name: str
    """What people call it."""
    options: str
    """The options that ask for it."""
    training: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the training that it sets."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the constraints that it sets."""
    keeps_training: bool = True
    """Whether the same parameters train with the same arithmetic."""

    def workload(self, workload: Workload) -> Workload:
        """Return the workload under the lever. Raises `ParaplanError` where the model has no layers for it."""
        return workload.trained_as(workload.training.replace(**self.training)) if self.training else workload

    def constraints(self, fixed: Constraints) -> Constraints:
        """Return the constraints under the lever."""
        return replace(fixed, **self.fixed)

    def beside(self, other: Lever) -> Lever:
        """Return both levers as one; where they set the same field, `other` decides."""
        return Lever(
            f"{self.name}, {other.name}",
            f"{self.options} {other.options}",
            {**self.training, **other.training},
            {**self.fixed, **other.fixed},
            self.keeps_training and other.keeps_training,
        )


def levers(workload: Workload, fixed: Constraints, executor: Executor) -> Iterator[Lever]:
    """Yield the levers that the training and what is `fixed` leave, in the order in which they are tried.

    A fused or chunked loss; the model's own 4-bit weights, or QLoRA; an 8-bit optimizer; recompute; activation offload;
    fewer sequences at once.
    """
    training = workload.training
    has_gpu = workload.cluster.gpu.vendor != "cpu"
    yield from _choices_left_free(fixed)
    if training.loss in ("plain", "chunked"):
        kernels = ("liger", "chunked") if training.loss == "plain" else ("liger",)
        offers = [Lever("fused loss", f"--loss {one}", {"loss": one}) for one in kernels]
        yield next((one for one in offers if lacking(one, workload, executor) is None), offers[0])
    if has_gpu:
        yield from _narrower_weights(workload)
    if training.optimizer in ("adamw", "adamw_foreach"):
        narrow = {"optimizer": "adamw_8bit"}
        yield Lever("8-bit AdamW", "--optimizer adamw_8bit", narrow, keeps_training=False)
        if training.precision == "bf16" and training.train == "full":
            options = "--precision bf16-pure --optimizer adamw_8bit"
            yield Lever("Pure bf16", options, {"precision": "bf16-pure", **narrow}, keeps_training=False)
    if fixed.recompute not in (None, "full"):
        yield Lever("recompute", f"without --recompute {fixed.recompute}", fixed={"recompute": None})
    if has_gpu and not training.offloads_activations:
        yield Lever("activation offload", "--offload-activations", {"offloads_activations": True})
    if (fixed.micro_batch_size or 1) > training.learns_from.group:
        option = f"without --micro-batch {fixed.micro_batch_size}"
        yield Lever("fewer sequences at once", option, fixed={"micro_batch_size": None})


def _choices_left_free(fixed: Constraints) -> Iterator[Lever]:
    """Yield what is fixed of a plan, each left free: that costs nothing but the choice."""
    for each in fields(fixed):
        value = getattr(fixed, each.name)
        if value is not None and each.name not in ("recompute", "micro_batch_size"):
            option = Constraints(**{each.name: value}).words[0]
            yield Lever(f"Without {option}", f"without {option}", fixed={each.name: None})


def _narrower_weights(workload: Workload) -> Iterator[Lever]:
    """Yield LoRA for full training, then the model's own narrow weights and QLoRA, each with experts stored so too."""
    training, released = workload.training, workload.model.released_in
    is_full = training.train == "full"
    adapter = {"train": LORA} if is_full else {}
    if is_full:
        yield Lever("LoRA", f"--train {LORA}", adapter, keeps_training=False)
    yield from _with_experts(Lever("", "", keeps_training=False), workload)
    is_wide = training.base_weights in (None, "bf16", "fp32")
    if training.linear_precision != "16bit" or not is_wide:
        return  # weights in 4 bits are multiplied in 16
    if training.replace(**adapter).trainable.adapter is None:
        return  # parts of the model train in their own precision
    for name, weights in ((f"the model's own {released} weights", released), ("QLoRA", QLORA)):
        if weights is not None:
            options = f"--train {LORA} --base-weights {weights}" if is_full else f"--base-weights {weights}"
            lever = Lever(name, options, {**adapter, "base_weights": weights}, keeps_training=False)
            yield lever
            yield from _with_experts(lever, workload)


def _with_experts(lever: Lever, workload: Workload) -> Iterator[Lever]:
    """Yield a lever with a tool that stores fused experts in the format too, where the workload's own does not."""
    try:
        tools = wider_quantizers(lever.workload(workload))
    except ParaplanError:  # the tool lacks the format, or the model the layers
        return
    for tool in tools[:1]:
        named = Lever("experts too", f"--quantizer {tool.name}", {"quantizer": tool.name}, keeps_training=False)
        yield lever.beside(named) if lever.name else named


def lacking(lever: Lever, workload: Workload, executor: Executor) -> str | None:
    """Return why the executor cannot train under a lever at all, None where it can."""
    if not lever.training:
        return None
    try:
        changed: TrainingSpec = workload.training.replace(**lever.training)
    except ParaplanError as error:  # options that exclude each other
        return error.message
    gap = training_gap(executor, changed, workload.model.num_blocks)
    return None if gap is None else rule_of(gap)


def lever_offers(
    workload: Workload,
    *,
    executor: Executor,
    fixed: Constraints,
    without: PlanEstimate | None = None,
    looks_for_fewest: bool = False,
) -> tuple[LeverOffer, ...]:
    """Return what each lever makes of a workload, in their order.

    `without` is the best plan without any; None where nothing fits. Then, where no lever alone is enough, those that
    keep the training are tried together, and all of them.
    """
    found: list[LeverOffer] = []
    usable: list[Lever] = []
    for lever in levers(workload, fixed, executor):
        if without is not None and "offload" in lever.fixed:
            continue  # asked about plans that need none
        offer = offer_of(lever, workload, executor=executor, fixed=fixed, without=without)
        if offer is None:
            continue
        found.append(offer)
        if offer.lacking is None:
            usable.append(lever)
    if without is None:
        found = [*_all_choices_left_free(found, workload, executor=executor, fixed=fixed), *found]
    if without is None and not any(one.fits for one in found):
        for together in _together(usable):
            offer = offer_of(together, workload, executor=executor, fixed=fixed)
            if offer is not None and offer.lacking is None:
                found.append(offer)
            if offer is not None and offer.fits:
                break
    if looks_for_fewest and workload.cluster.num_gpus <= MOST_GPUS:
        return tuple(_with_fewest(one, workload, usable, executor=executor, fixed=fixed) for one in found)
    return tuple(found)


def _all_choices_left_free(
    found: list[LeverOffer], workload: Workload, *, executor: Executor, fixed: Constraints
) -> list[LeverOffer]:
    """Return what fits with nothing fixed, where leaving out one choice is not enough."""
    if len(fixed.words) < 2 or any(one.fits for one in found if one.options.startswith("without ")):
        return []
    options = f"without {' and '.join(fixed.words)}"
    free = Lever("Without all choices", options, fixed={each.name: None for each in fields(fixed)})
    offer = offer_of(free, workload, executor=executor, fixed=fixed)
    return [offer] if offer is not None and offer.fits else []


def _together(usable: list[Lever]) -> Iterator[Lever]:
    """Yield levers as one: those that keep the training, then with 8-bit states, then with 4-bit weights too."""
    keeping = [one for one in usable if one.training and one.keeps_training]
    narrow = [one for one in usable if one.name == "8-bit AdamW"]
    reaching = [one for one in usable if "quantizer" in one.training]  # experts are stored in the format too
    weights = reaching or [one for one in usable if "base_weights" in one.training]
    seen = set[str]()
    trains_adapter = bool(weights) and "train" not in weights[0].training
    with_weights = [*keeping, *weights[:1]]
    for group in (keeping, with_weights * trains_adapter, [*keeping, *narrow], [*with_weights, *narrow]):
        if len(group) > 1:
            whole = group[0]
            for one in group[1:]:
                whole = whole.beside(one)
            if whole.options not in seen:
                seen.add(whole.options)
                yield whole


def offer_of(
    lever: Lever,
    workload: Workload,
    *,
    executor: Executor,
    fixed: Constraints,
    without: PlanEstimate | None = None,
) -> LeverOffer | None:
    """Return a lever with its best plan, None where no plan can be had with it or somebody asked for an end."""
    if is_stopped():
        return None
    offer = LeverOffer(
        name=lever.name,
        options=lever.options,
        keeps_training=lever.keeps_training,
        num_gpus=workload.cluster.num_gpus,
    )
    reason = lacking(lever, workload, executor)
    if reason is not None:
        return offer.replace(lacking=reason)
    say(f"pricing {lever.options}")
    try:
        other = lever.workload(workload)
        best = search(
            other,
            num_candidates=1,
            executor=executor,
            fixed=lever.constraints(fixed),
        ).best
    except NothingFitsError as error:
        return _priced(offer, other, error.nearest, fits=False)
    except ParaplanError:  # the model has no layers for it, or the choices exclude each other
        return None
    return _priced(offer, other, best, fits=True, without=without)


def _priced(
    offer: LeverOffer, workload: Workload, best: PlanEstimate, *, fits: bool, without: PlanEstimate | None = None
) -> LeverOffer:
    step = best.step
    return offer.replace(
        fits=fits,
        note=next(iter(untrainable_notes(workload)), None),
        plan=best.plan.describe(),
        peak_memory_bytes=best.peak_memory_bytes,
        usable_memory_bytes=best.usable_memory_bytes if without is None else without.usable_memory_bytes,
        host_bytes_per_node=best.host_bytes_per_node,
        step_time_s=step.step_time_s,
        slowdown=None if without is None else step.step_time_s / without.step.step_time_s - 1,
        tokens_per_s_per_gpu=step.tokens_per_s_per_gpu,
    )


def _with_fewest(
    offer: LeverOffer, workload: Workload, usable: list[Lever], *, executor: Executor, fixed: Constraints
) -> LeverOffer:
    """Return an offer with the fewest GPUs of its machines on which it fits."""
    lever = next((one for one in usable if one.options == offer.options), None)
    if not offer.fits or lever is None:
        return offer
    other, left = lever.workload(workload), lever.constraints(fixed)
    for smaller in smaller_clusters(workload.cluster):
        if some_plan_fits(replace(other, cluster=smaller), executor=executor, fixed=left):
            return offer.replace(fewest_gpus=smaller.num_gpus)
    return offer


def with_room(workload: Workload) -> Workload:
    """Return the workload with a tenth of the usable memory kept free: what fits then is not near the limit."""
    margin = max(workload.constants.memory_margin, SPARE)
    return replace(workload, constants=workload.constants.replace(memory_margin=margin))


def machine_offers(workload: Workload, *, executor: Executor, fixed: Constraints) -> tuple[LeverOffer, ...]:
    """Return what fits where no lever is pulled: shorter sequences, more of the GPUs, others with more memory."""
    found = list[LeverOffer | None]()
    length = longest_sequence(workload, executor=executor, fixed=fixed)
    if length is not None and length < workload.training.seq_length:
        shorter = Lever("shorter sequences", f"--seq-len {length}", {"seq_length": length}, keeps_training=False)
        found.append(offer_of(shorter, workload, executor=executor, fixed=fixed))
    more = more_gpus(workload, executor=executor, fixed=fixed)
    if more is not None:
        lever = Lever(gpus(more[1].num_gpus), more[0])
        found.append(offer_of(lever, replace(workload, cluster=more[1]), executor=executor, fixed=fixed))
    larger = larger_machines(workload, executor=executor, fixed=fixed)
    if larger is not None:
        lever = Lever("other GPUs", f"--profile {larger[0]}")
        found.append(offer_of(lever, replace(workload, cluster=larger[1]), executor=executor, fixed=fixed))
    return tuple(one for one in found if one is not None)


def explained(
    error: NothingFitsError, workload: Workload, *, executor: Executor, fixed: Constraints
) -> NothingFitsError:
    """Return the error with what would fit: cheap levers first, then shorter sequences and other machines."""
    offers = lever_offers(workload, executor=executor, fixed=fixed, looks_for_fewest=True)
    offers += machine_offers(workload, executor=executor, fixed=fixed)
    return error.offering(offers, framework=workload.framework.title)
