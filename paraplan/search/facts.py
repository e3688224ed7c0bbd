"""The numbers of a workload that the decision tree looks at."""

from __future__ import annotations

from paraplan.cost.estimate import stage_memories
from paraplan.cost.workload import Workload
from paraplan.hardware.interconnect import InterconnectThresholds, network_verdict, node_verdict
from paraplan.plan.parallel import ParallelPlan
from paraplan.search.tree import TreeFacts


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
    return TreeFacts(
        num_gpus=cluster.num_gpus,
        num_nodes=cluster.num_nodes,
        usable_memory_bytes=workload.usable_memory_bytes,
        training_state_bytes=state,
        least_activation_bytes=memory.activation_bytes + memory.workspace_bytes,
        largest_layer_bytes=round(largest.num_parameters * bytes_per_parameter),
        node=inside,
        network=between,
    )
