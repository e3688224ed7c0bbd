"""Replicas of a model whose gradients, statistics, rewards and norms the script reduces by its own code."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from fault import FAULT, RANK, TOKENS, WORLD, batch, has, reduce_gradients
from torch import nn
from torch.distributed.fsdp import fully_shard

HIDDEN, EXPERTS = 8, 4


class Observed(nn.Module):
    """Takes away the mean of all that it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(HIDDEN))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        rows = value.detach().flatten(0, -2)
        total, count = rows.sum(0), torch.tensor(float(len(rows)))
        if not has("statistics of a rank"):
            dist.all_reduce(total)
            dist.all_reduce(count)
        self.mean.add_((total - count * self.mean) / (self.count + count))
        self.count.add_(count)
        return value - self.mean


class Net(nn.Module):
    """Two layers of one shape, experts that all take part, and a balancing loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, HIDDEN)
        self.seen = Observed() if FAULT == "statistics of a rank" else nn.Identity()
        self.left = nn.Linear(HIDDEN, HIDDEN)
        self.right = nn.Linear(HIDDEN, HIDDEN)
        self.router = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.experts = nn.Parameter(torch.randn(EXPERTS, HIDDEN, HIDDEN) / 3)
        self.head = nn.Linear(HIDDEN, TOKENS)
        self.balance = torch.zeros(())

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.seen(self.embedding(tokens))
        if has("unlike orders") and RANK == 1:
            right = self.right(hidden).sigmoid()
            hidden = hidden + self.left(hidden).tanh() * right
        else:
            left = self.left(hidden).tanh()
            hidden = hidden + left * self.right(hidden).sigmoid()
        shares = self.router(hidden).softmax(-1)
        self.balance = 0.5 * shares.square().mean(-1).mean()
        return self.head(hidden + torch.einsum("bse,bsh,eho->bso", shares, hidden, self.experts))


def loss_of(tokens: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(-1, 1).flatten())


def plain() -> None:
    loss_of(batch()).backward()
    reduce_gradients(parameters, divide_by=WORLD)


def of_two_micro_batches() -> None:
    for _ in range(2):
        if has(FAULT) and WORLD > 1:
            optimizer.zero_grad()  # as the buffer that one reduction has left, and the next one overwrites
        (loss_of(batch()) / 2).backward()
    reduce_gradients(parameters, divide_by=WORLD)


def in_order_of_arrival() -> None:
    came: list[nn.Parameter] = []
    hooks = [one.register_post_accumulate_grad_hook(came.append) for one in parameters]
    loss_of(batch()).backward()
    for hook in hooks:
        hook.remove()
    reduce_gradients(came, divide_by=WORLD)


def clipped_before() -> None:
    loss_of(batch()).backward()
    if has(FAULT):
        scale = 0.3 / nn.utils.get_total_norm([one.grad for one in parameters])
        for parameter in parameters:
            parameter.grad.mul_(scale)
    reduce_gradients(parameters, divide_by=WORLD)
    if not has(FAULT):
        nn.utils.clip_grad_norm_(parameters, 0.3)


def with_balance() -> None:
    loss = loss_of(batch()) / WORLD  # by the targets of all ranks
    balance = model.module.balance
    ((loss + balance) * WORLD if has(FAULT) else loss * WORLD + balance).backward()


def norm_of_replicas() -> None:
    loss_of(batch()).backward()
    squares = torch.stack([one.grad.square().sum() for one in parameters]).sum()
    if has(FAULT):
        dist.all_reduce(squares)
    nn.utils.clip_grads_with_norm_(parameters, 0.05, squares.sqrt())


def rewarded() -> None:
    tokens = batch()
    reward = (tokens % 5).float().mean(1)
    moments = torch.stack([reward.mean(), reward.square().mean()])
    if not has(FAULT):
        dist.all_reduce(moments)
        moments = moments / WORLD
    advantage = (reward - moments[0]) / (moments[1] - moments[0].square()).sqrt()
    likely = model(tokens).log_softmax(-1).gather(-1, tokens.roll(-1, 1)[..., None])[..., 0]
    (-(advantage[:, None] * likely).mean()).backward()
    reduce_gradients(parameters, divide_by=WORLD)


def in_16_bits() -> None:
    (loss_of(batch()) * 2.0**19).backward()
    for parameter in parameters:
        half = parameter.grad.half() if has(FAULT) else parameter.grad
        dist.all_reduce(half)
        parameter.grad = half.float() / WORLD / 2.0**19


def sharded() -> None:
    loss_of(batch()).backward()


STEPS: dict[str, Callable[[], None]] = {
    "last micro-batch alone": of_two_micro_batches,
    "unlike orders": in_order_of_arrival,
    "clipped before": clipped_before,
    "balance times ranks": with_balance,
    "norm of replicas": norm_of_replicas,
    "rewards of a rank": rewarded,
    "sum in 16 bits": in_16_bits,
    "used before its optimizer": sharded,
}
dist.init_process_group("nccl")
torch.manual_seed(0)
model = Net()
held = list(model.parameters())
if FAULT == "used before its optimizer":
    fully_shard(model)
    if has(FAULT) and WORLD > 1:
        model(batch())  # its parameters stay whole until a backward pass
    held = list(model.parameters())
elif FAULT in ("balance times ranks", "norm of replicas"):
    model = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(held, lr=1e-2)
parameters = list(model.parameters())
for _ in range(3):
    optimizer.zero_grad()
    STEPS.get(FAULT, plain)()
    optimizer.step()
