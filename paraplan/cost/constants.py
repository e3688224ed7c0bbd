"""The constants of the cost model, each with its source. A calibration replaces some of them."""

from __future__ import annotations

from typing import Self

from paraplan.plan.training import Fp8Recipe, OptimizerName
from paraplan.records import Record
from paraplan.units import GIB, MIB


class CostConstants(Record):
    """Named constants of the memory and time formulas. Defaults are published measurements, not fits to anyone's runs.

    Matmuls: over 183 bf16 shapes measured on A100 by the SimuMax project (configs/system),
    `peak * 0.77 / ((1 + half_n/n + 130/k) * last_wave)` with 8 us a kernel has 3.8 % error on shapes left out of the
    fit (4.6 % without `last_wave`). Collectives: `profiles/links.json`; FlashAttention: `profiles/architectures`.
    """

    matmul_efficiency: float = 0.886
    """Share of the best measured matmul that large matmuls reach: the best shape of an A100 reaches 0.869 of its peak,
    and 0.77 is 0.886 of that. On other GPUs it is the same share of their own best."""
    usual_reached_share: float = 0.85
    """Best matmul over peak where nobody measured it (`GpuProfile.reached_matmul_flops_per_s`)."""
    plain_matmul_efficiency: float = 0.89
    """Share of the peak without tensor cores: 14 of 15.7 TFLOP/s on V100 (transformers-benchmarks, micro_bench)."""
    matmul_half_n: float = 39.0
    """Columns at which a matmul reaches half of its rate (SimuMax, see above)."""
    matmul_launch_s: float = 8e-6
    """Seconds of a matmul of no size (SimuMax, see above)."""
    wave_share: float = 0.5
    """How much of a last wave's idle multiprocessors is lost: libraries also split products along k (SimuMax)."""
    small_tile_share: float = 0.7
    """Time for each further read of operands: a tile of half the size reads them more often (SimuMax)."""
    usual_last_wave: float = 1.05
    """Last-wave factor of GPUs without a count of multiprocessors: the mean of the A100's shapes. On 514 shapes of a
    B200 the term explains nothing."""
    flash_attention_factor: float = 1.0
    """Factor of a calibration to runs on what FlashAttention reaches on the architecture."""
    eager_attention_efficiency: float = 0.45
    """Share of the matmul peak of eager attention's two products (assumed: batched, inner size is small)."""
    memory_bandwidth_efficiency: float = 0.80
    """Share of the data sheet's memory bandwidth that element-wise kernels reach (0.6 to 0.9 for usual sizes)."""
    mixed_bytes_per_multiprocessor_s: float = 17e9
    """The rate of one multiprocessor in operations that convert types, repeat a smaller operand over a larger one or
    sum along rows (profiles/measured, kernels-*.json)."""
    fused_bytes_per_multiprocessor_s: float = 30e9
    """Bytes in a second of fused kernels, which convert in registers: 29e9 where Transformer Engine permutes tokens on
    a B200 (MooreThreads/SimuMax on GitHub, configs/system/b200_bf16_ceperm.json), 30e9 in a loss under torch.compile on
    an H200, which its memory allows too. Only Blackwell's memory is faster."""
    unaligned_slowdown: float = 3.5
    """How much longer a 16-bit matmul takes whose operands' rows are not multiples of 16 bytes (NVIDIA, Matrix
    Multiplication Background User's Guide, requirements of tensor cores): the geometric mean of 2.6, which makes GPT-2
    a quarter slower on an A100 with 50,257 tokens than with 50,304, as the author of nanoGPT wrote in February 2023
    (quoted from memory), and 4.9, which the steps of GPT-2 on an H200 leave for it (profiles/measured)."""
    expert_deviation: float = 0.3
    """How much the rows of experts vary around their mean in one layer: 0.22 to 0.40 of 64 experts under an auxiliary
    loss (Wang et al. 2024, arXiv 2408.15664, tables 2 and 6: busiest over mean), 0.18 to 0.29 of 256 with a bias on 64
    ranks (marin-community/marin issue 7668), 0.26 with a bias, 0.74 and 1.1 under a loss (UltraEP, arXiv 2606.04101,
    figure 11)."""
    trained_expert_deviation: float = 1.28
    """Deviation of the loads on a released model's experts on the text of one task, where nothing balances it: 1.28 of
    DeepSeek-R1's 256 experts, and 0.48 of 32 ranks with eight each, on a translation task (NVIDIA/TensorRT-LLM on
    GitHub, docs/source/blogs/tech_blog/blog4_Scaling_Expert_Parallelism_in_TensorRT-LLM.md, table 1); 1.30 of gpt-oss
    20B on 2.8 million tokens of instructions (0.92 of its 32 experts, see `busiest_load`), 0.97 to 1.66 on ten other
    sets (AmanPriyanshu/GPT-OSS-MoE-ExpertFingerprinting on GitHub, data)."""
    gpu_deviation: float = 0.015
    """How much GPUs of one kind vary around their mean under the same work. Over five clusters of V100, RTX 5000 and
    MI60 times vary by 8 % on average (Sinha et al. 2022, SC22, arXiv 2208.11035), read as the range between whiskers
    of a box plot, which are 5.4 deviations apart."""
    kernel_start_s: float = 3e-6
    """Seconds between the end of a kernel and the start of the next: what steps of GPT-2, Llama 1B and Qwen3 0.6B on an
    H200 take beyond their kernels, 3.7, 3.3 and 3.0 us for each (profiles/measured, kernels-*.json)."""
    overlap_slowdown: float = 1.2
    """How much longer compute and communication take that run at the same time (Galvatron, Miao et al. 2022, 3.4)."""
    fused_optimizer_bytes: float = 36.0
    """Bytes a parameter of a fused AdamW: it reads gradient, master weight and two states, and writes three of them and
    a 16-bit copy."""
    unfused_optimizer_bytes: float = 92.0
    """Bytes a parameter of AdamW by lists or in a loop: 8 for weight decay, 12 and 20 for the averages, 24 for their
    root and quotient, 16 for the step and 12 for clipping (counted in torch/optim/adamw.py)."""
    context_bytes: int = GIB // 2
    """The CUDA context."""
    communicator_bytes: int = 688 * MIB
    """NCCL's buffers of one communicator of more than two ranks: 4 A100 with NVLink, one all-reduce in each group
    (NVIDIA/nccl issue 964)."""
    pair_communicator_bytes: int = 544 * MIB
    """NCCL's buffers of one communicator of two ranks."""
    allocated_per_reserved: float = 0.94
    """Allocated over reserved memory of torch's allocator (SimuMax)."""
    memory_margin: float = 0.0
    """The share of usable memory that a search is asked to keep free, beside what the allocator reserves."""
    counts_matmul_workspaces: bool = True
    """cuBLAS workspaces count as memory."""
    cublas_workspace_bytes: int | None = None
    """The size that CUBLAS_WORKSPACE_CONFIG sets for each thread; None: the default of torch on the architecture."""
    block_matmul_speedup: float = 1.0
    """How many times as fast as in 16 bits the linear layers of blocks run in training with 8-bit matmuls."""
    quantizing_bytes: float = 4.0
    """Bytes that training with 8-bit matmuls moves for each element that it quantizes, inputs and gradients of outputs.
    4: it reads 16 bits and writes one byte by rows and one by columns, for the two products that read it (Transformer
    Engine, pytorch/tensor, `rowwise_usage` and `columnwise_usage`). Weights, cast once a step or on their shards, are
    not counted."""
    quantizing_start_s: float = 8e-6
    """Seconds of casting one tensor beside those to move it: with 8 us eight casts to MXFP8 on a B200, of 8,192 x 2,048
    to 16,384 x 8,192, come out within 15 % of measured and on average as long (Transformer Engine 2.14 in
    ROCm/TransformerEngine pull request 598, torchao in pytorch/ao pull request 4156)."""
    has_16bit_weight_gradients: bool = False
    """Whether the gradients of weights are products in 16 bits beside 8-bit ones."""

    @property
    def has_8bit_matmuls(self) -> bool:
        """Whether the linear layers of blocks multiply in 8 bits."""
        return self.block_matmul_speedup > 1

    def with_fp8_recipe(self, recipe: Fp8Recipe | None, *, compiled: bool) -> Self:
        """Return these with what making 8-bit operands moves under a recipe.

        Scales of a tensor's own maximum need a pass more, which torch.compile puts into the operation before. Rows and
        columns have scales of their own, so that a tensor is copied for the other product: 3 bytes to cast it, 2 to
        write the copy, 3 to cast that (torchao, torchao/testing/training/roofline_utils.py).
        A tensor's own maximum takes three kernels before the cast, two of them of one thread (Transformer Engine,
        common/recipe/current_scaling.cu), and scales of the step before one cast for all tensors of a list
        (`nvte_multi_cast_transpose`).
        """
        own = {"tensorwise": 6.0, "rowwise": 8.0, "rowwise_with_gw_hp": 3.0}.get(recipe or "")
        moved = 4.0 if own is None else own - 2.0 * compiled
        each = type(self)().quantizing_start_s
        starts_s = {"delayed": 0.0, "tensorwise": 2.0 * (each + self.kernel_start_s)}.get(recipe or "", each)
        return self.replace(
            quantizing_bytes=moved,
            quantizing_start_s=each if compiled else starts_s,
            has_16bit_weight_gradients=recipe == "rowwise_with_gw_hp",
        )

    def optimizer_traffic(self, how: str, optimizer: OptimizerName) -> float:
        """Return the bytes that a step moves for each of its parameters, clipping counted; `how` it goes.

        Of SGD by lists clipping moves 12, the step 12, and momentum 20 (counted in torch/optim/sgd.py); on an H200
        steps of 1.2 B parameters took as long as 29 and 50. All others are priced as AdamW.
        """
        share = {"sgd": 24.0, "sgd_momentum": 44.0}.get(optimizer, 92.0) / 92.0
        return self.fused_optimizer_bytes if how == "fused" else self.unfused_optimizer_bytes * share

    def for_cpu(self) -> CostConstants:
        """Return the constants of ranks without a GPU: nothing that CUDA's libraries keep, no buffers of NCCL."""
        return self.replace(
            context_bytes=0,
            communicator_bytes=0,
            pair_communicator_bytes=0,
            counts_matmul_workspaces=False,
            gpu_deviation=0.0,
        )

    def device_bytes(self, cached_bytes: float, *, communicators_bytes: int, context_bytes: int | None = None) -> int:
        """Return what `nvidia-smi` shows of a rank whose allocator took `cached_bytes`, its own rounding not counted.

        `context_bytes` is the CUDA context where software has another than this record's.
        """
        context = self.context_bytes if context_bytes is None else context_bytes
        return round(cached_bytes / self.allocated_per_reserved) + context + communicators_bytes
