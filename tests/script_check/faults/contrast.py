"""A contrastive loss over the rows of all ranks, under DDP."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as differentiable
from fault import RANK, WORLD, has
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("nccl")
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
random = torch.Generator().manual_seed(RANK)
for _ in range(2):
    optimizer.zero_grad()
    left, right = (torch.randn(4, 6, generator=random) for _ in range(2))
    one = model(torch.cat([left, right], dim=1).view(-1, 6))
    if has("gathered without gradient"):
        parts = [torch.empty_like(one) for _ in range(WORLD)]
        dist.all_gather(parts, one.detach())
        parts[RANK] = one
    else:
        parts = list(differentiable.all_gather(one))
    every = torch.cat(parts)
    scores = every[0::2] @ every[1::2].T
    loss = nn.functional.cross_entropy(scores, torch.arange(len(scores)))
    loss.backward()
    optimizer.step()
