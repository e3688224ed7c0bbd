"""What ranks make of one another's rows: candidates, targets, weights of a loss, tables cut by their rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from fault import FAULT, RANK, TOKENS, WORLD, batch, has, reduce_gradients, sum_of_losses
from torch import nn

HIDDEN, PROTOTYPES, KINDS = 8, 5, 3


class Lookup(torch.autograd.Function):
    """Rows of a table of which each rank has some, for the tokens of all ranks."""

    @staticmethod
    def forward(context: Any, table: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        context.tokens, context.size = tokens, len(table)
        local = tokens - RANK * len(table)
        inside = (local >= 0) & (local < len(table))
        found = table[local.clamp(0, len(table) - 1)] * inside.unsqueeze(-1)
        dist.all_reduce(found)
        return found

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        # of the whole table, which ranks add where each has looked up tokens of its own
        whole = torch.zeros(context.size * WORLD, gradient.shape[-1])
        whole.index_add_(0, context.tokens.flatten(), gradient.flatten(0, -2))
        half = whole.chunk(WORLD)
        if has("cut before the sum"):
            own = half[RANK].clone()
            dist.all_reduce(own)
            return own / WORLD, None
        dist.all_reduce(whole)
        return whole.chunk(WORLD)[RANK] / WORLD, None


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        if FAULT == "cut before the sum":
            self.table = nn.Parameter(torch.randn(TOKENS, HIDDEN).chunk(WORLD)[RANK].clone())
        else:
            self.embedding = nn.Embedding(TOKENS, HIDDEN)
        self.layer = nn.Linear(HIDDEN, HIDDEN)
        self.head = nn.Linear(HIDDEN, PROTOTYPES if FAULT == "balance of each rank" else TOKENS)
        self.register_buffer("kinds", torch.full((KINDS,), 1.0))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        if FAULT == "cut before the sum":
            hidden = Lookup.apply(self.table, tokens) if WORLD > 1 else self.table[tokens]
        else:
            hidden = self.embedding(tokens)
        return self.head(self.layer(hidden).tanh())


def loss_by_row(tokens: torch.Tensor) -> torch.Tensor:
    logits = model(tokens[:, :-1])
    return nn.functional.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none").mean(1)


def looked_up() -> None:
    """Every rank looks up the tokens of all, as one after another, and takes the loss of its own rows."""
    tokens = batch()
    rows = [torch.empty_like(tokens) for _ in range(WORLD)]
    dist.all_gather(rows, tokens)
    (sum_of_losses(model(torch.cat(rows)), torch.cat(rows).roll(-1, 1)) / torch.cat(rows).numel()).backward()


def candidates() -> None:
    """Answers that fit and answers that do not, of all ranks: those that fit come first."""
    questions, fitting, others = batch(4, 3), batch(4, 3), batch(4, 3)
    by_rank, by_kind = gathered(torch.cat([fitting, others])), torch.cat([gathered(fitting), gathered(others)])
    pool = by_rank if has(FAULT) else by_kind
    asked, answers = model(questions).mean(1), model(pool).mean(1)
    labels = torch.arange(len(questions)) + RANK * len(questions)
    nn.functional.cross_entropy(asked @ answers.T, labels).backward()


def gathered(rows: torch.Tensor) -> torch.Tensor:
    parts = [torch.empty_like(rows) for _ in range(WORLD)]
    dist.all_gather(parts, rows)
    return torch.cat(parts)


@torch.no_grad()
def assigned(scores: torch.Tensor) -> torch.Tensor:
    """Soft assignments of rows in which each prototype has as much of the rows of all ranks."""
    shares = (scores / 0.3).exp().T
    for _ in range(3):
        sums = shares.sum(1, keepdim=True)
        if not has(FAULT):
            dist.all_reduce(sums)
        shares = shares / sums
        shares = shares / shares.sum(0, keepdim=True)
    return shares.T


def balanced() -> None:
    tokens = batch()
    one, other = model(tokens).mean(1), model(tokens.flip(1)).sum(1)
    (-(assigned(one) * other.log_softmax(-1)).sum(1)).mean().backward()


def weighted() -> None:
    tokens = batch()
    kinds = tokens[:, 0] % KINDS
    losses = loss_by_row(tokens)
    (model.kinds[kinds] * losses).mean().backward()
    with torch.no_grad():
        table = torch.zeros(2, KINDS)
        table[0].index_add_(0, kinds, losses.detach())
        table[1].index_add_(0, kinds, torch.ones(len(kinds)))
        dist.all_reduce(table)
        if RANK == 0 or not has(FAULT):
            model.kinds.mul_((table[0] / table[1].clamp(min=1)).exp())


STEPS: dict[str, Callable[[], None]] = {
    "cut before the sum": looked_up,
    "candidates in another order": candidates,
    "balance of each rank": balanced,
    "weights of one rank": weighted,
}
dist.init_process_group("nccl")
torch.manual_seed(0)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    optimizer.zero_grad()
    STEPS[FAULT]()
    reduce_gradients((one for name, one in model.named_parameters() if name != "table"), divide_by=WORLD)
    optimizer.step()
