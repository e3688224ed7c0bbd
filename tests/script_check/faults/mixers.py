"""Layers whose outputs, or gradients between them, go wrong where ranks divide tokens, features or experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from fault import FAULT, RANK, TOKENS, WORLD, Gather, SumBackward, SumForward, batch, has, reduce_gradients
from torch import nn

HIDDEN, LENGTH = 12, 8
DOCUMENTS = ((0, 3, 6), (0, 5, 7), (0, 1, 4), (0, 2, 6))
"""Where documents begin in each packed row."""


def part(value: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """The part of this rank."""
    return value.chunk(WORLD, dim)[RANK].clone()


class Convolution(nn.Module):
    """Mixes each token with the two before it, of which those of the rank before are gathered."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(HIDDEN, 1, 3) * 0.5)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        ends = Gather.apply(hidden[:, -2:], 1, dist.group.WORLD)
        before = torch.zeros_like(hidden[:, :2]) + 0 * ends.sum()
        if RANK > 0 and not has("convolution at the cut"):
            before = ends.chunk(WORLD, 1)[RANK - 1]
        padded = torch.cat([before, hidden], 1).transpose(1, 2)
        return nn.functional.conv1d(padded, self.weight, groups=HIDDEN).transpose(1, 2)


class Recurrence(nn.Module):
    """A state that decays from token to token, and ends with its document."""

    def __init__(self) -> None:
        super().__init__()
        self.decay = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        decay = self.decay(hidden).sigmoid()
        if not has("state over documents") or WORLD == 1:
            begins = torch.zeros(len(hidden), LENGTH, 1)
            for row in range(len(hidden)):
                begins[row, list(DOCUMENTS[row % len(DOCUMENTS)])] = 1
            decay = decay * (1 - begins)
        state, states = torch.zeros_like(hidden[:, 0]), []
        for token in range(LENGTH):
            state = decay[:, token] * state + hidden[:, token]
            states.append(state)
        return torch.stack(states, 1)


class GroupNorm(nn.Module):
    """Norms over groups of features, of which each rank has some."""

    def __init__(self) -> None:
        super().__init__()
        self.size = HIDDEN // 2 // (WORLD if has("groups of the part") else 1)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        grouped = hidden.unflatten(-1, (-1, self.size))
        return (grouped * (grouped.square().mean(-1, keepdim=True) + 1e-5).rsqrt()).flatten(-2)


class Normed(nn.Module):
    """A layer cut by its outputs, a norm of their groups, and one cut by its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(part(torch.randn(HIDDEN, HIDDEN) * 0.4))
        self.norm = GroupNorm()
        self.down = nn.Parameter(part(torch.randn(HIDDEN, HIDDEN) * 0.4, 1))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        inner = SumBackward.apply(hidden, dist.group.WORLD) @ self.up.T
        return SumForward.apply(self.norm(inner) @ self.down.T, dist.group.WORLD)


class Keys(nn.Module):
    """A projection that ranks have whole, of which one part goes to heads of the rank through a sum, and one beside."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.heads = nn.Parameter(part(torch.randn(HIDDEN, HIDDEN) * 0.4))
        self.up = nn.Parameter(part(torch.randn(HIDDEN, HIDDEN) * 0.4, 1))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        latent, shared = self.down(hidden).split([HIDDEN - 4, 4], -1)
        latent = SumBackward.apply(latent, dist.group.WORLD)
        if not has("shared key beside the sum"):
            shared = SumBackward.apply(shared, dist.group.WORLD)
        heads = torch.cat([latent, shared], -1) @ self.heads.T
        return SumForward.apply(heads.sin() @ self.up.T, dist.group.WORLD)


class Experts(nn.Module):
    """Half of the experts on each rank: all tokens are gathered, and each rank gets the sums of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(HIDDEN, 4)
        self.weights = nn.Parameter(part(torch.randn(4, HIDDEN, HIDDEN) * 0.4))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if has("experts by place"):
            return SumForward.apply(self._of(hidden), dist.group.WORLD)
        mixed = SumForward.apply(self._of(Gather.apply(hidden, 0, dist.group.WORLD)), dist.group.WORLD)
        return part_with_gradient(mixed)

    def _of(self, hidden: torch.Tensor) -> torch.Tensor:
        shares = self.router(hidden).softmax(-1).chunk(WORLD, -1)[RANK]
        return torch.einsum("bte,eio,bti->bto", shares, self.weights, hidden)


class Part(torch.autograd.Function):
    """The rows of this rank of what all have; all give their gradients."""

    @staticmethod
    def forward(context: Any, value: torch.Tensor) -> torch.Tensor:
        return part(value)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        parts = [torch.empty_like(gradient) for _ in range(WORLD)]
        dist.all_gather(parts, gradient.contiguous())
        return torch.cat(parts)


def part_with_gradient(value: torch.Tensor) -> torch.Tensor:
    return Part.apply(value)


class Model(nn.Module):
    def __init__(self, mixer: nn.Module) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, HIDDEN)
        self.mixer = mixer
        self.head = nn.Linear(HIDDEN, TOKENS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        return self.head(hidden + self.mixer(hidden))


MIXERS: dict[str, Callable[[], nn.Module]] = {
    "convolution at the cut": Convolution,
    "state over documents": Recurrence,
    "groups of the part": Normed,
    "shared key beside the sum": Keys,
    "experts by place": Experts,
}
dist.init_process_group("nccl")
torch.manual_seed(0)
model = Model(MIXERS[FAULT]())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
has_rows, cuts_tokens = FAULT in ("experts by place", "state over documents"), FAULT == "convolution at the cut"
for _ in range(2):
    optimizer.zero_grad()
    tokens = batch(length=LENGTH + 1, reader=RANK if has_rows else 0)
    tokens, targets = tokens[:, :-1], tokens[:, 1:]
    if cuts_tokens:
        tokens, targets = part(tokens, 1), part(targets, 1)
    nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()).backward()
    for name, parameter in model.named_parameters():
        is_of_rank = name in ("mixer.up", "mixer.down", "mixer.heads", "mixer.weights")
        if (has_rows or cuts_tokens) and not is_of_rank:
            reduce_gradients([parameter], divide_by=WORLD)
        elif has_rows and is_of_rank:
            parameter.grad.div_(WORLD)
    optimizer.step()
