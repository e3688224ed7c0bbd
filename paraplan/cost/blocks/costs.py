"""Costs of the blocks of a model on one rank: parameters, saved bytes, seconds, for every distinct sharding."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from paraplan.cost.blocks.kernels import KernelTimes
from paraplan.cost.blocks.media import media_bytes, media_s
from paraplan.cost.blocks.recomputed import input_apart_bytes, kept_by_ops, ops_again_s, unread_s
from paraplan.cost.blocks.saved_tensors import (
    Shardings,
    as_run,
    first_half_bytes,
    output_gradient_bytes,
    saved_bytes,
    sharding_columns,
    transient_bytes,
)
from paraplan.cost.blocks.tiled_mlp import beside_mlp, tile_bytes, tiles_again_s
from paraplan.cost.blocks.variants import shardings_of, variants
from paraplan.cost.cache import ShardingKey
from paraplan.cost.cost_model import cache_of
from paraplan.cost.framework import KernelProfile
from paraplan.cost.plan_table import Floats, Ints, Mask, PlanTable, RecomputeCode, distinct_rows
from paraplan.cost.workload import Workload
from paraplan.model.spec import BlockSpec, Matmul, Parameter
from paraplan.model.towers import tower_of
from paraplan.plan.training import TrainingSpec


class BlockCosts(NamedTuple):
    """Costs of the blocks of a model under K distinct shardings, of one micro-batch on one rank.

    What blocks cost is `[K, R]`, of one block of each of R kinds: `among` sums them. Others are `[K]`.
    """

    key: Ints
    """The sharding of each plan: a row of the other arrays."""
    counts: Ints
    """`[R, B + 1]`: how many of the first 0..B blocks are of each kind."""
    parameters: Floats
    """Sums of the parameters that train."""
    frozen_bytes: Floats
    """Sums of the bytes of those that do not."""
    expert_parameters: Floats
    """The parameters of routed experts that train, which `ep` divides too."""
    frozen_expert_bytes: Floats
    """Bytes of those of routed experts that do not train."""
    copied_parameters: Floats
    """The parameters of which autocast keeps a 16-bit copy."""
    saved_bytes: Floats
    """Saved activations in the first pipeline stage."""
    later_saved_bytes: Floats
    """Saved activations in other stages: under autocast the residual stream differs (`Shardings.residual_bytes`)."""
    recomputed_bytes: Floats
    """Bytes that a later stage's backward pass computes again."""
    output_gradient_bytes: Floats
    """The gradients of the outputs of matmuls and norms in a later stage."""
    forward_s: Floats
    """Seconds of forward passes."""
    backward_s: Floats
    """Seconds of backward passes."""
    recompute_s: Floats
    """Seconds of recomputation."""
    unread_s: Floats
    """Seconds of the product with which recomputation of whole blocks stops early."""
    largest_block_parameters: Floats
    """Parameters that train of the largest block."""
    largest_block_frozen_bytes: Floats
    """Bytes of the frozen parameters of the block that has most."""
    working_bytes: Floats
    """Bytes that the costliest block holds beside its saved activations while its backward pass runs."""
    first_half_bytes: Floats
    """Bytes beside saved activations in a backward pass that computes input gradients alone."""
    distinct_weight_parameters: Floats
    """Weights of distinct shapes of all blocks, each once."""
    largest_weight_parameters: Floats
    """Parameters of the largest weight of a block."""
    largest_gradient_bytes: Floats
    """The gradient of the largest weight as a backward pass computes it."""
    second_half_bytes: Floats
    """Gradients of weights in a backward pass that computes nothing else, of the costliest block."""
    embedding_parameters: Floats
    """Parameters of the embedding that train."""
    embedding_frozen_bytes: Floats
    """Bytes of those that do not."""
    tower_parameters: Floats
    """Parameters of the embedding that are a tower's, whose layers FSDP gathers one by one."""
    tower_frozen_bytes: Floats
    """Bytes of such that do not train."""
    embedding_saved_bytes: Floats
    """Saved activations of the embedding."""
    embedding_s: Floats
    """Seconds of both passes of the embedding."""
    head_parameters: Floats
    """Parameters of the head that train."""
    head_frozen_bytes: Floats
    """Bytes of those that do not."""
    tied_parameters: Floats
    """Parameters of the head's matrix, which a last stage has beside its own where it is the embedding's, if it
    trains."""
    head_copied_parameters: Floats
    """Parameters of the head of which autocast keeps a 16-bit copy."""
    head_saved_bytes: Floats
    """Saved activations of the head."""
    head_output_gradient_bytes: Floats
    """Gradients of the outputs of the head's matmuls and norms."""
    head_s: Floats
    """Seconds of both passes of the head and the loss."""
    boundary_bytes: Floats
    """The activation between two blocks."""
    first_boundary_bytes: Floats
    """The activation between two blocks of the first stage, where an embedding in fp32 begins it."""
    unscattered_bytes: Floats
    """Embeddings of the tokens of others, under sequence parallelism, in which the first block scatters them."""

    def select(self, rows: Mask | Ints) -> BlockCosts:
        """Return the costs for some of the plans."""
        return self._replace(key=self.key[rows])

    def among(self, column: Floats, low: Ints, high: Ints) -> Floats:
        """Return the sum of a `[K, R]` cost over the blocks from `low` to below `high` of each plan."""
        total: Floats = column[self.key, 0] * (self.counts[0, high] - self.counts[0, low])
        for kind in range(1, len(self.counts)):
            total += column[self.key, kind] * (self.counts[kind, high] - self.counts[kind, low])
        return total

    def of_all(self, column: Floats) -> Floats:
        """Return the sum of a `[K, R]` cost over all blocks of each plan."""
        return np.asarray((column @ self.counts[:, -1])[self.key])


def block_costs(workload: Workload, table: PlanTable) -> BlockCosts:
    """Return the costs of the blocks of the workload's model under the plans of `table`.

    Shardings that the workload was asked about before are not computed again.
    """
    columns, key = distinct_rows(*sharding_columns(table))
    shardings: list[ShardingKey] = list(zip(*(column.tolist() for column in columns), strict=True))
    known = cache_of(workload).blocks
    missing = known.missing(shardings)
    for positions, variant in variants(workload, columns, np.array(missing, dtype=np.int64)):
        costs = _costs_of(variant, shardings_of(variant, [column[positions] for column in columns]))
        known.add([shardings[position] for position in positions], costs)
    rows = np.array([known.rows[one] for one in shardings], dtype=np.int64)
    return BlockCosts(key=rows[key], counts=cache_of(workload).block_counts(workload.model), **known.columns())


def _costs_of(workload: Workload, shardings: Shardings) -> dict[str, Floats]:
    """Return the columns of `BlockCosts` for some shardings."""
    model, training, framework = workload.model, workload.kernel_training, workload.framework
    ends = _embedding_and_head_costs(workload, shardings)
    if training.compiled:  # the blocks, not what stands around them
        shardings, framework = replace(shardings, is_compiled=True), framework.compiled()
    times = KernelTimes(training, workload.cluster.gpu, shardings, workload.constants, framework)
    kinds = list(dict.fromkeys(run.block for run in model.runs))
    kinds = [as_run(kind, framework) for kind in kinds]
    keeping = [beside_mlp(kind, training) for kind in kinds]
    parameters = [_parameters(kind, shardings) for kind in kinds]
    frozen = [_frozen_bytes(kind, shardings) for kind in kinds]
    fused = framework.kernels.fused
    kept, later_kept = (
        [_kept_bytes(kind, workload, shardings, kernels=framework.kernels, is_first=is_first) for kind in keeping]
        for is_first in (True, False)
    )
    again = [
        saved_bytes(kind, training, shardings, fused_kernels=fused, is_first=False) - less
        for kind, less in zip(keeping, later_kept, strict=True)
    ]
    forward = [times.block_s(kind) for kind in kinds]
    repeated = [_recompute_s(*pair, shardings, times, framework.kernels) for pair in zip(kinds, forward, strict=True)]
    transient = [_transient_bytes(kind, training, shardings, fused_kernels=fused) for kind in kinds]
    outputs = [output_gradient_bytes(kind, training, shardings) for kind in kinds]
    working = [
        saved_bytes(kind, training, shardings, fused_kernels=fused)
        - less
        + input_apart_bytes(kind, training, shardings, less, fused_kernels=fused)
        + beside
        + _dequantized_bytes(kind, training, shardings)
        for kind, less, beside in zip(keeping, kept, transient, strict=True)
    ]
    first_half = [
        first_half_bytes(kind, training, shardings, fused_kernels=fused, transient=beside, output_gradients=gradients)
        for kind, beside, gradients in zip(keeping, transient, outputs, strict=True)
    ]
    return ends | {
        "parameters": _by_kind(parameters),
        "frozen_bytes": _by_kind(frozen),
        "largest_block_frozen_bytes": np.max(frozen, axis=0),
        "expert_parameters": _by_kind([_expert_parameters(kind, shardings) for kind in kinds]),
        "frozen_expert_bytes": _by_kind([_frozen_bytes(kind, shardings, of_experts=True) for kind in kinds]),
        "copied_parameters": _by_kind([_copied_parameters(kind, shardings, training) for kind in kinds]),
        "saved_bytes": _by_kind(kept),
        "later_saved_bytes": _by_kind(later_kept),
        "recomputed_bytes": _by_kind(again),
        "output_gradient_bytes": _by_kind(outputs),
        "forward_s": _by_kind(forward),
        "backward_s": _by_kind([times.block_s(kind, backward=True) + tiles_again_s(kind, times) for kind in kinds]),
        "recompute_s": _by_kind(repeated),
        "unread_s": _by_kind([unread_s(kind, times, is_compiled=training.compiled) for kind in kinds]),
        "largest_block_parameters": np.max(parameters, axis=0),
        "working_bytes": np.max(working, axis=0),
        "first_half_bytes": np.max(first_half, axis=0),
        "distinct_weight_parameters": _distinct_weights(kinds, shardings),
        "largest_weight_parameters": _largest_weight(kinds, shardings, np.ones_like(shardings.tp)),
        "largest_gradient_bytes": _largest_gradient(kinds, training, shardings),
        "second_half_bytes": np.max([_second_half_bytes(kind, training, shardings) for kind in kinds], axis=0),
    }


def _transient_bytes(block: BlockSpec, training: TrainingSpec, shardings: Shardings, *, fused_kernels: bool) -> Floats:
    """Return what the backward pass of a block holds beside what was kept, or of a tile of its MLP."""
    rest = beside_mlp(block, training)
    transient = transient_bytes(rest, training, shardings, fused_kernels=fused_kernels)
    return np.maximum(transient, tile_bytes(block, training, shardings, fused_kernels=fused_kernels))


def _embedding_and_head_costs(workload: Workload, shardings: Shardings) -> dict[str, Floats]:
    """Return the columns of the embedding, of the head with the loss, and of what blocks hand on."""
    model, training, framework = workload.model, workload.kernel_training, workload.framework
    times = KernelTimes(training, workload.cluster.gpu, shardings, workload.constants, framework)
    makes_logits_twice = training.loss == "cut" or (training.loss == "chunked" and framework.loss.recomputes_chunks)
    towers, fused = tower_of(model), framework.kernels.fused
    width = model.hidden_size * model.residual_streams
    boundary = shardings.tokens * width * training.activation_bytes / shardings.sequence_tp
    first_boundary = boundary * shardings.residual_bytes(training, is_first=True) / training.activation_bytes
    return {
        "embedding_parameters": _parameters(model.embedding, shardings),
        "embedding_frozen_bytes": _frozen_bytes(model.embedding, shardings),
        "tower_parameters": _parameters(towers, shardings),
        "tower_frozen_bytes": _frozen_bytes(towers, shardings),
        "embedding_saved_bytes": saved_bytes(model.embedding, training, shardings, fused_kernels=fused)
        + media_bytes(model, times),
        "embedding_s": times.moved_s(3.0 * boundary) + media_s(model, times),
        "head_parameters": _parameters(model.head, shardings),
        "head_frozen_bytes": _frozen_bytes(model.head, shardings),
        "tied_parameters": _largest_weight([model.head], shardings, np.ones_like(shardings.tp)),
        "head_copied_parameters": _copied_parameters(model.head, shardings),
        "head_saved_bytes": saved_bytes(model.head, training, shardings, fused_kernels=fused),
        "head_output_gradient_bytes": output_gradient_bytes(model.head, training, shardings),
        "head_s": times.block_s(model.head) * (2.0 if makes_logits_twice else 1.0)
        + times.block_s(model.head, backward=True)
        + times.loss_s(model.vocab_size or 0),
        "boundary_bytes": boundary,
        "first_boundary_bytes": first_boundary,
        "unscattered_bytes": first_boundary * (shardings.sequence_tp - 1),
    }


def _by_kind(values: list[Floats]) -> Floats:
    return np.stack(values, axis=1)


def _parameters(block: BlockSpec, shardings: Shardings) -> Floats:
    own = [parameter for parameter in block.parameters if parameter.trains and not parameter.is_expert]
    return _divided(own, shardings.tp) + _expert_parameters(block, shardings)


def _expert_parameters(block: BlockSpec, shardings: Shardings) -> Floats:
    return _divided([one for one in block.parameters if one.trains and one.is_expert], shardings.tp) / shardings.ep


def _frozen_bytes(block: BlockSpec, shardings: Shardings, *, of_experts: bool = False) -> Floats:
    total = np.zeros_like(shardings.tp)
    for parameter in (one for one in block.parameters if one.is_expert or not of_experts):
        ranks = (1.0 if parameter.tp_dim is None else shardings.tp) * (shardings.ep if parameter.is_expert else 1.0)
        total += (parameter.frozen_bytes or 0.0) / ranks
    return total


def _dequantized_bytes(block: BlockSpec, training: TrainingSpec, shardings: Shardings) -> Floats:
    """Return the largest copy of a quantized weight in the type of its product."""
    quantized = [one for one in block.matmuls if one.quantized_bytes]
    return training.activation_bytes * _weights_of(quantized, shardings, np.ones_like(shardings.tp))


def _divided(parameters: list[Parameter], tp: Floats) -> Floats:
    whole, split = (
        sum(one.num_elements for one in parameters if (one.tp_dim is not None) == is_split)
        for is_split in (False, True)
    )
    return whole + split / tp


def _copied_parameters(block: BlockSpec, shardings: Shardings, training: TrainingSpec | None = None) -> Floats:
    """Return the weights that autocast copies: not those of experts (grouped products), nor of layers in 8 bits."""
    is_rounded = training is not None and training.linear_precision != "16bit"
    copied = [one for one in block.matmuls if one.num_experts == 1 and not one.is_narrow and not is_rounded]
    divisors = [np.where(one.split == "none", 1.0, shardings.tp) for one in copied]
    return sum((one.k * one.n / by for one, by in zip(copied, divisors, strict=True)), np.zeros_like(shardings.tp))


def _distinct_weights(kinds: list[BlockSpec], shardings: Shardings) -> Floats:
    shapes = {(one.k, one.n, one.split) for kind in kinds for one in kind.matmuls if one.trains}
    total = np.zeros_like(shardings.tp)
    for k, n, split in shapes:
        total += k * n / (1.0 if split == "none" else shardings.tp)
    return total


def _largest_weight(kinds: list[BlockSpec], shardings: Shardings, expert_factor: Floats) -> Floats:
    """Return the elements of the largest weight that trains."""
    return _weights_of([one for kind in kinds for one in kind.matmuls if one.trains], shardings, expert_factor)


def _weights_of(matmuls: list[Matmul], shardings: Shardings, expert_factor: Floats) -> Floats:
    largest = np.zeros_like(shardings.tp)
    for matmul in matmuls:
        elements = float(matmul.k * matmul.n * matmul.num_experts)
        factor = expert_factor / shardings.ep if matmul.num_experts > 1 else 1.0
        largest = np.maximum(largest, elements * factor / (1.0 if matmul.split == "none" else shardings.tp))
    return largest


def _largest_gradient(kinds: list[BlockSpec], training: TrainingSpec, shardings: Shardings) -> Floats:
    """Return the bytes of the largest gradient of a weight, in the type in which its product is computed."""
    expert_bytes = np.where(shardings.is_autocast & shardings.has_fp32_weights, 4.0, training.activation_bytes)
    return training.activation_bytes * _largest_weight(kinds, shardings, expert_bytes / training.activation_bytes)


def _second_half_bytes(block: BlockSpec, training: TrainingSpec, shardings: Shardings) -> Floats:
    """Return the most that a backward pass of weights alone holds of their gradients, one after the other.

    That is one as it is computed and in fp32, where these differ, and the fp32 one before it, which torch still holds
    (torch/distributed/pipelining/_backward.py, `stage_backward_weight`).
    """
    has_fp32 = (
        shardings.has_fp32_weights
        if shardings.is_autocast
        else np.full_like(shardings.has_fp32_weights, fill_value=False)
    )
    added = np.where(has_fp32, 4.0, training.activation_bytes)
    copies = np.where(has_fp32, training.activation_bytes, 0.0)
    largest, before = np.zeros_like(shardings.tp), np.zeros_like(shardings.tp)
    for matmul in (matmul for matmul in block.matmuls if matmul.trains):
        is_expert = matmul.num_experts > 1
        share = (1.0 if matmul.split == "none" else shardings.tp) * (shardings.ep if is_expert else 1.0)
        elements = matmul.k * matmul.n * matmul.num_experts / share
        largest = np.maximum(largest, before + elements * (added + (0.0 if is_expert else copies)))
        before = elements * added
    return largest


def _kept_bytes(
    block: BlockSpec, workload: Workload, shardings: Shardings, *, kernels: KernelProfile, is_first: bool
) -> Floats:
    training = workload.kernel_training
    if not block.has_backward:
        return np.zeros_like(shardings.tp)
    whole, rest = (
        saved_bytes(
            block,
            training,
            shardings,
            fused_kernels=kernels.fused,
            is_first=is_first,
            without_attention_core=without,
        )
        for without in (False, True)
    )
    model = workload.model
    width = model.hidden_size * model.residual_streams * shardings.residual_bytes(training, is_first=is_first)
    entry = shardings.tokens * width / shardings.sequence_tp
    kept = np.select(
        [_is(shardings, RecomputeCode.FULL), _is(shardings, RecomputeCode.SELECTIVE)], [entry, rest], whole
    )
    chosen = _is(shardings, RecomputeCode.SELECTIVE_OPS)
    if not chosen.any():
        return kept
    of_ops = kept_by_ops(
        block,
        training,
        shardings,
        ops=kernels.recomputed_ops or "torch",
        fused_kernels=kernels.fused,
        is_first=is_first,
        entry_bytes=entry,
    )
    return np.where(chosen, np.minimum(of_ops, whole), kept)


def _recompute_s(
    block: BlockSpec, forward_s: Floats, shardings: Shardings, times: KernelTimes, kernels: KernelProfile
) -> Floats:
    if not block.has_backward:
        return np.zeros_like(forward_s)
    full, selective = _is(shardings, RecomputeCode.FULL), _is(shardings, RecomputeCode.SELECTIVE)
    again = np.select([full, selective], [forward_s, times.attention_core_s(block)], 0.0)
    chosen = _is(shardings, RecomputeCode.SELECTIVE_OPS)
    if not chosen.any():
        return again
    of_ops = ops_again_s(block, times, forward_s, ops=kernels.recomputed_ops or "torch", fused_kernels=kernels.fused)
    return np.where(chosen, of_ops, again)


def _is(shardings: Shardings, recompute: int) -> Mask:
    return np.asarray(shardings.recompute == recompute)
