"""The part of a model that trains: adapters, parts or all of it; read from the words of `--train`."""

from __future__ import annotations

import re
from difflib import get_close_matches
from typing import Literal

from pydantic import Field

from paraplan.errors import PlanError
from paraplan.records import Record

AdapterKind = Literal["lora", "dora", "ia3"]
InputCopy = Literal["shared", "activation", "fp32", "fused"]
"""The copy of its input that an adapter keeps: the tensor that its layer read, a copy in the type of activations or in
fp32; fused: the tensor that its layer read, in one operation with it (unsloth's `LoRA_QKV`, `LoRA_W`)."""
ALL_LINEAR = "all-linear"
FORMS = (
    "full, lora:r=16,targets=q|v, qlora:..., dora:..., rslora:..., ia3, head, embeddings, norms or layers:last4, joined"
    " by + where several train; of models with a tower for pictures or sound text, projector or tower"
)
QLORA_WEIGHTS = "nf4:double"
"""Format of frozen weights under QLoRA (Dettmers et al. 2023): NF4, with the scales of blocks in bytes."""
_IA3_TARGETS = ("k", "v", "down")
"""Layers that peft's IA3 scales by default: keys, values, the second feed-forward layer's input (Liu et al. 2022)."""


_PARTS = {
    "text": "text_model",
    "head": "head",
    "embeddings": "embeddings",
    "norms": "norms",
    "projector": "projector",
    "tower": "tower",
}
"""Words of `--train` for parts of a model, and the fields that say that they train."""


class AdapterSpec(Record):
    """Adapters beside frozen linear layers."""

    kind: AdapterKind = "lora"
    """LoRA (Hu et al. 2021), DoRA (Liu et al. 2024), IA3 (Liu et al. 2022)."""
    rank: int = Field(default=16, ge=1)
    """Inner size of LoRA and DoRA."""
    targets: tuple[str, ...] = (ALL_LINEAR,)
    """Names of linear layers, by their last part or its beginning: q_proj, q. `all-linear` takes those of all blocks,
    the head not, as in peft."""
    dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Dropout of the input of an adapter."""
    is_scaled_by_root: bool = False
    """Rank-stabilized LoRA (Kalajdzievski 2023): the same tensors, another factor."""


class Trainable(Record):
    """The parameters that train. Nothing named trains all of a model."""

    adapter: AdapterSpec | None = None
    """Adapters of linear layers; their own weights train."""
    head: bool = False
    """The output head trains."""
    embeddings: bool = False
    """The embedding trains."""
    norms: bool = False
    """The norms' weights train."""
    last_layers: int | None = Field(default=None, ge=1)
    """So many of the last blocks train."""
    text_model: bool = False
    """The whole language model trains, its towers do not where they are not named too."""
    projector: bool = False
    """Whether the layers train that make tokens of a tower's features."""
    tower: bool = False
    """A tower for pictures or sound trains."""

    @property
    def is_full(self) -> bool:
        """True where all parameters train."""
        return self == Trainable()

    @property
    def text(self) -> str:
        """The words of `--train` that say this."""
        parts = []
        if self.adapter is not None:
            kind = "rslora" if self.adapter.is_scaled_by_root else self.adapter.kind
            fields = [] if kind == "ia3" else [f"r={self.adapter.rank}"]
            if self.adapter.targets != default_targets(self.adapter.kind):
                fields.append(f"targets={'|'.join(self.adapter.targets)}")
            if self.adapter.dropout:
                fields.append(f"dropout={self.adapter.dropout:g}")
            parts.append(f"{kind}:{','.join(fields)}" if fields else kind)
        parts += [word for word, field in _PARTS.items() if getattr(self, field)]
        if self.last_layers is not None:
            parts.append(f"layers:last{self.last_layers}")
        return "+".join(parts) or "full"


def default_targets(kind: AdapterKind) -> tuple[str, ...]:
    """Return the layers that adapters of a kind stand beside where nobody says which."""
    return _IA3_TARGETS if kind == "ia3" else (ALL_LINEAR,)


def without_qlora(text: str) -> str:
    """Return words of `--train` with lora in the place of qlora, which is LoRA over weights of `QLORA_WEIGHTS`."""
    return re.sub(r"(^|\+)\s*qlora\b", r"\1lora", text.strip(), flags=re.IGNORECASE)


def parse_trainable(text: str) -> Trainable:
    """Return what the words of `--train` say trains.

    Raises `PlanError` for words that it does not know, with what would do.
    """
    values: dict[str, object] = {}
    for part in text.strip().lower().split("+"):
        name, _, rest = part.strip().partition(":")
        if name == "full" and not rest and "+" not in text:
            return Trainable()
        if name in ("lora", "dora", "rslora", "ia3"):
            if "adapter" in values:
                raise PlanError(f"--train {text} names adapters twice", hint="name one kind of adapter")
            values["adapter"] = _adapter(name, rest)
        elif name in _PARTS and not rest:
            values[_PARTS[name]] = True
        elif name == "layers" and rest.startswith("last") and rest[4:].isdigit() and int(rest[4:]):
            values["last_layers"] = int(rest[4:])
        else:
            raise PlanError(f"--train does not know {part.strip()!r}", hint=f"use {FORMS}")
    trainable = Trainable.model_validate(values)
    if trainable.text_model and trainable.replace(projector=False, tower=False) != Trainable(text_model=True):
        raise PlanError(f"--train {text}: all of the language model trains already", hint="use text alone, or leave it")
    return trainable


def _adapter(name: str, rest: str) -> AdapterSpec:
    kind: AdapterKind = "ia3" if name == "ia3" else "dora" if name == "dora" else "lora"
    values: dict[str, object] = {
        "kind": kind,
        "targets": default_targets(kind),
        "is_scaled_by_root": name == "rslora",
    }
    for field in filter(None, rest.split(",")):
        key, _, value = field.partition("=")
        if key in ("r", "rank") and value.isdigit() and kind != "ia3":
            if int(value) == 0:
                raise PlanError("a rank of 0 trains nothing", hint="use a rank of 1 or more: 8, 16 and 64 are usual")
            values["rank"] = int(value)
        elif key == "targets" and value:
            values["targets"] = tuple(filter(None, value.split("|")))
        elif key == "dropout" and _is_share(value):
            values["dropout"] = float(value)
        elif key == "alpha" and value:
            continue  # a factor, which costs nothing
        else:
            raise PlanError(
                f"--train {name} does not know {field!r}",
                hint=f"write {name}:r=16,targets=q|v,dropout=0.05; a dropout is below 1",
            )
    return AdapterSpec.model_validate(values)


def _is_share(text: str) -> bool:
    try:
        return 0 <= float(text) < 1
    except ValueError:
        return False


_SHORT_NAMES = {
    "q": ("q_proj", "query", "q_lin", "wq"),
    "k": ("k_proj", "key", "k_lin", "wk"),
    "v": ("v_proj", "value", "v_lin", "wv"),
    "o": ("o_proj", "out_proj", "out_lin", "wo"),
    "gate": ("gate_proj", "w1"),
    "up": ("up_proj", "w3", "fc1", "fc_in"),
    "down": ("down_proj", "w2", "fc2", "fc_out"),
    "qkv": ("qkv_proj", "query_key_value", "c_attn"),
}
"""Short names of layers, and what models call them."""


_ATTENTION_INPUTS = ("q", "k", "v", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")
"""Layers that `qkv` means where a model has none that makes all three: single ones, or those of latent attention."""


def module_name(target: str) -> str:
    """Return the name that Llama and its kin have for a short one: q_proj for q; others as they are."""
    return _SHORT_NAMES.get(target, (target,))[0]


def layer_matches(target: str, name: str) -> bool:
    """Return whether a target names a layer: by its last part, or the short name of that."""
    wanted = (target, *_SHORT_NAMES.get(target, ()))
    return target == ALL_LINEAR or any(name == one or name.endswith(f".{one}") for one in wanted)


def with_split_targets(trainable: Trainable, names: tuple[str, ...]) -> Trainable:
    """Return what trains with `qkv` as the layers of a model that has them apart, for tools that know no other names.

    `names` are the model's linear layers.
    """
    adapter = trainable.adapter
    if adapter is None or "qkv" not in adapter.targets or any(layer_matches("qkv", name) for name in names):
        return trainable
    apart = [one for one in _ATTENTION_INPUTS if any(layer_matches(one, name) for name in names)]
    spread = [one for target in adapter.targets for one in (apart if target == "qkv" else [target])]
    return trainable.replace(adapter=adapter.replace(targets=tuple(dict.fromkeys(spread)) or adapter.targets))


def targeted_layers(adapter: AdapterSpec, names: tuple[str, ...]) -> frozenset[str]:
    """Return which linear layers of `names` have an adapter.

    Raises `PlanError` for a target that no layer has, with near names.
    """
    found: set[str] = set()
    for target in adapter.targets:
        matching = {name for name in names if layer_matches(target, name)}
        if not matching and target == "qkv":
            matching = {name for name in names if any(layer_matches(one, name) for one in _ATTENTION_INPUTS)}
        if not matching:
            last = sorted({name.rpartition(".")[2] for name in names})
            near = get_close_matches(target, last, n=3, cutoff=0.4)
            raise PlanError(
                f"no linear layer is called {target!r}",
                hint=f"{'did you mean ' + ' or '.join(near) + '? ' if near else ''}the layers are {', '.join(last)}",
            )
        found |= matching
    return frozenset(found)
