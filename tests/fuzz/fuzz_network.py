"""The random models of `fuzz_grammar`, as modules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from fuzz_grammar import Recipe
from fuzz_parts import (
    COLUMNS,
    EXPERTS,
    IMAGE_NORMS,
    IMAGE_PARTS,
    ROWS,
    SEQUENCE_NORMS,
    SEQUENCE_PARTS,
    TOKENS,
    WIDTH,
    Attention,
    Mlp,
)
from torch import nn

FLOAT_INPUTS = 12
"""Numbers of each token where inputs are no ids."""


@dataclass
class ModelResult:
    """An output as libraries make them: attributes, some of them None."""

    logits: torch.Tensor
    loss: torch.Tensor | None = None


class Block(nn.Module):
    """Parts with a norm before each, and what the recipe's features add."""

    constant: torch.Tensor
    counter: torch.Tensor
    average: torch.Tensor
    load: torch.Tensor
    gate: nn.Module
    shared: nn.Module
    chooser: nn.Module

    def __init__(self, recipe: Recipe, index: int, shared: nn.Module) -> None:
        super().__init__()
        is_image = recipe.source == "image"
        known, norms = (IMAGE_PARTS, IMAGE_NORMS) if is_image else (SEQUENCE_PARTS, SEQUENCE_NORMS)
        names = recipe.parts
        if recipe.has("mixed blocks"):
            names = (recipe.parts[index % len(recipe.parts)],) if index % 3 else recipe.parts
        self.parts = nn.ModuleList(known[name]() for name in names)
        self.norms = nn.ModuleList(norms[recipe.norm]() for _ in names)
        self.has = recipe.has
        self.channels = 1 if is_image else -1
        self.tensors_over = (0, 2, 3) if is_image else (0, 1)
        if recipe.has("layer number"):
            self.layer_id = index
        if recipe.has("shared module"):
            self.shared = shared
        if recipe.has("dropout 0"):
            self.dropout = nn.Dropout(0.0)
        self._add_tensors(recipe)
        self._add_layers(recipe, index)

    def _add_tensors(self, recipe: Recipe) -> None:
        if recipe.has("constant buffer"):
            self.register_buffer("constant", torch.rand(WIDTH) + 0.5)
        if recipe.has("counter"):
            self.register_buffer("counter", torch.zeros((), dtype=torch.long))
        if recipe.has("average") or recipe.has("average read"):
            self.register_buffer("average", torch.zeros(WIDTH))
        if recipe.has("block scale"):
            self.scale = nn.Parameter(torch.tensor(0.8))
        if recipe.has("x0"):
            self.x0_share = nn.Parameter(torch.tensor(0.3))
        if recipe.has("correction") or recipe.has("router buffer"):
            self.chooser = nn.Linear(WIDTH, EXPERTS, bias=False)
            self.choices = nn.Parameter(torch.randn(EXPERTS, WIDTH) * 0.3)
        if recipe.has("correction"):
            self.correction = nn.Parameter(torch.randn(EXPERTS), requires_grad=False)
        if recipe.has("router buffer"):
            self.register_buffer("load", torch.zeros(EXPERTS))

    def _add_layers(self, recipe: Recipe, index: int) -> None:
        if recipe.has("frozen gate"):
            self.gate = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        if recipe.has("frozen encoder") or recipe.has("encoder"):
            self.cross = nn.Linear(WIDTH, WIDTH, bias=False)
        if recipe.has("value residual"):
            self.lift = nn.Linear(WIDTH, WIDTH, bias=False)
        if recipe.loss == "router loss":
            self.router = nn.Linear(WIDTH, EXPERTS)
        if recipe.has("frozen blocks") and index < 2:
            self.requires_grad_(False)

    def forward(
        self,
        hidden: torch.Tensor,
        value: torch.Tensor | None = None,
        *,
        x0: torch.Tensor | None = None,
        skip: torch.Tensor | None = None,
        context: torch.Tensor | None = None,
        table: torch.Tensor | None = None,
        mask: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
    ) -> Any:
        """Return hidden states, with a second tensor where the recipe has a value residual or a router's loss."""
        if x0 is not None:
            hidden = hidden + self.x0_share * x0
        if skip is not None:
            hidden = hidden + skip
        if context is not None:
            hidden = hidden + self.cross(context)
        for norm, part in zip(self.norms, self.parts, strict=True):
            normed = self._watched(norm(hidden))
            if isinstance(part, Attention) and attention_mask is not None:
                change = part(normed, attention_mask)
            else:
                change = part(normed)
            if table is not None:
                change = change * (1 + table)
            if mask is not None:
                change = change * mask.to(change.dtype)[..., None]
            hidden = hidden + self._scaled(change)
        hidden = self._with_choices(hidden)
        if self.has("value residual"):
            value = self.lift(hidden) if value is None else value + 0.5 * self.lift(hidden)
            return hidden + torch.tanh(value), value
        return hidden

    def _scaled(self, change: torch.Tensor) -> torch.Tensor:
        if self.has("block scale"):
            change = change * self.scale
        if self.has("shared module"):
            change = change + self._by_channel(self.shared, change)
        if self.has("dropout 0"):
            change = self.dropout(change)
        if self.has("detached copy"):
            change = change + 0.1 * change.detach()
        if self.has("frozen gate"):
            with torch.no_grad():
                gate = torch.sigmoid(self._by_channel(self.gate, change))
            change = change * gate
        return change

    def _by_channel(self, layer: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        moved: torch.Tensor = layer(hidden.movedim(self.channels, -1)).movedim(-1, self.channels)
        return moved

    def _watched(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.has("counter") and self.training:
            self.counter += 1
        if self.has("average read"):
            hidden = hidden - self._as_channels(self.average)
        if (self.has("average read") or self.has("average")) and self.training:
            with torch.no_grad():
                self.average.mul_(0.9).add_(0.1 * hidden.mean(self.tensors_over))
        if self.has("constant buffer"):
            hidden = hidden * self._as_channels(self.constant)
        return hidden

    def _as_channels(self, values: torch.Tensor) -> torch.Tensor:
        return values if self.channels == -1 else values[:, None, None]

    def _with_choices(self, hidden: torch.Tensor) -> torch.Tensor:
        if not (self.has("correction") or self.has("router buffer")):
            return hidden
        scores: torch.Tensor = self.chooser(hidden).sigmoid()
        ranked = scores.detach()
        if self.has("correction"):
            ranked = ranked + self.correction
        if self.has("router buffer"):
            ranked = ranked + self.load
        chosen = ranked.argmax(dim=-1)
        if self.has("router buffer") and self.training:
            with torch.no_grad():
                counts = F.one_hot(chosen, EXPERTS).flatten(0, -2).sum(dim=0).to(self.load.dtype)
                self.load += 0.01 * torch.sign(counts.mean() - counts)
        weight = scores.gather(-1, chosen[..., None])
        return hidden + self.choices[chosen] * weight


class RouterBlock(Block):
    """A block that returns the logits of its router beside the hidden states, for a loss on their balance."""

    def forward(self, hidden: torch.Tensor, value: torch.Tensor | None = None, **sides: Any) -> Any:
        """Return hidden states and the router's logits."""
        hidden = super().forward(hidden, value, **sides)
        return hidden, self.router(hidden)


class TowerBlock(nn.Module):
    """A block of another tower, smaller than those of the main stack."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the hidden states."""
        result: torch.Tensor = hidden + F.gelu(self.layer(self.norm(hidden)))
        return result


def sinusoids() -> torch.Tensor:
    """Return positions as the first transformers had them."""
    angles = torch.arange(TOKENS)[:, None] / 100 ** (torch.arange(0, WIDTH, 2) / WIDTH)
    return torch.cat([angles.sin(), angles.cos()], dim=-1)


class Network(nn.Module):
    """An entry, blocks and a head, as the recipe says."""

    entry: nn.Module
    sinusoids: torch.Tensor
    frozen_encoder: nn.Module
    encoder: nn.Module

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.recipe = recipe
        self.has = recipe.has
        if recipe.source == "tokens":
            self.embedding = nn.Embedding(recipe.vocabulary, WIDTH)
        elif recipe.source == "floats":
            self.entry = nn.Linear(FLOAT_INPUTS, WIDTH)
        else:
            self.entry = nn.Conv2d(3, WIDTH, 2, stride=2)
        self._add_entries(recipe)
        shared = nn.Linear(WIDTH, WIDTH)
        kind = RouterBlock if recipe.loss == "router loss" else Block
        self.blocks = nn.ModuleList(kind(recipe, index, shared) for index in range(recipe.num_blocks))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, recipe.vocabulary, bias=recipe.seed % 2 == 0 and not recipe.has("tied"))
        if recipe.has("tied"):
            self.head.weight = self.embedding.weight
        if recipe.has("frozen embedding"):
            self.embedding.requires_grad_(False)

    def _add_entries(self, recipe: Recipe) -> None:
        if recipe.has("positions"):
            self.positions = nn.Parameter(torch.randn(TOKENS, WIDTH) * 0.3)
        if recipe.has("sinusoids"):
            self.register_buffer("sinusoids", sinusoids(), persistent=False)
        if recipe.has("buckets"):
            self.buckets = nn.Embedding(4, WIDTH)
        if recipe.has("extra ids"):
            self.kinds = nn.Embedding(3, WIDTH)
        if recipe.has("table"):
            self.table = nn.Embedding(TOKENS, WIDTH)
        if recipe.has("flag"):
            self.sometimes = nn.Linear(WIDTH, WIDTH)
        if recipe.has("unused parameter"):
            self.unused = nn.Linear(WIDTH, 4)
        if recipe.has("prior"):
            self.prior = nn.Parameter(torch.randn(recipe.vocabulary), requires_grad=False)
        if recipe.has("root scale"):
            self.root_scale = nn.Parameter(torch.tensor(1.2))
        self._add_towers(recipe)

    def _add_towers(self, recipe: Recipe) -> None:
        if recipe.has("second stack"):
            self.first_stack = nn.Sequential(TowerBlock(), TowerBlock())
        for name in ("frozen encoder", "encoder"):
            if recipe.has(name):
                tower = nn.Sequential(nn.Linear(WIDTH, WIDTH), TowerBlock(), TowerBlock(), Mlp())
                self.add_module(name.replace(" ", "_"), tower.requires_grad_(name == "encoder"))

    def forward(
        self,
        inputs: torch.Tensor,
        mask: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        kinds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        flag: bool = False,
    ) -> Any:
        """Return logits, in the form that the recipe says."""
        hidden = self._enter(inputs, kinds, flag)
        sides = self._sides(hidden, mask, attention_mask)
        value, routed = None, []
        kept: list[torch.Tensor] = []
        for index, block in enumerate(self.blocks):
            if self.has("u-net") and index >= (len(self.blocks) + 1) // 2:
                sides["skip"] = kept.pop()
            made = block(hidden, value, **sides) if self.has("value residual") else block(hidden, **sides)
            hidden = made[0] if isinstance(made, tuple) else made
            if self.has("value residual"):
                value = made[1]
            if self.recipe.loss == "router loss":
                routed.append(made[1])
            if self.has("u-net") and index < len(self.blocks) // 2:
                kept.append(hidden)
        return self._leave(hidden, routed, labels)

    def _enter(self, inputs: torch.Tensor, kinds: torch.Tensor | None, flag: bool) -> torch.Tensor:
        hidden: torch.Tensor = self.embedding(inputs) if self.recipe.source == "tokens" else self.entry(inputs)
        if self.has("positions"):
            hidden = hidden + self.positions[: inputs.shape[1]]
        if self.has("sinusoids"):
            hidden = hidden + self.sinusoids[: inputs.shape[1]]
        if self.has("buckets"):
            hidden = hidden + self.buckets(torch.bucketize(inputs, torch.tensor([5, 11, 17], device=inputs.device)))
        if kinds is not None and self.has("extra ids"):
            hidden = hidden + self.kinds(kinds)
        if flag:
            hidden = hidden + self.sometimes(hidden)
        if self.has("second stack"):
            hidden = self.first_stack(hidden)
        return hidden

    def _sides(
        self, hidden: torch.Tensor, mask: torch.Tensor | None, attention_mask: torch.Tensor | None
    ) -> dict[str, torch.Tensor]:
        sides: dict[str, torch.Tensor] = {}
        if self.has("x0"):
            sides["x0"] = hidden
        if self.has("table"):
            sides["table"] = self.table(torch.arange(hidden.shape[1], device=hidden.device))
        if self.has("frozen encoder"):
            with torch.no_grad():
                sides["context"] = self.frozen_encoder(hidden)
        if self.has("encoder"):
            sides["context"] = self.encoder(hidden) + sides.get("context", 0.0)
        if mask is not None:
            sides["mask"] = mask
        if attention_mask is not None:
            sides["attention_mask"] = attention_mask
        return sides

    def _leave(self, hidden: torch.Tensor, routed: list[torch.Tensor], labels: torch.Tensor | None) -> Any:
        if self.recipe.source == "image":
            hidden = hidden.flatten(2).transpose(1, 2)
        hidden = self.norm(hidden)
        if self.recipe.loss in ("classes", "class sum", "contrastive"):
            hidden = hidden.mean(dim=1)
        logits: torch.Tensor = self.head(hidden)
        if self.has("prior"):
            logits = logits + self.prior.detach()
        if self.has("root scale"):
            logits = logits * self.root_scale
        if self.has("tuple output"):
            return logits, hidden
        if self.has("dict output"):
            return {"logits": logits, "aux": balance_loss(routed)} if routed else {"logits": logits}
        if self.has("object output"):
            loss = None
            if labels is not None:
                loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
            return ModelResult(logits=logits, loss=loss)
        return logits


def balance_loss(routed: list[torch.Tensor]) -> torch.Tensor:
    """Return the auxiliary loss of Switch Transformers (eq. 4): experts' shares of tokens times their probabilities."""
    losses = []
    for logits in routed:
        probabilities = logits.softmax(dim=-1)
        chosen = F.one_hot(logits.argmax(dim=-1), EXPERTS).to(logits.dtype)
        over = tuple(range(logits.ndim - 1))
        losses.append(EXPERTS * (chosen.mean(over) * probabilities.mean(over)).sum())
    return torch.stack(losses).sum()


def image_shape() -> tuple[int, int, int]:
    """Return the shape of an image, which the entry makes `TOKENS` pixels of."""
    return 3, 2 * ROWS, 2 * COLUMNS
