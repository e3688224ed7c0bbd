"""A small language model and its training, for checks on one GPU; the same code runs on a CPU to try the checks."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from paraplan import runtime
from paraplan.plan.parallel import ParallelPlan
from paraplan.plan.training import TrainingPrecision

HAS_GPU = torch.cuda.is_available()
TRIES = os.environ.get("PARAPLAN_TRY_GPU_CHECKS") == "1"
"""Whether checks run on the CPU as far as they go, to try them where there is no GPU."""
VOCABULARY = 512
TOKENS = 128 if HAS_GPU else 32
WIDTH = 256 if HAS_GPU else 32
HEADS = 4
BATCH = 8


class Block(nn.Module):
    """A transformer layer whose attention core is torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        batch, tokens, _ = hidden.shape
        heads = self.qkv(self.attention_norm(hidden)).view(batch, tokens, 3, HEADS, WIDTH // HEADS)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.out(attended.transpose(1, 2).reshape(batch, tokens, WIDTH))
        result: torch.Tensor = hidden + self.down(F.gelu(self.up(self.mlp_norm(hidden))))
        return result


class Model(nn.Module):
    """A decoder with learned positions."""

    def __init__(self, num_layers: int = 4) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(num_layers))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        hidden = self.embedding(tokens) + self.positions(places)
        for layer in self.layers:
            hidden = layer(hidden)
        result: torch.Tensor = self.head(self.norm(hidden))
        return result


def loss_fn(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs.flatten(0, 1).float(), targets.flatten())


def batch_of(step: int, size: int = BATCH) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids of which the next one follows from the last, so that there is something to learn."""
    starts = torch.randint(VOCABULARY, (size, 1), generator=torch.Generator().manual_seed(step))
    ids = (starts + 7 * torch.arange(TOKENS + 1)) % VOCABULARY
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


@dataclass
class Trained:
    """What a training came to on one rank, with gradients of the last step on the CPU."""

    losses: list[float]
    norms: list[float]
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)


def engine_of(
    plan: ParallelPlan, *, precision: TrainingPrecision = "fp32", num_layers: int = 4, **options: Any
) -> tuple[runtime.Job, Any]:
    """Return a job and an engine that trains the model under `plan` on this rank's device."""
    job = runtime.init(plan, precision=precision, shows_progress=False)
    torch.manual_seed(0)
    given: dict[str, Any] = {
        "loss_fn": loss_fn,
        "optimizer": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        "max_grad_norm": 1.0,
        "example_inputs": torch.zeros(2, TOKENS, dtype=torch.long),
    }
    return job, job.prepare(Model(num_layers), **(given | options))


def train(plan: ParallelPlan, *, num_steps: int = 4, precision: TrainingPrecision = "fp32", **options: Any) -> Trained:
    """Train for some steps; every rank of a copy takes the same batch, those of `dp` their share."""
    job, engine = engine_of(plan, precision=precision, **options)
    size = BATCH // job.dp
    losses, norms = [], []
    for step in range(num_steps):
        inputs, targets = (part[job.dp_rank * size :][:size] for part in batch_of(step))
        losses.append(engine.step(inputs, targets).item())
        norms.append(float(engine.grad_norm))
    gradients = {
        name: engine.whole(name, held.grad).float().cpu()
        for name, held in engine.parameters.items()
        if held.grad is not None
    }
    job.close()
    return Trained(losses, norms, gradients)
