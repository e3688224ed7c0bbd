"""Seconds of the matmuls of one block of one micro-batch on one GPU."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from paraplan.cost.blocks.routing import busiest_load, expert_ranks
from paraplan.cost.blocks.saved_tensors import Shardings
from paraplan.cost.constants import CostConstants
from paraplan.cost.framework import FrameworkProfile
from paraplan.cost.plan_table import Floats, Mask
from paraplan.cost.stack import fuses_experts
from paraplan.hardware.architecture import MatmulShapeCosts
from paraplan.hardware.profiles import GpuProfile, KernelFit, Precision
from paraplan.model.spec import BlockSpec, Matmul
from paraplan.plan.training import TrainingSpec


def effective_peak(gpu: GpuProfile, training: TrainingSpec) -> float:
    """Return the matmul peak that the training precision reaches on `gpu`, in FLOP/s.

    fp32 training counts plain fp32 arithmetic: torch leaves TF32 off for matmuls by default. A GPU without bf16 units
    computes it at the fp32 rate.
    """
    wanted: tuple[Precision, Precision] = (training.compute_precision, "fp32")
    return next(gpu.peak_flops_per_s[name] for name in wanted if name in gpu.peak_flops_per_s)


def counted_peak(gpu: GpuProfile, training: TrainingSpec, *, uses_tf32: bool = False) -> float:
    """Return the peak that model FLOPs utilization counts against: that of the numbers that linear layers multiply.

    8 bits have the architecture's multiple of the 16-bit peak, 4 bits are taken for 8; fp32 on TF32 cores has theirs.
    """
    if training.linear_precision != "16bit":
        return effective_peak(gpu, training) * gpu.shared.fp8_speedup
    if training.compute_precision == "fp32" and uses_tf32 and "tf32" in gpu.peak_flops_per_s:
        return gpu.peak_flops_per_s["tf32"]
    return effective_peak(gpu, training)


_THIN = 16
"""Rows, columns or inner size up to which a product is one of vectors: tiles of tensor cores have 16 or more (PTX)."""

_HALF_TILE = 64.0
"""Rows of a tile that an expert's last one leaves empty, half of 128 on average: on an H200 grouped products of 256
rows for each of 8 to 128 experts take 1.3 times as long with uneven rows as with even ones, of 1,024 rows 1.06 times
(profiles/measured, kernels-*.json)."""
_GROUPED_SLOWDOWN = 1.27
"""How much longer grouped products take to read their weights than element-wise kernels: at 16 and 64 rows for each
expert they reach 0.63 of an H200's bandwidth (profiles/measured, kernels-*.json)."""
_TILES = np.array([(128, 256), (256, 128), (128, 128), (64, 128), (128, 64), (64, 64)], dtype=float)
"""Rows and columns of the tiles that libraries choose from, the largest first."""


_EXPERT_START_S = 8e-6
"""Transformer Engine's grouped linear layer calls cuBLAS for each expert (transformer_engine/common/gemm,
nvte_multi_stream_cublas_gemm), each priced as a matmul of no size: 72 shapes of a B200 (MooreThreads/SimuMax on GitHub,
configs/system/b200_bf16_ceperm.json, forward and gradients of inputs) come out 7 % too slow and 1 % too fast on average
so, 36 and 40 % too fast without."""


@dataclass(frozen=True, eq=False)
class MatmulTimes:
    """Prices the matmuls of blocks by FLOPs and shape, and what they read and write by bytes."""

    training: TrainingSpec
    gpu: GpuProfile
    shardings: Shardings
    constants: CostConstants
    framework: FrameworkProfile

    def moved_s(self, num_bytes: Floats) -> Floats:
        """Return the seconds to move `num_bytes` through the GPU's memory."""
        bandwidth = self.gpu.memory_bandwidth_bytes_per_s * self.constants.memory_bandwidth_efficiency
        return num_bytes / bandwidth

    def matmuls_s(self, block: BlockSpec, *, backward: bool) -> Floats:
        """Return the seconds of all matmuls of one pass, an entry a sharding; each shape on a rank is priced once."""
        if len(self.shardings.products[0]) == len(self.shardings.tp):
            return self._distinct_matmuls_s(block, backward=backward)
        few = replace(self, shardings=self.shardings.of_products)
        return np.asarray(few._distinct_matmuls_s(block, backward=backward)[self.shardings.products[1]])

    def _distinct_matmuls_s(self, block: BlockSpec, *, backward: bool) -> Floats:
        """Return the seconds of all matmuls of one pass; equal ones are priced once, and all side by side."""
        total = np.zeros_like(self.shardings.tp)
        kinds = [
            (one.k, one.n, one.split, one.rows_per_token, one.num_experts, one.trains, one.of_activations)
            for one in block.matmuls
        ]
        distinct = dict(zip(kinds, block.matmuls, strict=True))
        if not distinct:
            return total
        rows, n, k = (np.stack(each) for each in zip(*map(self._shape, distinct.values()), strict=True))
        # Backward: the gradient of the input, then that of the weight where it trains.
        trains = np.array([[one.trains] for one in distinct.values()])
        is_routed = np.array([[one.num_experts > 1] for one in distinct.values()])
        tiled = np.where(is_routed, rows + np.minimum(_HALF_TILE, rows / 2), rows)
        shapes = [(tiled, k, n)] if backward else [(tiled, n, k)]
        if backward and trains.any():
            shapes.append((k, n, rows))
        spread = self.shardings.tp / np.stack([self._split_ranks(matmul) for matmul in distinct.values()])
        experts = np.stack([one.num_experts / self._expert_ranks(one) for one in distinct.values()]) / spread
        # Heads and products of activations stay in 16 bits.
        is_narrow = np.array([[not (block.is_end or one.of_activations)] for one in distinct.values()])
        in_8bit = is_narrow & self.constants.has_8bit_matmuls
        each = self._products_s(shapes, in_8bit=in_8bit) * self._misalignment(n, k)
        if backward and trains.any() and not trains.all():
            alone = self._products_s(shapes[:1], in_8bit=in_8bit) * self._misalignment(n, k)
            each = np.where(trains, each, alone)
        is_fp32 = self._computes_experts_in_fp32 & is_routed
        if is_fp32.any():
            whole = replace(self, training=self.training.replace(precision="fp32"))
            each = np.where(is_fp32, whole._products_s(shapes), each)
        speedup = np.where(is_narrow, self._speedup(trains, backward=backward), 1.0)
        moved_s = self._moved_by_s(rows, n, k, backward=backward) * np.where(is_routed, _GROUPED_SLOWDOWN, 1.0)
        starts_s = len(shapes) * self._shape_costs.launch_s
        if is_routed.any():  # a grouped kernel starts once
            apart_s = len(shapes) * (_EXPERT_START_S if self._starts_each_expert() else 0.0)
            each = np.where(is_routed & ~is_fp32, each - starts_s + apart_s, each)
        seconds = experts * np.maximum(each / speedup, moved_s)
        seconds = seconds + np.where(is_routed & ~is_fp32, starts_s, 0.0)
        of_kind = dict(zip(distinct, seconds, strict=True))
        for kind in kinds:
            total = total + of_kind[kind]
        return total

    def _starts_each_expert(self) -> bool:
        """Return whether the product of each expert starts by itself, where no grouped kernel is started once."""
        return self.framework.kernels.engine and not fuses_experts(self.training.stack)

    def _speedup(self, trains: Mask, *, backward: bool) -> Floats | float:
        """Return how many times as fast as in 16 bits the products of a pass are, an entry a matmul."""
        whole = self.constants.block_matmul_speedup
        if not backward or not self.constants.has_16bit_weight_gradients:
            return whole
        return np.where(trains, 2.0 / (1.0 / whole + 1.0), whole)  # one product of two stays

    def _moved_by_s(self, rows: Floats, n: Floats, k: Floats, *, backward: bool) -> Floats:
        """Return the least seconds of a matmul's products in one pass: what they read and write.

        A gradient that the product adds to those of earlier micro-batches is read and written as they are kept.
        """
        each = float(self.training.activation_bytes)
        once = each * (rows * k + k * n + rows * n)
        if not backward:
            return self.moved_s(once)
        is_added = self.framework.data_parallel.fuses_accumulation and self.training.precision != "fp32"
        written = 2.0 * self.framework.storage.gradient_bytes if is_added else each
        return self.moved_s(once + each * (rows * k + rows * n) + written * k * n)

    def _shape(self, matmul: Matmul) -> tuple[Floats, Floats, Floats]:
        """Return rows, columns and inner size of a matmul on one rank, under each sharding."""
        tp = self._split_ranks(matmul)
        dense = matmul.dense_rows_per_token
        routed = matmul.rows_per_token if dense is None else dense
        rows = self.shardings.tokens * routed / matmul.num_experts * self._expert_ranks(matmul)
        if matmul.num_experts > 1 and dense is None:
            rows = rows * self._load(matmul)
        if matmul.of_activations:
            rows = rows / (tp if matmul.split == "column" else 1.0)
            return rows, np.full_like(tp, matmul.n), np.full_like(tp, matmul.k)
        n = matmul.n / tp if matmul.split == "column" else np.full_like(tp, matmul.n)
        k = matmul.k / tp if matmul.split == "row" else np.full_like(tp, matmul.k)
        return rows, n, k

    def _load(self, matmul: Matmul) -> Floats:
        """Return the rows of the busiest rank over the mean, of a matmul of experts."""
        ranks = expert_ranks(self.framework, ep=self.shardings.ep, tp=self.shardings.tp)
        return busiest_load(self.training, self.constants, matmul, ranks=ranks)

    def _split_ranks(self, matmul: Matmul) -> Floats:
        """Return over how many ranks each weight of a matmul is split, if it is: those of experts may be whole."""
        is_whole = matmul.num_experts > 1 and self.framework.experts.over_tensor_ranks
        return np.ones_like(self.shardings.tp) if is_whole else self.shardings.tp

    def _expert_ranks(self, matmul: Matmul) -> Floats:
        """Return over how many ranks the experts of a matmul go."""
        return self.shardings.ep if matmul.num_experts > 1 else np.ones_like(self.shardings.ep)

    @property
    def _computes_experts_in_fp32(self) -> Mask:
        """Shardings under autocast over fp32 weights: it knows no grouped products (ATen/autocast_mode.h of torch)."""
        return self.shardings.has_fp32_weights & self.shardings.is_autocast

    def _products_s(self, shapes: list[tuple[Floats, Floats, Floats]], *, in_8bit: Mask | bool = False) -> Floats:
        return np.asarray(sum(self._product_s(*shape, in_8bit=in_8bit) for shape in shapes))

    def _product_s(self, m: Floats, n: Floats, k: Floats, *, in_8bit: Mask | bool = False) -> Floats:
        """Return the seconds of one product `[m, k] x [k, n]`; see `CostConstants` for the form and its source.

        `in_8bit` says that its arithmetic will be divided by a speedup, which writing its results, in 16 bits all the
        same, does not share: on an H200 products of inner sizes of 768, 2,048 and 4,096 and more are 1.4, 1.7 and 1.9
        times as fast in 8 bits (profiles/measured, kernels-*.json).
        """
        constants = self.constants
        if self._fit is not None:
            return _fitted_product_s(self._fit, m, n, k)
        shapes = self._shape_costs
        half_k = shapes.half_k * np.where(in_8bit, constants.block_matmul_speedup, 1.0)
        penalty = 1.0 + shapes.half_n / n + half_k / k
        reached = self._reached_share() * constants.matmul_efficiency * self.gpu.shared.sustained_matmul_share
        peak = self._peak() * (reached if self._uses_tensor_cores() else self._plain_efficiency)
        tiled_s = 2.0 * m * n * k * penalty * self._last_wave(m, n) / peak
        is_thin = np.minimum(np.minimum(m, n), k) <= _THIN
        product_s = np.where(is_thin, np.minimum(tiled_s, self._vector_product_s(m, n, k)), tiled_s)
        return np.asarray(product_s + shapes.launch_s)

    @cached_property
    def _shape_costs(self) -> MatmulShapeCosts:
        """The cost of a product's shape on this GPU.

        Where nobody measured it the inner size that costs half of the rate is that whose arithmetic takes as long as
        writing the result, which nothing hides.
        """
        if self.gpu.shared.matmul_shapes is not None:
            return self.gpu.shared.matmul_shapes
        constants, per_byte = self.constants, self._peak() / self.gpu.memory_bandwidth_bytes_per_s
        return MatmulShapeCosts(
            half_n=constants.matmul_half_n,
            half_k=self.gpu.shared.matmul_written_share * per_byte * self.training.activation_bytes / 2,
            wave_share=constants.wave_share,
            small_tile_share=constants.small_tile_share,
            launch_s=constants.matmul_launch_s,
            plain_share=1.0,
            unaligned_slowdown=constants.unaligned_slowdown,
        )

    @property
    def _plain_efficiency(self) -> float:
        return self.constants.plain_matmul_efficiency * self._shape_costs.plain_share

    def _vector_product_s(self, m: Floats, n: Floats, k: Floats) -> Floats:
        """Return the seconds of a product without tiles or tensor cores, which libraries take for thin operands."""
        peak = self.gpu.peak("fp32") or self._peak()
        moved = self.training.activation_bytes * (m * k + k * n + m * n)
        return np.maximum(2.0 * m * n * k / (peak * self._plain_efficiency), self.moved_s(moved))

    def _last_wave(self, m: Floats, n: Floats) -> Floats | float:
        """Return how much longer a product takes because its tiles do not fill all waves of multiprocessors.

        NVIDIA, Matrix Multiplication Background User's Guide, tile and wave quantization. A library takes the tile that
        suits a shape best; smaller ones read their operands more often.
        """
        count, constants = self.gpu.num_multiprocessors, self.constants
        if count is None:
            return constants.usual_last_wave
        # Arithmetic outside of tensor cores is slow enough that small tiles feed it too.
        shapes = self._shape_costs
        small_tile_share = shapes.small_tile_share if self._uses_tensor_cores() else 0.0
        rows, columns = _TILES.T.reshape(2, -1, *(1 for _ in m.shape))
        tiles = np.ceil(m / rows) * np.ceil(n / columns)
        idle = np.ceil(tiles / count) * count * rows * columns / (m * n) - 1.0
        reads = 1 / rows + 1 / columns
        more_reads = reads / reads[0] - 1.0
        return np.asarray(((1.0 + shapes.wave_share * idle) * (1.0 + small_tile_share * more_reads)).min(axis=0))

    def _misalignment(self, *dimensions: Floats) -> Floats:
        """Return how much longer a 16-bit product takes whose operands' rows do not begin at multiples of 128 bytes."""
        whole = [_divides(8, size) for size in dimensions]
        lines = [_divides(64, size) for size in dimensions]
        if self.training.precision == "fp32":
            return np.ones_like(self.shardings.tp)
        slower = np.where(np.all(lines, axis=0), 1.0, self.gpu.shared.unaligned_line_slowdown)
        return np.asarray(np.where(np.all(whole, axis=0), slower, self._shape_costs.unaligned_slowdown))

    def _peak(self) -> float:
        tf32 = self.gpu.peak("tf32")
        if self.training.precision == "fp32" and self.framework.kernels.uses_tf32 and tf32 is not None:
            return tf32 * self.gpu.clock_share
        return effective_peak(self.gpu, self.training) * self.gpu.clock_share

    def _uses_tensor_cores(self) -> bool:
        return self.training.precision != "fp32" or (
            self.framework.kernels.uses_tf32 and self.gpu.peak("tf32") is not None
        )

    @cached_property
    def _fit(self) -> KernelFit | None:
        """The fit of a calibration of this machine for the training's precision."""
        calibration = self.gpu.calibration
        return None if calibration is None else calibration.fit(self.training.compute_precision)

    def _reached_share(self) -> float:
        """Return the share of the peak that the best matmul reaches on this GPU, as measured in 16 bits."""
        best, peak = self.gpu.reached_matmul_flops_per_s, self.gpu.peak("bf16") or self.gpu.peak("fp16")
        return best / peak if best is not None and peak is not None else self.constants.usual_reached_share


def _fitted_product_s(fit: KernelFit, m: Floats, n: Floats, k: Floats) -> Floats:
    penalty = 1.0 + fit.half_m / m + fit.half_n / n + fit.half_k / k
    return np.asarray(2.0 * m * n * k * penalty / fit.matmul_flops_per_s + fit.matmul_launch_s)


def _divides(unit: int, sizes: Floats) -> Mask:
    return np.asarray(sizes % unit == 0)
