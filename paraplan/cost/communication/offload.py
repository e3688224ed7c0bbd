"""Seconds that offload to the host adds to a step: copies over PCIe, and the optimizer's step on the CPU."""

from __future__ import annotations

import numpy as np

from paraplan.cost.plan_table import Floats, OffloadCode, PlanTable
from paraplan.cost.workload import Workload

CPU_STEP_S_PER_PARAMETER = 1.39e-9
"""torch's Adam on the CPUs of a DGX-2: 1.39 s for a billion parameters (Ren et al. 2021, ZeRO-Offload, Table 4, quoted
from memory; their own CPU-Adam takes 0.22 s). All ranks of a machine share its CPUs."""

_GRADIENT, _PARAMETER = 4.0, 4.0


def offload_step_s(workload: Workload, local_parameters: Floats) -> Floats:
    """Return the seconds of an optimizer step on the host: gradients go there, parameters come back.

    `local_parameters` are those that one rank updates. GPUs of a machine copy at the same time, each over its own PCIe
    link; their CPUs' work adds up.
    """
    cluster = workload.cluster
    ranks = min(cluster.gpus_per_node, cluster.num_gpus)
    copied = local_parameters * (_GRADIENT + _PARAMETER) / cluster.gpu.pcie_bandwidth_bytes_per_s
    return np.asarray(copied + local_parameters * ranks * CPU_STEP_S_PER_PARAMETER)


def offload_gather_s(workload: Workload, table: PlanTable, shard_parameters: Floats) -> Floats:
    """Return the seconds in which offloaded shards of parameters and gradients pass PCIe in one step.

    Shards are read from the host for each forward and each backward pass and gradients are written after each: FSDP
    copies them beside compute as far as it gathers ahead, which is not counted.
    """
    moved = shard_parameters * (2 * _PARAMETER + _GRADIENT) * table.num_microbatches
    is_there = table.offload == OffloadCode.PARAMETERS
    return np.where(is_there, moved / workload.cluster.gpu.pcie_bandwidth_bytes_per_s, 0.0)
