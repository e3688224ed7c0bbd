"""The constants of the cost model, each with its source. A calibration replaces some of them."""

from __future__ import annotations

from paraplan.records import Record
from paraplan.units import GIB


class FlashSpeed(Record):
    """Share of the matmul peak that one generation of FlashAttention reaches on one architecture, causal FLOPs counted.

    `capability` is the major compute capability from which the row holds.
    """

    generation: int
    capability: int
    forward: float
    backward: float
    source: str


FLASH_SPEEDS = (
    FlashSpeed(
        generation=1,
        capability=0,
        forward=0.40,
        backward=0.30,
        source="Dao 2023, section 1: 30-50 % and 25-35 % on A100",
    ),
    FlashSpeed(
        generation=1,
        capability=9,
        forward=0.22,
        backward=0.18,
        source="the same kernels' FLOP/s on H100, whose peak is 3.2x",
    ),
    FlashSpeed(
        generation=2,
        capability=0,
        forward=0.65,
        backward=0.55,
        source="Dao 2023, section 4.1: up to 73 % and 63 % on A100",
    ),
    FlashSpeed(
        generation=2,
        capability=9,
        forward=0.38,
        backward=0.32,
        source="Dao 2023, section 4.1: up to 335 TFLOP/s on H100",
    ),
    FlashSpeed(
        generation=3, capability=0, forward=0.65, backward=0.55, source="as generation 2: the third needs Hopper"
    ),
    FlashSpeed(
        generation=3,
        capability=9,
        forward=0.65,
        backward=0.52,
        source="Shah et al. 2024, section 4.1: up to 75 % on H100",
    ),
)
"""From the papers' figures for long sequences, somewhat below their best case."""


class CostConstants(Record):
    """Named constants of the memory and time formulas. Defaults are published measurements, not fits to anyone's runs.

    Matmul (`matmul_*`): saturating efficiency over 183 bf16 shapes measured on A100 by the SimuMax project
    (configs/system), `peak * 0.757 / (1 + half_m/m + half_n/n + half_k/k)`. The best shape of an A100 reaches 0.869 of
    its peak, so 0.757 is 0.871 of that; on other GPUs it is the same share of their own best
    (`GpuProfile.reached_matmul_flops_per_s`), or of `usual_reached_share` of the peak where nobody measured it.
    A matmul with a dimension that is no multiple of 8 takes `unaligned_slowdown` times as long in 16 bits (NVIDIA,
    Matrix Multiplication Background User's Guide, requirements to use tensor cores).
    Collectives: `profiles/links.json`.
    """

    matmul_efficiency: float = 0.871
    usual_reached_share: float = 0.85
    matmul_half_m: float = 77.0
    matmul_half_n: float = 39.0
    matmul_half_k: float = 39.0
    matmul_launch_s: float = 24e-6
    flash_attention: tuple[FlashSpeed, ...] = FLASH_SPEEDS
    eager_attention_efficiency: float = 0.45
    memory_bandwidth_efficiency: float = 0.80
    unaligned_slowdown: float = 2.0
    loss_bytes_per_logit: float = 24.0
    overlap_slowdown: float = 1.2
    optimizer_bytes_per_parameter: float = 36.0
    context_bytes: int = GIB // 2
    communicator_bytes: int = GIB // 2
    allocated_per_reserved: float = 0.94

    def flash_speed(self, *, generation: int, compute_capability: str | None) -> FlashSpeed:
        """Return what FlashAttention of a generation reaches on a GPU; GPUs that are not NVIDIA's count as Ampere."""
        major = int(float(compute_capability or 8))
        rows = [row for row in self.flash_attention if row.generation == generation and row.capability <= major]
        return max(rows, key=lambda row: row.capability)

    def for_cpu(self) -> CostConstants:
        """Return the constants of ranks without a GPU: no context, and communicators without buffers of their own."""
        return self.replace(context_bytes=0, communicator_bytes=0)

    def beside_allocator_bytes(self, num_gpus: int) -> int:
        """Return what a rank holds outside of torch's allocator: the CUDA context, and NCCL's buffers among several."""
        return self.context_bytes + (self.communicator_bytes if num_gpus > 1 else 0)

    def usable_memory_bytes(self, total_bytes: int, *, num_gpus: int) -> int:
        """Return what training may allocate of a GPU that reports `total_bytes`.

        What torch's allocator does not see comes off, and the allocator reserves more than is allocated
        (SimuMax: reserved = allocated / 0.94).
        """
        return int((total_bytes - self.beside_allocator_bytes(num_gpus)) * self.allocated_per_reserved)

    def device_bytes(self, allocated_bytes: float, *, num_gpus: int) -> int:
        """Return what `nvidia-smi` shows of a rank whose allocator hands out `allocated_bytes`."""
        return round(allocated_bytes / self.allocated_per_reserved) + self.beside_allocator_bytes(num_gpus)
