"""Seconds that one block of one micro-batch spends on one GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from paraplan.cost.blocks.matmuls import MatmulTimes
from paraplan.cost.blocks.module_traffic import module_traffic, num_kernels
from paraplan.cost.blocks.routing import expert_ranks
from paraplan.cost.blocks.saved_tensors import saved_bytes
from paraplan.cost.context_parts import context_parts
from paraplan.cost.plan_table import Floats
from paraplan.cost.stack import fuses_experts, stack_values
from paraplan.model.spec import Attention, BlockSpec, Matmul

_BIAS_BYTES = (28.0, 34.0)
"""Bytes that a forward and a backward pass move for each element of experts' outputs where these have a bias: it is
scaled and added in fp32, expert by expert, and all are joined and cast (Megatron-LM, core/transformer/moe/experts.py,
_apply_bias; NeMo AutoModel's GroupedExpertsDeepEP does so too)."""

_CLAMP_BYTES = (8.0, 10.0)
"""Bytes, forward and backward, for each element of the gates and inner inputs of such experts, which are clamped and
joined before the fused activation (core/fusions/fused_bias_geglu.py, weighted_bias_quick_geglu_impl)."""

_UNFUSED_SOFTMAX_BYTES = (32.0, 34.0)
"""Bytes that torch's own operations move for each score beyond one fused kernel, forward and backward.

Forward 6 bytes to make a 16-bit score fp32, 8 to scale, 8 to mask, 8 for the softmax, 6 to return to 16 bits, less 4;
backward 6, 12, 8, 8, 6, less 6 (forward_torch_softmax of Megatron-LM's megatron/model/fused_softmax.py).
"""
_UNFUSED_FP32_SOFTMAX_BYTES = 16.0
"""Bytes for each fp32 score beyond one fused kernel, in either pass: scaled and masked by themselves. No fused kernel
takes these (`is_kernel_available` in the same file)."""


_FUSED_KERNELS = 10
"""Kernels that a forward pass of a block starts beside matmuls where they are fused: two norms, two rotations,
attention, an activation, two sums with dropout, two copies into another order; a backward pass starts about twice as
many."""
INDEX_SCORE_BYTES = 4
_INDEX_PASSES = 6
"""Times that scores of an indexer are read or written: made, scaled, rectified (two each), and summed over heads."""
_LEAST_S = 1e-12  # of a pass that does nothing


class PassSeconds(NamedTuple):
    """Seconds of one pass of a block, one entry a sharding; the parts sum to the whole."""

    matmuls: Floats
    attention: Floats
    between: Floats
    """Everything else."""


@dataclass(frozen=True, eq=False)
class KernelTimes(MatmulTimes):
    """Prices the kernels of blocks: matmuls and attention by FLOPs, everything else by the bytes that it moves."""

    def block_s(self, block: BlockSpec, *, backward: bool = False) -> Floats:
        """Return the seconds of the forward or the backward pass of one block, one entry a sharding."""
        return np.asarray(sum(self.parts_s(block, backward=backward)))

    def parts_s(self, block: BlockSpec, *, backward: bool = False) -> PassSeconds:
        """Return these seconds by part.

        What a forward pass moves is told by what it saves where nothing is frozen.
        """
        if backward and not block.has_backward:
            return PassSeconds(*[np.zeros_like(self.shardings.tp)] * 3)
        adapters = self.shardings.tokens / self.shardings.tp * block.adapter_traffic_per_token
        traffic = adapters * (2.0 if backward else 1.0)
        traffic = traffic + self._rotary_bytes(block)
        if self.constants.has_8bit_matmuls and not block.is_end:
            traffic = traffic + self._quantizing_bytes(block, backward=backward)
        traffic = traffic + self._unfused_softmax_bytes(block, backward=backward) + self._dequantizing_bytes(block)
        between_s = self._between_s(block.before_freezing or block, backward=backward) + self.moved_s(traffic)
        between_s = between_s + self._routed_s(block, backward=backward) + self._quantizing_starts_s(block)
        matmuls_s, attention_s = self.matmuls_s(block, backward=backward), self.attention_s(block, backward=backward)
        # Below the power limit, which products one after the other reach, they run faster.
        others = between_s / np.maximum(matmuls_s + attention_s + between_s, _LEAST_S)
        return PassSeconds(matmuls_s / (1.0 + self.gpu.shared.matmul_cool_gain * others), attention_s, between_s)

    def products_s(self, block: BlockSpec, chosen: Sequence[Matmul]) -> Floats:
        """Return the seconds of some of a block's matmuls in its forward pass."""
        whole_s = self.matmuls_s(block, backward=False)
        share = self.matmuls_s(block.replace(matmuls=tuple(chosen)), backward=False) / np.maximum(whole_s, _LEAST_S)
        return np.asarray(share * self.parts_s(block).matmuls)

    def _between_s(self, block: BlockSpec, *, backward: bool) -> Floats:
        """Return the seconds of norms, rotations, activations and sums in one pass: fused, or module by module."""
        kernels = self.framework.kernels
        starts_s = self.constants.kernel_start_s * (not block.is_end)
        if kernels.fused:
            saved = saved_bytes(block, self.training, self.shardings, fused_kernels=True)
            rate = self.constants.fused_bytes_per_multiprocessor_s
            forward_s = self._issued_s(saved * kernels.traffic_per_saved_byte, rate) + starts_s * _FUSED_KERNELS
            return forward_s * (2.0 if backward else 1.0)
        # Each matmul is three of the products that are priced with their start; of the rest a third is forward.
        starts_s *= max(0.0, num_kernels(block) - 3 * len(block.matmuls)) * (2 / 3 if backward else 1 / 3)
        traffic = module_traffic(block, self.training, self.shardings, backward=backward)
        return starts_s + self.moved_s(traffic.plain) + self.mixed_s(traffic.mixed)

    def mixed_s(self, num_bytes: Floats) -> Floats:
        """Return the seconds of operations that convert types or repeat operands, and move `num_bytes` for that."""
        return self._issued_s(num_bytes, self.constants.mixed_bytes_per_multiprocessor_s)

    def _issued_s(self, num_bytes: Floats, each_bytes_per_s: float) -> Floats:
        """Return the seconds to move `num_bytes` where a multiprocessor of NVIDIA's moves no more than that."""
        count = self.gpu.num_multiprocessors if self.gpu.vendor == "nvidia" else None
        issued = 0.0 if count is None else num_bytes / (count * each_bytes_per_s)
        return np.maximum(self.moved_s(num_bytes), issued)

    def _dequantizing_bytes(self, block: BlockSpec) -> Floats:
        """Return what copies of quantized weights in the type of products read and write, in either pass."""
        total = np.zeros_like(self.shardings.tp)
        for one in (one for one in block.matmuls if one.quantized_bytes):
            ranks = (1.0 if one.split == "none" else self.shardings.tp) * self._expert_ranks(one)
            each = one.quantized_bytes + self.training.activation_bytes
            total += one.k * one.n * one.num_experts * each / ranks
        return total

    def _rotary_bytes(self, block: BlockSpec) -> Floats | float:
        """Return what a pass moves to turn queries and keys as complex numbers, beyond a fused rotation.

        Of latent attention, which turns a part of them, nothing is counted.
        """
        core, each = block.attention, self.framework.kernels.complex_rotary_bytes
        if not each or not self.training.compiled or core is None or core.qk_head_dim != core.v_head_dim:
            return 0.0
        turned = (core.num_heads + core.num_kv_heads) * core.qk_head_dim
        return np.asarray(self.shardings.tokens / self.shardings.tp * turned * each)

    def _routed_s(self, block: BlockSpec, *, backward: bool) -> Floats | float:
        """Return the seconds of a pass to order tokens by expert, and back, and to add experts' biases."""
        profile, routed = self.framework.experts, [one for one in block.matmuls if one.num_experts > 1]
        if not routed:
            return 0.0
        shared = self.shardings.tp if profile.over_tensor_ranks else self.shardings.sequence_tp
        rows = self.shardings.tokens / shared * routed[0].rows_per_token * self._load(routed[0])
        ranks = expert_ranks(self.framework, ep=self.shardings.ep, tp=self.shardings.tp)
        dispatcher = profile.dispatcher
        moves = dispatcher.row_moves + dispatcher.sent_row_moves * (ranks > 1)
        moves = moves + dispatcher.padding_row_moves * self.constants.has_8bit_matmuls
        plain = moves * routed[0].k * self.training.activation_bytes
        has_bias = any(one.is_expert and one.name.endswith("bias") for one in block.parameters)
        if not has_bias or fuses_experts(self.training.stack):
            return self.moved_s(rows * plain)
        plain = plain + _CLAMP_BYTES[backward] * routed[0].n
        return self.moved_s(rows * plain) + self.mixed_s(rows * _BIAS_BYTES[backward] * routed[-1].n)

    def _quantizing_bytes(self, block: BlockSpec, *, backward: bool) -> Floats:
        """Return what making 8-bit operands moves: inputs in a forward pass, gradients of outputs in a backward pass.

        Matmuls that read one input quantize it once. Routers multiply in 16 bits or more.
        """
        linear = [one for one in block.matmuls if not (one.weighs or one.of_activations)]
        inputs = {(one.k, one.rows_per_token, one.split) for one in linear}
        tp, total = self.shardings.tp, np.zeros_like(self.shardings.tp)
        if backward:
            for one in linear:
                total += one.rows_per_token * one.n / (tp if one.split == "column" else 1.0)
        else:
            for k, rows, split in inputs:
                total += rows * k / (tp if split == "row" else 1.0)
        return self.shardings.tokens * total * self.constants.quantizing_bytes

    def _quantizing_starts_s(self, block: BlockSpec) -> Floats | float:
        """Return the seconds to start casting what products of experts read in a pass, where each starts by itself.

        Inputs in a forward pass, gradients of outputs in a backward pass, expert by expert (Transformer Engine,
        pytorch/csrc/extensions/cast.cpp, `multi_tensor_quantize_impl`).
        """
        routed = [one for one in block.matmuls if one.num_experts > 1]
        if not routed or not self._starts_each_expert() or not self.constants.has_8bit_matmuls:
            return 0.0
        ranks = expert_ranks(self.framework, ep=self.shardings.ep, tp=self.shardings.tp)
        tensors = len({(one.k, one.split) for one in routed})
        return np.asarray(tensors * routed[0].num_experts / ranks * self.constants.quantizing_start_s)

    def attention_core_s(self, block: BlockSpec) -> Floats:
        """Return the seconds of the attention core's forward pass, which selective recompute runs again."""
        if self.framework.kernels.fused:
            whole, rest = (
                saved_bytes(block, self.training, self.shardings, fused_kernels=True, without_attention_core=without)
                for without in (False, True)
            )
            between_s = self.moved_s((whole - rest) * self.framework.kernels.traffic_per_saved_byte)
        else:
            scores = module_traffic(block, self.training, self.shardings, backward=False, attention_core_alone=True)
            between_s = self.moved_s(scores.plain) + self.mixed_s(scores.mixed)
        softmax_s = self.moved_s(self._unfused_softmax_bytes(block, backward=False))
        return np.asarray(self.attention_s(block) + between_s + softmax_s)

    def attention_s(self, block: BlockSpec, *, backward: bool = False) -> Floats:
        """Return the seconds of the attention kernels in one pass."""
        cores = (one for one in (block.attention, block.cross_attention) if one)
        seconds = sum((self._attention_s(one, backward=backward) for one in cores), np.zeros_like(self.shardings.tp))
        if (
            self.training.attention == "sdpa"
            and self.training.precision != "fp32"
            and any(one.role == "attention_dropout_mask" for one in block.saved)
        ):
            speed = self.gpu.shared.attention_speed(self.framework.kernels.flash_generation, uses_sdpa=True)
            seconds = seconds * speed.dropout_slowdown[backward]
        return seconds if backward or block.index_scores is None else seconds + self._index_s(block.index_scores)

    def _index_s(self, scores: Attention) -> Floats:
        """Return the seconds of an indexer's scores in a forward pass; they have no backward pass.

        transformers multiplies them in fp32 on each rank of tensor parallelism, scales them, applies ReLU and sums them
        over heads, one operation after the other (models/deepseek_v32/modeling_deepseek_v32.py). Fused kernels are
        taken to reach the rate of attention.
        """
        if self.framework.kernels.fused:
            return self._attention_s(scores, backward=False)
        length, tokens = self.training.attended_length, self.shardings.tokens
        peak = (self.gpu.peak("fp32") or self._peak()) * self._plain_efficiency
        moved = tokens * length * scores.num_heads * INDEX_SCORE_BYTES
        return np.asarray(tokens * scores.flops_per_token(length) / peak + self.moved_s(moved * _INDEX_PASSES))

    def loss_s(self, vocab_size: int) -> Floats:
        """Return the seconds of the loss on logits, forward and backward."""
        loss = self.framework.loss.implementation
        ranks = 1.0 if self.framework.loss.gathers_logits else self.shardings.tp
        num_bytes = self.shardings.tokens * vocab_size / ranks * loss.traffic_per_logit
        return self._issued_s(num_bytes, loss.multiprocessor_bytes_per_s)

    def _attention_s(self, attention: Attention, *, backward: bool) -> Floats:
        length = self.training.attended_length
        ranks = np.ones_like(self.shardings.tp) if attention.is_whole else self.shardings.tp
        parts = context_parts(attention, self.shardings.tp, self.shardings.context_ranks)
        flops = self.shardings.tokens * attention.flops_per_token(length) / ranks * parts.causal_load
        constants = self.constants
        if self.training.attention == "eager":
            flops = flops * (2.0 if backward else 1.0)
            # A product whose rows begin anywhere is slower, as it is in the other matmuls.
            slower = self._shape_costs.unaligned_slowdown if attention.qk_head_dim % 8 else 1.0
            efficiency, computed = constants.eager_attention_efficiency / slower, 1.0
        else:
            generation = self.framework.kernels.flash_generation
            speed = self.gpu.shared.attention_speed(generation, uses_sdpa=self.training.attention == "sdpa")
            # The papers count the scores that the backward pass makes again (Dao 2023, section 4.1).
            flops = flops * (2.5 if backward else 1.0)
            measured = self._attention_rate(backward=backward)
            if measured is not None:
                return np.asarray(computed_share(attention, length) * flops / measured)
            width = (attention.qk_head_dim + attention.v_head_dim) / 2
            efficiency = speed.peak_share(width, backward=backward) * constants.flash_attention_factor
            efficiency *= stack_values().fp8_attention_speedup if self.training.stack.fp8_attention else 1.0
            efficiency *= self._reached_share() if speed.is_of_reached else 1.0
            computed = computed_share(attention, length, edge_tokens=speed.causal_tokens)
            if backward:
                queries = self.shardings.tokens * attention.queries_per_token * attention.num_heads
                queries = queries * attention.qk_head_dim / ranks
                moved_s = self.moved_s(queries * speed.backward_bytes)
                return np.asarray(computed * flops / (self._peak() * efficiency) + moved_s)
        return np.asarray(computed * flops / (self._peak() * efficiency))

    def _unfused_softmax_bytes(self, block: BlockSpec, *, backward: bool) -> Floats:
        """Return what eager attention's softmax moves beyond a fused one, where that does not take its scores."""
        kernels, is_fp32 = self.framework.kernels, self.training.precision == "fp32"
        multiple = kernels.fused_softmax_heads
        can_be_unfused = multiple > 1 or (is_fp32 and kernels.fused)
        if not can_be_unfused or block.attention is None or self.training.attention != "eager":
            return np.zeros_like(self.shardings.tp)
        heads = block.attention.num_heads / (1.0 if block.attention.is_whole else self.shardings.tp)
        is_fused = heads * np.ceil(self.shardings.tokens / self.shardings.seq_length) % multiple == 0
        scores = self.shardings.tokens * self.shardings.seq_length * heads
        if is_fp32:
            return np.asarray(scores * _UNFUSED_FP32_SOFTMAX_BYTES)
        return np.asarray(np.where(is_fused, 0.0, scores * _UNFUSED_SOFTMAX_BYTES[backward]))

    def _attention_rate(self, *, backward: bool) -> float | None:
        if self._fit is None:
            return None
        return self._fit.attention_backward_flops_per_s if backward else self._fit.attention_forward_flops_per_s


def computed_share(attention: Attention, length: int, *, edge_tokens: float = 0.0) -> float:
    """Return which share of the pairs of queries and `window` keys, of all keys without one, is computed under a mask.

    A causal mask leaves half of all pairs. A window much shorter than the sequence leaves all of its own: only the
    first queries see fewer keys. Blocks on an edge of the mask are computed whole, which costs half of `edge_tokens`
    keys a query at each edge: one on the diagonal, another at the far end of a window (Dao-AILab/flash-attention,
    csrc/flash_attn/src/flash_fwd_kernel.h: key blocks run from that of the window's far end to that of the diagonal).
    """
    if not attention.is_causal:
        return 1.0
    reach = min(length, attention.window or length)
    return (1.0 - 0.5 * reach / length) * (1.0 + edge_tokens / reach)
