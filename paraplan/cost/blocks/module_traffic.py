"""Bytes that a block of transformers' modules moves outside of matmuls, one operation after the other.

Counted by operator in both passes (torch's dispatcher over Llama, Qwen3 and GPT-2 under autocast, in 16 bits and in
fp32, tests/cost/test_module_traffic.py): each tensor that a block keeps tells what made it and what reads it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from paraplan.cost.blocks.saved_tensors import Shardings, kept_sizes
from paraplan.cost.plan_table import Floats
from paraplan.model.saved_role import SavedRole
from paraplan.model.spec import BlockSpec, SavedTensor
from paraplan.plan.training import TrainingSpec

_UNKNOWN = (2.6, 5.2)
"""Bytes for each one that is kept of tensors that no rule knows: a Llama block moves about as much, norms left out."""
_WIDENED_SCORES = (25.5, 29.0)
"""Bytes for each score of eager attention in 16 bits with a softmax in fp32: scaled, masked, widened, exponentiated,
narrowed, and back over the same."""
_PLAIN_SCORES = (6.0, 5.0)
"""Bytes for each byte of a score of eager attention whose softmax is in the type of the scores."""


class _Activation(NamedTuple):
    """Bytes that an activation moves for each byte of an element in a forward and a backward pass, and its kernels."""

    forward: float
    backward: float
    num_kernels: int


_ACTIVATIONS: dict[SavedRole, _Activation] = {
    "activated_gate": _Activation(5.0, 9.0, 6),
    "power": _Activation(19.0, 30.0, 20),  # GELU by its formula, three powers and products of them
    "activation_internals": _Activation(2.0, 3.0, 2),
    "mlp_inner_output": _Activation(2.0, 3.0, 2),
}
"""The traffic of an activation, by the tensor that it keeps: all that it moves is counted by the first of these that a
block has."""
_COUNTED_WITH_OTHERS: frozenset[SavedRole] = frozenset(
    {"up_projection", "value", "attention_output", "softmax_statistics", "norm_statistics", "normalised", "centred"}
)

LLAMA_KERNELS = 142
"""Kernels that a Llama block starts in both passes under autocast: the block that hosts were timed with."""
KERNEL_START_S = 0.0003 / 39
"""Seconds of the host to start one small kernel, as adapters and loops have: those of a Llama block of transformers, 39
by operation (16 of its norms, 10 of rotations, 5 of the MLP, 4 projections, 2 of attention, 2 sums), over the 0.3 ms
that it takes."""
_KERNELS_OF_MATMUL, _KERNELS_OF_BIAS = 8, 2
"""A product and two of gradients, copies of both operands and of gradients in another type; sums for a bias."""
_KERNELS_OF_SUMS = 12
"""Sums with the residual stream and of gradients, with their copies."""


class Traffic(NamedTuple):
    """Bytes of one pass: of `plain` operations, over tensors of one type and shape, and of `mixed` ones.

    Mixed operations convert types, repeat a smaller operand over a larger one or sum along rows; the kernels that torch
    has for these are bound by their instructions on GPUs with fast memory.
    """

    plain: Floats
    mixed: Floats


class _Widths(NamedTuple):
    """Bytes of an element of each type."""

    activation: float
    residual: Floats
    weights: Floats
    norm: Floats
    """The traffic of a norm of the residual stream."""


def module_traffic(
    block: BlockSpec,
    training: TrainingSpec,
    shardings: Shardings,
    *,
    backward: bool,
    attention_core_alone: bool = False,
) -> Traffic:
    """Return what the forward or the backward pass of `block`, or of its attention core alone, moves.

    One entry a sharding.
    """
    widths = _widths(block, training, shardings)
    plain, mixed = np.zeros_like(shardings.tp), np.zeros_like(shardings.tp)
    if block.is_traced:
        total = sum(size for _, size in kept_sizes(block, training, shardings, fused_kernels=False, is_first=True))
        return Traffic(plain + total * _UNKNOWN[backward], mixed)
    activation, powers = _activation_of(block), 0
    for tensor, size in kept_sizes(block, training, shardings, fused_kernels=False, is_first=True):
        powers += tensor.role == "power"
        if attention_core_alone and not tensor.in_attention_core:
            continue
        if tensor.role in _ACTIVATIONS and (tensor.role != activation or powers > 1):
            continue
        elements = _elements(tensor, shardings)
        one = _of_tensor(tensor, widths, is_autocast=shardings.is_autocast, backward=backward)
        if one is None:
            mixed = mixed + size * _UNKNOWN[backward]
        else:
            plain, mixed = plain + elements * one[0], mixed + elements * one[1]
    if attention_core_alone:
        return Traffic(np.asarray(plain), np.asarray(mixed))
    stream = _of_stream(block, widths, backward=backward)
    tokens = shardings.tokens / shardings.sequence_tp
    plain, mixed = plain + tokens * stream[0], mixed + tokens * stream[1]
    if backward:
        plain = plain + shardings.tokens * _bias_columns(block, shardings) * widths.activation
    return Traffic(np.asarray(plain), np.asarray(mixed))


def num_kernels(block: BlockSpec) -> float:
    """Return about how many kernels both passes of `block` start, module by module.

    Profiled under autocast, GPT-2, Llama and Qwen3 have 84, 142 and 186 in a block (scripts/measure_host.py).
    """
    if block.is_traced:
        return LLAMA_KERNELS
    products = sum(_KERNELS_OF_MATMUL for one in block.matmuls if one.num_experts == 1)
    biases = sum(_KERNELS_OF_BIAS for one in block.parameters if one.name.endswith("bias") and "norm" not in one.name)
    activation = _activation_of(block)
    total = _KERNELS_OF_SUMS + products + biases + (_ACTIVATIONS[activation].num_kernels if activation else 0)
    for one in block.saved:
        is_norm_of_torch = one.role == "norm_input" and one.element_type == "promoted"
        total += 22 * (one.role in ("norm_input_in_fp32", "centred_squares")) + 3 * is_norm_of_torch
        is_dropout = one.element_type == "mask" and not one.elements_per_token_pair
        total += 2 * (is_dropout or one.role == "router_input_in_fp32")
        total += 12 * (one.is_turned and (one.kernels is None or "sdpa" in one.kernels))
    return total


def _activation_of(block: BlockSpec) -> SavedRole | None:
    roles = {one.role for one in block.saved if one.elements_per_token > 0}
    return next((role for role in _ACTIVATIONS if role in roles), None)


def _widths(block: BlockSpec, training: TrainingSpec, shardings: Shardings) -> _Widths:
    activation = float(training.activation_bytes)
    residual = shardings.residual_bytes(training, is_first=True)
    weights = np.where(shardings.has_fp32_weights & shardings.is_autocast, 4.0, activation)
    promoted = np.full_like(residual, 4.0) if shardings.is_autocast else np.full_like(residual, activation)
    norm = {"promoted": promoted, "residual": residual, "weights": np.maximum(residual, weights)}[block.norm_output]
    return _Widths(activation, residual, weights, norm)


def _elements(tensor: SavedTensor, shardings: Shardings) -> Floats:
    divisor = {"tensor": shardings.tp, "sequence": shardings.sequence_tp, "none": np.ones_like(shardings.tp)}
    each = tensor.elements_per_token + tensor.elements_per_token_pair * shardings.seq_length
    return np.asarray(shardings.tokens * each / divisor[tensor.split])


def _of_tensor(
    tensor: SavedTensor, widths: _Widths, *, is_autocast: bool, backward: bool
) -> tuple[Floats | float, Floats | float] | None:
    """Return the bytes of plain and of mixed operations for each element, None where no rule knows the tensor."""
    role, activation = tensor.role, widths.activation
    each = widths.weights if tensor.element_type == "weights" else activation
    if tensor.element_type == "mask":
        return 2.0 * activation + 1.0, 0.0
    if tensor.elements_per_token_pair:
        return 0.0, _of_scores(tensor, activation, is_autocast=is_autocast, backward=backward)
    if tensor.num_readers is not None:
        return _of_norm_output(tensor.num_readers, widths, backward=backward)
    if role == "router_input_in_fp32":  # cast, and its gradient cast back
        return 0.0, activation + 4.0
    if role == "norm_input_in_fp32":
        given = widths.residual if tensor.split == "sequence" else np.full_like(widths.residual, activation)
        return 0.0, _written_out_norm(given, widths, backward=backward)
    if role == "centred_squares":  # Cohere's norm, written out too
        return 0.0, 200.0 if backward else 86.0
    if role == "norm_input" and tensor.element_type == "promoted":  # torch's own norm
        read, written = widths.residual, widths.norm
        return 0.0, read + written + (read if backward else 0.0)
    if role in ("query", "key"):
        return (0.0, _turned(widths, backward=backward)) if tensor.is_turned else (0.0, 0.0)
    if role in _ACTIVATIONS:
        width = _gelu_width(widths) if role == "power" else each
        return (_ACTIVATIONS[role].backward if backward else _ACTIVATIONS[role].forward) * width, 0.0
    return (0.0, 0.0) if role in _COUNTED_WITH_OTHERS else None


def _of_scores(tensor: SavedTensor, activation: float, *, is_autocast: bool, backward: bool) -> float:
    if tensor.role != "probabilities":
        return 0.0
    widens = activation < 4 and (tensor.element_type == "fp32" or is_autocast)
    return _WIDENED_SCORES[backward] if widens else activation * _PLAIN_SCORES[backward]


def _of_norm_output(readers: int, widths: _Widths, *, backward: bool) -> tuple[Floats, Floats]:
    """Return what linear layers make of a norm's output: a copy each in 16 bits, and the sum of their gradients."""
    is_wide = widths.norm > widths.activation
    copies = np.where(is_wide, readers * (widths.norm + widths.activation), 0.0)
    if not backward:
        return copies, np.zeros_like(copies)
    return (readers - 1) * 3.0 * widths.norm, copies


def _written_out_norm(given: Floats, widths: _Widths, *, backward: bool) -> Floats:
    """Return the bytes of a root mean square norm: widened, squared, averaged, scaled, narrowed, weighted."""
    is_narrow = given < 4
    if backward:
        return np.where(is_narrow & (widths.weights == 4), 100.0, 97.0)
    return np.where(is_narrow, np.where(widths.weights == 4, 38.0, 36.0), 28.0)


def _turned(widths: _Widths, *, backward: bool) -> Floats:
    """Return the bytes of a rotation: two products, a half turned and put together, a sum.

    Where cosines are wide, so is all this, and it ends with a copy in 16 bits.
    """
    is_wide = widths.norm > widths.activation
    if backward:
        return np.where(is_wide, 58.0, 16.0 * widths.activation)
    return np.where(is_wide, 36.0, 10.0 * widths.activation)


def _gelu_width(widths: _Widths) -> float:
    return 4.0 if widths.norm.max() > widths.activation else widths.activation


def _of_stream(block: BlockSpec, widths: _Widths, *, backward: bool) -> tuple[Floats | float, Floats | float]:
    """Return what the two sums with the residual stream move for one token."""
    width = max((one.n for one in block.matmuls if one.split == "row"), default=0)
    if not width:
        return 0.0, 0.0
    has_mlp = any(one.role in ("mlp_input", "mlp_inner_output") for one in block.saved) or len(block.matmuls) > 4
    sums = 2.0 if has_mlp else 1.0
    wide, narrow = widths.residual, widths.activation
    differs = wide > narrow
    if backward:
        return width * sums * 3.0 * wide, width * sums * np.where(differs, wide + narrow, 0.0)
    each = width * sums * (2.0 * wide + narrow)
    return np.where(differs, 0.0, each), np.where(differs, each, 0.0)


def _bias_columns(block: BlockSpec, shardings: Shardings) -> Floats:
    total = np.zeros_like(shardings.tp)
    for one in block.parameters:
        if one.name.endswith("bias") and len(one.shape) == 1 and "norm" not in one.name and "ln_" not in one.name:
            total += one.num_elements / (1.0 if one.tp_dim is None else shardings.tp)
    return total
