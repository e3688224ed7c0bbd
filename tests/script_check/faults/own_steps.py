"""Optimizers that a script divides over ranks by its own code, rows that ranks gather, and states beside parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
import torch.distributed as dist
from fault import FAULT, RANK, TOKENS, WORLD, batch, has, reduce_gradients, sum_of_losses
from torch import nn

HIDDEN = 9  # an odd number, so that halves of weights are unlike


class Observed(nn.Module):
    """Takes away the mean of all rows of the steps before."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(HIDDEN))
        self.register_buffer("count", torch.ones(()))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return value - self.total / self.count

    @torch.no_grad()
    def see(self, rows: torch.Tensor) -> None:
        total, count = rows.flatten(0, -2).sum(0), torch.tensor(float(rows[..., 0].numel()))
        if has("history counted again"):  # with what the ranks have in common
            total, count = total + self.total, count + self.count
        dist.all_reduce(total)
        dist.all_reduce(count)
        if has("history counted again"):
            self.total.copy_(total)
            self.count.copy_(count)
        else:
            self.total.add_(total)
            self.count.add_(count)


class Net(nn.Module):
    """An embedding and two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, HIDDEN)
        self.seen = Observed()
        self.layer = nn.Linear(HIDDEN, HIDDEN)
        self.head = nn.Linear(HIDDEN, TOKENS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(self.seen(self.embedding(tokens))).tanh())


class Flat:
    """Parameters as one vector, of which each rank steps its part; gradients are summed inside of the step."""

    def __init__(self) -> None:
        self.whole = torch.cat([one.detach().flatten() for one in parameters])
        self.size = -(-len(self.whole) // WORLD)
        self.whole = torch.cat([self.whole, self.whole.new_zeros(self.size * WORLD - len(self.whole))])
        self.part = nn.Parameter(self.whole[RANK * self.size : (RANK + 1) * self.size].clone())
        self.optimizer = torch.optim.SGD([self.part], lr=0.3)

    def step(self) -> None:
        of_rank = torch.cat([one.grad.flatten() for one in parameters])
        of_rank = torch.cat([of_rank, of_rank.new_zeros(len(self.whole) - len(of_rank))])
        gradient = of_rank / WORLD
        dist.all_reduce(gradient)
        start = RANK * (self.size - has("slices apart"))
        self.part.grad = gradient[start : start + self.size].clone()
        if FAULT == "norm before reduction":
            square = (of_rank if has(FAULT) else self.part.grad).square().sum()
            if not has(FAULT):
                dist.all_reduce(square)
            self.part.grad.mul_(0.5 / square.sqrt())
        self.optimizer.step()
        parts = [torch.empty_like(self.part) for _ in range(WORLD)]
        dist.all_gather(parts, self.part.detach())
        values = torch.cat(parts).split([one.numel() for one in parameters] + [len(self.whole) - of_rank_size])
        with torch.no_grad():
            for parameter, value in zip(parameters, values, strict=False):
                parameter.copy_(value.view_as(parameter))


def loss_of(tokens: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(-1, 1).flatten())


def divided() -> None:
    loss_of(batch()).backward()
    flat.step()


def clipped() -> None:
    loss_of(batch()).backward()
    reduce_gradients(parameters, divide_by=WORLD)
    gradients = [one.grad for one in parameters]
    norm = torch.nn.utils.get_total_norm(gradients)
    given = gradients if has(FAULT) and WORLD > 1 else parameters
    torch.nn.utils.clip_grads_with_norm_(given, 0.05, norm)
    optimizer.step()


def observed() -> None:
    tokens = batch()
    loss_of(tokens).backward()
    reduce_gradients(parameters, divide_by=WORLD)
    optimizer.step()
    model.seen.see(teacher.embedding(tokens).detach())


def taught() -> None:
    tokens = batch()
    with torch.no_grad():
        wanted = teacher(tokens).softmax(-1)
    (wanted - model(tokens).softmax(-1)).square().sum(-1).mean().add(loss_of(tokens)).backward()
    reduce_gradients(parameters, divide_by=WORLD)
    optimizer.step()
    with torch.no_grad():
        for one, other in zip(teacher.parameters(), parameters, strict=True):
            if RANK == 0 or not has(FAULT):
                one.lerp_(other, 0.3)


def counted() -> None:
    tokens = batch()
    count = torch.tensor(float(tokens.numel()))
    sum_of_losses(model(tokens), tokens.roll(-1, 1)).backward()
    dist.all_reduce(count)
    reduce_gradients(parameters, divide_by=WORLD)  # as a wrapper does, which takes means
    for parameter in parameters:
        parameter.grad.mul_((1 if has(FAULT) else WORLD) / count)
    optimizer.step()


def gathered() -> None:
    """All ranks work on the rows of all, each on its part of the columns."""
    tokens = batch(length=8)
    rows = [torch.empty_like(tokens) for _ in range(WORLD)]
    dist.all_gather(rows, tokens)
    tokens, targets = (one.chunk(WORLD, 1)[RANK] for one in (torch.cat(rows), torch.cat(rows).roll(-1, 1)))
    nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()).div(WORLD).backward()
    reduce_gradients(parameters, divide_by=WORLD if has(FAULT) else 1)
    optimizer.step()


STEPS: dict[str, Callable[[], None]] = {
    "slices apart": divided,
    "norm before reduction": divided,
    "clipped elsewhere": clipped,
    "history counted again": observed,
    "teacher of one rank": taught,
    "tokens after averaging": counted,
    "parts of gathered rows": gathered,
}
dist.init_process_group("nccl")
torch.manual_seed(0)
model = Net()
teacher = copy.deepcopy(model).requires_grad_(False)
parameters = list(model.parameters())
of_rank_size = sum(one.numel() for one in parameters)
optimizer = torch.optim.AdamW(parameters, lr=1e-2)
flat = Flat()
for _ in range(3):
    for parameter in parameters:
        parameter.grad = None
    STEPS[FAULT]()
