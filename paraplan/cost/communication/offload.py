"""Seconds that offload to the host adds to a step: copies over PCIe, and the optimizer's step on the CPU."""

from __future__ import annotations

import numpy as np

from paraplan.cost.plan_table import Floats, OffloadCode, PlanTable
from paraplan.cost.workload import Workload

UNFUSED_CPU_SLOWDOWN = 6.0
"""How much longer AdamW takes on CPUs operation by operation: DeepSpeed's fused one is 5 to 7 times as fast
(deepspeed.ai, tutorials/zero-offload); torch's own fused one 13 times on two cores."""

_GPUS_OF_A_SOCKET = 4
"""Machines with up to as many GPUs have half of what those with eight have (AWS p3, GCP a2 and a3; SpareCores)."""


def offload_step_s(workload: Workload, table: PlanTable, local_parameters: Floats) -> Floats:
    """Return the seconds of an optimizer step on the host: gradients go there, parameters come back.

    `local_parameters` are those that one rank updates. GPUs of a machine copy at the same time, each over its own PCIe
    link; all share the bandwidth of its memory, which a fused AdamW reaches: on two cores it took as long as 31 bytes
    a parameter in fp32 that are read and written again.
    """
    cluster = workload.cluster
    ranks = min(cluster.gpus_per_node, cluster.num_gpus)
    sockets = 1 if ranks <= _GPUS_OF_A_SOCKET else 2
    is_fused = workload.framework.storage.optimizer_step == "fused"
    moved = local_parameters * ranks * workload.optimizer_traffic("fused") * (1.0 if is_fused else UNFUSED_CPU_SLOWDOWN)
    parameter_bytes, gradient_bytes = _moved_bytes(workload, table)
    copied = local_parameters * (gradient_bytes + parameter_bytes) / cluster.gpu.pcie_bandwidth_bytes_per_s
    return np.asarray(copied + moved / (sockets * cluster.gpu.shared.host_socket_bytes_per_s))


def offload_gather_s(
    workload: Workload, table: PlanTable, shard_parameters: Floats, frozen_shard_bytes: Floats
) -> Floats:
    """Return the seconds in which offloaded shards of parameters and gradients pass PCIe in one step.

    `shard_parameters` train, others have `frozen_shard_bytes`. Shards are read from the host for each forward and
    each backward pass and gradients are written after each: FSDP copies them beside compute as far as it gathers
    ahead, which is not counted.
    """
    parameter_bytes, gradient_bytes = _moved_bytes(workload, table)
    moved = shard_parameters * (2 * parameter_bytes + gradient_bytes) + 2 * frozen_shard_bytes
    is_there = table.offload == OffloadCode.PARAMETERS
    seconds = moved * table.num_microbatches / workload.cluster.gpu.pcie_bandwidth_bytes_per_s
    return np.where(is_there, seconds, 0.0)


def _moved_bytes(workload: Workload, table: PlanTable) -> tuple[float, Floats]:
    """Return the bytes of a parameter and of a gradient that pass PCIe, as the framework stores them."""
    parameter_bytes = workload.framework.storage.weight_bytes if workload.is_mixed_precision else 4.0
    return parameter_bytes, workload.gradient_bytes(table.zero_stage)
