"""Encoders for text (BERT, RoBERTa) and images (ViT).

Shapes and defaults are those of the transformers library's configuration and model classes, read in version 5.23.
"""

from __future__ import annotations

from typing import NamedTuple

from paraplan.errors import ModelError
from paraplan.model.attention import AttentionStyle, Heads, attention
from paraplan.model.config_file import ModelConfig
from paraplan.model.decoder import block_from_part
from paraplan.model.feed_forward import MlpStyle, kept_by_activation, mlp
from paraplan.model.heads import number_of_labels, unknown_architecture
from paraplan.model.norm import norm
from paraplan.model.part import Part, dropout, kept, linear, weight
from paraplan.model.spec import BlockRun, BlockSpec, Matmul, ModelSpec
from paraplan.model.vision_encoders import pair


class EncoderLayer(NamedTuple):
    """One encoder layer: names of its parts; norms stand behind (BERT) or before (ViT) attention and MLP."""

    projections: tuple[str, str, str, str]
    norms: tuple[str, str]
    mlp: tuple[str, str]


BERT_LAYER = EncoderLayer(
    projections=("attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense"),
    norms=("attention.output.LayerNorm", "output.LayerNorm"),
    mlp=("intermediate.dense", "output.dense"),
)
VIT_LAYER = EncoderLayer(
    projections=("attention.q_proj", "attention.k_proj", "attention.v_proj", "attention.o_proj"),
    norms=("layernorm_before", "layernorm_after"),
    mlp=("mlp.fc1", "mlp.fc2"),
)


def _layers(
    config: ModelConfig, layer: EncoderLayer, hidden: int, *, qkv_bias: bool, default_rate: float, softmax_in_fp32: bool
) -> tuple[BlockRun, ...]:
    num_heads = config.count("num_attention_heads")
    head_dim = config.optional_count("head_dim") if config.model_type == "vit" else None
    if head_dim is None:
        head_dim = config.divide("hidden_size", hidden, "num_attention_heads", num_heads)
    heads = Heads(hidden, num_heads, num_heads, head_dim)
    rate = config.fraction("hidden_dropout_prob", default=default_rate)
    is_causal = config.flag("is_decoder", default=False)
    if config.flag("add_cross_attention", default=False):
        raise ModelError(
            f"{config.source}: add_cross_attention=True is not described", hint="give a factory as file.py:factory"
        )
    style = AttentionStyle(
        projections=layer.projections,
        qkv_bias=qkv_bias,
        output_bias=True,
        rotary=False,
        softmax_in_fp32=softmax_in_fp32,
        dropout=config.fraction("attention_probs_dropout_prob", default=default_rate),
    )
    activation = MlpStyle(layer.mlp, config.text("hidden_act", default="gelu"), bias=True)
    part = attention(heads, style) + dropout("dropout_mask", rate, hidden)
    part += norm(layer.norms[0], "layer", hidden) + norm(layer.norms[1], "layer", hidden)
    part += mlp(hidden, config.count("intermediate_size"), activation)
    part += dropout("mlp_output_mask", rate, hidden)
    block = block_from_part(
        "transformer", part, attention=heads.attention(is_causal=is_causal), tp_limit=heads.num_heads
    )
    return (BlockRun(block=block, count=config.layers("num_hidden_layers")),)


def bert(config: ModelConfig) -> ModelSpec:
    """BERT and RoBERTa: learned positions and segments, norms behind each part."""
    hidden = config.count("hidden_size")
    vocab_size = config.count("vocab_size")
    positions = config.count("max_position_embeddings", default=512)
    is_roberta = config.model_type == "roberta"
    # RoBERTa counts positions from the padding token's index on (fairseq), so its first ones are never used.
    usable = positions - config.size("pad_token_id", default=1) - 1 if is_roberta else positions
    embedding = weight("word_embeddings.weight", vocab_size, hidden, tp_dim=0, layer="embedding")
    embedding += weight("position_embeddings.weight", positions, hidden, layer="embedding")
    types = config.count("type_vocab_size", default=2)
    embedding += weight("token_type_embeddings.weight", types, hidden, layer="embedding")
    embedding += norm("LayerNorm", "layer", hidden)
    embedding += dropout("dropout_mask", config.fraction("hidden_dropout_prob", default=0.1), hidden)
    head, tied = _bert_head(config, hidden, vocab_size, is_roberta=is_roberta)
    return ModelSpec(
        name=config.name,
        model_type=config.model_type,
        source=config.source,
        hidden_size=hidden,
        vocab_size=vocab_size,
        max_seq_length=usable,
        tied_embeddings=tied,
        embedding=block_from_part("embedding", embedding),
        runs=_layers(config, BERT_LAYER, hidden, qkv_bias=True, default_rate=0.1, softmax_in_fp32=False),
        head=block_from_part("head", head),
    )


# What each class of transformers puts behind the encoder: a pooler, the language model's head, a classifier's outputs.
_BERT_HEADS = {
    "ForMaskedLM": ("language model",),
    "LMHeadModel": ("language model",),
    "ForCausalLM": ("language model",),
    "ForPreTraining": ("pooler", "language model", "pair"),
    "ForNextSentencePrediction": ("pooler", "pair"),
    "ForSequenceClassification": ("pooler", "labels"),
    "ForMultipleChoice": ("pooler", "choice"),
    "ForTokenClassification": ("labels",),
    "ForQuestionAnswering": ("labels",),
    "Model": ("pooler",),
}


def _bert_head(config: ModelConfig, hidden: int, vocab_size: int, *, is_roberta: bool) -> tuple[Part, bool]:
    suffix = next((key for key in _BERT_HEADS if config.architecture.endswith(key)), None)
    if config.architecture and suffix is None:
        raise unknown_architecture(config)
    pieces = _BERT_HEADS[suffix or "ForMaskedLM"]
    if is_roberta and suffix == "ForSequenceClassification":
        pieces = ("dense", "labels")
    outputs = {"pair": 2, "choice": 1, "labels": number_of_labels(config)}
    part, tied = Part(), False
    for piece in pieces:
        if piece in ("pooler", "dense"):
            part += _per_sequence(linear(piece, hidden, hidden, bias=True))
        elif piece == "language model":
            tied = config.flag("tie_word_embeddings", default=True)
            part += _masked_language_model_head(config, hidden, vocab_size, tied=tied)
        else:
            part += linear(piece, hidden, outputs[piece], bias=True)
    return part, tied


def _masked_language_model_head(config: ModelConfig, hidden: int, vocab_size: int, *, tied: bool) -> Part:
    part = kept("head_input", hidden, split="sequence") + linear("transform.dense", hidden, hidden, bias=True)
    activation = "gelu" if config.model_type == "roberta" else config.text("hidden_act", default="gelu")
    part += kept("head_activation", kept_by_activation(activation) * hidden, split="sequence")
    part += norm("transform.LayerNorm", "layer", hidden) + kept("projection_input", hidden, split="sequence")
    part += weight("bias", vocab_size, tp_dim=0)
    if not tied:  # transformers ties the two biases together with the matrix
        part += weight("decoder.weight", vocab_size, hidden, tp_dim=0, layer="linear")
        part += weight("decoder.bias", vocab_size, tp_dim=0)
    return part + Part(matmuls=(Matmul(name="decoder", k=hidden, n=vocab_size, split="column"),))


def _per_sequence(part: Part) -> Part:
    """Return the parameters of a layer that runs once a sequence: its FLOPs per token are not worth counting."""
    return Part(parameters=part.parameters)


def vit(config: ModelConfig) -> ModelSpec:
    """ViT: one token for each patch of the image and one for the class."""
    hidden = config.count("hidden_size")
    channels = config.count("num_channels", default=3)
    height, width = pair(config, "image_size", 224)
    patch_height, patch_width = pair(config, "patch_size", 16)
    patches = (height // patch_height) * (width // patch_width)
    patch_size = channels * patch_height * patch_width
    embedding = weight("cls_token", 1, 1, hidden) + weight("position_embeddings", 1, patches + 1, hidden)
    embedding += weight("patch_embeddings.projection.weight", hidden, channels, patch_height, patch_width)
    embedding += weight("patch_embeddings.projection.bias", hidden)
    rows = patches / (patches + 1)
    embedding += Part(matmuls=(Matmul(name="patch_embeddings", k=patch_size, n=hidden, rows_per_token=rows),))
    embedding += kept("pixels", patch_size * rows)
    embedding += dropout("dropout_mask", config.fraction("hidden_dropout_prob"), hidden)
    if config.architecture.endswith("ForMaskedImageModeling"):
        embedding += weight("mask_token", 1, 1, hidden)
    return ModelSpec(
        name=config.name,
        model_type=config.model_type,
        source=config.source,
        hidden_size=hidden,
        max_seq_length=patches + 1,
        embedding=block_from_part("embedding", embedding),
        runs=_layers(
            config,
            VIT_LAYER,
            hidden,
            qkv_bias=config.flag("qkv_bias", default=True),
            default_rate=0.0,
            softmax_in_fp32=True,
        ),
        head=_vit_head(config, hidden, channels, tokens=patches + 1),
    )


def _vit_head(config: ModelConfig, hidden: int, channels: int, *, tokens: int) -> BlockSpec:
    part = norm("layernorm", "layer", hidden)
    if not config.architecture or config.architecture.endswith("ForImageClassification"):
        labels = number_of_labels(config)
        part += _per_sequence(linear("classifier", hidden, labels, bias=True))
        part += Part(matmuls=(Matmul(name="classifier", k=hidden, n=labels, rows_per_token=1 / tokens),))
        part += kept("head_input", hidden)  # a view of all tokens, of which the first is used
    elif config.architecture.endswith("ForMaskedImageModeling"):
        stride = config.count("encoder_stride", default=16)
        part += weight("decoder.weight", stride * stride * channels, hidden, 1, 1)
        part += weight("decoder.bias", stride * stride * channels)
        part += Part(matmuls=(Matmul(name="decoder", k=hidden, n=stride * stride * channels),))
    elif config.architecture.endswith("Model"):
        width = config.count("pooler_output_size", default=hidden)
        part += _per_sequence(linear("pooler.dense", hidden, width, bias=True))
    else:
        raise unknown_architecture(config)
    return block_from_part("head", part)


ENCODERS = {"bert": bert, "roberta": bert, "vit": vit}
