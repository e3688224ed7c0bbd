"""Tokens of a sequence divided over cp, data parallel beside it; keys and values are gathered."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from fault import TOKENS, WORLD, Gather, batch, count_of, has, reduce_gradients, sum_of_losses
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

LENGTH, HIDDEN = 8, 8
dist.init_process_group("nccl")
size = min(2, WORLD)
mesh = init_device_mesh("cpu", (WORLD // size, size), mesh_dim_names=("dp", "cp"))
dp, cp = mesh.get_group("dp"), mesh.get_group("cp")
size, place = dist.get_world_size(cp), dist.get_rank(cp)


def gathered(value: torch.Tensor, group: Any) -> torch.Tensor:
    whole = Gather.apply(value, 1, group)
    if has("keys of others without gradient"):
        parts = whole.detach().chunk(size, 1)
        return torch.cat([value if number == place else part for number, part in enumerate(parts)], 1)
    return whole


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, HIDDEN)
        self.position = nn.Embedding(LENGTH, HIDDEN)
        self.query, self.key, self.value = (nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(3))
        self.head = nn.Linear(HIDDEN, TOKENS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        length = tokens.shape[1]
        first = 0 if has("positions from zero") else place * length
        hidden = self.embedding(tokens) + self.position(torch.arange(first, first + length))
        key, value = gathered(self.key(hidden), cp), gathered(self.value(hidden), cp)
        seen = torch.arange(key.shape[1]) <= torch.arange(place * length, (place + 1) * length)[:, None]
        mixed = nn.functional.scaled_dot_product_attention(self.query(hidden), key, value, attn_mask=seen)
        return self.head(hidden + mixed)


torch.manual_seed(0)
model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for _ in range(2):
    optimizer.zero_grad()
    tokens = batch(length=LENGTH, reader=dist.get_rank(dp))
    labels = tokens.roll(-1, 1)
    labels[:, :3] = -100
    tokens, labels = (one.chunk(size, 1)[place] for one in (tokens, labels))
    count = count_of(labels)
    if has("mean of each part"):
        count = float((labels >= 0).sum()) * WORLD
    loss = sum_of_losses(model(tokens), labels) / count
    if has("scaled by cp"):
        loss = loss * size
    if has("divided by cp"):
        loss = loss / size
    loss.backward()
    reduce_gradients(model.parameters(), dp)
    if not has("reduced over dp alone"):
        reduce_gradients(model.parameters(), cp)
    optimizer.step()
