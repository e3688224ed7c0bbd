"""Towers beside a language model: encoders of pictures and sound, and the projectors from their features to tokens.

A tower's weights stand with the embedding: the first pipeline stage has them, and tensor parallelism leaves them whole,
as transformers' plans and Megatron-Bridge do. Its work follows from how many tokens of pictures or sound a sequence
has, which is asked for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from paraplan.errors import PlanError
from paraplan.model.attention import AttentionStyle, Heads, attention
from paraplan.model.decoder import block_from_part
from paraplan.model.norm import NormKind, norm
from paraplan.model.part import Part
from paraplan.model.spec import (
    BlockSpec,
    Matmul,
    ModelSpec,
    Parameter,
    SavedTensor,
    TowerAttention,
    TowerKind,
    TowerSpec,
)

TOWER, PROJECTOR = "tower.", "projector."
"""How the names of their parameters begin."""


@dataclass(frozen=True)
class TowerShape:
    """One tower, every choice resolved from its config. Parts count what one patch needs.

    `windows` are layers that attend to so many patches alone, as (patches, layers); the others attend to a whole
    picture. `patches_per_token` patches become one token; `picture` is the number of patches of one picture, None
    where pictures have any size.
    """

    heads: Heads
    depth: int
    attention: AttentionStyle
    norm_kind: NormKind
    norms: tuple[str, ...]
    mlp: Part
    patches: Part
    projector: Part
    patches_per_token: float
    picture: int | None = None
    windows: tuple[int, int] | None = None
    after: Part = field(default_factory=Part)
    kind: TowerKind = "image"


def with_tower(model: ModelSpec, shape: TowerShape) -> ModelSpec:
    """Return the model with a tower: its weights beside the embedding's, its work for each patch apart."""
    layer = attention(shape.heads, shape.attention) + shape.mlp
    own = "" if shape.kind == "image" else f"{shape.kind}."
    for name in shape.norms:
        layer += norm(name, shape.norm_kind, shape.heads.hidden)
    tower, projector = f"{TOWER}{own}", f"{PROJECTOR}{own}"
    parameters = [
        *_parameters(shape.patches, tower),
        *(one for index in range(shape.depth) for one in _parameters(layer, f"{tower}layers.{index}.")),
        *_parameters(shape.after, tower),
        *_parameters(shape.projector, projector),
    ]
    embedding = model.embedding.replace(parameters=(*model.embedding.parameters, *parameters))
    count = shape.depth
    windows: tuple[TowerAttention, ...] = ()
    if shape.windows is not None:
        reach, windowed = shape.windows
        count -= windowed
        windows = (TowerAttention(core=shape.heads.attention(is_causal=False, window=reach), layers=windowed),)
    work = TowerSpec(
        kind=shape.kind,
        tower=_work("tower", shape.patches, *[layer] * shape.depth, shape.after),
        projector=_work("projector", shape.projector),
        attention=(TowerAttention(core=shape.heads.attention(is_causal=False), layers=count), *windows),
        layer_input_elements=float(shape.depth * shape.heads.hidden),
        patches_per_token=shape.patches_per_token,
        picture_patches=shape.picture,
    )
    return model.replace(embedding=embedding, towers=(*model.towers, work))


def with_media(model: ModelSpec, tokens: Mapping[TowerKind, int], seq_length: int) -> ModelSpec:
    """Return the model with the work of its towers for sequences that hold so many tokens of pictures or sound.

    Raises `PlanError` where it has no such tower, or a sequence not so many tokens.
    """
    works = {tower.kind: tower for tower in model.towers}
    blocks: list[BlockSpec] = []
    for kind, count in tokens.items():
        if not count:
            continue
        if kind not in works:
            kinds = " and ".join(f"--{one}-tokens" for one in works)
            raise PlanError(
                f"--{kind}-tokens {count}: {model.name} has no tower for that, or none that is read natively",
                hint=f"it has one for {kinds}" if kinds else f"leave out --{kind}-tokens",
            )
        if count > seq_length:
            raise PlanError(
                f"--{kind}-tokens {count} is more than the {seq_length} tokens of a sequence, of which they are a part",
                hint=f"use at most {seq_length}, or a longer --seq-len",
            )
        blocks += _media(works[kind], count, seq_length)
    return model.replace(media=tuple(blocks))


def is_of_tower(parameter: Parameter) -> bool:
    """Whether a parameter is one of a tower or of a projector behind it."""
    return parameter.name.startswith((TOWER, PROJECTOR))


def tower_of(model: ModelSpec) -> BlockSpec:
    """Return the weights of all towers and projectors as a block, without any where there is no tower."""
    return BlockSpec(kind="tower", parameters=tuple(one for one in model.embedding.parameters if is_of_tower(one)))


def _media(work: TowerSpec, tokens: int, seq_length: int) -> tuple[BlockSpec, BlockSpec]:
    """Return the work of one tower and of its projector, of a token of a sequence on average."""
    patches = tokens * work.patches_per_token
    share = patches / seq_length
    picture = work.picture_patches or patches
    cores: list[Matmul] = []
    reaches = [min(each.core.window or picture, picture) for each in work.attention]
    for each, reach in zip(work.attention, (max(1, round(one)) for one in reaches), strict=True):
        rows = each.core.num_heads * each.layers * share
        for name, k, n in (("scores", each.core.qk_head_dim, reach), ("values", reach, each.core.v_head_dim)):
            if rows:
                cores.append(Matmul(name=f"attention {name}", k=k, n=n, rows_per_token=rows, of_activations=True))
    inputs = SavedTensor(role="layer_inputs", elements_per_token=work.layer_input_elements * share)
    layers = sum(each.layers for each in work.attention)
    mean_reach = sum(each.layers * reach for each, reach in zip(work.attention, reaches, strict=True)) / layers
    tower, projector = (_scaled(block, share, mean_reach) for block in (work.tower, work.projector))
    tower = tower.replace(
        matmuls=(*tower.matmuls, *cores),
        saved=(*tower.saved, inputs),
        saved_fused=(*tower.saved_fused, inputs),
    )
    return tower, projector


def _scaled(block: BlockSpec, share: float, mean_reach: float) -> BlockSpec:
    """Return what a block does of a token on average, where a patch attends to so many in a layer on average."""

    def saved(tensors: Iterable[SavedTensor]) -> Iterator[SavedTensor]:
        for one in tensors:
            elements = one.elements_per_token + one.elements_per_token_pair * mean_reach
            yield one.replace(elements_per_token=elements * share, elements_per_token_pair=0.0)

    return block.replace(
        matmuls=tuple(one.replace(rows_per_token=one.rows_per_token * share) for one in block.matmuls),
        saved=tuple(saved(block.saved)),
        saved_fused=tuple(saved(block.saved_fused)),
    )


def _parameters(part: Part, prefix: str) -> list[Parameter]:
    """Return the parameters of a part under their names in the model, as every rank has all of them."""
    return [one.replace(name=f"{prefix}{one.name}", tp_dim=None) for one in part.parameters]


def _work(kind: str, *parts: Part) -> BlockSpec:
    """Return what parts do one after another on every rank, products of equal shapes and tensors of one kind together.

    A part that comes again, as layers do, is looked at once.
    """
    counts = Counter(map(id, parts))
    once = [(part, counts[number]) for number, part in {id(part): part for part in parts}.items()]
    rows: dict[tuple[int, int], Matmul] = {}
    for part, count in once:
        for one in part.matmuls:
            key = (one.k, one.n)
            before = rows[key] if key in rows else one.replace(name=f"{kind}.{one.name}", rows_per_token=0.0)
            rows_per_token = before.rows_per_token + count * one.rows_per_token
            rows[key] = before.replace(rows_per_token=rows_per_token, split="none")
    merged = Part(
        matmuls=tuple(rows.values()),
        saved=tuple(_merged((one, count) for part, count in once for one in part.saved)),
        saved_fused=tuple(_merged((one, count) for part, count in once for one in part.saved_fused)),
    )
    return block_from_part(kind, merged)


def _merged(tensors: Iterable[tuple[SavedTensor, int]]) -> Iterator[SavedTensor]:
    kinds: dict[SavedTensor, tuple[float, float]] = {}
    for one, count in tensors:
        key = one.replace(elements_per_token=0.0, elements_per_token_pair=0.0, weights_of=None, split="none")
        each, pairs = kinds.get(key, (0.0, 0.0))
        kinds[key] = (each + count * one.elements_per_token, pairs + count * one.elements_per_token_pair)
    for key, (each, pairs) in kinds.items():
        yield key.replace(elements_per_token=each, elements_per_token_pair=pairs)
