"""A plan in the words that people use for it, and what to know of its prediction."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress

from paraplan.cost.blocks.routing import expert_ranks
from paraplan.cost.estimate import STEP_PARTS, PlanEstimate, StepEstimate, estimate_plan, host_share
from paraplan.cost.lower_bounds import lower_bound_reason
from paraplan.cost.workload import Workload
from paraplan.errors import ParaplanError
from paraplan.model.saved import saved_bytes
from paraplan.model.trainable import ALL_LINEAR, module_name
from paraplan.plan.parallel import AXES, Degree, ParallelPlan

LOW_MFU, LARGE_BUBBLE = 0.15, 0.30
"""Cautions on a plan: a poor use of the GPUs, a pipeline that waits."""
AS_FAST = 0.8
"""Share of a plan's tokens a second: plain FSDP is worth a word from there."""

_RECOMPUTE = {
    "selective": "activation recompute of attention",
    "selective_ops": "activation recompute of chosen operations",
    "full": "full activation recompute",
}


def plan_in_words(workload: Workload, plan: ParallelPlan) -> str:
    """Return a plan in a sentence: `FSDP (ZeRO-3) over 8 GPUs, micro-batch size 2, 4 accumulation steps`."""
    ranks = expert_ranks(workload.framework, ep=plan.ep, tp=plan.tp)
    parts = [_spread(plan, plan.degrees | {"ep": ranks if workload.model.num_experts > 1 else 1})]
    if plan.sequence_parallel:
        parts.append("sequence parallelism")
    parts.append(f"micro-batch size {plan.micro_batch_size}")
    if plan.pp > 1:
        parts.append(f"{plan.num_microbatches} micro-batches a step")
    elif plan.num_microbatches > 1:
        parts.append(f"{plan.num_microbatches} accumulation steps")
    if plan.recompute != "none":
        parts.append(_RECOMPUTE[plan.recompute])
    if plan.offload != "none":
        parts.append(
            {"optimizer": "optimizer in host memory", "parameters": "parameters and optimizer in host memory"}[
                plan.offload
            ]
        )
    return ", ".join(parts)


def _spread(plan: ParallelPlan, degrees: Mapping[Degree, int]) -> str:
    if plan.devices_per_process > 1:
        return f"DataParallel in one process over {plan.devices_per_process} GPUs"
    if plan.world_size == 1:
        return "one GPU"
    others = [f"{axis.title} {degree}" for axis in AXES if axis.name != "dp" and (degree := degrees[axis.name]) > 1]
    schedule = f" ({_schedule(plan)})" if plan.pp > 1 else ""
    if not others:
        return f"{'FSDP (ZeRO-3)' if _is_fsdp(plan) else _replicas(plan)} over {plan.dp} GPUs"
    named = [name + (schedule if name.startswith("pipeline") else "") for name in others]
    of_data = f"data {plan.dp} ({_replicas(plan)})" if plan.dp > 1 else _replicas(plan) if plan.zero_stage else ""
    return " x ".join(filter(None, [*named, of_data])) + f" over {plan.world_size} GPUs"


def _replicas(plan: ParallelPlan) -> str:
    if plan.zero_shards:
        return f"hybrid sharding (ZeRO-{plan.zero_stage} in groups of {plan.zero_shards})"
    return f"ZeRO-{plan.zero_stage}" if plan.zero_stage else "DDP"


def _is_fsdp(plan: ParallelPlan) -> bool:
    return plan.zero_stage == 3 and plan.zero_shards is None


def _schedule(plan: ParallelPlan) -> str:
    names = {"gpipe": "GPipe", "1f1b": "1F1B", "zero_bubble": "zero bubble"}
    if plan.pipeline_schedule == "interleaved_1f1b":
        return f"interleaved 1F1B, {plan.virtual_pipeline_size} stages each"
    return names.get(plan.pipeline_schedule or "", "")


def cautions(workload: Workload, estimate: PlanEstimate) -> tuple[str, ...]:
    """Return what to worry about beside memory, a sentence each with its cause: GPUs that idle, the batch."""
    step, found = estimate.step, []
    unpriced = lower_bound_reason(workload, estimate.plan)
    if unpriced is not None:
        found.append(unpriced)
    cause, share = _largest_waste(estimate.plan, step)
    narrow = 1.0 if workload.training.linear_precision == "16bit" else workload.cluster.gpu.shared.fp8_speedup
    if step.mfu * narrow < LOW_MFU and workload.cluster.gpu.vendor != "cpu":
        waited = host_share(workload, estimate.plan)
        why = f"{share:.0%} of the step is {cause}" if share > 0.25 else "kernels this small do not fill the GPU"
        if waited > max(share, 0.25):
            helps = ["larger micro-batches"] * (estimate.plan.num_microbatches > 1)
            helps += [] if workload.training.compiled else ["--compile"]
            less = f", which {' and '.join(helps)} would shorten" if helps else ""
            why = f"for {waited:.0%} of the step they wait for the host to start kernels{less}"
        found.append(f"only {step.mfu:.1%} of the GPUs' peak is used: {why}{_scarcity(workload)}")
    elif step.pipeline_bubble_s > LARGE_BUBBLE * step.step_time_s:
        bubble = step.pipeline_bubble_s / step.step_time_s
        found.append(f"{bubble:.0%} of the step is waiting in the pipeline{_scarcity(workload)}")
    if any(run.block.loops_over_tokens for run in workload.model.runs):
        found.append(
            "the model's code loops over the tokens, and keeps what a fused kernel would not: with one (mamba_ssm and "
            "the like) a step takes less memory, and a part of the time"
        )
    return (*found, *_of_linear_attention(workload), *_of_adapters(workload), *_of_batch(workload, estimate))


def _of_linear_attention(workload: Workload) -> Iterator[str]:
    """Yield whose kernels linear attention is priced with, where a framework's own code has two ways."""
    model = workload.model
    blocks = {id(run.block): run.block for run in model.runs}.values()
    linear = [one for one in blocks if any(each.name.startswith("delta rule") for each in one.matmuls)]
    if not linear or workload.framework.kernels.fused or workload.training.attention == "eager":
        return
    kept, written_out = (
        saved_bytes(linear[0].saved, seq_length=workload.training.seq_length, micro_batch_size=1, kernel=kernel)
        for kernel in (workload.training.attention, "eager")
    )
    more = f", which keeps {written_out / kept:.1f} times as much of such a layer" if kept else ""
    yield (
        "linear attention is priced with flash-linear-attention's kernels: where they are not installed, transformers "
        f"takes its own code{more} and loops over chunks of tokens (--attention eager counts what it keeps)"
    )


def _of_adapters(workload: Workload) -> Iterator[str]:
    """Yield a caution where layers that adapters are to stand beside are in some blocks alone, as in hybrids."""
    adapter = workload.training.trainable.adapter
    runs = [run for run in workload.model.runs if run.block.matmuls]
    total = sum(run.count for run in runs)
    reached: dict[int, list[str]] = {}
    for target in () if adapter is None or adapter.targets == (ALL_LINEAR,) else adapter.targets:
        ends = f"{module_name(target)}.lora_A.weight"
        count = sum(run.count for run in runs if any(one.name.endswith(ends) for one in run.block.parameters))
        if 0 < count < total:
            reached.setdefault(count, []).append(target)
    for count, targets in reached.items():
        yield (
            f"adapters on {', '.join(targets)} are in {count} of {total} layers: the others have no layer of these "
            "names; targets=all-linear reaches each"
        )


def step_parts(plan: ParallelPlan, step: StepEstimate) -> list[tuple[str, float]]:
    """Return the exposed parts of a step that take any time, each with its title and its seconds."""
    titles = {part.name: part.title for part in STEP_PARTS}
    if plan.offload != "none":
        titles["optimizer_s"] = "optimizer, on the host"
    if plan.offload == "parameters":
        titles["data_parallel_s"] = "data-parallel and copies from the host"
    found = ((title, float(getattr(step, name))) for name, title in titles.items())
    return [(title, seconds) for title, seconds in found if seconds > 0]


def _largest_waste(plan: ParallelPlan, step: StepEstimate) -> tuple[str, float]:
    worst = max((part for part in STEP_PARTS if part.waste), key=lambda part: float(getattr(step, part.name)))
    is_copied = worst.name == "data_parallel_s" and plan.offload == "parameters"
    words = "copies from the host and data-parallel communication" if is_copied else worst.waste
    return words, getattr(step, worst.name) / step.step_time_s


def _scarcity(workload: Workload) -> str:
    batch, gpus = workload.training.global_batch_size, workload.cluster.num_gpus
    return f" ({batch} sequences for {gpus} GPUs)" if batch < 4 * gpus else ""


def _of_batch(workload: Workload, estimate: PlanEstimate) -> tuple[str, ...]:
    """Return the batches near by under which plain FSDP fits and is about as fast, where this one does not allow it."""
    batch, gpus = workload.training.global_batch_size, workload.cluster.num_gpus
    if 2 * batch < gpus or batch % gpus == 0:
        return ()
    near = [size for size in (batch - batch % gpus, batch - batch % gpus + gpus) if size]
    if not any(_is_about_as_fast(plain, estimate) for plain in _plain(workload, near[-1])):
        return ()
    sizes = " or ".join(map(str, near))
    return (f"{gpus} GPUs do not divide {batch} sequences; a global batch of {sizes} allows plain data parallelism",)


def _plain(workload: Workload, batch: int) -> Iterator[PlanEstimate]:
    """Yield DDP, and FSDP in one micro-batch without recompute and in many with it, with a batch that GPUs divide."""
    gpus = workload.cluster.num_gpus
    share = batch // gpus
    plan = ParallelPlan(dp=gpus, zero_stage=3 if gpus > 1 else 0, num_microbatches=share, recompute="full")
    at_once = plan.replace(micro_batch_size=share, num_microbatches=1, recompute="none")
    plans = (at_once.replace(zero_stage=0), at_once, plan)
    other = workload.trained_as(workload.training.replace(global_batch_size=batch))
    for each in plans:
        with suppress(ParaplanError):
            yield estimate_plan(other, each)


def _is_about_as_fast(plain: PlanEstimate, estimate: PlanEstimate) -> bool:
    return plain.fits and plain.step.tokens_per_s_per_gpu >= AS_FAST * estimate.step.tokens_per_s_per_gpu


def device_tool(workload: Workload) -> str:
    """Return where the memory of a whole device shows: `in nvidia-smi`."""
    tools = {"nvidia": "in nvidia-smi", "amd": "in rocm-smi"}
    return tools.get(workload.cluster.gpu.vendor, "by the process")
