"""What matrix libraries keep for themselves through torch's allocator: workspaces of the same size in every step."""

from __future__ import annotations

from paraplan.cost.workload import Workload
from paraplan.units import KIB, MIB

# torch keeps one for each thread that multiplies, and a backward pass runs on a thread of its own
# (aten/src/ATen/cuda/CublasHandlePool.cpp: `:4096:2:16:8`, and 32 MiB from Hopper on).
_THREADS = 2
_TORCH_BYTES, _TORCH_HOPPER_BYTES = 2 * 4096 * KIB + 8 * 16 * KIB, 32 * MIB
# Transformer Engine keeps one more (pytorch/module/base.py, `get_cublas_workspace_size_bytes`).
_ENGINE_BYTES, _ENGINE_HOPPER_BYTES = 4 * MIB, 32 * MIB
_HOPPER = 9


def matmul_workspace_bytes(workload: Workload) -> int:
    """Return the bytes of the workspaces that matmuls keep on a GPU of the workload; none where it is no NVIDIA GPU."""
    gpu, kind = workload.cluster.gpu, workload.framework.storage.matmul_workspaces
    if gpu.vendor != "nvidia" or kind == "none" or not workload.constants.counts_matmul_workspaces:
        return 0
    is_hopper = (gpu.cuda_capability or 0) >= _HOPPER
    of_torch = _TORCH_HOPPER_BYTES if is_hopper else _TORCH_BYTES
    stated = workload.constants.cublas_workspace_bytes
    total = _THREADS * (of_torch if stated is None else stated)
    if kind == "transformer_engine":
        total += _ENGINE_HOPPER_BYTES if is_hopper else _ENGINE_BYTES
    return total
