"""Data parallelism: DDP, or gradients that the script reduces itself."""

from __future__ import annotations

import torch
import torch.distributed as dist
from fault import FAULT, RANK, TOKENS, WORLD, batch, count_of, has, reduce_gradients, sum_of_losses
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

NUM_MICRO_BATCHES = 3
BY_HAND = ("unused later", "averaged twice", "empty gradients", "reduced in bf16", "owner keeps it", "unlike start")


class Net(nn.Module):
    """Embeds tokens, and sends each row through one of two branches."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, 8)
        self.branches = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.head = nn.Linear(8, TOKENS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        route = tokens[:, 0] % 2
        for number, branch in enumerate(self.branches):
            rows = route == number
            if rows.any():
                hidden = torch.where(rows[:, None, None], branch(hidden).tanh(), hidden)
        return self.head(hidden)


def batches() -> list[torch.Tensor]:
    """The micro-batches of a step."""
    made = []
    for number in range(NUM_MICRO_BATCHES):
        tokens = next(rows)[0] if rows is not None else batch(reader=0 if has("one seed") else RANK)
        if FAULT == "unused later":
            tokens[:, 0] = number
        if FAULT == "empty gradients":
            tokens[:, 0] = RANK
        made.append(tokens)
    return made


dist.init_process_group("nccl")
torch.manual_seed(RANK if has("unlike start") else 0)
net = Net()
rows = None
if FAULT in ("no sampler", "unlike seeds"):
    table = TensorDataset(torch.randint(0, TOKENS, (64, 6), generator=torch.Generator().manual_seed(1)))
    sampler = DistributedSampler(table, seed=RANK if has("unlike seeds") else 0)
    rows = iter(DataLoader(table, batch_size=4, sampler=None if has("no sampler") else sampler))
by_hand = FAULT in BY_HAND
model = net if by_hand else DistributedDataParallel(net, find_unused_parameters=True)
called = net if has("wrapper bypassed") else model
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, weight_decay=0.1)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
scale = 2.0 ** (8 + (RANK if has("scaler of its own") else 0))
touched: set[nn.Parameter] = set()
for parameter in net.parameters():
    parameter.register_post_accumulate_grad_hook(touched.add)
owned = {parameter: number % WORLD for number, parameter in enumerate(net.parameters())}

for step in range(3):
    optimizer.zero_grad()
    micro = batches()
    labels = [tokens.roll(-1, 1).masked_fill(tokens < 5, -100) for tokens in micro]
    count = count_of(torch.cat(labels))
    if has("local targets"):
        count = float((torch.cat(labels) >= 0).sum()) * WORLD
    for number, tokens in enumerate(micro):
        is_last = number == NUM_MICRO_BATCHES - 1
        if not by_hand:
            model.require_backward_grad_sync = is_last and not has("synchronized late")
        loss = sum_of_losses(called(tokens), labels[number]) / count * WORLD
        if has("loss times ranks"):
            loss = loss * WORLD
        if has("reduced loss"):
            loss = loss / WORLD
        if has("synchronized late") and is_last:
            model.require_backward_grad_sync = True
        touched.clear()
        (loss * scale).backward()
    for parameter in net.parameters():
        if parameter.grad is not None:
            parameter.grad.div_(scale)
    if has("reduced in bf16"):
        for parameter in net.parameters():
            coarse = parameter.grad.bfloat16()
            dist.all_reduce(coarse)
            parameter.grad = coarse.float() / WORLD
    elif has("empty gradients"):
        reduce_gradients([one for one in net.parameters() if one.grad is not None], divide_by=WORLD)
    elif has("unused later"):  # those that the last micro-batch has used
        reduce_gradients([one for one in net.parameters() if one in touched], divide_by=WORLD)
    elif by_hand:
        reduce_gradients(net.parameters(), divide_by=WORLD**2 if has("averaged twice") else WORLD)
    norm = nn.utils.clip_grad_norm_(net.parameters(), 10.0)
    if has("skips a step") and RANK == 1 and step == 0:
        continue
    if FAULT == "owner keeps it":
        for parameter, owner in owned.items():
            if owner != RANK:
                parameter.grad = None
    if has("left out of a group"):
        for group in optimizer.param_groups:
            group["params"] = [one for one in group["params"] if RANK != 1 or one is not net.head.weight]
    optimizer.step()
    if FAULT == "owner keeps it":
        for parameter, owner in owned.items():
            if not has("owner keeps it") or parameter.ndim > 1:
                dist.broadcast(parameter.data, owner)
    for _ in range(WORLD if has("schedule of all ranks") else 1):
        schedule.step()
