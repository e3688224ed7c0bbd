"""A smaller model of the same structure: fewer layers, fewer heads, narrower, by the fields of a configuration.

What decides how a model is split stays: whether `tp` divides its heads, its groups of heads and its vocabulary, which
kinds of layers it has, tied embeddings, experts. Dropout is turned off: ranks that hold parts of a layer draw other
random numbers than one process.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import gcd
from typing import Any

_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "depth")
_KINDS = ("hybrid_override_pattern", "layers_block_type")
"""Fields that name each layer's kind, by a letter or a word, and are what a file without a number of layers has."""
_STACKS = ("encoder_layers", "decoder_layers", "num_encoder_layers", "num_decoder_layers")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads", "decoder_attention_heads")
_GROUPS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_head_kv", "num_global_key_value_heads")
_HIDDEN = ("hidden_size", "n_embd", "d_model", "embed_dim", "dim", "word_embed_proj_dim", "embedding_size")
_INNER = ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "d_ff", "moe_intermediate_size")
_OTHER_INNER = (
    *("encoder_ffn_dim", "decoder_ffn_dim", "shared_expert_intermediate_size"),
    *("moe_shared_expert_intermediate_size", "moe_latent_size"),
)
_SCANS = (
    ("n_groups", "mamba_num_heads"),
    ("linear_num_key_heads", "linear_num_value_heads"),
    ("linear_num_heads", "linear_num_heads"),
)
"""Fields of layers whose state is carried from token to token: groups, and the heads that share them."""
_VOCABULARY = ("vocab_size", "vocabulary_size", "vocab_size_per_layer_input")
_POSITIONS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_seq_length", "seq_length")
_WINDOWS = ("sliding_window", "attention_window", "window_size")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_INTERVAL = "full_attention_interval"
"""Every so manieth layer has full attention, the others linear attention: one of each kind stays."""
_ROPE = ("rope_scaling", "rope_parameters")
_AT_MOST = {
    "spatial_merge_size": 1,  # mergers of patches are then smaller than the layers of the language model
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "top_k_experts": 2,
    "num_kv_shared_layers": 0,  # few layers are none to share with
    "moe_k": 2,
    "moe_topk": 2,
    "n_group": 2,
    "num_expert_group": 2,
    "topk_group": 1,
    "o_groups": 2,
    "o_lora_rank": 8,
    "index_n_heads": 2,
    "index_topk": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "d_kv": 8,
    "rotary_dim": 8,
    "state_size": 8,
    "ssm_state_size": 8,
    "mamba_head_dim": 8,
    "hidden_size_per_layer_input": 8,
    "global_head_dim": 16,
    "linear_head_dim": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "chunk_size": 8,
}
SIZES = frozenset(
    {*_LAYERS, *_STACKS, *_HEADS, *_GROUPS, *_HIDDEN, *_INNER, *_OTHER_INNER, *_VOCABULARY, *_POSITIONS, *_WINDOWS}
    | {*_EXPERTS, *_AT_MOST, *(name for names in _SCANS for name in names), "head_dim"}
)
"""Fields that a smaller model has other values of: where a file leaves them out, the library's own are to be given."""
SECTIONS = "mrope_section"
"""How rotary positions share a head's features among time, height and width."""
_HEAD_DIM, _NO_HEADS_WIDTH, _SMALL_VOCABULARY, _SMALL_EXPERTS = 16, 64, 128, 4


@dataclass(frozen=True)
class Smaller:
    """Limits of a smaller model: at most `num_layers` layers, `tp` ranks that share one, short sequences.

    Each of these shares its heads with `cp` ranks that have other tokens. `depth` is the number of layers of the model
    that a part of its configuration belongs to, None for the whole.
    """

    num_layers: int
    tp: int
    seq_length: int
    keeps_width: bool = False
    keeps_vocabulary: bool = False
    cp: int = 1
    depth: int | None = None


def shrink_fields(fields: Mapping[str, Any], to: Smaller) -> dict[str, Any]:
    """Return the fields of a configuration, as transformers names them, of a smaller model of the same structure."""
    small = dict(fields)
    kinds = next((len(fields[name]) for name in _KINDS if fields.get(name)), None)
    depth = _first(fields, (*_LAYERS, *_STACKS)) or kinds or to.depth
    for name in (*_LAYERS, *_STACKS):
        if _is_count(fields.get(name)):
            small[name] = min(fields[name], to.num_layers)
    small |= _each(fields, (_INTERVAL,), to.num_layers)
    if depth is not None and depth > to.num_layers:
        small |= _fewer_layers(fields, depth, to.num_layers)
    if not to.keeps_width:
        small |= _narrower(fields, to)
    for name, value in fields.items():
        if isinstance(value, (int, float)) and not isinstance(value, bool) and _is_dropout(name):
            small[name] = type(value)(0)
        if isinstance(value, dict) and name.endswith("_config"):
            small[name] = shrink_fields(value, replace(to, depth=depth))
    vision, width = small.get("vision_config"), _first(small.get("text_config") or small, _HIDDEN)
    if isinstance(vision, dict) and "out_hidden_size" in vision and width and not to.keeps_width:
        small["vision_config"] = vision | {"out_hidden_size": width}  # what the language model reads
    return small


def _fewer_layers(fields: Mapping[str, Any], depth: int, count: int) -> dict[str, Any]:
    """Return the lists that say something of each of `depth` layers, or name some by index, for `count` layers."""
    lists = {name: value for name, value in fields.items() if isinstance(value, list)}
    small: dict[str, Any] = {name: _every_kind(value, count) for name, value in lists.items() if len(value) == depth}
    small |= {
        name: "".join(_every_kind(list(fields[name]), count)) for name in _KINDS if isinstance(fields.get(name), str)
    }
    named = {
        name: value
        for name, value in lists.items()
        if name not in small and name.endswith("_layers") and all(_is_index(item) for item in value)
    }
    if sorted(place for places in named.values() for place in places) == list(range(1, depth + 1)):
        kinds = [next(name for name, places in named.items() if place in places) for place in range(1, depth + 1)]
        few = _every_kind(kinds, count)
        return small | {name: [place + 1 for place, kind in enumerate(few) if kind == name] for name in named}
    return small | {name: [place for place in places if place < count] for name, places in named.items()}


def _narrower(fields: Mapping[str, Any], to: Smaller) -> dict[str, Any]:
    small = _fewer_heads(fields, to)
    for name in _VOCABULARY:
        if _is_count(fields.get(name)) and fields[name] > _SMALL_VOCABULARY and not to.keeps_vocabulary:
            small[name] = _SMALL_VOCABULARY + fields[name] % to.tp
    vocabulary = _first({**fields, **small}, _VOCABULARY)
    for name, value in fields.items():
        if name.endswith(("_token_id", "_token_index")) and vocabulary is not None:
            small[name] = _token(value, vocabulary)
    for names, limit in ((_POSITIONS, 4 * to.seq_length), (_WINDOWS, to.seq_length // 2), (_EXPERTS, _SMALL_EXPERTS)):
        small |= _each(fields, names, limit)
    small |= {name: min(fields[name], limit) for name, limit in _AT_MOST.items() if _is_count(fields.get(name))}
    head_dim = small.get("head_dim") or _ratio({**fields, **small})
    small |= {name: _plain_rope(fields[name], head_dim) for name in _ROPE if fields.get(name) is not None}
    return small


def _ratio(fields: Mapping[str, Any]) -> int | None:
    """Return the width of a head that follows from that of all, None where the fields do not say."""
    hidden, heads = _first(fields, _HIDDEN), _first(fields, _HEADS)
    return hidden // heads if hidden and heads else None


def _fewer_heads(fields: Mapping[str, Any], to: Smaller) -> dict[str, Any]:
    """Return the fields of attention, and of the sizes that follow from it."""
    heads, groups, hidden = _first(fields, _HEADS), _first(fields, _GROUPS), _first(fields, _HIDDEN)
    small: dict[str, Any] = {}
    width = _NO_HEADS_WIDTH
    if heads is not None and hidden is not None:
        small_heads, small_groups = _fewer(heads, to.tp * to.cp, least=2), None
        if groups is not None:
            sharing = to.tp if groups % (to.tp * to.cp) else to.tp * to.cp
            small_groups = _fewer(groups, sharing, least=1 if groups == 1 else 2)
            small_heads = small_groups * _queries(heads // groups, small_groups, to)
        head_dim = min(_HEAD_DIM, fields.get("head_dim") or hidden // heads)
        width = small_heads * head_dim
        small |= _each(fields, _HEADS, small_heads) | _each(fields, _GROUPS, small_groups or 0)
        small |= _each(fields, ("head_dim",), head_dim)
    elif heads is not None and _is_count(fields.get("head_dim")):  # a part that says no more than its heads
        small |= _each(fields, _HEADS, _fewer(heads, to.tp * to.cp, least=2)) | _each(fields, ("head_dim",), 8)
    small |= _each(fields, _HIDDEN, width) | _each(fields, (*_INNER, *_OTHER_INNER), 2 * width)
    for group_name, head_name in _SCANS:
        if _is_count(fields.get(group_name)) and _is_count(fields.get(head_name)):
            few = _fewer(fields[group_name], to.tp * to.cp, least=2)
            small |= {group_name: few, head_name: few * min(2, fields[head_name] // fields[group_name])}
    if _is_count(fields.get("qk_rope_head_dim")):  # latent attention: heads have a part with positions and one without
        rotary = _AT_MOST["qk_rope_head_dim"]
        has_rest = fields.get("head_dim") != fields["qk_rope_head_dim"]  # of Mistral 4 it is that of both parts
        small |= _each(fields, ("head_dim",), 2 * rotary if has_rest else rotary)
        small |= _each(fields, ("qk_head_dim",), 2 * rotary)
    return small


def _queries(count: int, groups: int, to: Smaller) -> int:
    """Return a few heads for each of `groups` in place of `count`, which `tp` and `cp` share out as they do those."""
    copies = to.cp // gcd(max(1, groups // to.tp), to.cp)
    return next((few for few in range(min(2, count), count) if few % copies == 0), count)


def _each(fields: Mapping[str, Any], names: Iterable[str], limit: int) -> dict[str, int]:
    """Return those of `names` that are counts in `fields`, at most `limit`."""
    return {name: min(fields[name], limit) for name in names if _is_count(fields.get(name))}


def _fewer(count: int, tp: int, *, least: int) -> int:
    """Return a small number of heads that `tp` divides exactly where it divides `count`."""
    if count % tp:
        return count
    return min(count, tp * max(1, -(-least // tp)))


def _every_kind(values: list[Any], count: int) -> list[Any]:
    """Return `count` of the values of the layers, such that as many kinds as possible are among them, in order."""
    seen: list[Any] = []
    first = [index for index, value in enumerate(values) if value not in seen and not seen.append(value)]  # type: ignore[func-returns-value]
    rest = [index for index in range(len(values)) if index not in first]
    return [values[index] for index in sorted([*first, *rest][:count])]


def _plain_rope(value: Any, head_dim: int | None) -> Any:
    """Return the settings of rotary positions without scaling to long sequences, sections in proportion."""
    if not isinstance(value, dict):
        return value
    if value and all(isinstance(item, dict) for item in value.values()):  # one for each kind of layer
        return {name: _plain_rope(item, head_dim) for name, item in value.items()}
    kept = {name: value[name] for name in ("rope_theta", "partial_rotary_factor") if name in value}
    sections = value.get(SECTIONS)
    if sections and head_dim:  # of half the features of a head that are rotated: time, height, width
        half = int(head_dim * kept.get("partial_rotary_factor", 1.0)) // 2
        few = [section * half // sum(sections) for section in sections]
        few[min(range(len(few)), key=lambda place: sections.count(sections[place]))] += half - sum(few)
        kept[SECTIONS] = few  # height and width stay alike
    return {"rope_type": "default", **kept} if kept else None


def _token(value: Any, vocabulary: int) -> Any:
    if isinstance(value, list):
        return [_token(item, vocabulary) for item in value]
    return 1 if _is_index(value) and value >= vocabulary else value


def _first(fields: Mapping[str, Any], names: Iterable[str]) -> int | None:
    return next((fields[name] for name in names if _is_count(fields.get(name))), None)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_index(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_dropout(name: str) -> bool:
    return "dropout" in name or name.endswith(("pdrop", "layerdrop"))
