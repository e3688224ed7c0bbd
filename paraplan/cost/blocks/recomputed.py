"""Recompute of chosen operations: what a block keeps of its activations then, and what its backward pass runs again."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from paraplan.cost.blocks.kernels import KernelTimes
from paraplan.cost.blocks.saved_tensors import Shardings, kept_sizes
from paraplan.cost.plan_table import Floats, RecomputeCode
from paraplan.model.spec import BlockSpec, Matmul, SavedTensor
from paraplan.plan.stack import RecomputedOps
from paraplan.plan.training import TrainingSpec

_ACTIVATIONS = ("mlp_inner_output", "activated_gate")
_UP_PROJECTED = ("query", "key", "value")
_UP_PROJECTIONS = ("q_b_proj", "kv_b_proj")
_ROUTED = ("router_probabilities", "routing_weights", "tokens_by_expert", "activation_input", "up_projection")
"""Tensors of experts that a block keeps, beside those that `modules` drops."""
_ATTENTION_PRODUCTS = ("attn.", "q_proj", "k_proj", "v_proj", "o_proj", "qkv")
_KERNEL_OUTPUTS = ("attention_output", "softmax_statistics")
_NORMS_AFTER_LAST = ("post_feedforward", "output.LayerNorm", "post_mlp", "final_layer_norm")
"""How the weights of norms begin that follow a block's last product."""
_MOVED_PER_DROPPED_BYTE = 3.0
"""A gated activation reads two tensors and writes one; a norm reads and writes one, and is counted the same."""


def kept_by_ops(
    block: BlockSpec,
    training: TrainingSpec,
    shardings: Shardings,
    *,
    ops: RecomputedOps,
    fused_kernels: bool,
    is_first: bool,
    entry_bytes: Floats,
) -> Floats:
    """Return the bytes that `block` keeps of one micro-batch; `entry_bytes` are those of its input.

    Under tensor parallelism the output of a row-parallel product is kept as it is before the sum over ranks.
    """
    kept = entry_bytes.astype(float) if ops == "torch" else np.zeros_like(shardings.tp)
    for tensor, size in kept_sizes(block, training, shardings, fused_kernels=fused_kernels, is_first=is_first):
        is_kept = tensor.role in _KERNEL_OUTPUTS if ops == "torch" else not _is_dropped(block, tensor, ops)
        if is_kept:
            kept = kept + size
    if ops != "torch":
        return kept
    for matmul in _kept_products(block):
        ranks = shardings.tp if matmul.split == "column" else 1.0
        kept = kept + shardings.tokens * matmul.rows_per_token * matmul.n * training.activation_bytes / ranks
    return kept


def input_apart_bytes(
    block: BlockSpec, training: TrainingSpec, shardings: Shardings, kept: Floats, *, fused_kernels: bool
) -> Floats:
    """Return what full recompute has `kept`, the input in 16 bits, where the norms of `block` keep copies in fp32."""
    tensors = block.saved_fused if fused_kernels else block.saved
    in_fp32 = any(one.role == "norm_input_in_fp32" and one.element_type == "fp32" for one in tensors)
    promoted = shardings.is_autocast and any(
        one.role == "norm_input" and one.element_type == "promoted" for one in tensors
    )
    is_apart = shardings.residual_bytes(training, is_first=True) < 4.0
    is_full = shardings.recompute == RecomputeCode.FULL
    return np.where(is_full & is_apart & (in_fp32 or promoted), kept, 0.0)


def ops_again_s(
    block: BlockSpec,
    times: KernelTimes,
    forward_s: Floats,
    *,
    ops: RecomputedOps,
    fused_kernels: bool,
) -> Floats:
    """Return the seconds of what runs again of a forward pass that takes `forward_s`."""
    if ops == "torch":
        return np.asarray(forward_s - times.products_s(block, list(_kept_products(block))) - times.attention_s(block))
    if ops == "experts" and _has_experts(block):
        attention = [one for one in block.matmuls if any(name in one.name for name in _ATTENTION_PRODUCTS)]
        return np.asarray(forward_s - times.products_s(block, attention) - times.attention_s(block))
    dropped = np.zeros_like(times.shardings.tp)
    for tensor, size in kept_sizes(block, times.training, times.shardings, fused_kernels=fused_kernels, is_first=True):
        if _is_dropped(block, tensor, ops) and tensor.role not in _UP_PROJECTED:
            dropped = dropped + size
    again = [one for one in block.matmuls if one.name.endswith(_UP_PROJECTIONS)]
    return np.asarray(times.moved_s(_MOVED_PER_DROPPED_BYTE * dropped) + times.products_s(block, again))


def unread_product(block: BlockSpec) -> Matmul | None:
    """Return the product that ends a forward pass where no gradient reads what it makes: a sum alone follows it.

    Of experts rows are put into their order after it, which their gradients need; norms, dropout and adapters come
    after it too.
    """
    if (
        not block.matmuls
        or block.before_freezing is not None
        or _has_experts(block)
        or any(one.name.startswith(_NORMS_AFTER_LAST) for one in block.parameters)
        or any(one.role == "mlp_output_mask" for one in block.saved)
    ):
        return None
    return block.matmuls[-1]


def unread_s(block: BlockSpec, times: KernelTimes, *, is_compiled: bool) -> Floats:
    """Return the seconds of the product with which recomputation of all stops early, 0 where it does not."""
    # Products in 8 bits are operations of their own, which save what they read when they have ended.
    stops = times.framework.kernels.checkpoints == "early" and times.training.linear_precision == "16bit"
    last = unread_product(block) if is_compiled or stops else None
    return np.zeros_like(times.shardings.tp) if last is None else times.products_s(block, [last])


def _kept_products(block: BlockSpec) -> Iterator[Matmul]:
    products = [one for one in block.matmuls if one.num_experts == 1]
    return iter(products[::2])


def _has_experts(block: BlockSpec) -> bool:
    return any(one.num_experts > 1 for one in block.matmuls)


def _is_dropped(block: BlockSpec, tensor: SavedTensor, ops: RecomputedOps) -> bool:
    if ops == "experts" and tensor.role in _ROUTED and _has_experts(block):
        return True
    is_latent = any(one.name.endswith("kv_b_proj") for one in block.matmuls)
    is_projected = is_latent and tensor.role in _UP_PROJECTED
    return tensor.num_readers is not None or tensor.role in _ACTIVATIONS or is_projected
