"""Right models that draw random numbers as they compute, and such that others teach."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from right_scripts import CE, divided, loader, mlp
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

RANDOM = np.random.default_rng()


class Drawing(nn.Module):
    """Random numbers are drawn in the forward pass: noise, a mask, one number a batch, or dropout by function."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        if self.what == "noise-again":
            return checkpoint(self.drawn, rows, use_reentrant=False)
        return self.drawn(rows)

    def drawn(self, rows: torch.Tensor) -> torch.Tensor:
        hidden = self.first(rows)
        if self.what in ("noise", "noise-again"):
            hidden = hidden + 0.3 * torch.empty_like(hidden).normal_()
        elif self.what == "masked":
            hidden = hidden * (torch.rand(len(hidden), 1) > 0.5)
        elif self.what == "one-draw":
            hidden = hidden * (0.5 + torch.rand(()))
        elif self.what == "numpy-mask":
            hidden = hidden * torch.tensor(RANDOM.random(tuple(hidden.shape)) > 0.5)
        elif self.what == "numpy-rows":
            hidden = hidden * torch.from_numpy(RANDOM.random((len(hidden), 1)).astype(np.float32))
        else:
            hidden = functional.dropout(hidden, 0.3, self.training)
        return self.last(hidden.tanh())


def drawing(how: str, what: str) -> None:
    model = divided(Drawing(what), how)
    torch.manual_seed(4 + (0 if what == "one-draw" else dist.get_rank()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for rows, targets in loader():
        optimizer.zero_grad()
        CE(model(rows), targets).backward()
        optimizer.step()


def taught(how: str, what: str) -> None:
    """A model learns from the moving average of itself, or from what it was some steps ago."""
    plain = mlp()
    teacher = copy.deepcopy(plain).requires_grad_(False)
    model = divided(plain, how)
    teacher = divided(teacher, how) if how != "ddp" else teacher
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step, (rows, _) in enumerate(loader()):
        if what == "frozen":
            wanted = teacher(rows)
        else:
            with torch.no_grad():
                wanted = teacher(rows).softmax(-1)
        optimizer.zero_grad()
        functional.mse_loss(model(rows + 0.1).softmax(-1), wanted).backward()
        optimizer.step()
        if how == "fsdp2":
            teacher.reshard()
        with torch.no_grad():
            for one, other in zip(teacher.parameters(), model.parameters(), strict=True):
                if what == "target" and step % 2 == 0:
                    one.copy_(other)
                elif what != "target":
                    one.lerp_(other, 0.5)


def sampled(what: str) -> None:
    """Answers are drawn from the model itself; advantages are taken in each group of answers, or beside all of them."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=40, pad_token_id=0, eos_token_id=39))
    older = copy.deepcopy(model).requires_grad_(False)
    wrapped = divided(model, "ddp")
    torch.manual_seed(100 + dist.get_rank())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(3):
        questions = torch.randint(2, 38, (2, 4)).repeat_interleave(4, 0)
        with torch.no_grad():
            answers = model.generate(questions, max_new_tokens=6, min_new_tokens=6, do_sample=True)
            rewards = torch.tensor([float(sum(row) % 7) for row in answers[:, 4:].tolist()])
            moments = torch.stack([rewards.mean(), rewards.square().mean()])
            dist.all_reduce(moments)
            mean, square = (moments / dist.get_world_size()).unbind()
            advantages = (rewards - mean) / (square - mean**2).sqrt()
            if what == "groups":
                groups = rewards.view(-1, 4)
                advantages = (groups - groups.mean(1, keepdim=True)).flatten()
            before = older(answers).logits[:, 3:-1].log_softmax(-1).gather(-1, answers[:, 4:, None])[..., 0]
        now = wrapped(answers).logits[:, 3:-1].log_softmax(-1).gather(-1, answers[:, 4:, None])[..., 0]
        gains = (now - before).exp() * advantages[:, None]
        optimizer.zero_grad()
        (-gains.mean()).backward()
        optimizer.step()


DRAWS = ("noise", "noise-again", "masked", "one-draw", "by-function", "numpy-mask", "numpy-rows")
DRAWS_AND_TEACHERS: dict[str, Callable[[], Any]] = {
    **{f"ddp/{what}": lambda what=what: drawing("ddp", what) for what in DRAWS},
    "fsdp2/noise": lambda: drawing("fsdp2", "noise"),
    **{f"{how}/taught": lambda how=how: taught(how, "average") for how in ("ddp", "fsdp1", "fsdp1-flat", "fsdp2")},
    **{f"ddp/sampled-{what}": lambda what=what: sampled(what) for what in ("groups", "all")},
    **{f"ddp/taught-{what}": lambda what=what: taught("ddp", what) for what in ("target", "frozen")},
}
