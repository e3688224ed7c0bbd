"""Hybrids of Mamba-2, attention and mixtures of experts, as Megatron-Core runs them (Nemotron-H, Nemotron 3).

What transformers' own modules keep is another matter: they are traced (`transformers_model`).
"""

from __future__ import annotations

from itertools import groupby

from paraplan.errors import ModelError
from paraplan.model.attention import AttentionStyle, Heads, attention
from paraplan.model.config_file import ModelConfig
from paraplan.model.decoder import block_from_part
from paraplan.model.feed_forward import ExpertsStyle, MlpStyle, experts, mlp
from paraplan.model.heads import HeadStyle, output_projection
from paraplan.model.norm import norm
from paraplan.model.part import Part, kept, linear, weight
from paraplan.model.spec import BlockRun, BlockSpec, Matmul, ModelSpec

_PATTERN = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}


def is_hybrid(config: ModelConfig) -> bool:
    """Return whether a configuration names its layers' mixers by letters, as NVIDIA's own code reads them."""
    return config.model_type == "nemotron_h" and config.has("hybrid_override_pattern")


def read_hybrid(config: ModelConfig) -> ModelSpec:
    """Return the model of a `nemotron_h` configuration: a layer has one norm and one of four mixers.

    `hybrid_override_pattern` names the mixers by letters. Raises `ModelError` for a pattern with other letters, or of
    another length than `num_hidden_layers`.
    """
    hidden, pattern = config.count("hidden_size"), config.text("hybrid_override_pattern")
    strange = sorted(set(pattern) - set(_PATTERN))
    if strange:
        raise ModelError(
            f"hybrid_override_pattern has {strange[0]!r}", hint="use M (Mamba), * (attention), - (MLP) and E (experts)"
        )
    blocks = {letter: _block(config, _PATTERN[letter], hidden) for letter in set(pattern)}
    layers = config.layers("num_hidden_layers", default=len(pattern) or None)
    if len(pattern) != layers:
        raise ModelError(
            f"hybrid_override_pattern names {len(pattern)} layers, and num_hidden_layers is {layers}",
            hint="give the pattern a letter for each layer",
        )
    vocab_size = config.count("vocab_size")
    head = norm("norm_f", "rms", hidden) + kept("head_input", hidden, split="sequence", num_readers=1)
    tied = config.flag("tie_word_embeddings", default=False)
    head += output_projection(HeadStyle(width=hidden, tied_by_default=False), vocab_size, tied=tied)
    embedding = weight("embeddings.weight", vocab_size, hidden, tp_dim=0, layer="embedding")
    return ModelSpec(
        name=config.name,
        model_type=config.model_type,
        source=config.source,
        hidden_size=hidden,
        vocab_size=vocab_size,
        embedding=block_from_part("embedding", embedding),
        runs=tuple(BlockRun(block=blocks[letter], count=len(list(group))) for letter, group in groupby(pattern)),
        tied_embeddings=tied,
        head=block_from_part("head", head),
    )


def _block(config: ModelConfig, kind: str, hidden: int) -> BlockSpec:
    part = norm("norm", "rms", hidden)
    if kind == "attention":
        heads = Heads(
            hidden=hidden,
            num_heads=config.count("num_attention_heads"),
            num_kv_heads=config.count("num_key_value_heads"),
            head_dim=config.count("head_dim"),
        )
        style = AttentionStyle(projections=("q_proj", "k_proj", "v_proj", "o_proj"), rotary=False)
        limit = heads.num_kv_heads
        return block_from_part(kind, part + attention(heads, style), attention=heads.attention(), tp_limit=limit)
    if kind == "mamba":
        return block_from_part(kind, part + _mamba(config, hidden), tp_limit=config.count("n_groups"))
    if kind == "mlp":
        return block_from_part(kind, part + _plain(hidden, config.count("intermediate_size")))
    return block_from_part(kind, part + _experts(config, hidden))


def _plain(hidden: int, inner: int, *, keeps_input: bool = True) -> Part:
    return mlp(hidden, inner, MlpStyle(("up_proj", "down_proj"), "relu2"), keeps_input=keeps_input)


def _experts(config: ModelConfig, hidden: int) -> Part:
    """Return experts of two matrices, beside shared ones; `moe_latent_size` is the width that tokens are sent in."""
    latent = config.optional_count("moe_latent_size") or hidden
    style = ExpertsStyle(
        num_experts=config.count("n_routed_experts"),
        experts_per_token=config.count("num_experts_per_tok"),
        inner=config.count("moe_intermediate_size"),
        activation="relu2",
        readers=("up_proj",),
        is_gated=False,
    )
    part = experts(latent, style)
    if latent != hidden:
        part += linear("fc1_latent_proj", hidden, latent, bias=False)
        part += linear("fc2_latent_proj", latent, hidden, bias=False)
    shared = config.size("moe_shared_expert_intermediate_size", default=0)
    return part + _plain(hidden, shared, keeps_input=False) if shared else part


def _mamba(config: ModelConfig, hidden: int) -> Part:
    """Return a Mamba-2 mixer: projections, a convolution over time, and the state space duality's chunked products.

    For every token of a chunk of Q: scores with the chunk's tokens `2 Q N` a group and their values `2 Q P` a head,
    half of each under the causal mask, and the chunk's state in and out, `2 N P` a head each (Dao and Gu 2024, section
    6). The fused kernel keeps what the input projection returns and its own output (mamba_ssm,
    ops/triton/ssd_combined.py, `mamba_split_conv1d_scan_combined`), and computes the rest again.
    """
    heads, width = config.count("mamba_num_heads"), config.count("mamba_head_dim")
    groups, state = config.count("n_groups"), config.count("ssm_state_size")
    chunk, inner = config.count("chunk_size", default=128), heads * width
    convolved = inner + 2 * groups * state
    projected = inner + convolved + heads
    part = kept("attention_input", hidden, split="sequence", num_readers=1)
    part += linear("in_proj", hidden, projected, bias=False, split="column")
    part += kept("convolution_input", projected, split="tensor") + kept("scan_output", inner, split="tensor")
    part += weight("conv1d", convolved, config.count("conv_kernel", default=4), tp_dim=0)
    for name in ("A_log", "D", "dt_bias"):
        part += weight(name, heads, tp_dim=0)
    part += weight("mixer.norm", inner, tp_dim=0)
    scan: tuple[tuple[str, int, int, float], ...]
    scan = (("scores", state, chunk, groups / 2), ("values", chunk, width, heads / 2))
    scan += tuple((f"state {way}", state, width, float(heads)) for way in ("in", "out"))
    part += Part(
        matmuls=tuple(
            Matmul(name=name, k=k, n=n, rows_per_token=rows, split="column", of_activations=True)
            for name, k, n, rows in scan
        )
    )
    return part + linear("out_proj", inner, hidden, bias=False, split="row")
