"""What matrix libraries keep for themselves through torch's allocator: workspaces of the same size in every step."""

from __future__ import annotations

from paraplan.cost.workload import Workload

_THREADS = 2
"""torch keeps a workspace for each thread that multiplies, and a backward pass runs on a thread of its own."""


def matmul_workspace_bytes(workload: Workload) -> int:
    """Return the bytes of the workspaces that matmuls keep on a GPU of the workload; none where it is no NVIDIA GPU."""
    gpu, kind = workload.cluster.gpu, workload.framework.storage.matmul_workspaces
    if gpu.vendor != "nvidia" or kind == "none" or not workload.constants.counts_matmul_workspaces:
        return 0
    stated = workload.constants.cublas_workspace_bytes
    total = _THREADS * (gpu.shared.torch_workspace_bytes if stated is None else stated)
    return total + (gpu.shared.engine_workspace_bytes if kind == "transformer_engine" else 0)
