"""DeepSeek-V4: attention over compressed keys, hyper-connections, experts of which the first layers' are fixed.

Shapes and defaults are those of the transformers library's configuration and model classes, read in version 5.24.
Layers for multi-token prediction that checkpoints bring are no part of the classes that transformers builds.
"""

from __future__ import annotations

from itertools import groupby

from paraplan.errors import ModelError
from paraplan.model.compressed_attention import CompressedHeads, Compression, attention_cores, compressed_attention
from paraplan.model.config_file import ModelConfig
from paraplan.model.decoder import block_from_part
from paraplan.model.families import rotary_positions
from paraplan.model.families_experts import Mixture, mixture
from paraplan.model.heads import HeadStyle, read_head
from paraplan.model.hyper_connections import hyper_connection, joined_streams
from paraplan.model.norm import NormKind, norm, norm_output
from paraplan.model.part import Part, kept, weight
from paraplan.model.spec import BlockRun, BlockSpec, ModelSpec

_NORM: NormKind = "rms_in_fp32"
_SPARSE, _HEAVY, _SLIDING = "compressed_sparse_attention", "heavily_compressed_attention", "sliding_attention"
_KINDS = {0: _SLIDING, 4: _SPARSE, 128: _HEAVY}
_RATES = {_SPARSE: ("compress_rate_csa", 4), _HEAVY: ("compress_rate_hca", 128)}
_MIXTURE = Mixture(
    num_experts=(("n_routed_experts", "num_local_experts"), 256),
    per_token=(("num_experts_per_tok",), 6),
    num_shared=("n_shared_experts", 1),
    router="softmax_in_activations",
    activation="clamped_silu",
)


def deepseek_v4(config: ModelConfig) -> ModelSpec:
    """Return the model of a configuration, by transformers' names or those of DeepSeek's files."""
    hidden, vocab_size = config.count("hidden_size", default=4096), config.count("vocab_size", default=129_280)
    streams = config.count("hc_mult", default=4)
    types = _types(config)
    blocks = {kind: _block(config, kind, hidden, streams) for kind in dict.fromkeys(types)}
    joined = joined_streams("model.hc_head", hidden, streams)
    style = HeadStyle(hidden, tied_by_default=False, norm=("model.norm", _NORM, hidden), projection=joined)
    head, tied = read_head(config, style, vocab_size)
    table = weight("model.embed_tokens.weight", vocab_size, hidden, tp_dim=0, layer="embedding")
    return ModelSpec(
        name=config.name,
        model_type=config.model_type,
        source=config.source,
        hidden_size=hidden,
        vocab_size=vocab_size,
        max_seq_length=rotary_positions(config),
        tied_embeddings=tied,
        embedding=block_from_part("embedding", table),
        runs=tuple(BlockRun(block=blocks[kind], count=len(list(group))) for kind, group in groupby(types)),
        head=head,
        residual_streams=streams,
    )


def _types(config: ModelConfig) -> tuple[str, ...]:
    """Return the attention of each layer: by `layer_types`, by the rates of DeepSeek's files, else in turns."""
    count = config.layers("num_hidden_layers", default=43)
    types, rates = config.names("layer_types"), config.fields.get("compress_ratios")
    if not types and isinstance(rates, list):
        types = tuple(_KINDS.get(rate, str(rate)) for rate in rates[:count])
    if not types:
        turns = tuple(_SPARSE if index % 2 else _HEAVY for index in range(max(count - 2, 0)))
        types = (_HEAVY,) * min(count, 2) + turns
    strange = sorted(set(types) - set(_KINDS.values()))
    if strange or len(types) != count:
        raise ModelError(
            f"{config.source}: layer_types names {strange[0] if strange else f'{len(types)} layers'}, expected "
            f"{', '.join(_KINDS.values())} for each of {count} layers",
            hint="correct 'layer_types' or leave it out: layers take turns then",
        )
    return types


def _block(config: ModelConfig, kind: str, hidden: int, streams: int) -> BlockSpec:
    heads = _heads(config, hidden)
    compression = _compression(config, kind)
    iterations = config.count("hc_sinkhorn_iters", default=20)
    experts = mixture(config, hidden, _MIXTURE) + kept("router_probabilities", config.count("n_routed_experts"))
    part = Part()
    for name in ("input_layernorm", "post_attention_layernorm"):
        part += norm(name, _NORM, hidden)
    for name in ("attn_hc", "ffn_hc"):
        part += hyper_connection(name, hidden, streams, iterations=iterations)
    part += compressed_attention(heads, compression).inside("self_attn") + experts.inside("mlp")
    cores = attention_cores(heads, compression)
    return block_from_part("moe", part, **cores, tp_limit=heads.groups, norm_output=norm_output(_NORM))


def _compression(config: ModelConfig, kind: str) -> Compression:
    if kind == _SLIDING:
        return Compression()
    name, usual = _RATES[kind]
    rate = config.section("compress_rates").count(kind, default=config.count(name, default=usual))
    if kind == _HEAVY:
        return Compression(rate)
    heads, size = config.count("index_n_heads", default=64), config.count("index_head_dim", default=128)
    return Compression(rate, (heads, size))


def _heads(config: ModelConfig, hidden: int) -> CompressedHeads:
    num_heads, head_dim = config.count("num_attention_heads", default=64), config.count("head_dim", default=512)
    groups = config.count("o_groups", default=8)
    config.divide("num_attention_heads", num_heads, "o_groups", groups)
    return CompressedHeads(
        hidden=hidden,
        num_heads=num_heads,
        head_dim=head_dim,
        query_rank=config.count("q_lora_rank", default=1024),
        rotary_dim=config.count("qk_rope_head_dim", default=head_dim // 8),
        groups=groups,
        output_rank=config.count("o_lora_rank", default=1024),
        window=config.count("sliding_window", default=128),
    )
