"""Notes on a workload that name no mistake, whatever its plan."""

from __future__ import annotations

from paraplan.cost.estimate import assumed_speeds
from paraplan.cost.generation import task_notes
from paraplan.cost.indexers import indexer_notes
from paraplan.cost.stored_weights import storage_notes
from paraplan.cost.workload import Workload
from paraplan.hardware.bus_bandwidth import inside_link
from paraplan.plan.training import training_notes
from paraplan.units import format_bandwidth


def workload_notes(workload: Workload) -> tuple[str, ...]:
    """Return what to know of training, frozen weights, sparse attention, experts and speeds, a sentence each."""
    notes = training_notes(workload.model, workload.training) + storage_notes(workload)
    notes += indexer_notes(workload) + dense_expert_notes(workload)
    return notes + task_notes(workload) + assumed_speeds(workload) + assumed_copies(workload)


def dense_expert_notes(workload: Workload) -> tuple[str, ...]:
    """Return in a sentence how many experts compute every token in transformers' own code; none where few do."""
    products = (one for run in workload.model.runs for one in run.block.matmuls)
    dense = next((one for one in products if one.dense_rows_per_token is not None), None)
    if dense is None:
        return ()
    return (
        f"all {dense.num_experts} experts of a layer compute every token in transformers' own code of this family, "
        f"{dense.num_experts / dense.rows_per_token:.0f} times the work that its router asks for: frameworks with "
        "experts of their own (megatron-bridge, torchtitan) compute what it chose",
    )


def assumed_copies(workload: Workload) -> tuple[str, ...]:
    """Return in a sentence how fast GPUs without P2P are taken to copy to one another; none where that is known."""
    cluster = workload.cluster
    if cluster.gpus_per_node < 2 or cluster.measured or cluster.gpu.peer_access is not False:
        return ()
    link = inside_link(cluster, [gpu.index for gpu in cluster.node.gpus[:2]])
    slow = workload.links.speed("pcie-host").pair_bytes_per_s
    if link.kind != "pcie-host" or slow is None or link.pair_bytes_per_s <= slow:
        return ()
    fast, measured = format_bandwidth(link.pair_bytes_per_s), format_bandwidth(slow)
    return (
        f"{cluster.gpu.title} has no P2P: two of them are taken to copy {fast} through the memory of a fast host; "
        f"{measured} were measured on a rented one (--link no-p2p)",
    )
