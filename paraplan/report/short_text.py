"""The short answers, a dozen labelled lines: what is trained on what, the plan, memory, speed, cautions."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from paraplan.accuracy.history import effect_of_history, history_in_words
from paraplan.accuracy.ranges import out_of_memory_risk, step_range
from paraplan.cost.blocks.matmuls import counted_peak
from paraplan.cost.estimate import FULL_MEMORY, PlanEstimate, allocator_holds, evaluate_plan
from paraplan.cost.loading import loading_of
from paraplan.cost.lower_bounds import lower_bound_reason
from paraplan.cost.plan_table import RECOMPUTES
from paraplan.cost.workload import Workload
from paraplan.plan.parallel import ParallelPlan
from paraplan.report.plan_words import cautions, plan_in_words
from paraplan.units import format_bytes, format_count, format_seconds

if TYPE_CHECKING:  # the search, which an estimate does without
    from paraplan.search.offers import LeverOffer
    from paraplan.search.recommendation import Recommendation
    from paraplan.search.results import SearchResult

LABEL_WIDTH = 10
LOADING = "Loading"
ROOMY = 0.9
"""Share of usable memory below which a plan leaves room for fragmentation."""
WORTH_SAYING = 0.02
"""A risk below this goes unsaid."""
MOST_LEVERS = 3
"""Changes of options that the short answer names."""
MUCH_FASTER = 0.05
"""Share of a step's time from which a change that trains otherwise is named."""
MUCH_ATTENTION = 0.25
"""Share of the FLOPs from which it is said how attention is counted: some publish half of it."""


class Line(NamedTuple):
    """One line of an answer. `tone` is good, bad, caution, dim, or nothing."""

    label: str
    text: str
    tone: str = ""

    def __str__(self) -> str:
        return f"{self.label:{LABEL_WIDTH}}{self.text}"


def workload_lines(workload: Workload) -> tuple[Line, ...]:
    """Return what is trained, and on what."""
    model, cluster, training = workload.whole_model or workload.model, workload.cluster, workload.training
    return (
        Line("Model", f"{model.name}, {format_count(model.parameters.total)} parameters"),
        Line("Training", f"{training.global_batch_size} sequences of {training.seq_length} tokens, {training.title}"),
        Line("Machine", str(cluster)),
    )


def memory_verdict(workload: Workload, estimate: PlanEstimate) -> tuple[str, str]:
    """Return whether a plan fits, by its peak, its risk and torch's allocator in one verdict, and the tone of that."""
    peak, usable = estimate.peak_memory_bytes, estimate.usable_memory_bytes
    memory = f"{format_bytes(peak)} of {format_bytes(usable)} usable per GPU"
    if estimate.host_bytes_per_node:
        of = "" if estimate.host_memory_bytes is None else f" of {format_bytes(estimate.host_memory_bytes)}"
        memory += f", {format_bytes(estimate.host_bytes_per_node)}{of} in a machine's memory for offload"
    if peak > usable:
        return f"does not fit, {format_bytes(peak - usable)} too much on a GPU: {memory}", "bad"
    if not estimate.fits:
        return f"does not fit in the host's memory: {memory}", "bad"
    loading = loading_of(workload, estimate)
    if loading is not None and not loading.fits:
        return f"a step fits, {memory}, but the weights cannot be loaded: {loading.lacking_in_words}", "bad"
    risk = out_of_memory_risk(workload, estimate)
    words = f", {risk:.0%} risk of running out" if risk is not None and risk >= WORTH_SAYING else ""
    if not allocator_holds(workload, estimate):
        taken, there = format_bytes(estimate.cached_device_bytes), format_bytes(workload.cluster.gpu_memory_bytes)
        return (
            f"may not fit: {memory}, and torch's allocator would take {taken} of the GPU's {there} and has to give "
            f"some back{words}",
            "caution",
        )
    known = estimate.host_memory_bytes
    if known is not None and estimate.host_bytes_per_node > FULL_MEMORY * known:
        left = format_bytes(known - estimate.host_bytes_per_node)
        return f"fits only just: {memory}, {left} of that left for data and the system{words}", "caution"
    if peak > FULL_MEMORY * usable:
        return f"fits only just: {memory}, {format_bytes(usable - peak)} left{words}", "caution"
    return f"fits: {memory}{words}", "good"


def mfu_in_words(workload: Workload, estimate: PlanEstimate) -> str:
    """Return the utilization, the peak that it counts against, and how it counts masked attention where that weighs."""
    training, model = workload.training, workload.model
    peak = "" if training.linear_precision == "16bit" else " of the 8-bit peak"
    whole = model.flops_per_token(training.attended_length)
    share = 1 - model.flops_per_token(training.attended_length, with_attention=False) / whole if whole else 0.0
    counted = ", masked attention counted in full" if share >= MUCH_ATTENTION else ""
    return f"MFU {estimate.step.mfu:.1%}{peak}{counted}"


def peak_in_words(workload: Workload) -> str | None:
    """Return the rate that utilization counts against beside the sparse one of data sheets, None without such."""
    training, gpu, kernels = workload.training, workload.cluster.gpu, workload.framework.kernels
    if gpu.shared.sparse_speedup == 1 or (training.precision == "fp32" and not kernels.uses_tf32):
        return None
    dense = counted_peak(gpu, training, uses_tf32=kernels.uses_tf32) / 1e12
    return (
        f"MFU counts against {dense:,.0f} TFLOP/s, the dense rate: data sheets state {gpu.shared.sparse_speedup:g} "
        "times that too, with sparsity, which training does not have"
    )


def what_lets_fit(workload: Workload, estimate: PlanEstimate) -> str | None:
    """Return the first recompute and the largest micro-batch with which a plan fits a GPU, None where neither does."""
    plan, found = estimate.plan, []
    size, group = plan.micro_batch_size, workload.training.learns_from.group
    later = RECOMPUTES[RECOMPUTES.index(plan.recompute) + 1 :]
    smaller = [each for each in range(size - 1, 0, -1) if size % each == 0 and each % group == 0]
    for name, changes in (
        ("recompute", [{"recompute": one} for one in later if one in workload.recomputes]),
        ("micro-batch", [_of_micro_batches(plan, each) for each in smaller]),
    ):
        other = next(
            (each for change in changes if (each := evaluate_plan(workload, plan.replace(**change))).fits), None
        )
        if other is not None:
            value = other.plan.recompute if name == "recompute" else other.plan.micro_batch_size
            seconds = format_seconds(other.step.step_time_s)
            found.append(f"with --{name} {value}: {format_bytes(other.peak_memory_bytes)}, {seconds} a step")
    return "; ".join(found) or None


def _of_micro_batches(plan: ParallelPlan, size: int) -> dict[str, int]:
    return {"micro_batch_size": size, "num_microbatches": plan.num_microbatches * plan.micro_batch_size // size}


def plan_lines(workload: Workload, estimate: PlanEstimate) -> tuple[Line, ...]:
    """Return a plan in words and in short, its memory and speed."""
    step = estimate.step
    verdict, tone = memory_verdict(workload, estimate)
    is_too_large = estimate.peak_memory_bytes > estimate.usable_memory_bytes
    fitting = what_lets_fit(workload, estimate) if is_too_large else None
    rate = format_count(step.tokens_per_s_per_gpu)
    likely = step_range(workload, estimate)
    own = history_in_words(effect_of_history(workload, estimate.plan))  # of CPUs, which have no range
    basis = own if likely is None else likely.in_words
    ends = f" ({format_seconds(likely.low_s)} to {format_seconds(likely.high_s)})" if likely is not None else ""
    lines = (
        Line("Plan", plan_in_words(workload, estimate.plan), "bad" if tone == "bad" else "good"),
        Line("", estimate.plan.describe(), "dim"),
        Line("Memory", verdict, tone),
        *(Line("Fits", words, "caution") for words in (fitting,) if words is not None),
        Line(
            "Speed",
            f"{format_seconds(step.step_time_s)} a step{ends}, {rate} tokens/s per GPU, "
            f"{mfu_in_words(workload, estimate)}"
            if lower_bound_reason(workload, estimate.plan) is None
            else f"at least {format_seconds(step.step_time_s)} a step, at most {rate} tokens/s per GPU",
        ),
        *((Line("", basis, "caution" if own else "dim"),) if basis is not None else ()),
        *(Line("Samples", words) for words in (samples_in_words(workload, estimate),) if words is not None),
        *_loading(workload, estimate),
        *(Line("Caution", words, "caution") for words in cautions(workload, estimate)),
    )
    if workload.cluster.gpu.vendor != "cpu":
        return lines
    return tuple(line._replace(text=line.text.replace("GPUs", "processes").replace("GPU", "process")) for line in lines)


def _loading(workload: Workload, estimate: PlanEstimate) -> tuple[Line, ...]:
    """Return what loading takes, where that is more than a step or much of the host's memory."""
    loading = loading_of(workload, estimate)
    if loading is None or not loading.is_worth_saying:
        return ()
    return (Line(LOADING, loading.in_words, "dim" if loading.fits else "bad"),)


def samples_rates(workload: Workload, estimate: PlanEstimate) -> tuple[float, float]:
    """Return how many tokens of samples a GPU trains on a second where samples are padded, and where they are packed.

    Padding loads ranks of experts unevenly, and samples that are packed attend to less: a step of as many tokens is
    shorter.
    """
    training = workload.training
    if not training.padding_share:
        return estimate.step.tokens_per_s_per_gpu, estimate.step.tokens_per_s_per_gpu
    packs = workload.trained_as(training.replace(packs_samples=True))
    packed = evaluate_plan(packs, estimate.plan).step.tokens_per_s_per_gpu
    return estimate.step.tokens_per_s_per_gpu * (1.0 - training.padding_share), packed


def samples_in_words(workload: Workload, estimate: PlanEstimate) -> str | None:
    """Return how fast samples are trained on that are shorter than a sequence, None where nobody said so."""
    training = workload.training
    if training.packs_samples:
        if (training.sample_length or 0) >= training.seq_length:
            return f"of {training.sample_length} tokens: each fills a sequence alone, and what is over is cut"
        own = "each attends to its own tokens alone"
        if training.attention != "flash":
            own = f"{training.attention} attention computes all scores of a sequence and masks them, flash does not"
        return f"of {training.sample_length} tokens, packed: {own}"
    if not training.padding_share:
        return None
    padded, packed = (format_count(rate) for rate in samples_rates(workload, estimate))
    together = format_count(training.global_batch_size / (1.0 - training.padding_share))
    return (
        f"of {training.sample_length} tokens: padded to {training.seq_length}, {padded} tokens of samples a second per "
        f"GPU; packed, {packed}, and a step has {together} samples in place of {training.global_batch_size}"
    )


def estimate_lines(workload: Workload, estimate: PlanEstimate) -> tuple[Line, ...]:
    """Return a plan, whether it fits, and the figures that are read first."""
    lines = [*workload_lines(workload), *plan_lines(workload, estimate)]
    grown = segments_in_words(workload, estimate)
    if grown is not None:
        place = next(at for at, line in enumerate(lines) if line.label == "Memory")
        lines.insert(place + 1, Line("Fits", grown, "good"))
    return tuple(lines)


def segments_in_words(workload: Workload, estimate: PlanEstimate) -> str | None:
    """Return what torch's allocator takes under segments that grow, None where it has room without or not even then."""
    if not estimate.fits or allocator_holds(workload, estimate):
        return None
    from paraplan.search.levers import growing_segments  # the search, which other estimates do without

    for lever in growing_segments(workload):
        under = lever.workload(workload)
        grown = evaluate_plan(under, estimate.plan)
        if allocator_holds(under, grown):
            return f"with {lever.options}: torch's allocator then takes {format_bytes(grown.cached_device_bytes)}"
    return None


def recommendation_lines(answer: Recommendation) -> tuple[Line, ...]:
    """Return the recommended plan, its figures, why it is recommended, and the three changes that help most."""
    result = answer.result
    beside = (
        ("Found", answer.found),
        ("Options", None if answer.chosen is None else answer.chosen.in_words),
        ("Mixed", answer.mixed),
        ("Why", result.remark),
        ("Why not", None if result.plain_reason is None else result.plain_reason.of_the_other),
        ("Roomier", _roomier(result)),
        ("Offload", answer.offload),
    )
    of_plan = plan_lines(answer.workload, result.best)
    lacking = [line for line in of_plan if line.label == LOADING and line.tone == "bad"]
    first = first_levers(answer)
    levers = [Line("Lever", one.in_short, "good") for one in answer.levers if one.fits and not one.is_free]
    told = {one.options for one in first}
    faster = [
        Line("Faster", f"{one.options}: {one.in_words}", "good")
        for one in answer.helps
        if one.costs_nothing and one.options not in told
    ]
    others = {
        one.options.split()[0]: Line("Faster", f"{one.options}: {one.in_words}; trains otherwise", "good")
        for one in reversed(answer.helps)
        if one.share >= MUCH_FASTER and not one.keeps_training and not answer.levers
    }
    return (
        *workload_lines(answer.workload),
        *(line._replace(label="First") for line in lacking),
        *(Line("First", one.in_short, "good") for one in first),
        *(line for line in of_plan if line not in lacking),
        *(
            [Line("GPUs", answer.idle, "caution")] if answer.idle is not None else []
        ),  # not the machines that were named
        *(Line(label, words) for label, words in beside if words is not None),
        *[*faster[:1], *levers, *faster[1:], *reversed(others.values())][: max(0, MOST_LEVERS - len(first))],
    )


def first_levers(answer: Recommendation) -> tuple[LeverOffer, ...]:
    """Return the levers that stand before the plan."""
    return tuple(one for one in answer.levers if one.is_free)


def lever_lines(answer: Recommendation) -> tuple[Line, ...]:
    """Return in full the levers that cost something, those that are not enough, and those that are lacking."""
    from paraplan.search.offers import offers_beside  # the search, which an estimate does without

    title = answer.workload.framework.told_as
    return (
        *(Line("Lever", one.in_words, "good") for one in answer.levers if one.fits and not one.is_free),
        *(Line("", words, "dim") for words in offers_beside(answer.levers, framework=title)),
    )


def _roomier(result: SearchResult) -> str | None:
    """Return the fastest plan that leaves clearly more memory, where the recommended one takes nearly all."""
    best = result.best
    if best.peak_memory_bytes <= FULL_MEMORY * best.usable_memory_bytes:
        return None
    ways = [(one.step_time_s, one.peak_memory_bytes, one.plan.describe()) for one in result.candidates if one.fits]
    if result.roomier is not None:
        plan = result.roomier
        ways.append((plan.step.step_time_s, plan.peak_memory_bytes, plan.plan.describe()))
    roomy = [way for way in ways if way[1] <= ROOMY * best.usable_memory_bytes]
    if not roomy:
        return None
    seconds, memory, words = min(roomy)
    ratio = seconds / best.step.step_time_s
    speed = f"{ratio - 1:.0%} slower" if ratio < 2 else f"{ratio:.1f} times as slow"
    if ratio < 1:
        speed = f"{1 - ratio:.0%} less time"
    return f"{words} needs {format_bytes(memory)}, {speed}"
