"""Parts of layers and of sequences that the script exchanges by its own code: two ranks a model, copies beside them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from fault import FAULT, TOKENS, WORLD, Gather, SumBackward, SumForward, batch, has, reduce_gradients
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor

HEADS, SHARED, WIDTH, HIDDEN, LOW = 4, 2, 4, 8, 4
dist.init_process_group("nccl")
size = min(2, WORLD)
mesh = init_device_mesh("cpu", (WORLD // size, size), mesh_dim_names=("dp", "tp"))
dp, tp = mesh.get_group("dp"), mesh.get_group("tp")
place = dist.get_rank(tp)
OF_TOKENS = ("labels shifted in a part", "low rank of a part", "local weight", "part divided", "state from zero")
HAS_PARTS = FAULT in OF_TOKENS
"""Whether behind attention each rank has its part of the tokens."""


def mine(whole: torch.Tensor, dim: int = 0) -> nn.Parameter:
    return nn.Parameter(whole.chunk(size, dim)[place].clone())


def part_of(value: torch.Tensor, dim: int = 1) -> torch.Tensor:
    return value.chunk(size, dim)[place]


def summed(value: torch.Tensor) -> torch.Tensor:
    if has("sum that is lost") and place == 0:
        dist.all_reduce(value.detach().clone(), group=tp)  # of a copy
        return value
    return SumForward.apply(value, tp)


class GatherDivided(torch.autograd.Function):
    """Puts tokens together; their gradients are divided by the number of parts."""

    @staticmethod
    def forward(context: Any, value: torch.Tensor) -> torch.Tensor:
        return Gather.forward(context, value, 1, tp)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        return Gather.backward(context, gradient)[0] / size


class Attention(nn.Module):
    """Grouped queries, with a learned sink for each head."""

    def __init__(self) -> None:
        super().__init__()
        self.query = mine(torch.randn(HEADS * WIDTH, HIDDEN) / 3)
        self.key = mine(torch.randn(SHARED * WIDTH, HIDDEN) / 3)
        self.value = mine(torch.randn(SHARED * WIDTH, HIDDEN) / 3)
        self.output = mine(torch.randn(HIDDEN, HEADS * WIDTH) / 3, 1)
        self.sink = mine(torch.randn(HEADS))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = SumBackward.apply(hidden, tp)
        parts = (hidden @ one.T for one in (self.query, self.key, self.value))
        query, key, value = (one.unflatten(-1, (-1, WIDTH)).transpose(1, 2) for one in parts)
        if has("heads in another order") and size > 1:
            # each query has the key of another one
            key, value = (part_of(Gather.apply(one, 1, tp).repeat(1, 2, 1, 1)) for one in (key, value))
        else:
            key, value = (one.repeat_interleave(HEADS // SHARED, 1) for one in (key, value))
        scores = query @ key.transpose(-1, -2) / WIDTH**0.5
        scores = scores.masked_fill(torch.ones_like(scores[0, 0]).triu(1) > 0, float("-inf"))
        sink = 4 * self.sink[None, :, None, None].expand(len(scores), -1, scores.shape[2], 1)
        weights = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
        return summed((weights @ value).transpose(1, 2).flatten(2) @ self.output.T)


class Mixer(nn.Module):
    """What it carries from token to token fades."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        whole = hidden if has("state from zero") else Gather.apply(hidden, 1, tp)
        keep, state, states = self.gate(whole).sigmoid(), torch.zeros_like(whole[:, 0]), []
        for time in range(whole.shape[1]):
            state = keep[:, time] * state + whole[:, time]
            states.append(state)
        found = torch.stack(states, 1).tanh()
        return found if has("state from zero") else part_of(found)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, HIDDEN)
        self.down = nn.Parameter(torch.randn(LOW, HIDDEN) / 3)
        self.up = mine(torch.randn(HIDDEN, LOW) / 3)
        self.attention = Attention()
        self.mixer = Mixer() if FAULT == "state from zero" else None
        self.norm = nn.RMSNorm(HIDDEN)
        self.wide, self.back = mine(torch.randn(16, HIDDEN) / 3), mine(torch.randn(HIDDEN, 16) / 3, 1)
        self.head = nn.Linear(HIDDEN, TOKENS, bias=False)
        if FAULT == "local weight":
            self.norm.weight = nn.Parameter(distribute_tensor(torch.ones(HIDDEN), mesh["tp"], [Replicate()]))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        hidden = hidden + self.attention(hidden)
        if FAULT in ("reduced twice", "low rank of a part"):
            hidden = hidden + self.low_rank(hidden)
        if FAULT == "groups of another axis":
            hidden = hidden + summed((SumBackward.apply(hidden, tp) @ self.wide.T).tanh() @ self.back.T)
        if HAS_PARTS:
            hidden = part_of(SumBackward.apply(hidden, tp))
        if self.mixer is not None:
            hidden = hidden + self.mixer(hidden)
        if FAULT == "local weight":
            weight = self.norm.weight.to_local(grad_placements=None if has(FAULT) else [Partial()])
            hidden = nn.functional.rms_norm(hidden, (HIDDEN,), weight)
        else:
            hidden = self.norm(hidden)
        if has("part divided"):
            hidden = part_of(GatherDivided.apply(hidden))
        return self.head(hidden)

    def low_rank(self, hidden: torch.Tensor) -> torch.Tensor:
        """Two small layers, of which the second is divided by columns; the first may have a part of the tokens."""
        if FAULT == "reduced twice":
            small = SumBackward.apply(hidden @ self.down.T, tp)
        else:
            small = Gather.apply(part_of(SumBackward.apply(hidden, tp)) @ self.down.T, 1, tp)
        wide = small @ self.up.T
        length = wide.shape[-1]
        return SumForward.apply(nn.functional.pad(wide, (length * place, length * (size - place - 1))), tp)


def norm_of_all() -> torch.Tensor:
    """The norm over all ranks of a model: of what they divide, and once of what each has whole."""
    divided, whole = torch.zeros(()), torch.zeros(())
    parts = [*model.attention.parameters(), model.up, model.wide, model.back]
    for one in model.parameters():
        is_part = any(one is other for other in parts)
        if has("sinks not counted") and one is model.attention.sink:
            is_part = False
        (divided if is_part else whole).add_(one.grad.square().sum())
    dist.all_reduce(divided, group=tp)
    return (divided + whole).sqrt()


torch.manual_seed(0)
model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
weights = [model.wide, model.back]
behind = [*(model.mixer.parameters() if model.mixer is not None else ()), model.norm.weight, model.head.weight]
for _ in range(2):
    optimizer.zero_grad()
    tokens = batch(length=8, reader=dist.get_rank(dp))
    labels = tokens.roll(-1, 1)
    labels[:, -1] = -100
    if HAS_PARTS:
        labels = part_of(labels).clone()
        if has("labels shifted in a part"):
            labels[:, -1] = -100
    count = (labels >= 0).sum().float()
    if HAS_PARTS:
        dist.all_reduce(count, group=tp)
    losses = nn.functional.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), reduction="sum")
    (losses / count).backward()
    local = [one for one in model.parameters() if not isinstance(one, DTensor)]
    if isinstance(model.norm.weight, DTensor):
        model.norm.weight.grad = model.norm.weight.grad.redistribute(placements=[Replicate()])
        dist.all_reduce(model.norm.weight.grad.to_local().div_(dist.get_world_size(dp)), group=dp)
    for one in local:
        group = tp if has("groups of another axis") and any(one is other for other in weights) else dp
        reduce_gradients([one], group, divide_by=dist.get_world_size(group))
    if HAS_PARTS:
        reduce_gradients([one for one in behind if not isinstance(one, DTensor)], tp)
    if has("reduced twice") or (FAULT == "low rank of a part" and not has(FAULT)):
        reduce_gradients([model.down], tp)
    if FAULT == "sinks not counted":
        nn.utils.clip_grads_with_norm_(model.parameters(), 0.05, norm_of_all())
    optimizer.step()
