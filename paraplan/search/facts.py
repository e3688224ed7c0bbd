"""The numbers of a workload that the decision tree looks at."""

from __future__ import annotations

from dataclasses import replace

from paraplan.cost.estimate import estimate_plan, stage_memories
from paraplan.cost.workload import Workload
from paraplan.hardware.interconnect import InterconnectThresholds, network_verdict, node_verdict
from paraplan.plan.parallel import ParallelPlan
from paraplan.search.tree import TreeFacts

_SEQUENCES = 4


def tree_facts(workload: Workload, thresholds: InterconnectThresholds | None = None) -> TreeFacts:
    """Return the facts of a workload: memory of one process with the smallest micro-batch, and the links."""
    training = workload.training
    alone = ParallelPlan(micro_batch_size=1, num_microbatches=training.global_batch_size, recompute="full")
    memory = stage_memories(workload, alone)[0]
    state = memory.parameter_bytes + memory.gradient_bytes + memory.optimizer_state_bytes
    model = workload.model
    largest = max([*model.blocks, model.embedding, model.head], key=lambda block: block.num_parameters)
    bytes_per_parameter = state / max(1, model.parameters.total)
    cluster = workload.cluster
    limits = thresholds or InterconnectThresholds()
    inside, between = node_verdict(cluster, limits), network_verdict(cluster, limits)
    needed = state + memory.activation_bytes + memory.workspace_bytes
    has_gpus = cluster.gpu.vendor != "cpu"
    has_choice = has_gpus and cluster.num_nodes == 1 < cluster.num_gpus and needed <= workload.usable_memory_bytes
    ddp_s, one_process_s = _steps_of_processes(workload) if has_choice else (None, None)
    return TreeFacts(
        num_gpus=cluster.num_gpus,
        num_nodes=cluster.num_nodes,
        usable_memory_bytes=workload.usable_memory_bytes,
        training_state_bytes=state,
        least_step_bytes=memory.activation_bytes + memory.workspace_bytes,
        largest_layer_bytes=round(largest.num_parameters * bytes_per_parameter),
        node=inside,
        network=between,
        ddp_step_s=ddp_s,
        one_process_step_s=one_process_s,
        has_gpus=has_gpus,
    )


def _steps_of_processes(workload: Workload) -> tuple[float, float]:
    """Return the seconds of a step of one micro-batch, a sequence or a few on each GPU, under DDP and DataParallel."""
    gpus = workload.cluster.num_gpus
    each = min(_SEQUENCES, max(1, workload.training.global_batch_size // gpus))
    made = replace(workload, training=workload.training.replace(global_batch_size=each * gpus))
    plans = (
        ParallelPlan(dp=gpus, micro_batch_size=each),
        ParallelPlan(devices_per_process=gpus, micro_batch_size=each * gpus),
    )
    ddp, one_process = (estimate_plan(made, plan).step.step_time_s for plan in plans)
    return ddp, one_process
