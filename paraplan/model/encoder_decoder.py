"""T5: an encoder and a decoder, joined by cross-attention.

Shapes and defaults are those of the transformers library's configuration and model classes, read in version 5.23.
Both halves are taken to read `seq_length` tokens.
"""

from __future__ import annotations

from paraplan.errors import ModelError
from paraplan.model.attention import AttentionStyle, Heads, attention
from paraplan.model.config_file import ModelConfig
from paraplan.model.decoder import block_from_part
from paraplan.model.feed_forward import MlpStyle, mlp
from paraplan.model.heads import number_of_labels, unknown_architecture
from paraplan.model.norm import NormKind, norm
from paraplan.model.part import Part, dropout, kept, linear, weight
from paraplan.model.spec import BlockRun, BlockSpec, Matmul, ModelSpec

_NORM: NormKind = "rms_t5"


def t5(config: ModelConfig) -> ModelSpec:
    """T5 (ReLU) and T5 1.1 (gated GELU): relative positions in the first block of each half."""
    hidden = config.count("d_model", "hidden_size")
    vocab_size = config.count("vocab_size")
    architecture = config.architecture
    has_decoder = not architecture.endswith(("EncoderModel", "ForTokenClassification"))
    encoder_layers = config.layers("num_layers", "num_hidden_layers")
    decoder_layers = config.layers("num_decoder_layers", default=encoder_layers) if has_decoder else 0
    rate = config.fraction("dropout_rate", default=0.1)
    runs = _stack(config, hidden, encoder_layers, is_decoder=False)
    if has_decoder:
        runs += _stack(config, hidden, decoder_layers, is_decoder=True)
    embedding = weight("shared.weight", vocab_size, hidden, tp_dim=0, layer="embedding")
    embedding += dropout("dropout_mask", rate, hidden * (2 if has_decoder else 1))
    # transformers ties the head to the embedding in every T5, whatever tie_word_embeddings says.
    is_language_model = not architecture or architecture.endswith("ForConditionalGeneration")
    return ModelSpec(
        name=config.name,
        model_type=config.model_type,
        source=config.source,
        hidden_size=hidden,
        vocab_size=vocab_size,
        tied_embeddings=is_language_model,
        embedding=block_from_part("embedding", embedding),
        runs=runs,
        head=_head(config, hidden, vocab_size, has_decoder=has_decoder, rate=rate),
    )


def _head(config: ModelConfig, hidden: int, vocab_size: int, *, has_decoder: bool, rate: float) -> BlockSpec:
    part = norm("encoder.final_layer_norm", _NORM, hidden) + dropout("dropout_mask", rate, hidden)
    if has_decoder:
        part += kept("encoder_output", hidden, split="sequence")
        part += norm("decoder.final_layer_norm", _NORM, hidden) + dropout("dropout_mask", rate, hidden)
    architecture = config.architecture
    if not architecture or architecture.endswith("ForConditionalGeneration"):
        part += kept("head_input", hidden, split="sequence")
        part += Part(matmuls=(Matmul(name="lm_head", k=hidden, n=vocab_size, split="column"),))
    elif architecture.endswith("ForSequenceClassification"):
        dense = linear("classification_head.dense", hidden, hidden, bias=True)
        labels = linear("classification_head.out_proj", hidden, number_of_labels(config), bias=True)
        part += Part(parameters=dense.parameters + labels.parameters)
    elif architecture.endswith("ForTokenClassification"):
        part += linear("classifier", hidden, number_of_labels(config), bias=True)
    elif architecture.endswith("ForQuestionAnswering"):
        part += linear("qa_outputs", hidden, number_of_labels(config), bias=True)
    elif not architecture.endswith("Model"):
        raise unknown_architecture(config)
    return block_from_part("head", part)


def _stack(config: ModelConfig, hidden: int, count: int, *, is_decoder: bool) -> tuple[BlockRun, ...]:
    """Return one half: its first block, which holds the relative positions, and the others."""
    first = BlockRun(block=_block(config, hidden, is_decoder=is_decoder, is_first=True), count=1)
    if count == 1:
        return (first,)
    return first, BlockRun(block=_block(config, hidden, is_decoder=is_decoder, is_first=False), count=count - 1)


def _block(config: ModelConfig, hidden: int, *, is_decoder: bool, is_first: bool) -> BlockSpec:
    num_heads = config.count("num_heads", "num_attention_heads")
    heads = Heads(hidden, num_heads, num_heads, config.count("d_kv", "head_dim", default=64))
    rate = config.fraction("dropout_rate", default=0.1)
    part = Part()
    if is_first:
        buckets = config.count("relative_attention_num_buckets", default=32)
        part += weight(
            "layer.0.SelfAttention.relative_attention_bias.weight", buckets, num_heads, tp_dim=1, layer="embedding"
        )
        # The bucket of every pair of positions, a 64-bit index.
        part += kept("position_bias", pairs=2, element_type="fp32", is_shared_by_batch=True, by="modules")
        if is_decoder:  # transformers hands an empty bias to every cross-attention
            part += kept("position_bias", pairs=num_heads, kernels=("sdpa",), is_shared_by_batch=True, by="modules")
    part += _attention(heads, "layer.0", "SelfAttention", hidden, rate)
    if is_decoder:
        mask = kept(
            "attention_mask", pairs=1, element_type="mask", kernels=("sdpa",), is_shared_by_batch=True, by="modules"
        )
        part += mask + _attention(heads, "layer.1", "EncDecAttention", hidden, rate)
    part += _feed_forward(config, hidden, f"layer.{2 if is_decoder else 1}", rate)
    return block_from_part(
        "decoder" if is_decoder else "encoder",
        part,
        attention=heads.attention(is_causal=is_decoder),
        cross_attention=heads.attention(is_causal=False) if is_decoder else None,
        tp_limit=num_heads,
    )


def _attention(heads: Heads, layer: str, name: str, hidden: int, rate: float) -> Part:
    style = AttentionStyle(
        projections=tuple(f"{layer}.{name}.{projection}" for projection in ("q", "k", "v", "o")),
        rotary=False,
        softmax_in_fp32=False,
        position_bias=name == "SelfAttention",
        dropout=rate,
    )
    part = norm(f"{layer}.layer_norm", _NORM, hidden) + attention(heads, style)
    return part + dropout("dropout_mask", rate, hidden)


def _feed_forward(config: ModelConfig, hidden: int, layer: str, rate: float) -> Part:
    kind = config.text("feed_forward_proj", default="relu")
    *gate, activation = kind.split("-")
    if gate not in ([], ["gated"]):
        raise ModelError(
            f"{config.source}: feed_forward_proj={kind!r}, expected an activation or gated-ACTIVATION",
            hint="correct 'feed_forward_proj', for example to 'gated-gelu'",
        )
    # transformers reads gated-gelu as the tanh form written out in Python.
    activation = "gelu_new" if kind == "gated-gelu" else activation
    names = ("wi_0", "wi_1", "wo") if gate else ("wi", "wo")
    projections = tuple(f"{layer}.DenseReluDense.{name}" for name in names)
    inner = config.count("d_ff")
    part = norm(f"{layer}.layer_norm", _NORM, hidden)
    part += mlp(hidden, inner, MlpStyle(projections, activation, is_gated=bool(gate), inner_dropout=rate))
    return part + dropout("mlp_output_mask", rate, hidden)
