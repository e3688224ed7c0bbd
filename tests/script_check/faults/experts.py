"""Experts divided over ep. Every rank has the rows of its own, and sends each to the rank of its expert."""

from __future__ import annotations

import torch
import torch.distributed as dist
from fault import FAULT, TOKENS, WORLD, Gather, SumBackward, SumForward, batch, has, reduce_gradients, sum_of_losses
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

HIDDEN, EXPERTS = 8, 4
dist.init_process_group("nccl")
size = min(2, WORLD)
mesh = init_device_mesh("cpu", (WORLD // size, size), mesh_dim_names=("dp", "ep"))
dp, ep = mesh.get_group("dp"), mesh.get_group("ep")
size, place = dist.get_world_size(ep), dist.get_rank(ep)


class Experts(nn.Module):
    """All ranks of ep compute all rows with their own experts, and the parts are summed."""

    def __init__(self) -> None:
        super().__init__()
        weights = torch.randn(EXPERTS, HIDDEN, HIDDEN) / 3
        self.weights = nn.Parameter(weights.chunk(size)[place].clone())

    def forward(self, rows: torch.Tensor, chances: torch.Tensor) -> torch.Tensor:
        every = Gather.apply(rows, 0, ep)
        scores = Gather.apply(chances, 0, ep)
        best, chosen = scores.topk(2, -1)
        local = chosen - place * len(self.weights)
        outside = (local < 0) | (local >= len(self.weights))
        outputs = torch.einsum("ri,eoi->reo", every, self.weights).tanh()
        picked = outputs.gather(1, local.clamp(0, len(self.weights) - 1)[..., None].expand(-1, -1, HIDDEN))
        if has("slots of other ranks"):
            weighted = picked * (best * 1.0 + (-best.detach()).masked_fill(~outside, 0.0))[..., None]
        elif has("empty slots are NaN"):
            weighted = (picked / (~outside)[..., None].float().sqrt()).nan_to_num(0, 0, 0) * best[..., None]
        else:
            weighted = picked * best.masked_fill(outside, 0.0)[..., None]
        mixed = SumBackward.apply(SumForward.apply(weighted.sum(1), ep), ep)
        return mixed.chunk(size)[place]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, HIDDEN)
        self.router = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.experts = Experts()
        self.head = nn.Linear(HIDDEN, TOKENS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        chances = self.router(hidden).softmax(-1)
        mixed = self.experts(hidden.flatten(0, 1), chances.flatten(0, 1))
        return self.head(hidden + mixed.view_as(hidden))


torch.manual_seed(0)
model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
own = [model.experts.weights]
shared = [parameter for parameter in model.parameters() if parameter is not own[0]]
for _ in range(2):
    optimizer.zero_grad()
    tokens = batch()
    loss = sum_of_losses(model(tokens), tokens.roll(-1, 1)) / tokens.numel()
    loss.backward()
    is_reduced = [one for one in shared if not (has("gate not reduced") and one is model.router.weight)]
    reduce_gradients(is_reduced, divide_by=WORLD)
    reduce_gradients(own, dp, divide_by=WORLD if not has("times ep") else dist.get_world_size(dp))
    if FAULT == "norm of its own experts":
        experts = own[0].grad.square().sum()
        if not has(FAULT):
            dist.all_reduce(experts, group=ep)
        norm = (experts + sum(one.grad.square().sum() for one in shared)).sqrt()
        nn.utils.clip_grads_with_norm_(model.parameters(), 0.05, norm)
    if has("gate never stepped") and size > 1:
        model.router.weight.grad = None
    optimizer.step()
