"""Adapters in the words of peft and of the tools that pass its words on, as those of `--train`."""

from __future__ import annotations

import re

from paraplan.errors import PlanError
from paraplan.interop.fields import Fields
from paraplan.model.trainable import ALL_LINEAR, AdapterKind, AdapterSpec, Trainable, default_targets

_USUAL = ("q", "v")
"""Layers that peft takes where none is named, for Llama and its kin (peft/utils/constants.py)."""
_EVERY = ("all", "all-linear", "all_linear")
_PARTS = {"lm_head": "head", "output": "head", "embed_tokens": "embeddings", "wte": "embeddings"}
"""Modules outside of blocks that people train beside adapters, by their names in transformers."""
_OTHER_NAMES = {
    "linear_qkv": ("qkv",),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc2": ("down_proj",),
    "linear_q_down_proj": ("q_a_proj",),
    "linear_q_up_proj": ("q_b_proj",),
    "linear_kv_down_proj": ("kv_a_proj_with_mqa",),
    "linear_kv_up_proj": ("kv_b_proj",),
    "linear_q_proj": ("q_proj",),
    **{f"w{name}": (f"{name}_proj",) for name in ("q", "k", "v", "o", "kv", "q_a", "q_b", "kv_b", "o_a", "o_b")},
    "wkv_a": ("kv_a_proj_with_mqa",),
    "w1": ("gate_proj",),
    "w2": ("down_proj",),
    "w3": ("up_proj",),
}
"""Layers of transformers in those of Megatron-Core, some of which are several in one product, and in the names that
makers of models give them in code of their own (Llama, DeepSeek)."""


def trainable_of(
    fields: Fields,
    *,
    kind: AdapterKind = "lora",
    rank: int | None = None,
    targets: object = None,
    dropout: object = 0.0,
    by_root: bool = False,
    saved: object = None,
    parameters: object = None,
    usual: tuple[str, ...] = _USUAL,
) -> tuple[str, list[str]]:
    """Return what a tool's keys say trains in the words of `--train`, and notes.

    `targets` is a list of layers, one string with commas, peft's "all-linear", a regular expression, or None for
    `usual`; `parameters` are those that get adapters by themselves, as fused experts do (peft, target_parameters), and
    no layers beside unless they are named; `saved` are the modules that train as a whole beside the adapters. Raises
    `PlanError` for a rank below 1 and a dropout that is none.
    """
    notes: list[str] = []
    if kind != "ia3" and rank is not None and rank < 1:
        raise PlanError(f"{fields.source}: a rank of {rank} trains nothing", hint="use a rank of 1 or more")
    if isinstance(dropout, bool) or not isinstance(dropout, int | float) or not 0 <= dropout < 1:
        raise PlanError(f"{fields.source}: a dropout of {dropout!r} is not from 0 to 1", hint="fix that key")
    named = _words(targets) or not _words(parameters)
    layers = (
        default_targets(kind) if kind == "ia3" and targets is None else _layers(targets, usual, notes) if named else ()
    )
    if _words(parameters):
        layers = _with_parameters(_words(parameters), layers, notes)
    adapter = AdapterSpec(kind=kind, rank=rank or 8, targets=layers, dropout=float(dropout), is_scaled_by_root=by_root)
    parts = {}
    for name in _words(saved):
        known = _PARTS.get(name.rpartition(".")[2]) or ("norms" if "norm" in name else None)
        if known is None:
            notes.append(f"{name} trains as a whole beside the adapters: not priced")
        else:
            parts[known] = True
    return Trainable(adapter=adapter).replace(**parts).text, notes


def _with_parameters(names: list[str], layers: tuple[str, ...], notes: list[str]) -> tuple[str, ...]:
    """Return the layers with adapters where parameters are named beside, of which those of experts are known."""
    others = [name for name in names if "experts" not in name]
    if others:
        notes.append(f"adapters on the parameters {', '.join(others)}: not priced")
    if len(others) == len(names):
        return layers or _USUAL
    if layers == (ALL_LINEAR,):
        notes.append("adapters on experts' parameters beside all linear layers: those on experts are not priced")
        return layers
    return (*layers, "experts")


def _layers(targets: object, usual: tuple[str, ...], notes: list[str]) -> tuple[str, ...]:
    words = _words(targets)
    if not words:
        notes.append(f"no target layers are named: {' and '.join(usual)} assumed, --train says otherwise")
        return usual
    if any(word in _EVERY for word in words):
        beside = [word for word in words if word.rpartition(".")[2] in _PARTS]
        if beside:
            notes.append(f"adapters on {', '.join(beside)} beside all linear layers: not priced")
        return (ALL_LINEAR,)
    if any(not re.fullmatch(r"[\w.-]+", word) for word in words):
        notes.append("target layers are a regular expression: all linear layers assumed, --train says otherwise")
        return (ALL_LINEAR,)
    names = (name for word in words for name in _OTHER_NAMES.get(word.rpartition(".")[2].lower(), (word.lower(),)))
    return tuple(dict.fromkeys(names))


def _words(value: object) -> list[str]:
    if value is None:
        return []
    if isinstance(value, str):
        is_expression = re.search(r"[()*\\|\[]", value) is not None
        return [value] if is_expression else [word.strip() for word in value.split(",") if word.strip()]
    if isinstance(value, list | tuple | set):
        return [str(word) for word in value]
    return [str(value)]
