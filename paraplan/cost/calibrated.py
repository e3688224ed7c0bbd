"""The constants of the cost model as a machine's own calibration has them."""

from __future__ import annotations

from paraplan.cost.constants import CostConstants
from paraplan.hardware.profiles import GpuProfile


def calibrated_constants(constants: CostConstants, gpu: GpuProfile) -> CostConstants:
    """Return `constants` with those replaced that `paraplan calibrate` measured; all of them where it did not.

    What matmuls and attention reach is read from the calibration itself (`KernelTimes`).
    """
    measured = gpu.calibration
    if measured is None:
        return constants
    changes: dict[str, float] = {}
    moved = measured.moved_bytes_per_s
    if moved is not None:
        changes["memory_bandwidth_efficiency"] = moved / gpu.memory_bandwidth_bytes_per_s
    if measured.optimizer_s_per_parameter is not None:
        # The step is priced as traffic at that bandwidth, so it counts as the traffic that takes as long.
        moved = moved or gpu.memory_bandwidth_bytes_per_s * constants.memory_bandwidth_efficiency
        changes["unfused_optimizer_bytes"] = measured.optimizer_s_per_parameter * moved
    if measured.overlap_slowdown is not None:
        changes["overlap_slowdown"] = measured.overlap_slowdown
    return constants.replace(**changes)
