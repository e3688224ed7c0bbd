"""Tensor parallelism by hand, two ranks a model, data parallel beside it."""

from __future__ import annotations

import torch
import torch.distributed as dist
from fault import FAULT, TOKENS, WORLD, SumBackward, SumForward, batch, has, reduce_gradients
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

HEADS, WIDTH, HIDDEN = 2, 4, 8
dist.init_process_group("nccl")
size = min(2, WORLD)
mesh = init_device_mesh("cpu", (WORLD // size, size), mesh_dim_names=("dp", "tp"))
dp, tp = mesh.get_group("dp"), mesh.get_group("tp")
size, place = dist.get_world_size(tp), dist.get_rank(tp)
IS_SEQUENCE = FAULT == "norm of a part of the tokens"


def mine(whole: torch.Tensor, dim: int = 0) -> nn.Parameter:
    return nn.Parameter(whole.chunk(size, dim)[place].clone())


def column(value: torch.Tensor) -> torch.Tensor:
    """What enters a layer that is split by columns; its gradient comes from all of them."""
    return value if has("exchange left out") else SumBackward.apply(value, tp)


class Attention(nn.Module):
    """Heads are divided; all share one key and one value."""

    def __init__(self) -> None:
        super().__init__()
        query, key = torch.randn(HEADS * WIDTH, HIDDEN) / 3, torch.randn(2 * WIDTH, HIDDEN) / 3
        self.query = mine(query)
        self.key_value = nn.Parameter(key)
        self.output = mine(torch.randn(HIDDEN, HEADS * WIDTH) / 3, 1)
        self.bias = nn.Parameter(torch.randn(HIDDEN))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = column(hidden)
        shared = self.key_value if FAULT == "one key for all heads" else SumBackward.apply(self.key_value, tp)
        query = (hidden @ self.query.T).unflatten(-1, (-1, WIDTH)).transpose(1, 2)
        key, value = ((hidden @ shared.T)[:, None]).chunk(2, -1)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        part = mixed.transpose(1, 2).flatten(2) @ self.output.T
        if has("bias on every rank"):
            return SumForward.apply(part + self.bias, tp)
        if has("bias divided"):
            return SumForward.apply(part + self.bias / size, tp)
        return SumForward.apply(part, tp) + self.bias


class Gated(nn.Module):
    """Gate and input are one weight, as checkpoints have it."""

    def __init__(self) -> None:
        super().__init__()
        both = torch.randn(2, 8, HIDDEN) / 3
        self.both = mine(both.flatten(0, 1)) if FAULT == "fused in halves" else mine(both, 1)
        self.down = mine(torch.randn(HIDDEN, 8) / 3, 1)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        gate, up = (column(hidden) @ self.both.flatten(0, -2).T).chunk(2, -1)
        if FAULT == "fused in halves" and not has("fused in halves"):
            whole = SumForward.apply(nn.functional.pad(column(hidden) @ self.both.T, PADS), tp)
            gate, up = (one.chunk(size, -1)[place] for one in SumBackward.apply(whole, tp).chunk(2, -1))
        return SumForward.apply((nn.functional.silu(gate) * up) @ self.down.T, tp)


PADS = (16 // size * place, 16 - 16 // size * (place + 1))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = mine(torch.randn(TOKENS, HIDDEN))
        self.attention, self.gated = Attention(), Gated()
        self.norm = nn.LayerNorm(HIDDEN)
        self.head = mine(torch.randn(TOKENS, HIDDEN) / 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        local = tokens - place * len(self.embedding)
        outside = (local < 0) | (local >= len(self.embedding))
        hidden = nn.functional.embedding(local.clamp(0, len(self.embedding) - 1), self.embedding)
        if not has("rows of others"):
            hidden = hidden.masked_fill(outside[..., None], 0.0)
        hidden = SumForward.apply(hidden, tp)
        hidden = hidden + self.attention(hidden)
        hidden = hidden + self.gated(hidden)
        if IS_SEQUENCE:  # each rank norms its own tokens, and the next layer gathers them
            part = self.norm(SumBackward.apply(hidden, tp).chunk(size, 1)[place])
            length = part.shape[1]
            hidden = SumForward.apply(nn.functional.pad(part, (0, 0, length * place, length * (size - place - 1))), tp)
        else:
            hidden = self.norm(hidden)
        return SumBackward.apply(hidden, tp) @ self.head.T


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Cross entropy over a vocabulary that is divided, with smoothed labels where the fault has to do with them."""
    local = labels - place * logits.shape[-1]
    inside = (local >= 0) & (local < logits.shape[-1])
    total = SumForward.apply(logits.exp().sum(-1), tp).log()
    chosen = logits.gather(-1, local.clamp(0, logits.shape[-1] - 1)[..., None])[..., 0]
    losses = total - SumForward.apply(chosen.where(inside, torch.zeros(())), tp)
    if has("gradient of the owner alone"):
        losses = SumForward.apply((total - chosen).where(inside, torch.zeros(())), tp)
    if FAULT == "labels smoothed over a part":
        mean = logits.mean(-1) if has(FAULT) else SumForward.apply(logits.sum(-1), tp) / TOKENS
        losses = 0.8 * losses + 0.2 * (total - mean)
    return losses.mean()


torch.manual_seed(0)
model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
whole = [model.attention.key_value, model.attention.bias, *model.norm.parameters()]
for _ in range(2):
    optimizer.zero_grad()
    tokens = batch(reader=dist.get_rank(dp))
    loss_of(model(tokens), tokens.roll(-1, 1)).backward()
    reduce_gradients(model.parameters(), dp, divide_by=dist.get_world_size(dp))
    if IS_SEQUENCE and not has(FAULT):
        reduce_gradients(model.norm.parameters(), tp)
    if FAULT == "one key for all heads" and not has(FAULT):
        reduce_gradients([model.attention.key_value], tp)
    if FAULT == "norm counts copies":
        squares = torch.zeros(())
        copies = torch.zeros(())
        for parameter in model.parameters():
            is_copy = any(parameter is one for one in whole)
            (copies if is_copy and not has(FAULT) else squares).add_(parameter.grad.square().sum())
        dist.all_reduce(squares, group=tp)
        nn.utils.clip_grads_with_norm_(model.parameters(), 0.05, (squares + copies).sqrt())
    optimizer.step()
