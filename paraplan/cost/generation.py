"""Answers that a model generates while it is trained (GRPO): the memory that this takes, and about how long."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from paraplan.cost.blocks.matmuls import effective_peak
from paraplan.cost.workload import Workload
from paraplan.plan.task import TRL_RESERVE
from paraplan.units import format_bytes, format_seconds

OWN_MEMORY = 0.9
"""Share of the memory of a GPU of its own that vLLM reserves by default (`gpu_memory_utilization`)."""
_BYTES = 2.0  # an element of weights and of cached keys and values, in 16 bits


@dataclass(frozen=True)
class Generation:
    """How one group of GPUs generates its share of a batch."""

    num_gpus: int
    """GPUs that hold one copy of the model, divided among them."""
    is_shared: bool
    """True where these GPUs train as well."""
    reserved_bytes: float
    """Held on each of them all the time."""
    weight_bytes: float
    """Bytes of weights among what is reserved."""
    num_at_once: int
    """Sequences whose keys and values fit beside the weights; 0 where not even one does."""
    num_sequences: int
    """Sequences of a step for each group."""
    seconds: float
    """To generate them at the speed of the memory and of matmuls."""

    def note(self) -> str:
        """Return that in a sentence, with what is not counted."""
        if not self.num_at_once:
            return (
                f"generation does not fit: {format_bytes(self.weight_bytes)} of weights on each of {self.num_gpus} "
                f"GPUs, and {format_bytes(self.reserved_bytes)} for weights and cache"
            )
        where = "each GPU keeps" if self.is_shared else "each of the GPUs that generate keeps"
        kept = f"{where} {format_bytes(self.reserved_bytes)} for it, {format_bytes(self.weight_bytes)} of that weights"
        group = "GPU" if self.num_gpus == 1 else f"group of {self.num_gpus} GPUs"
        return (
            f"generation: {kept}; {self.num_sequences} sequences a {group}, {min(self.num_at_once, self.num_sequences)}"
            f" at once, take at least {format_seconds(self.seconds)}, which the step time leaves out. Not modeled: "
            "prompts, scheduling, rewards, sending weights"
        )


def generation_of(workload: Workload) -> Generation | None:
    """Return how answers are generated, None where none are, or where nothing of that is held while a step trains.

    The fewest GPUs of a machine, a power of two, hold a copy whose weights leave room for one sequence's keys and
    values in the share that vLLM reserves. A step of decoding reads weights and cached keys and values once (Pope et
    al. 2022, section 3.1), or takes as long as its products; sequences that do not fit at once wait for those that do.
    """
    task, training, cluster = workload.training.learns_from, workload.training, workload.cluster
    is_shared = task.generator_gpus == 0
    if task.kind != "grpo" or (is_shared and task.reserve == 0):
        return None
    shared = TRL_RESERVE if task.reserve is None else task.reserve
    reserved = cluster.gpu_memory_bytes * (shared if is_shared else OWN_MEMORY)
    model = workload.whole_model or workload.model
    weights, cache = model.parameters.total * _BYTES, cache_bytes(workload, training.seq_length)
    available = task.generator_gpus or cluster.num_gpus
    limit = min(available, cluster.gpus_per_node)
    sizes = [size for size in (2**power for power in range(limit.bit_length())) if size <= limit]
    size = next((one for one in sizes if (weights + cache) / one <= reserved), sizes[-1])
    num_sequences = ceil(training.global_batch_size / max(1, available // size))
    at_once = max(0, int((reserved * size - weights) / cache)) if cache else num_sequences
    completion = task.completion_tokens(training.seq_length)
    running = max(1, min(at_once, num_sequences))
    mean_length = training.seq_length - completion / 2
    read = (weights + running * cache_bytes(workload, mean_length)) / size
    flops = running * 2.0 * model.parameters.total / size
    step_s = max(
        read / workload.memory_bandwidth_bytes_per_s,
        flops / (effective_peak(cluster.gpu, training) * workload.constants.usual_reached_share),
    )
    rounds = ceil(num_sequences / running)
    return Generation(
        num_gpus=size,
        is_shared=is_shared,
        reserved_bytes=reserved,
        weight_bytes=weights / size,
        num_at_once=at_once,
        num_sequences=num_sequences,
        seconds=rounds * completion * step_s,
    )


def cache_bytes(workload: Workload, length: float) -> float:
    """Return the cached keys and values of one sequence of `length` tokens; a window keeps no more than its reach."""
    total = 0.0
    for run in (workload.whole_model or workload.model).runs:
        attention = run.block.attention
        if attention is not None:
            kept = length if attention.window is None else min(length, attention.window)
            total += run.count * kept * attention.num_kv_heads * (attention.qk_head_dim + attention.v_head_dim)
    return total * _BYTES


def task_notes(workload: Workload) -> tuple[str, ...]:
    """Return what to know of a task that is more than one pass over given sequences, a sentence each."""
    training = workload.training
    task, notes = training.learns_from, []
    if task.kind == "embedding":
        notes.append(
            f"{training.global_batch_size} sequences of a step are {training.global_batch_size // 2} pairs of texts; "
            "texts of other ranks, which some losses gather as negatives, are not counted"
        )
    elif task.group == 2:
        notes.append(
            f"{training.global_batch_size} sequences of a step are {training.global_batch_size // 2} pairs; a "
            "micro-batch counts both sequences of a pair, where TRL's batch size counts pairs"
        )
    if training.copies_reference:
        notes.append("counted: a reference model in 16 bits beside the one that trains, and its forward pass")
    elif task.has_reference:
        notes.append("counted: the reference model's forward pass, by the base model without its adapters")
    if (task.completion or 0) >= training.seq_length:
        notes.append(
            f"a completion of {task.completion} tokens leaves no prompt in a sequence of {training.seq_length}"
        )
    generation = generation_of(workload)
    if generation is not None:
        notes.append(generation.note())
    elif task.kind == "grpo":
        notes.append(
            "generation holds nothing on the GPUs while a step trains; its time and its own peak are not priced"
        )
    tools = workload.framework.task_tools
    if not task.is_run_by_trl:
        notes.append(f"paraplan writes no file for --task {task.kind}, and paraplan.runtime trains on given sequences")
    elif task.kind != "sft" and tools is not None:
        notes.append(f"{tools} train so by {workload.framework.title}; paraplan writes none of their files")
    elif task.kind != "sft":
        notes.append("TRL runs this (paraplan export --to trl); paraplan.runtime trains on given sequences")
    return tuple(notes)
