"""The tensors that a block keeps for its backward pass on one rank, for every distinct sharding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from paraplan.cost.context_parts import context_parts
from paraplan.cost.framework import FrameworkProfile
from paraplan.cost.plan_table import Floats, Ints, Mask, PlanTable, first_rows
from paraplan.model.saved_role import SavedRole
from paraplan.model.spec import BlockSpec, Parameter, SavedTensor
from paraplan.plan.training import TrainingSpec

_FIXED_BYTES = {"fp32": 4.0, "mask": 1.0}
_ONLY_INPUTS: frozenset[SavedRole] = frozenset(
    {"mlp_inner_output", "tokens_by_expert", "query_latent", "key_value_latent"}
)
"""Tensors that nothing but linear layers read, beside the outputs of norms."""


@dataclass(frozen=True, eq=False)
class Shardings:
    """Distinct shardings of a block by the plans of a table, one entry a sharding."""

    tokens: Floats
    """Tokens of one micro-batch on one rank."""
    own_tokens: Floats
    """Tokens of one of its sequences on one rank."""
    seq_length: int
    """Tokens of a sequence on all ranks."""
    tp: Floats
    """Ranks of tensor parallelism."""
    sequence_tp: Floats
    """Ranks that share the tensors outside of the tensor-parallel regions."""
    recompute: Ints
    """A `RecomputeCode`."""
    is_autocast: bool
    """The model runs under autocast."""
    keeps_gathered_inputs: bool
    """Inputs that tensor parallelism gathers are kept (`TensorParallelProfile.keeps_gathered_inputs`)."""
    has_fp32_weights: Mask
    """Parameters are in fp32 under autocast: ZeRO gathers them in 16 bits."""
    ep: Floats
    """Ranks that share out the experts: each has as many rows for fewer experts."""
    expert_load: Floats
    """Rows of the busiest rank of experts over the mean."""
    context_ranks: Ints
    """Ranks of context parallelism that exchange tokens for heads or gather keys: 1 for those of a ring."""
    products: tuple[Ints, Ints]
    """The first sharding of each shape of matrix products on a rank, and which of these each sharding has."""
    has_fp32_residual: bool = False
    """Frozen norms and embeddings in fp32 make the residual stream so, in every stage."""
    is_compiled: bool = False
    """torch.compile chooses what a block keeps."""
    has_8bit_inputs: bool = False
    """Linear layers of blocks keep their inputs in 8 bits."""
    known_sizes: dict[tuple[int, bool, bool], list[tuple[SavedTensor, Floats]]] = field(
        default_factory=dict, init=False, repr=False
    )
    """Answers of `kept_sizes` to earlier questions."""

    @classmethod
    def of_columns(
        cls,
        columns: Sequence[Ints],
        training: TrainingSpec,
        *,
        autocast: bool = False,
        keeps_gathered_inputs: bool = False,
        rings_context: bool = False,
        fp32_weights: bool = True,
        fp32_residual: bool = False,
        inputs_in_8bit: bool = False,
        expert_load: Floats | None = None,
    ) -> Shardings:
        """Return the shardings of `columns`, in the order of `sharding_columns`; None is an even load of experts."""
        tp, sequence_parallel, cp, micro_batch_size, recompute, sharded, ep = columns
        return cls(
            tokens=micro_batch_size * training.seq_length / cp,
            own_tokens=training.seq_length / cp,
            seq_length=training.seq_length,
            tp=tp.astype(float),
            sequence_tp=np.where(sequence_parallel == 1, tp, 1).astype(float),
            recompute=recompute,
            is_autocast=autocast and training.precision != "fp32",
            keeps_gathered_inputs=keeps_gathered_inputs,
            has_fp32_weights=(sharded == 0) & fp32_weights,
            has_fp32_residual=fp32_residual,
            has_8bit_inputs=inputs_in_8bit,
            ep=ep.astype(float),
            expert_load=np.ones(len(ep)) if expert_load is None else expert_load,
            context_ranks=np.ones_like(cp) if rings_context else cp,
            products=first_rows(tp, cp, micro_batch_size, ep, sharded),
        )

    @property
    def of_products(self) -> Shardings:
        """One sharding of each shape of matrix products."""
        rows = self.products[0]
        return replace(
            self,
            tokens=self.tokens[rows],
            own_tokens=self.own_tokens[rows],
            tp=self.tp[rows],
            sequence_tp=self.sequence_tp[rows],
            recompute=self.recompute[rows],
            has_fp32_weights=self.has_fp32_weights[rows],
            ep=self.ep[rows],
            expert_load=self.expert_load[rows],
            context_ranks=self.context_ranks[rows],
            products=(np.arange(len(rows)), np.arange(len(rows))),
        )

    def residual_bytes(self, training: TrainingSpec, *, is_first: bool) -> Floats:
        """Return the bytes of an element of the residual stream.

        Under autocast an fp32 embedding starts it in fp32; what a pipeline sends to later stages has 16 bits.
        """
        if self.has_fp32_residual:
            return np.full(len(self.tp), 4.0)
        is_fp32 = self.has_fp32_weights if self.is_autocast and is_first else np.zeros_like(self.has_fp32_weights)
        return np.where(is_fp32, 4.0, training.activation_bytes)


def sharding_columns(table: PlanTable) -> tuple[Ints, ...]:
    """Return what tells one sharding from another, in columns of whole numbers, one entry a plan."""
    is_sharded = (table.zero_stage > 0).astype(np.int64)
    return table.tp, table.sequence_parallel, table.cp, table.device_batch_size, table.recompute, is_sharded, table.ep


def saved_bytes(
    block: BlockSpec,
    training: TrainingSpec,
    shardings: Shardings,
    *,
    fused_kernels: bool,
    is_first: bool = True,
    without_attention_core: bool = False,
) -> Floats:
    """Return the bytes that `block` keeps of one micro-batch; under selective recompute without its attention core.

    `is_first` says that the block stands in the first pipeline stage.
    """
    total = np.zeros_like(shardings.tp)
    for tensor, size in kept_sizes(block, training, shardings, fused_kernels=fused_kernels, is_first=is_first):
        if not (without_attention_core and tensor.in_attention_core):
            total += size
    if shardings.is_compiled:
        total += _entry_bytes(block, training, shardings, is_first=is_first)
    return total


def kept_sizes(
    block: BlockSpec, training: TrainingSpec, shardings: Shardings, *, fused_kernels: bool, is_first: bool
) -> list[tuple[SavedTensor, Floats]]:
    """Return the tensors that `block` keeps of one micro-batch, each with its bytes."""
    is_first = is_first or not shardings.is_autocast  # the residual stream is the same then
    key = (id(block), fused_kernels, is_first)
    if key not in shardings.known_sizes:
        shardings.known_sizes[key] = [
            (tensor, tensor_bytes(block, tensor, training, shardings, is_first=is_first))
            for tensor in kept_tensors(block, training, fused_kernels=fused_kernels)
        ]
    return shardings.known_sizes[key]


def _entry_bytes(block: BlockSpec, training: TrainingSpec, shardings: Shardings, *, is_first: bool) -> Floats:
    """Return what the input of a compiled block takes beyond the activations' type.

    Of the inputs of its norms only the first is the residual stream, whatever the type of that is; the next is
    computed again from it and from what the attention gave.
    """
    inputs = [tensor for tensor in block.saved_fused if tensor.element_type == "promoted"]
    if not inputs:
        return np.zeros_like(shardings.tp)
    wider = shardings.residual_bytes(training, is_first=is_first) - training.activation_bytes
    return np.asarray(shardings.tokens * inputs[0].elements_per_token * wider / shardings.sequence_tp)


def transient_bytes(block: BlockSpec, training: TrainingSpec, shardings: Shardings, *, fused_kernels: bool) -> Floats:
    """Return the bytes that the backward pass of `block` holds besides what was kept.

    Counted is the gradient of its largest tensor: what was kept for an operation is freed as its gradients come. An
    activation that is written out in products has the gradients of all that autocast promoted at once. Of what ranks
    gathered they have the whole gradient before they share it out.
    A model that was traced lists sums of tensors, none of which is wider than a matmul. The gradients of both factors
    of a gated activation stand beside that of their product, which is freed itself: where the next layer is frozen, it
    has not kept the product, and nothing is freed for them.
    """
    widths = (matmul.rows_per_token * max(matmul.k, matmul.n) for matmul in block.matmuls)
    widest = max(widths, default=float("inf"))
    heads = float("inf") if block.attention is None else float(block.attention.num_heads)
    largest = shardings.tokens * block.gathered_per_token * training.activation_bytes
    promoted = np.zeros_like(shardings.tp)
    for tensor, kept in kept_sizes(block, training, shardings, fused_kernels=fused_kernels, is_first=True):
        size = kept
        if tensor.elements_of_copy:  # no gradient that stands beside it, or one that counts as a copy itself
            continue
        if tensor.elements_per_token > widest or tensor.elements_per_token_pair > heads:
            narrow = tensor.replace(
                elements_per_token=min(tensor.elements_per_token, widest),
                elements_per_token_pair=min(tensor.elements_per_token_pair, heads),
            )
            size = tensor_bytes(block, narrow, training, shardings, is_first=True)
        if tensor.element_type == "promoted" and shardings.is_autocast:
            promoted = np.where(size >= largest, size + np.where(size == largest, promoted, 0.0), promoted)
        if tensor.role == "up_projection":
            size = (2 if block.before_freezing is None else 3) * size
        largest = np.maximum(largest, size)
    return np.maximum(largest, promoted)


def output_gradient_bytes(block: BlockSpec, training: TrainingSpec, shardings: Shardings) -> Floats:
    """Return the bytes of the gradients of what each matmul and each norm of `block` gives, after the first stage.

    That is what a backward pass taken in halves keeps for the weights (torch/distributed/pipelining/_backward.py,
    `stage_backward_input`). Autocast does not know the grouped products of experts, and a norm whose output is cast to
    the residual stream's type is scaled in fp32 before.
    """
    outputs = [
        SavedTensor(
            role="gradient",
            elements_per_token=matmul.n * matmul.rows_per_token,
            element_type="weights" if matmul.num_experts > 1 else "activation",
            split="tensor" if matmul.split == "column" and not matmul.gathers else "none",
        )
        for matmul in block.matmuls
    ]
    for parameter in block.parameters:
        if len(parameter.shape) == 1 and parameter.name.endswith("weight") and not parameter.is_expert:
            heads = _normed_heads(block, parameter)
            outputs.append(
                SavedTensor(
                    role="gradient",
                    elements_per_token=parameter.num_elements * (heads or 1),
                    element_type="fp32" if block.norm_output == "residual" else block.norm_output,
                    split="tensor" if heads else "sequence",
                )
            )
    return np.asarray(
        sum(
            (tensor_bytes(block, output, training, shardings, is_first=False) for output in outputs),
            np.zeros_like(shardings.tp),
        )
    )


def first_half_bytes(
    block: BlockSpec,
    training: TrainingSpec,
    shardings: Shardings,
    *,
    fused_kernels: bool,
    transient: Floats,
    output_gradients: Floats,
) -> Floats:
    """Return what the backward pass of activations holds of a block beside gradients that stay and all that was kept.

    That is the gradient of its largest tensor, or of a power: its own gradient, the three tensors of its formula
    (tools/autograd, `pow_backward`), and gradients of other branches that wait for it, two of 16 bits or one of 32. An
    activation's power comes before the gradients of most outputs of its block, a norm's after them. `transient` and
    `output_gradients` are the block's `transient_bytes` and `output_gradient_bytes`.
    """
    largest = transient
    for tensor, size in kept_sizes(block, training, shardings, fused_kernels=fused_kernels, is_first=False):
        if tensor.is_powered:
            waiting = size * 2 * training.activation_bytes / _FIXED_BYTES["fp32"]
            to_come = output_gradients if tensor.split == "tensor" else 0.0
            largest = np.maximum(largest, 4 * size + waiting - to_come)
    return largest


def _normed_heads(block: BlockSpec, weight: Parameter) -> int | None:
    """Return how many heads a norm of queries or keys goes over one by one; None for a norm of a whole token."""
    attention = block.attention
    if attention is None or weight.num_elements != attention.qk_head_dim or "norm" not in weight.name:
        return None
    if "q_" in weight.name:
        return attention.num_heads
    return attention.num_kv_heads if "k_" in weight.name else None


def kept_tensors(block: BlockSpec, training: TrainingSpec, *, fused_kernels: bool) -> Iterator[SavedTensor]:
    """Return the tensors that `block` keeps for its backward pass without recompute."""
    for tensor in block.saved_fused if fused_kernels else block.saved:
        is_a_copy = tensor.absent_in_fp32 and training.precision == "fp32"
        if (tensor.kernels is None or training.attention in tensor.kernels) and not is_a_copy:
            yield tensor


def tensor_bytes(
    block: BlockSpec, tensor: SavedTensor, training: TrainingSpec, shardings: Shardings, *, is_first: bool
) -> Floats:
    """Return the bytes of one tensor that `block` keeps."""
    if tensor.elements_of_copy:
        return np.asarray(training.activation_bytes * tensor.elements_of_copy / (shardings.ep * shardings.tp))
    tokens = shardings.own_tokens if tensor.is_shared_by_batch else shardings.tokens
    elements = tokens * (tensor.elements_per_token + tensor.elements_per_token_pair * shardings.seq_length)
    is_whole = tensor.num_readers is not None and shardings.keeps_gathered_inputs
    split = "none" if is_whole else tensor.split
    divisor = {"tensor": shardings.tp, "sequence": shardings.sequence_tp, "none": np.ones_like(shardings.tp)}[split]
    copies = _context_copies(block, tensor, shardings) * (shardings.expert_load if tensor.is_of_expert_rows else 1.0)
    if shardings.has_8bit_inputs and not block.is_end:
        copies = copies * _8bit_share(tensor)
    return copies * elements * _element_bytes(block, tensor, training, shardings, is_first=is_first) / divisor


def _8bit_share(tensor: SavedTensor) -> float:
    """Return what training with 8-bit matmuls keeps of a tensor beside the bytes that it has in 16 bits.

    Attention's backward pass reads its output in 16 bits, beside which the next layer keeps its own; a router reads 16.
    """
    if tensor.role == "attention_output":
        return 1.5
    is_input = tensor.num_readers is not None or tensor.role in _ONLY_INPUTS
    return 0.5 if is_input and tensor.role != "router_input" else 1.0


def _context_copies(block: BlockSpec, tensor: SavedTensor, shardings: Shardings) -> Floats | float:
    """Return how often a rank of context parallelism keeps what attention keeps, over that of its own tokens.

    Keys and values are gathered. The output of a fused kernel is kept as that has it, of some heads, and as the next
    layer has it, of the rank's own tokens.
    """
    core = block.attention
    if core is None or (shardings.context_ranks == 1).all():
        return 1.0
    if tensor.role == "attention_output" and tensor.kernels is not None and "flash" in tensor.kernels:
        return np.where(shardings.context_ranks > 1, 2.0, 1.0)
    if tensor.role not in ("key", "value"):
        return 1.0
    heads = tensor.elements_per_token / (core.qk_head_dim if tensor.role == "key" else core.v_head_dim)
    return context_parts(core, shardings.tp, shardings.context_ranks).key_copies(heads // shardings.tp)


def _element_bytes(
    block: BlockSpec, tensor: SavedTensor, training: TrainingSpec, shardings: Shardings, *, is_first: bool
) -> Floats | float:
    if shardings.is_compiled and (tensor.num_readers is not None or tensor.element_type == "promoted"):
        return training.activation_bytes
    if tensor.num_readers is not None and shardings.is_autocast:
        if block.norm_output == "promoted":
            return training.activation_bytes * tensor.num_readers
        wide = shardings.has_fp32_weights
        if block.norm_output == "residual":
            wide = shardings.residual_bytes(training, is_first=is_first) == _FIXED_BYTES["fp32"]
        return training.activation_bytes * np.where(wide, tensor.num_readers, 1)
    if tensor.element_type == "promoted":
        return _FIXED_BYTES["fp32"] if shardings.is_autocast else training.activation_bytes
    if tensor.element_type == "residual":
        return shardings.residual_bytes(training, is_first=is_first)
    if tensor.element_type == "cast":
        return training.activation_bytes if shardings.is_autocast else _FIXED_BYTES["fp32"]
    has_fp32_weights = shardings.has_fp32_weights & shardings.is_autocast
    if tensor.element_type == "weights":
        return np.where(has_fp32_weights, _FIXED_BYTES["fp32"], training.activation_bytes)
    if tensor.element_type == "weights_copy":
        return np.where(has_fp32_weights, training.activation_bytes, 0.0)
    if tensor.element_type == "promoted_copy":
        return training.activation_bytes if shardings.is_autocast else 0.0
    return _FIXED_BYTES.get(tensor.element_type, training.activation_bytes)


def as_run(block: BlockSpec, framework: FrameworkProfile) -> BlockSpec:
    """Return `block` with what a framework's blocks keep beside fused kernels."""
    kept = block.saved_fused
    if framework.kernels.writes_out_gates:
        roles = {one.role for one in kept}
        kept += tuple(one for one in block.saved if one.role == "activated_gate" and one.role not in roles)
    return block if kept is block.saved_fused else block.replace(saved_fused=kept)
