"""Small models and one training, run on whatever ranks a test gives it."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from paraplan import runtime
from paraplan.plan.parallel import ParallelPlan
from paraplan.plan.training import TrainingPrecision

VOCABULARY, HIDDEN, TOKENS, GLOBAL_BATCH = 24, 16, 8, 12
NUM_STEPS, NUM_BATCHES = 2, 6  # a second step shows what the first one left in the optimizer


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.up = nn.Linear(HIDDEN, 2 * HIDDEN)
        self.down = nn.Linear(2 * HIDDEN, HIDDEN)

    def forward(self, hidden: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        mixed = hidden.cumsum(dim=1) / hidden.shape[1]
        change = self.down(F.gelu(self.up(self.norm(hidden + mixed))))
        return hidden + (change if scale is None else change * scale)


class Decoder(nn.Module):
    """Embedding, position parameter of the model itself, blocks that all read one table, norm and head."""

    def __init__(self, num_layers: int = 5, *, tied: bool = False, shared_scale: bool = False) -> None:
        super().__init__()
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)  # stands before the blocks, runs after them
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.positions = nn.Parameter(torch.randn(TOKENS, HIDDEN) * 0.1)
        self.scale = nn.Embedding(TOKENS, HIDDEN) if shared_scale else None
        self.sharpness = nn.Parameter(torch.tensor(1.5)) if shared_scale else 1.0  # a single number: no shards of it
        self.layers = nn.ModuleList(Layer() for _ in range(num_layers))
        self.norm = nn.LayerNorm(HIDDEN)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        steps = torch.arange(tokens.shape[1])
        hidden = self.embedding(tokens) + self.positions[: tokens.shape[1]]
        scale = None if self.scale is None else self.scale(steps)
        for layer in self.layers:
            hidden = layer(hidden, scale)
        return self.head(self.norm(hidden)) * self.sharpness


class TupleLayer(Layer):
    def forward(self, *, hidden: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, None]:
        return super().forward(hidden * mask), None


class KeywordDecoder(nn.Module):
    """Takes a dict of inputs, hands hidden states on by keyword, and gets tuples back."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.stack = nn.ModuleDict({"layers": nn.ModuleList(TupleLayer() for _ in range(4))})
        self.head = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.embedding(tokens)
        for layer in self.stack["layers"]:
            hidden = layer(hidden=hidden, mask=mask[..., None])[0]
        return {"logits": self.head(hidden)}


class AttentionLayer(nn.Module):
    """Causal attention with one fused projection of query, key and value, which its code views as three times heads."""

    def __init__(self, num_heads: int = 4) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = hidden.shape
        heads = self.qkv(self.attention_norm(hidden)).view(batch, tokens, 3, self.num_heads, width // self.num_heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.out(attended.transpose(1, 2).reshape(batch, tokens, width))
        return hidden + self.down(F.gelu(self.up(self.mlp_norm(hidden))))


class GroupedLayer(nn.Module):
    """Attention of 4 query heads in 2 groups with a norm of the queries, written out; and a gated MLP, fused."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp_norm, self.query_norm = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN), nn.LayerNorm(4)
        self.query = nn.Linear(HIDDEN, 16)
        self.key_value = nn.Linear(HIDDEN, 16, bias=False)
        self.out = nn.Linear(16, HIDDEN)
        self.gate_up, self.down = nn.Linear(HIDDEN, 48, bias=False), nn.Linear(24, HIDDEN, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        batch, tokens, _ = hidden.shape
        normed = self.norm(hidden)
        query = self.query_norm(self.query(normed).view(batch, tokens, 4, 4)).transpose(1, 2)
        both = self.key_value(normed)
        key, value = (half.reshape(batch, tokens, 2, 4).transpose(1, 2) for half in (both[..., :8], both[..., 8:]))
        key, value = (half.repeat_interleave(2, dim=1) for half in (key, value))
        scores = query @ key.transpose(-2, -1) / 2
        allowed = torch.ones(tokens, tokens, dtype=torch.bool).tril()
        weights = scores.masked_fill(~allowed, float("-inf")).softmax(dim=-1)
        hidden = hidden + self.out((weights @ value).transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.mlp_norm(hidden)).chunk(2, dim=-1)
        return hidden + self.down(F.silu(gate) * up)


class ExpertsLayer(Layer):
    """Two experts, their weights stacked as transformers does it: fewer rows than there are shards."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(HIDDEN, 2)
        self.experts_up = nn.Parameter(torch.randn(2, 2 * HIDDEN, HIDDEN) * 0.1)
        self.experts_down = nn.Parameter(torch.randn(2, HIDDEN, 2 * HIDDEN) * 0.1)

    def forward(self, hidden: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        hidden = super().forward(hidden, scale)
        shares = self.router(hidden).softmax(dim=-1)
        inner = F.gelu(torch.einsum("bth,efh->ebtf", hidden, self.experts_up))
        return hidden + torch.einsum("ebtf,ehf,bte->bth", inner, self.experts_down, shares)


class Experts(nn.Module):
    """Gated experts with their weights stacked, and a bias of each; every token goes through all of them."""

    def __init__(self, num_experts: int = 4, inner: int = 12) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.randn(num_experts, 2 * inner, HIDDEN) * 0.2)
        self.gate_up_bias = nn.Parameter(torch.randn(num_experts, 2 * inner) * 0.2)
        self.down = nn.Parameter(torch.randn(num_experts, HIDDEN, inner) * 0.2)
        self.down_bias = nn.Parameter(torch.randn(num_experts, HIDDEN) * 0.2)

    def forward(self, hidden: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        gate_up = torch.einsum("nh,efh->enf", hidden, self.gate_up) + self.gate_up_bias[:, None]
        gate, up = gate_up.chunk(2, dim=-1)
        made = torch.einsum("enf,ehf->enh", F.silu(gate) * up, self.down) + self.down_bias[:, None]
        return torch.einsum("enh,ne->nh", made, shares)


class MixtureLayer(AttentionLayer):
    """Attention, and experts of which a router weighs what they return, beside one that all tokens share."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(HIDDEN, 4), Experts()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = super().forward(hidden)
        normed = self.mlp_norm(hidden)
        flat = normed.reshape(-1, HIDDEN)
        return hidden + self.experts(flat, self.router(flat).softmax(dim=-1)).view_as(normed)


class RoutedExperts(Experts):
    """The same experts, for the tokens that chose them."""

    def forward(self, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        shares = torch.zeros(len(hidden), len(self.gate_up)).scatter(1, chosen, weights)
        return super().forward(hidden, shares)


class SortedExperts(nn.Module):
    """Experts of one layer each, for rows that lie one behind the other, so many for each."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, HIDDEN, HIDDEN) * 0.2)

    def forward(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        parts = torch.split(rows, counts.tolist())
        return torch.cat([F.linear(part, weight) for part, weight in zip(parts, self.weight, strict=True)])


class RoutedLayer(AttentionLayer):
    """Attention, and experts of which a router chooses two, whose weights are `kind`."""

    kind = "stacked"

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(HIDDEN, 4)
        self.experts = self._experts()

    def _experts(self) -> nn.Module:
        return RoutedExperts()

    def _expert(self) -> nn.Module:
        return nn.Sequential(nn.Linear(HIDDEN, 12), nn.GELU(), nn.Linear(12, HIDDEN))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = super().forward(hidden)
        flat = self.mlp_norm(hidden).reshape(-1, HIDDEN)
        weights, chosen = self.router(flat).softmax(dim=-1).topk(2)
        return hidden + self.mixed(flat, chosen, weights).view_as(hidden)

    def mixed(self, flat: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        if self.kind == "stacked":
            return self.experts(flat, chosen, weights)
        mixed = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            rows, places = torch.where(chosen == number)
            if len(rows):
                mixed = mixed.index_add(0, rows, expert(flat[rows]) * weights[rows, places, None])
        return mixed


class ListedLayer(RoutedLayer):
    """The same with a list of experts, called one by one where tokens chose them."""

    kind = "listed"

    def _experts(self) -> nn.Module:
        return nn.ModuleList(self._expert() for _ in range(4))


class NamedLayer(RoutedLayer):
    """The same with experts that are called by their names, beside a dropout in the same container."""

    def _experts(self) -> nn.Module:
        experts = nn.ModuleDict({f"expert_{number}": self._expert() for number in range(4)})
        experts.dropout = nn.Dropout(0.0)
        return experts

    def mixed(self, flat: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        mixed = torch.zeros_like(flat)
        for number in chosen.unique().tolist():
            rows, places = torch.where(chosen == number)
            made = self.experts.dropout(self.experts[f"expert_{number}"](flat[rows]))
            mixed = mixed.index_add(0, rows, made * weights[rows, places, None])
        return mixed


class SortedLayer(RoutedLayer):
    """The same with rows sorted by expert, and the number of each expert's."""

    def _experts(self) -> nn.Module:
        return SortedExperts()

    def mixed(self, flat: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        order = chosen.flatten().argsort(stable=True)
        made = self.experts(flat[order // 2], torch.bincount(chosen.flatten(), minlength=4))
        return torch.zeros_like(flat).index_add(0, order // 2, made * weights.flatten()[order, None])


class Transformer(nn.Module):
    """A decoder of layers of one class, with an embedding and a head of its own."""

    def __init__(
        self, layer: type[nn.Module] = AttentionLayer, num_layers: int = 3, vocabulary: int = VOCABULARY
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, HIDDEN)
        self.layers = nn.ModuleList(layer() for _ in range(num_layers))
        self.norm = nn.LayerNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(self.norm(hidden))


def sequential() -> nn.Sequential:
    return nn.Sequential(
        nn.Embedding(VOCABULARY, HIDDEN), Layer(), Layer(), Layer(), Layer(), nn.Linear(HIDDEN, VOCABULARY)
    )


def frozen_start() -> Decoder:
    """A tied table and first blocks that are not trained: a rank of a pipeline may train nothing."""
    model = Decoder(tied=True)
    for frozen in (model.embedding, *model.layers[:4]):
        frozen.requires_grad_(False)
    model.positions.requires_grad_(False)
    return model


MODELS = {
    "decoder": Decoder,
    "tied": lambda: Decoder(tied=True),
    "shared scale": lambda: Decoder(shared_scale=True),
    "frozen start": frozen_start,
    "sequential": sequential,
    "keyword": KeywordDecoder,
    "attention": lambda: Transformer(num_layers=4),
    "two blocks": lambda: Transformer(num_layers=2),
    "grouped": lambda: Transformer(GroupedLayer),
    "experts": lambda: Transformer(ExpertsLayer),
    "odd vocabulary": lambda: Transformer(num_layers=2, vocabulary=VOCABULARY + 1),
    "routed": lambda: Transformer(RoutedLayer, num_layers=2),
    "listed": lambda: Transformer(ListedLayer, num_layers=2),
    "named": lambda: Transformer(NamedLayer, num_layers=2),
    "sorted": lambda: Transformer(SortedLayer, num_layers=2),
    "mixture": lambda: Transformer(MixtureLayer, num_layers=2, vocabulary=VOCABULARY + 1),
}


class TokenPairs:
    """More samples than the steps need, so that the order of the data matters."""

    def __init__(self, *, as_dict: bool = False) -> None:
        generator = torch.Generator().manual_seed(7)
        self._tokens = torch.randint(VOCABULARY, (NUM_BATCHES * GLOBAL_BATCH, TOKENS + 1), generator=generator)
        self._as_dict = as_dict

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: int, /) -> tuple[Any, torch.Tensor]:
        row = self._tokens[index]
        inputs = {"tokens": row[:-1], "mask": (row[:-1] > 2).float()} if self._as_dict else row[:-1]
        return inputs, row[1:]


def loss_fn(outputs: Any, targets: torch.Tensor) -> torch.Tensor:
    logits = outputs["logits"] if isinstance(outputs, dict) else outputs
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def train_all(cases: list[tuple[str, ParallelPlan | None]], precision: TrainingPrecision = "fp32") -> list[Training]:
    """Train one model after another, each under its plan, on the same ranks."""
    return [train(model_name, plan, precision=precision) for model_name, plan in cases]


@dataclass(frozen=True)
class Training:
    """What one rank saw of a training: the losses, gradient norms, and its gradients and parameters by name."""

    eval_losses: list[float]
    losses: list[float]
    grad_norms: list[float]
    gradients: dict[str, torch.Tensor]
    parameters: dict[str, torch.Tensor]
    metrics: dict[str, float]


def train(
    model_name: str,
    plan: ParallelPlan | None,
    *,
    precision: TrainingPrecision = "fp32",
    max_grad_norm: float = 0.5,
    num_steps: int = NUM_STEPS,
) -> Training:
    warnings.simplefilter("error")
    job = runtime.init(plan, precision=precision)
    torch.manual_seed(100 + job.world.rank)  # other weights on every rank, so that rank 0's must be handed out
    model = MODELS[model_name]()
    as_dict = model_name == "keyword"
    example = {"tokens": torch.zeros(2, TOKENS, dtype=torch.long), "mask": torch.ones(2, TOKENS)}
    engine = job.prepare(
        model,
        loss_fn=loss_fn,
        optimizer=lambda parameters: torch.optim.AdamW(
            [parameter for parameter in parameters if parameter.requires_grad],
            lr=1e-2,
            eps=1e-4,
            weight_decay=0.1,
            fused=True,
        ),
        max_grad_norm=max_grad_norm,
        verify="off",  # the comparison with one process is the test
        example_inputs=example if as_dict else torch.zeros(2, TOKENS, dtype=torch.long),
    )
    batches = job.shard(TokenPairs(as_dict=as_dict), batch_size=GLOBAL_BATCH, seed=3)
    eval_losses, losses, norms = [], [], []
    for step, (inputs, targets) in enumerate(batches):
        if step == num_steps:
            break
        if not step:
            eval_losses.append(engine.eval_step(inputs, targets).item())
        losses.append(engine.step(inputs, targets).item())
        norms.append(engine.grad_norm.item())
    return Training(
        eval_losses=eval_losses,
        losses=losses,
        grad_norms=norms,
        gradients={
            name: engine.whole(name, value.grad).clone()
            for name, value in engine.parameters.items()
            if value.grad is not None
        },
        parameters={name: engine.whole(name).clone() for name in engine.parameters},
        metrics={name: value.item() for name, value in engine.metrics.items()},
    )
