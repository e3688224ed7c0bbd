"""Families of the GPT-2 era: each names its fields and lays out its blocks in its own way.

Shapes and defaults are those of the transformers library's configuration and model classes, read in version 5.23.
"""

from __future__ import annotations

from paraplan.errors import ModelError
from paraplan.model.attention import AttentionStyle, Heads
from paraplan.model.config_file import ModelConfig
from paraplan.model.decoder import DecoderShape, EmbeddingStyle, LayerKind
from paraplan.model.feed_forward import MlpStyle, mlp
from paraplan.model.heads import HeadStyle
from paraplan.model.norm import NormKind
from paraplan.model.part import Part, kept, linear


def _heads(config: ModelConfig, hidden_field: str, hidden: int, *heads_fields: str) -> Heads:
    num_heads = config.count(*heads_fields)
    head_dim = config.divide(hidden_field, hidden, heads_fields[0], num_heads)
    return Heads(hidden, num_heads, num_heads, head_dim)


def gpt2(config: ModelConfig) -> DecoderShape:
    """GPT-2: learned positions, one fused projection, weights stored input first."""
    hidden = config.count("n_embd", "hidden_size")
    inner = config.optional_count("n_inner") or 4 * hidden
    positions = config.count("n_positions", "max_position_embeddings", default=1024)
    if config.flag("add_cross_attention", default=False):
        raise ModelError(
            f"{config.source}: add_cross_attention=True is not described", hint="give a factory as file.py:factory"
        )
    style = MlpStyle(
        projections=("mlp.c_fc", "mlp.c_proj"),
        activation=config.text("activation_function", default="gelu_new"),
        bias=True,
        input_first=True,
    )
    rate = config.fraction("resid_pdrop", default=0.1)
    return DecoderShape(
        hidden=hidden,
        vocab_size=config.count("vocab_size"),
        max_seq_length=positions,
        heads=_heads(config, "n_embd", hidden, "n_head", "num_attention_heads"),
        attention=AttentionStyle(
            projections=("attn.c_attn", "attn.c_proj"),
            qkv_bias=True,
            output_bias=True,
            input_first=True,
            rotary=False,
            softmax_in_fp32=False,
            dropout=config.fraction("attn_pdrop", default=0.1),
        ),
        layers=(LayerKind(mlp(hidden, inner, style)),) * config.layers("n_layer", "num_hidden_layers"),
        norm_kind="layer",
        norms=("ln_1", "ln_2"),
        embedding=EmbeddingStyle("wte", hidden, ("wpe", positions), dropout=config.fraction("embd_pdrop", default=0.1)),
        head=HeadStyle(width=hidden, tied_by_default=True, norm=("ln_f", "layer", hidden)),
        residual_dropouts=(rate, rate),
    )


def gpt_neo(config: ModelConfig) -> DecoderShape:
    """GPT-Neo: GPT-2 with separate projections without bias, and a sliding window in every second layer."""
    hidden = config.count("hidden_size")
    positions = config.count("max_position_embeddings", default=2048)
    rate = config.fraction("resid_dropout")
    style = MlpStyle(
        projections=("mlp.c_fc", "mlp.c_proj"),
        activation=config.text("activation_function", default="gelu_new"),
        bias=True,
    )
    part = mlp(hidden, config.optional_count("intermediate_size") or 4 * hidden, style)
    return DecoderShape(
        hidden=hidden,
        vocab_size=config.count("vocab_size"),
        max_seq_length=positions,
        heads=_heads(config, "hidden_size", hidden, "num_heads", "num_attention_heads"),
        attention=AttentionStyle(
            projections=(
                "attn.attention.q_proj",
                "attn.attention.k_proj",
                "attn.attention.v_proj",
                "attn.attention.out_proj",
            ),
            output_bias=True,
            rotary=False,
            products_in_fp32=True,
            dropout=config.fraction("attention_dropout"),
        ),
        layers=tuple(LayerKind(part, window) for window in _gpt_neo_windows(config)),
        norm_kind="layer",
        norms=("ln_1", "ln_2"),
        embedding=EmbeddingStyle("wte", hidden, ("wpe", positions), dropout=config.fraction("embed_dropout")),
        head=HeadStyle(width=hidden, tied_by_default=True, norm=("ln_f", "layer", hidden)),
        residual_dropouts=(rate, rate),
    )


def _gpt_neo_windows(config: ModelConfig) -> list[int | None]:
    count = config.layers("num_layers", "num_hidden_layers")
    kinds = config.names("attention_layers")
    if not kinds:
        groups = config.fields.get("attention_types") or [[["global", "local"], count // 2]]
        try:
            kinds = tuple(kind for names, times in groups for _ in range(times) for kind in names)
        except (TypeError, ValueError) as error:
            raise ModelError(
                f"{config.source}: attention_types={groups!r}, expected a list such as [[['global', 'local'], 12]]",
                hint="correct 'attention_types' in the config",
            ) from error
    if len(kinds) != count:
        raise ModelError(
            f"{config.source}: attention_types describes {len(kinds)} layers, num_layers is {count}",
            hint="make both name the same number of layers",
        )
    window = config.count("window_size", default=256)
    return [window if kind == "local" else None for kind in kinds]


def gptj(config: ModelConfig) -> DecoderShape:
    """GPT-J: attention and MLP side by side behind one norm, rotary positions, a head with bias."""
    hidden = config.count("n_embd", "hidden_size")
    rate = config.fraction("resid_pdrop")
    style = MlpStyle(
        projections=("mlp.fc_in", "mlp.fc_out"),
        activation=config.text("activation_function", default="gelu_new"),
        bias=True,
    )
    part = mlp(hidden, config.optional_count("n_inner") or 4 * hidden, style)
    return DecoderShape(
        hidden=hidden,
        vocab_size=config.count("vocab_size"),
        max_seq_length=config.count("n_positions", "max_position_embeddings", default=2048),
        heads=_heads(config, "n_embd", hidden, "n_head", "num_attention_heads"),
        attention=AttentionStyle(
            projections=("attn.q_proj", "attn.k_proj", "attn.v_proj", "attn.out_proj"),
            products_in_fp32=True,
            dropout=config.fraction("attn_pdrop"),
        ),
        layers=(LayerKind(part),) * config.layers("n_layer", "num_hidden_layers"),
        norm_kind="layer",
        norms=("ln_1",),
        embedding=EmbeddingStyle("wte", hidden, dropout=config.fraction("embd_pdrop")),
        head=HeadStyle(width=hidden, tied_by_default=False, norm=("ln_f", "layer", hidden), bias=True),
        residual="parallel",
        residual_dropouts=(rate, rate),
    )


def gpt_neox(config: ModelConfig) -> DecoderShape:
    """GPT-NeoX and Pythia: a fused projection, attention and MLP side by side, each behind its own norm."""
    hidden = config.count("hidden_size")
    bias = config.flag("attention_bias", default=True)
    rate = config.fraction("hidden_dropout")
    style = MlpStyle(
        projections=("mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
        activation=config.text("hidden_act", default="gelu"),
        bias=True,
    )
    part = mlp(hidden, config.count("intermediate_size"), style)
    parallel = config.flag("use_parallel_residual", default=True)
    return DecoderShape(
        hidden=hidden,
        vocab_size=config.count("vocab_size"),
        max_seq_length=config.optional_count("max_position_embeddings"),
        heads=_heads(config, "hidden_size", hidden, "num_attention_heads"),
        attention=AttentionStyle(
            projections=("attention.query_key_value", "attention.dense"),
            qkv_bias=bias,
            output_bias=bias,
            copies_output=True,
            dropout=config.fraction("attention_dropout"),
        ),
        layers=(LayerKind(part),) * config.layers("num_hidden_layers"),
        norm_kind="layer",
        norms=("input_layernorm", "post_attention_layernorm"),
        embedding=EmbeddingStyle("embed_in", hidden, dropout=rate),
        head=HeadStyle(width=hidden, tied_by_default=False, norm=("final_layer_norm", "layer", hidden)),
        residual="parallel_two_norms" if parallel else "sequential",
        residual_dropouts=(rate, rate),
    )


def opt(config: ModelConfig) -> DecoderShape:
    """OPT: learned positions, two more than it uses; ReLU; the 350M model's embeddings are narrower than its blocks."""
    hidden = config.count("hidden_size")
    width = config.optional_count("word_embed_proj_dim") or hidden
    positions = config.count("max_position_embeddings", default=2048)
    bias = config.flag("enable_bias", default=True)
    kind: NormKind = "layer" if config.flag("layer_norm_elementwise_affine", default=True) else "layer_without_weights"
    rate = config.fraction("dropout", default=0.1)
    style = MlpStyle(
        projections=("fc1", "fc2"), activation=config.text("activation_function", default="relu"), bias=bias
    )
    has_final_norm = config.flag("do_layer_norm_before", default=True) and not config.flag(
        "_remove_final_layer_norm", default=False
    )
    return DecoderShape(
        hidden=hidden,
        vocab_size=config.count("vocab_size"),
        max_seq_length=positions,
        heads=_heads(config, "hidden_size", hidden, "num_attention_heads"),
        attention=AttentionStyle(
            projections=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.out_proj"),
            qkv_bias=bias,
            output_bias=bias,
            rotary=False,
            dropout=config.fraction("attention_dropout"),
        ),
        layers=(LayerKind(mlp(hidden, config.count("ffn_dim"), style)),) * config.layers("num_hidden_layers"),
        norm_kind=kind,
        norms=("self_attn_layer_norm", "final_layer_norm"),
        embedding=EmbeddingStyle("embed_tokens", width, ("embed_positions", positions + 2)),
        head=HeadStyle(
            width=width,
            tied_by_default=True,
            norm=("final_layer_norm", kind, hidden) if has_final_norm else None,
            projection=_projection_out(hidden, width) if width != hidden else Part(),
        ),
        residual_dropouts=(rate, rate),
    )


def _projection_out(hidden: int, width: int) -> Part:
    return kept("projection_input", hidden, split="sequence") + linear("project_out", hidden, width, bias=False)


def bloom(config: ModelConfig) -> DecoderShape:
    """BLOOM: ALiBi in place of positions, a norm behind the embedding."""
    hidden = config.count("n_embed", "hidden_size")
    rate = config.fraction("hidden_dropout")
    style = MlpStyle(projections=("mlp.dense_h_to_4h", "mlp.dense_4h_to_h"), activation="bloom_gelu", bias=True)
    return DecoderShape(
        hidden=hidden,
        vocab_size=config.count("vocab_size"),
        max_seq_length=config.optional_count("seq_length"),
        heads=_heads(config, "hidden_size", hidden, "n_head", "num_attention_heads"),
        attention=AttentionStyle(
            projections=("self_attention.query_key_value", "self_attention.dense"),
            qkv_bias=True,
            output_bias=True,
            rotary=False,
            dropout=config.fraction("attention_dropout"),
        ),
        layers=(LayerKind(mlp(hidden, 4 * hidden, style)),) * config.layers("n_layer", "num_hidden_layers"),
        norm_kind="layer",
        norms=("input_layernorm", "post_attention_layernorm"),
        embedding=EmbeddingStyle("word_embeddings", hidden, norm=("word_embeddings_layernorm", "layer")),
        head=HeadStyle(width=hidden, tied_by_default=True, norm=("ln_f", "layer", hidden)),
        residual_dropouts=(rate, rate),
    )


def falcon(config: ModelConfig) -> DecoderShape:
    """Falcon: multi-query (7B), grouped (40B, 180B) or full attention; attention and MLP side by side in most."""
    hidden = config.count("n_embed", "hidden_size")
    num_heads = config.count("num_attention_heads", "n_head")
    new = config.flag("new_decoder_architecture", default=False)
    multi_query = config.flag("multi_query", default=True)
    alibi = config.flag("alibi", default=False)
    num_kv_heads = config.count("num_kv_heads", "n_head_kv", default=num_heads)
    if not new:
        num_kv_heads = 1 if multi_query else num_heads
    bias = config.flag("bias", default=False)
    parallel = config.flag("parallel_attn", default=True)
    norms_in_parallel = config.count("num_ln_in_parallel_attn", default=2 if new else 1)
    norms: tuple[str, ...] = ("input_layernorm",)
    if not parallel:
        norms = ("input_layernorm", "post_attention_layernorm")
    elif norms_in_parallel == 2:
        norms = ("ln_attn", "ln_mlp")
    style = MlpStyle(
        projections=("mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
        activation=config.text("activation", default="gelu"),
        bias=bias,
    )
    part = mlp(hidden, config.optional_count("ffn_hidden_size") or 4 * hidden, style)
    head_dim = config.divide("hidden_size", hidden, "num_attention_heads", num_heads)
    config.divide("num_attention_heads", num_heads, "num_kv_heads", num_kv_heads)
    rate = config.fraction("hidden_dropout")
    return DecoderShape(
        hidden=hidden,
        vocab_size=config.count("vocab_size"),
        max_seq_length=config.optional_count("max_position_embeddings"),
        heads=Heads(hidden, num_heads, num_kv_heads, head_dim),
        attention=AttentionStyle(
            projections=("self_attention.query_key_value", "self_attention.dense"),
            qkv_bias=bias,
            output_bias=bias,
            rotary=not alibi,
            softmax_in_fp32=False,
            masks_each_layer=not alibi,
            splits_by_copy=new or multi_query,
            repeats_kv=new,
            dropout=config.fraction("attention_dropout") if alibi else 0.0,
        ),
        layers=(LayerKind(part),) * config.layers("num_hidden_layers", "n_layer"),
        norm_kind="layer",
        norms=norms,
        embedding=EmbeddingStyle("word_embeddings", hidden),
        head=HeadStyle(width=hidden, tied_by_default=True, norm=("ln_f", "layer", hidden)),
        residual="parallel" if len(norms) == 1 else ("parallel_two_norms" if parallel else "sequential"),
        residual_dropouts=(0.0 if parallel or new else config.fraction("attention_dropout"), rate),
        shared=kept("attention_mask", pairs=num_heads, kernels=("sdpa",), by="modules") if alibi else Part(),
    )


def mpt(config: ModelConfig) -> DecoderShape:
    """MPT: ALiBi, no bias anywhere; transformers builds it without the options of MosaicML's own code."""
    hidden = config.count("d_model", "hidden_size")
    rate = config.section("attn_config").fraction("attn_pdrop")
    style = MlpStyle(projections=("ffn.up_proj", "ffn.down_proj"), activation="gelu")
    return DecoderShape(
        hidden=hidden,
        vocab_size=config.count("vocab_size"),
        max_seq_length=config.optional_count("max_seq_len"),
        heads=_heads(config, "d_model", hidden, "n_heads", "num_attention_heads"),
        attention=AttentionStyle(projections=("attn.Wqkv", "attn.out_proj"), rotary=False, dropout=rate),
        layers=(LayerKind(mlp(hidden, 4 * hidden, style)),) * config.layers("n_layers", "num_hidden_layers"),
        norm_kind="layer_without_bias",
        norms=("norm_1", "norm_2"),
        embedding=EmbeddingStyle("wte", hidden),
        head=HeadStyle(width=hidden, tied_by_default=True, norm=("norm_f", "layer_without_bias", hidden)),
        residual_dropouts=(rate, rate),
        shared=kept("attention_mask", pairs=1, element_type="mask", by="modules"),
    )


CLASSIC = {
    "gpt2": gpt2,
    "gpt_neo": gpt_neo,
    "gpt_neox": gpt_neox,
    "gptj": gptj,
    "opt": opt,
    "bloom": bloom,
    "falcon": falcon,
    "mpt": mpt,
}
