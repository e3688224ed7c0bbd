"""A model as it is trained: a sequence of blocks, each with its parameters, matmuls and saved activations.

Shapes are those of one unsplit model. `split` fields say which of them tensor and sequence parallelism divide;
`paraplan.cost` divides, nothing here does.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd, prod
from typing import Literal

from pydantic import Field

from paraplan.model.saved_role import SavedRole
from paraplan.model.weight_formats import WeightFormat
from paraplan.records import Record
from paraplan.units import format_count

AttentionKernel = Literal["flash", "sdpa", "eager"]
ElementType = Literal[
    "activation", "fp32", "mask", "promoted", "residual", "weights", "cast", "promoted_copy", "weights_copy"
]
ActivationSplit = Literal["tensor", "sequence", "none"]
NormOutput = Literal["promoted", "weights", "residual"]
BlockModule = Literal["self_attn", "linear_attn", "mlp", "shared_experts"]
"""The parts of a decoder's block between two sums with the residual stream."""
Layer = Literal["linear", "experts", "embedding", "other"]
"""The layer that holds a parameter: torch's nn.Linear (or transformers' Conv1D), experts fused in one tensor of three
dimensions, a table of embeddings, or another module: norms, routers and convolutions."""


class Parameter(Record):
    """One parameter tensor. `tp_dim` is the dimension that tensor parallelism divides, None where each rank keeps all.

    `is_expert` marks tensors of routed experts, which expert parallelism divides along dimension 0.
    `frozen_bytes` is what a tensor that does not train takes as it is stored, None for one that trains: that one takes
    what the training says. `layer` is the kind of module that holds it, by which tools choose what they quantize and
    put adapters beside.
    """

    name: str
    shape: tuple[int, ...]
    layer: Layer = "other"
    tp_dim: int | None = None
    is_expert: bool = False
    frozen_bytes: float | None = None

    @property
    def trains(self) -> bool:
        """Whether it has a gradient and optimizer state."""
        return self.frozen_bytes is None

    @property
    def num_elements(self) -> int:
        """Number of elements of the whole tensor."""
        return prod(self.shape)


class Matmul(Record):
    """A product of activations `[tokens * rows_per_token, k]` with a weight `[k, n]`.

    `split` is the tensor dimension that tensor parallelism divides: "column" divides n, "row" divides k.
    `rows_per_token` is above 1 where a router sends each token to several experts (top-k: k rows over all of them).
    `trains` is False where the weight is frozen, and no gradient of it is computed. `is_narrow` says that the weight is
    no fp32 one, which autocast would copy. `quantized_bytes` is what an element of a weight takes of which every use
    makes a copy in the type of the product, 0 for others. `group_share` is below 1 where a router sends a token to
    experts of so large a share of their groups alone (DeepSeek-AI 2024, DeepSeek-V3, section 2.1.2). `of_activations`
    says that both factors are activations: gradients of both are computed whatever is frozen, and "column" divides the
    rows, which are of heads. Ranks of tensor parallelism gather the outputs of one that `gathers`, or the gradients of
    its inputs where "row" divides these. `dense_rows_per_token` are the rows that transformers' own code computes where
    it gives each token to every expert (Llama 4), None where it computes no others. One that `weighs` says where tokens
    go, or by how much something counts: nobody multiplies it in 8 bits.
    """

    name: str
    k: int = Field(gt=0)
    n: int = Field(gt=0)
    split: Literal["column", "row", "none"] = "none"
    rows_per_token: float = 1.0
    num_experts: int = 1
    trains: bool = True
    is_narrow: bool = False
    quantized_bytes: float = 0.0
    group_share: float = 1.0
    of_activations: bool = False
    gathers: bool = False
    dense_rows_per_token: float | None = None
    weighs: bool = False

    @property
    def flops_per_token(self) -> float:
        """Forward FLOPs for one token, a multiply-add counted as two."""
        return 2.0 * self.k * self.n * self.rows_per_token


class Attention(Record):
    """Scaled dot-product attention of one block. `window` is the reach of a sliding window, None for no window.

    Where it `is_whole`, tensor parallelism does not divide its heads: each rank attends with all of them.
    `tokens_per_key` tokens were made one key. `v_head_dim` is 0 where scores alone are computed.
    `num_keys` is the number of keys of an input of its own length, as pictures and sound have, None where keys are
    those of the sequence; `queries_per_token` are the queries for each token of the sequence, which then may be others.
    """

    num_heads: int = Field(gt=0)
    num_kv_heads: int = Field(gt=0)
    qk_head_dim: int = Field(gt=0)
    v_head_dim: int = Field(ge=0)
    is_causal: bool = True
    window: int | None = None
    is_whole: bool = False
    tokens_per_key: int = Field(default=1, gt=0)
    num_keys: int | None = Field(default=None, gt=0)
    queries_per_token: float = Field(default=1.0, gt=0)

    def flops_per_token(self, seq_length: int) -> float:
        """Forward FLOPs of QK^T and PV for one token against `seq_length` keys, the mask's saving not counted."""
        keys = self.num_keys or seq_length // self.tokens_per_key
        reach = keys if self.window is None else min(keys, self.window)
        return 2.0 * self.num_heads * reach * (self.qk_head_dim + self.v_head_dim) * self.queries_per_token


class SavedTensor(Record):
    """One tensor that a block keeps for its backward pass, per token of a micro-batch.

    Elements = `elements_per_token` + `elements_per_token_pair` * key length (attention scores: one per head).
    `split`: "tensor" is divided by tp; "sequence" is divided by tp under sequence parallelism only.
    `kernels` names the attention kernels under which it is kept, None for all.
    `in_attention_core` marks what selective recompute (Korthikanti et al. 2022, section 5) frees.
    `absent_in_fp32` marks a low-precision copy of another tensor of the list: with fp32 activations both are one.
    `is_shared_by_batch` marks what a micro-batch keeps once, however many sequences it has.
    The element types "promoted", "residual" and "weights" differ from "activation" under autocast alone, where
    parameters stay in fp32: promoted is what autocast computes in fp32 (norms, powers), residual has the type of the
    residual stream, weights that of the parameters: operators that autocast does not know, and casts to weights.
    Cast is what a model casts to fp32 itself for a matmul, which autocast casts back. Copies in 16 bits of what is
    promoted, or of what has the weights' type, are there where that is in fp32 under autocast.
    `is_powered` marks what a power reads, whose backward pass makes three tensors of that size.
    `num_readers` counts the matmuls that read the output of a norm: where that is fp32, autocast makes each its copy.
    None marks what is no such output. `is_turned` marks queries and keys that rotary positions made anew.
    `elements_of_copy` are those of a copy of experts' weights, which a micro-batch keeps whatever its tokens.
    `is_of_expert_rows` marks what experts keep of the rows that routers send them, of which a rank may have more than
    its own tokens make. `weights_of` names the linear layers whose weights' gradients alone read it, none where those
    of other weights do; None where something else reads it too. `module` is the part of a decoder's block that keeps
    it, None where nobody said that.
    """

    role: SavedRole
    elements_per_token: float = 0.0
    elements_per_token_pair: float = 0.0
    element_type: ElementType = "activation"
    split: ActivationSplit = "none"
    kernels: tuple[AttentionKernel, ...] | None = None
    in_attention_core: bool = False
    absent_in_fp32: bool = False
    is_shared_by_batch: bool = False
    is_powered: bool = False
    num_readers: int | None = None
    is_turned: bool = False
    is_of_expert_rows: bool = False
    elements_of_copy: float = 0.0
    weights_of: tuple[str, ...] | None = None
    module: BlockModule | None = None


class BlockSpec(Record):
    """One block of a model: a transformer layer, the embedding, or the head with its final norm.

    `tp_limit` is the largest number that may divide it for tensor parallelism together with all its divisors
    (heads and key-value heads decide); 1 where the block cannot be split, None where nothing limits it. Of a traced
    module nobody says which of its weights would be divided, so 1 there, and `is_traced`.
    `saved` is what the block's own modules keep, run one operation after the other (transformers' code on
    torch kernels); `saved_fused` is what remains where norms, activations and rotations are fused kernels
    (Megatron-LM, Transformer Engine), the setting of Korthikanti et al. 2022. Sum one of the two, never both.
    `cross_attention` is a second attention: over an encoder's output (decoders of encoder-decoder models), or over
    compressed keys.
    `norm_output` is the type of what its norms return under autocast: fp32 where autocast runs the norm's kernel, that
    of the residual stream, or the wider one of this and the weights.
    `has_backward` is False where nothing in it or before it trains. Adapters start `adapter_kernels` kernels in a
    forward pass and move `adapter_traffic_per_token` bytes outside of their products. `before_freezing` is the block as
    it was, None where nothing is frozen: what a pass moves does not depend on that.
    """

    kind: str
    parameters: tuple[Parameter, ...] = ()
    matmuls: tuple[Matmul, ...] = ()
    attention: Attention | None = None
    cross_attention: Attention | None = None
    index_scores: Attention | None = None
    """Scores by which an indexer chooses the tokens that the attention reads; they have no backward pass."""
    saved: tuple[SavedTensor, ...] = ()
    saved_fused: tuple[SavedTensor, ...] = ()
    tp_limit: int | None = None
    norm_output: NormOutput = "promoted"
    is_traced: bool = False
    has_backward: bool = True
    adapter_kernels: int = 0
    adapter_traffic_per_token: float = 0.0
    before_freezing: BlockSpec | None = None
    gathered_per_token: float = 0.0
    """Elements of a token that ranks of tensor parallelism gather between the products of the block."""
    loops_over_tokens: bool = False
    """A traced block's code goes token by token, as references of scan kernels do: what all tokens do counts as one."""

    @property
    def is_end(self) -> bool:
        """Whether it stands before or after the repeated blocks."""
        return self.kind in ("embedding", "head")

    @property
    def num_parameters(self) -> int:
        """Elements of all parameters of one such block."""
        return sum(parameter.num_elements for parameter in self.parameters)

    def flops_per_token(self, seq_length: int, *, with_attention: bool = True) -> float:
        """Forward FLOPs for one token; without the part that grows with the sequence if `with_attention` is False."""
        flops = sum(matmul.flops_per_token for matmul in self.matmuls)
        if with_attention:
            attentions = (self.attention, self.cross_attention, self.index_scores)
            flops += sum(attention.flops_per_token(seq_length) for attention in attentions if attention is not None)
        return flops


class BlockRun(Record):
    """`count` equal blocks in a row."""

    block: BlockSpec
    count: int = Field(gt=0)


TowerKind = Literal["image", "audio"]
"""The input that a tower encodes. Frames of video are images."""


class TowerAttention(Record):
    """The attention of some layers of a tower.

    `core.window` is the number of patches of its windows, None for a whole picture.
    """

    core: Attention
    layers: int


class TowerSpec(Record):
    """The work of a tower for one patch of a picture, or one frame of sound: its weights are the embedding's.

    `tower` and `projector` are sums over their layers. `patches_per_token` patches become one token of the language
    model. `picture_patches` are those of one picture, None where it has any size: then all tokens of a sequence are
    taken as one picture. `layer_input_elements` is the sum of what its layers read.
    """

    kind: TowerKind
    tower: BlockSpec
    projector: BlockSpec
    attention: tuple[TowerAttention, ...]
    layer_input_elements: float
    patches_per_token: float
    picture_patches: int | None = None


class ParameterCount(Record):
    """Parameters by part; the parts sum to `total`. A tied head counts once, in `embedding`."""

    embedding: int
    blocks: int
    head: int

    @property
    def total(self) -> int:
        """All parameters, tied ones once."""
        return self.embedding + self.blocks + self.head


class ModelSpec(Record):
    """A model in the order of its forward pass: embedding, runs of blocks, head.

    `tied_embeddings` says that the head's matmul uses the embedding's matrix: the head then lists no weight for it.
    `max_seq_length` is the longest sequence that the model was made for, None where its positions have no limit.
    `source` is what the user named: a path, a bundled name, or `file.py:factory`. `released_in` is the narrow format of
    the weights that its makers published, None where those are in 16 bits or more. `towers` encode pictures and sound;
    `media` is their work, of a token of a sequence on average, none where nobody said how many tokens are theirs.
    """

    name: str
    model_type: str
    source: str
    released_in: WeightFormat | None = None
    hidden_size: int = Field(gt=0)
    vocab_size: int | None = None
    max_seq_length: int | None = None
    tied_embeddings: bool = False
    embedding: BlockSpec
    runs: tuple[BlockRun, ...]
    head: BlockSpec
    towers: tuple[TowerSpec, ...] = ()
    media: tuple[BlockSpec, ...] = ()
    residual_streams: int = Field(default=1, gt=0)
    """Residual streams side by side that blocks hand on, of `hidden_size` each: one of nearly all models."""

    @property
    def all_parameters(self) -> Iterator[tuple[Parameter, int]]:
        """Every parameter tensor, and how many such there are."""
        for block, count in ((self.embedding, 1), *((run.block, run.count) for run in self.runs), (self.head, 1)):
            yield from ((parameter, count) for parameter in block.parameters)

    @property
    def num_trained(self) -> int:
        """Elements of all parameters that train."""
        return sum(each.num_elements * count for each, count in self.all_parameters if each.trains)

    @property
    def has_windows(self) -> bool:
        """Whether any layer attends within a sliding window, so that what it keeps depends on the length."""
        return any(run.block.attention is not None and bool(run.block.attention.window) for run in self.runs)

    def __repr__(self) -> str:
        return f"<ModelSpec {self.name}: {format_count(self.parameters.total)} parameters>"

    @property
    def is_partly_frozen(self) -> bool:
        """Whether any parameter does not train."""
        return any(not parameter.trains for parameter, _ in self.all_parameters)

    @property
    def has_learned_positions(self) -> bool:
        """True where a table of the embedding has a row for each position, so that sequences cannot be longer."""
        longest = self.max_seq_length or 0
        return any(
            parameter.tp_dim is None and len(parameter.shape) == 2 and longest <= parameter.shape[0] <= longest + 2
            for parameter in self.embedding.parameters
        )

    @property
    def tp_limits(self) -> frozenset[int]:
        """The numbers that each degree of tensor parallelism has to divide."""
        return frozenset(run.block.tp_limit for run in self.runs if run.block.tp_limit is not None)

    @property
    def vocabulary(self) -> int:
        """Outputs of the head's widest matmul, 0 where it has none."""
        return max((matmul.n for matmul in self.head.matmuls), default=0)

    @property
    def num_blocks(self) -> int:
        """Number of repeated blocks (transformer layers), embedding and head not counted."""
        return sum(run.count for run in self.runs)

    @property
    def num_experts(self) -> int:
        """Experts of every layer that has some, or what their numbers have in common; 1 for a model without."""
        return gcd(*({one.num_experts for run in self.runs for one in run.block.matmuls} - {1})) or 1

    @property
    def blocks(self) -> list[BlockSpec]:
        """All repeated blocks in order."""
        return [run.block for run in self.runs for _ in range(run.count)]

    @property
    def _all_blocks(self) -> list[tuple[BlockSpec, int]]:
        ends = [(self.embedding, 1), (self.head, 1), *((one, 1) for one in self.media)]
        return [*ends, *((run.block, run.count) for run in self.runs)]

    @property
    def parameters(self) -> ParameterCount:
        """Parameters by part."""
        return ParameterCount(
            embedding=self.embedding.num_parameters,
            blocks=sum(run.block.num_parameters * run.count for run in self.runs),
            head=self.head.num_parameters,
        )

    def flops_per_token(self, seq_length: int, *, with_attention: bool = True) -> float:
        """Forward FLOPs of the whole model for one token. Forward and backward together are three times that."""
        return sum(
            block.flops_per_token(seq_length, with_attention=with_attention) * count
            for block, count in self._all_blocks
        )

    def training_flops_per_token(self, seq_length: int) -> float:
        """FLOPs of both passes for one token: three times the forward pass, without the gradients of frozen weights.

        Of blocks without a backward pass it is the forward pass alone.
        """
        total = 0.0
        for block, count in self._all_blocks:
            forward = block.flops_per_token(seq_length)
            frozen = sum(matmul.flops_per_token for matmul in block.matmuls if not matmul.trains)
            if block.index_scores is not None:
                frozen += 2 * block.index_scores.flops_per_token(seq_length)
            total += count * (3 * forward - frozen if block.has_backward else forward)
        return total
