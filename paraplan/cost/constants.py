"""The constants of the cost model, each with its source. A calibration replaces some of them."""

from __future__ import annotations

from paraplan.records import Record
from paraplan.units import GIB


class CostConstants(Record):
    """Named constants of the memory and time formulas. Defaults are published measurements, not fits to anyone's runs.

    Matmul (`matmul_*`): over 183 bf16 shapes measured on A100 by the SimuMax project (configs/system),
    `peak * 0.77 / ((1 + half_n/n + half_k/k) * last_wave)` with 8 us a kernel has 3.8 % error on shapes left out of the
    fit (4.6 % without `last_wave`). There `wave_share` 0.5 is how much of a last wave's idle multiprocessors is lost:
    libraries also cut products along k. A tile of half the size reads its operands more often, and `small_tile_share`
    0.7 of that costs time. On 514 shapes of a B200 the term explains nothing, so GPUs without a
    count of multiprocessors take `usual_last_wave`, the mean of the A100's shapes.
    The best shape of an A100 reaches 0.869 of its peak, so 0.77 is 0.886 of that; on other GPUs it is the same share
    of their own best (`GpuProfile.reached_matmul_flops_per_s`), or of `usual_reached_share` of the peak where nobody
    measured it. Without tensor cores a matmul reaches `plain_matmul_efficiency` (14 of 15.7 TFLOP/s on V100,
    transformers-benchmarks on GitHub, micro_bench). A matmul whose operands' rows are no multiple of 16 bytes takes
    `unaligned_slowdown` times as long (NVIDIA, Matrix Multiplication Background User's Guide, requirements of tensor
    cores). What FlashAttention reaches is a fact of an architecture (`ArchitectureProfile`); a calibration to runs
    multiplies it by `flash_attention_factor`.
    Optimizer: a fused AdamW reads gradient, master weight and two states, writes three of them and a 16-bit copy; one
    that goes operation by operation moves 8 bytes for weight decay, 12 and 20 for the averages, 24 for their root and
    quotient, 16 for the step and 12 for clipping (counted in torch/optim/adamw.py), whether by lists or in a loop.
    Collectives: `profiles/links.json`.
    """

    matmul_efficiency: float = 0.886
    usual_reached_share: float = 0.85
    plain_matmul_efficiency: float = 0.89
    matmul_half_n: float = 39.0
    matmul_half_k: float = 130.0
    matmul_launch_s: float = 8e-6
    wave_share: float = 0.5
    small_tile_share: float = 0.7
    usual_last_wave: float = 1.05
    flash_attention_factor: float = 1.0
    eager_attention_efficiency: float = 0.45
    memory_bandwidth_efficiency: float = 0.80
    unaligned_slowdown: float = 2.0
    overlap_slowdown: float = 1.2
    fused_optimizer_bytes: float = 36.0
    unfused_optimizer_bytes: float = 92.0
    context_bytes: int = GIB // 2
    communicator_bytes: int = GIB // 2
    allocated_per_reserved: float = 0.94
    counts_matmul_workspaces: bool = True
    cublas_workspace_bytes: int | None = None
    """What CUBLAS_WORKSPACE_CONFIG sets for each thread; None: the default of torch on the architecture."""
    block_matmul_speedup: float = 1.0
    """How many times as fast as in 16 bits the linear layers of blocks run in training with 8-bit matmuls."""

    def optimizer_traffic(self, how: str) -> float:
        """Return the bytes that a step of AdamW moves for each of its parameters, clipping counted; `how` it goes."""
        return self.fused_optimizer_bytes if how == "fused" else self.unfused_optimizer_bytes

    def for_cpu(self) -> CostConstants:
        """Return the constants of ranks without a GPU: nothing that CUDA's libraries keep, no buffers of NCCL."""
        return self.replace(context_bytes=0, communicator_bytes=0, counts_matmul_workspaces=False)

    def beside_allocator_bytes(self, num_gpus: int) -> int:
        """Return what a rank holds outside of torch's allocator: the CUDA context, and NCCL's buffers among several."""
        return self.context_bytes + (self.communicator_bytes if num_gpus > 1 else 0)

    def usable_memory_bytes(self, total_bytes: int, *, num_gpus: int) -> int:
        """Return what training may allocate of a GPU that reports `total_bytes`.

        What torch's allocator does not see comes off, and the allocator reserves more than is allocated
        (SimuMax: reserved = allocated / 0.94).
        """
        return int((total_bytes - self.beside_allocator_bytes(num_gpus)) * self.allocated_per_reserved)

    def device_bytes(self, cached_bytes: float, *, num_gpus: int, context_bytes: int | None = None) -> int:
        """Return what `nvidia-smi` shows of a rank whose allocator took `cached_bytes`, its own rounding not counted.

        `context_bytes` is the CUDA context where software has another than this record's.
        """
        context = self.context_bytes if context_bytes is None else context_bytes
        communicators = self.communicator_bytes if num_gpus > 1 else 0
        return round(cached_bytes / self.allocated_per_reserved) + context + communicators
