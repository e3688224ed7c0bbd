"""Embeddings and heads split over `tp` by vocabulary: every rank has the rows of some tokens.

A rank looks up the tokens that it has, and the ranks sum what they found. The head is a column layer, whose logits the
model's own last steps and the loss meet as `logits` says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F  # noqa: N812  # the name that all of PyTorch uses
from torch import nn

from paraplan.runtime.shards.group import TensorGroup, reduce_from_region
from paraplan.runtime.shards.overlap import enter_region, late_linear
from paraplan.runtime.shards.sharding import Sharding
from paraplan.runtime.split.layers import has_own_weight
from paraplan.runtime.split.logits import VocabularyLogits
from paraplan.runtime.structure.copies import copy_of
from paraplan.runtime.structure.ends import layers_read_elsewhere
from paraplan.runtime.structure.forwards import DOES_NOT_RUN, set_forward
from paraplan.runtime.structure.model_structure import ModelStructure

_TOLERANCE = 1e-6


@dataclass(frozen=True)
class VocabularySplit:
    """The embeddings and heads that are split, by their names in the model, and why others of that size are not."""

    size: int = 0
    embeddings: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()
    whole: Mapping[str, str] = field(default_factory=dict)


def find_vocabulary_split(structure: ModelStructure, *, size: int) -> VocabularySplit:
    """Return how the embedding and the head of a model are split over `size` ranks.

    A head is a linear layer outside of the blocks, and of those of other towers, with as many outputs as an embedding
    there has rows. Where `size` does not divide them the last rank has fewer rows; nothing is padded.
    """
    meta_model = structure.meta_model
    blocks = tuple(f"{block}." for block in structure.stack.names)
    outside = {
        name: module
        for name, module in meta_model.named_modules()
        if not f"{name}.".startswith(blocks) and not any(part.isdigit() for part in name.split(".")[:-1])
    }
    embeddings = {name: module for name, module in outside.items() if isinstance(module, nn.Embedding)}
    heads = {name: module for name, module in outside.items() if isinstance(module, nn.Linear)}
    rows = {module.num_embeddings for module in embeddings.values()}
    vocabulary = max((module.out_features for module in heads.values() if module.out_features in rows), default=0)
    chosen = [name for name, module in embeddings.items() if module.num_embeddings == vocabulary]
    ends = [name for name, module in heads.items() if module.out_features == vocabulary]
    if not vocabulary:
        return VocabularySplit()
    reason = (
        f"tp={size} leaves ranks without a part of a vocabulary of {vocabulary}"
        if Sharding(dim=0, segments=(vocabulary,), size=size).local_length(size - 1) < 1
        else _computed_reason(meta_model, [*chosen, *ends])
        or _shared_reason(meta_model, {*chosen, *ends})
        or _read_reason(structure, [*chosen, *ends])
        or next(filter(None, (_lookup_reason(structure.model.get_submodule(name), size) for name in chosen)), None)
    )
    if reason is not None:
        return VocabularySplit(whole=dict.fromkeys([*chosen, *ends], reason))
    return VocabularySplit(size=vocabulary, embeddings=tuple(chosen), heads=tuple(ends))


def apply_vocabulary_split(
    model: nn.Module, split: VocabularySplit, group: TensorGroup, logits: VocabularyLogits
) -> dict[str, Sharding]:
    """Leave this rank's rows in the embeddings and heads that `model`, or a stage of it, holds; return their cuts."""
    held = {name: module for name, module in model.named_modules(remove_duplicate=False) if name}
    sharding = Sharding(dim=0, segments=(split.size,), size=group.size)
    parts: dict[int, nn.Parameter] = {}
    for name in (*split.embeddings, *split.heads):
        module = held.get(name)
        if isinstance(module, (nn.Embedding, nn.Linear)):
            for whole in module.parameters(recurse=False):
                if id(whole) not in parts:
                    part = sharding.part(whole.detach(), group.index).clone(memory_format=torch.contiguous_format)
                    parts[id(whole)] = nn.Parameter(part, requires_grad=whole.requires_grad)
    for module in held.values():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if id(parameter) in parts:
                setattr(module, name, parts[id(parameter)])
    for name in split.embeddings:
        module = held.get(name)
        if isinstance(module, nn.Embedding):
            _look_up_own(module, group, sharding)
    for name in split.heads:
        module = held.get(name)
        if isinstance(module, nn.Linear):
            set_forward(module, _split_head(module, sharding, group, logits))
    own = {id(part) for part in parts.values()}
    return {name: sharding for name, parameter in model.named_parameters() if id(parameter) in own}


def _split_head(
    module: nn.Linear, sharding: Sharding, group: TensorGroup, logits: VocabularyLogits
) -> Callable[[torch.Tensor], torch.Tensor]:
    def head(given: torch.Tensor) -> torch.Tensor:
        entered, late = enter_region(given, None, module, group, for_products=True)
        if late is None:
            local = F.linear(entered, module.weight, module.bias)
        else:
            local = late_linear(entered, module.weight.detach(), module.bias, late)
        return logits.made(local, sharding.at(local.ndim - 1))

    return head


def _look_up_own(module: nn.Embedding, group: TensorGroup, sharding: Sharding) -> None:
    """Make `module`, which holds this rank's rows, look up those and sum what all ranks found."""
    inner: Callable[[torch.Tensor], torch.Tensor] = module.forward
    start, _, count = sharding.pieces(group.index)[0]
    if module.padding_idx is not None:  # its gradient is 0
        is_own = start <= module.padding_idx < start + count
        module.padding_idx = module.padding_idx - start if is_own else None

    def forward(tokens: torch.Tensor) -> torch.Tensor:
        own = tokens - start
        is_other = (own < 0) | (own >= count)
        found = inner(own.masked_fill(is_other, 0)).masked_fill(is_other[..., None], 0.0)
        return reduce_from_region(found, group)

    set_forward(module, forward)


def _computed_reason(meta_model: nn.Module, chosen: list[str]) -> str | None:
    computed = [name for name in chosen if not has_own_weight(meta_model.get_submodule(name))]
    return f"the weight of {computed[0]} is computed from other parameters" if computed else None


def _shared_reason(meta_model: nn.Module, chosen: set[str]) -> str | None:
    """Return why a parameter of the chosen layers cannot be split: a layer that is not chosen computes with it."""
    split = {id(parameter) for name in chosen for parameter in meta_model.get_submodule(name).parameters()}
    for name, module in meta_model.named_modules(remove_duplicate=False):
        is_leaf = not any(True for _ in module.children())
        shares = any(id(parameter) in split for parameter in module.parameters(recurse=False))
        if shares and is_leaf and name not in chosen:
            return f"{name} uses its parameters too"
    return None


def _read_reason(structure: ModelStructure, chosen: list[str]) -> str | None:
    """Return why parameters of the chosen layers cannot be split: other code computes with them too."""
    if layers_read_elsewhere(structure, chosen):
        return "the model computes with its weight outside of its forward pass"
    return None


def _lookup_reason(module: nn.Module, size: int) -> str | None:
    """Return why an embedding cannot be looked up in parts, None where it can."""
    assert isinstance(module, nn.Embedding)
    if module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
        return "its lookup changes with the rows that it has"
    if type(module).forward is nn.Embedding.forward or module.weight.is_meta:
        return None
    # Code of its own: compared with itself whole, without other ranks.
    tokens = torch.arange(module.num_embeddings, device=module.weight.device)[None]
    found = torch.zeros(())
    with torch.no_grad():
        for index in range(size):
            part, group = copy_of(module), TensorGroup(size=size, index=index, handle=None)
            sharding = Sharding(dim=0, segments=(module.num_embeddings,), size=size)
            part.weight = nn.Parameter(sharding.part(module.weight, index).contiguous())
            _look_up_own(part, group, sharding)
            try:
                found, expected = found + part(tokens), module(tokens)
            except DOES_NOT_RUN as failure:
                return f"it does not look up rows for numbers of tokens: {str(failure).splitlines()[0]}"
    error = (found - expected).abs().max() / expected.abs().max().clamp(min=1e-30)
    return None if error <= _TOLERANCE else "its lookup is more than one of rows"
