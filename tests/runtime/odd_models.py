"""Models that use more than a chain of trained blocks: frozen towers, detached paths, side inputs, buffers, skips."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from paraplan import runtime
from paraplan.errors import ParaplanError
from paraplan.plan.parallel import ParallelPlan

WIDTH, WORDS, LENGTH, BATCH, NUM_STEPS, NUM_BLOCKS = 12, 17, 6, 8, 2, 4


class Block(nn.Module):
    """A gated unit; what stands beside the hidden state is added to its inner part."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.inner, self.outer = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor, beside: torch.Tensor | None = None) -> torch.Tensor:
        inner = self.norm(hidden if beside is None else hidden + beside)
        return hidden + self.outer(F.silu(self.inner(inner)))


class Base(nn.Module):
    """An embedding, blocks and a head."""

    block: Callable[[], nn.Module] = Block

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(type(self).block() for _ in range(NUM_BLOCKS))
        self.head = nn.Linear(WIDTH, WORDS)

    def run(self, hidden: torch.Tensor, *beside: Any) -> torch.Tensor:
        for layer in self.layers:
            hidden = layer(hidden, *beside)
        return hidden

    def forward(self, tokens: torch.Tensor) -> Any:
        return self.head(self.run(self.words(tokens)))


class FrozenTower(Base):
    """A frozen encoder under no_grad that every block reads."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Sequential(nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.tower.requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            context = self.tower(tokens)
        return self.head(self.run(self.words(tokens), context))


class TrainedTower(FrozenTower):
    """An encoder that every block reads, and that is trained from every block."""

    def __init__(self) -> None:
        super().__init__()
        self.tower.requires_grad_(True)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.run(self.words(tokens), self.tower(tokens)))


class TowerByMethod(FrozenTower):
    """A frozen encoder that is called by another name than forward, at the end."""

    class Tower(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(WORDS, WIDTH)

        def encode(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.table(tokens)

    def __init__(self) -> None:
        super().__init__()
        self.tower = self.Tower().requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        start = self.words(tokens) + self.tower.encode(tokens) + self.tower.table.weight[0]
        return self.head(self.run(start))


class DetachedPrior(Base):
    """A frozen vector that is added to the logits, detached."""

    def __init__(self) -> None:
        super().__init__()
        self.prior = nn.Parameter(torch.randn(WORDS), requires_grad=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens) + self.prior.detach()


class ByData(DetachedPrior):
    """The same by `.data` of a trained one."""

    def __init__(self) -> None:
        super().__init__()
        self.prior = nn.Parameter(torch.randn(WORDS))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return Base.forward(self, tokens) * self.prior.data.exp() + self.prior


class ChosenExpert(Block):
    """A frozen correction that only an argmax reads."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 3, bias=False)
        self.correction = nn.Parameter(torch.randn(3), requires_grad=False)
        self.scales = nn.Parameter(torch.randn(3, WIDTH))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        score = self.gate(hidden).sigmoid()
        chosen = (score.detach() + self.correction).argmax(-1)
        return super().forward(hidden) + self.scales[chosen] * score.amax(-1, keepdim=True)


class Chosen(Base):
    block = ChosenExpert


class UnusedPart(Block):
    """A parameter that nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        self.never = nn.Parameter(torch.randn(3), requires_grad=False)


class Unused(Base):
    block = UnusedPart


class IntegerPath(Base):
    """A table of integers that chooses rows of a table for every block, through comparisons and a copy in place."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("groups", torch.randint(5, (WORDS,)))
        self.border = nn.Parameter(torch.tensor(2.5), requires_grad=False)
        self.group_table = nn.Embedding(5, WIDTH)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        chosen = torch.zeros_like(tokens)
        chosen[:, 1:] = torch.where(self.groups[tokens] > self.border, self.groups[tokens], 0)[:, 1:]
        return self.head(self.run(self.words(tokens), self.group_table(chosen)))


class InputSkip(Base):
    """The embedding beside the hidden state in every block, and at the end."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        start = F.normalize(self.words(tokens), dim=-1)
        return self.head(self.run(start, start) + start)


class InPlace(Block):
    """Adds to the hidden state that it is given, in place."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden += self.outer(F.silu(self.inner(hidden.clone())))
        return hidden


class InPlaceBlocks(Base):
    block = InPlace


class StepCount(Base):
    """A count of forward passes that scales the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.steps += 1
        return super().forward(tokens) * (1 + self.steps / 10)


class WarmUp(StepCount):
    """A count of forward passes that every block reads."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.steps += 1
        return self.head(self.run(self.words(tokens), self.steps / 10))


class MeanOfWords(Base):
    """A moving average of the embedding that nothing reads but the checkpoint, and one of the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("logit_mean", torch.zeros(WORDS))
        self.register_buffer("never", torch.randn(2))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.words(tokens)
        if self.training:
            self.mean.lerp_(hidden.detach().mean((0, 1)), 0.1)
        logits = self.head(self.run(hidden))
        if self.training:
            self.logit_mean.mul_(0.9).add_(logits.detach().mean((0, 1)), alpha=0.1)
        return logits - self.logit_mean


class FrozenAverage(Base):
    """A frozen parameter that the forward pass updates from the embedding, and blocks read."""

    def __init__(self) -> None:
        super().__init__()
        self.average = nn.Parameter(torch.zeros(WIDTH), requires_grad=False)
        self.trained = nn.Parameter(torch.ones(WIDTH))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.words(tokens)
        if self.training:
            with torch.no_grad():
                self.average.mul_(0.5).add_(hidden.mean((0, 1)))
        return self.head(self.run(hidden * self.trained, self.average.clone()))


class NormedBlock(Block):
    """Batch norm: running statistics inside of a block."""

    def __init__(self) -> None:
        super().__init__()
        self.batch_norm = nn.BatchNorm1d(WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(self.batch_norm(hidden.transpose(1, 2)).transpose(1, 2))


class Normed(Base):
    block = NormedBlock


class NormedEnds(Base):
    """Batch norm before and after the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.BatchNorm1d(WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.run(self.first(self.words(tokens).transpose(1, 2)).transpose(1, 2))
        return self.head(self.last(hidden.transpose(1, 2)).transpose(1, 2))


class KeepingBlock(Block):
    """Keeps what it computed last, as caches and monitors do."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.kept = F.relu_(self.inner(self.norm(hidden)))
        self.last = hidden + self.outer(self.kept)
        return self.last


class Keeping(Base):
    block = KeepingBlock


class SharedBlock(Block):
    """Holds a part that all blocks share."""

    shared: nn.Module

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden, self.shared(hidden))


class SharedPart(Base):
    block = SharedBlock

    def __init__(self) -> None:
        super().__init__()
        shared = nn.Linear(WIDTH, WIDTH)
        for layer in self.layers:
            layer.shared = shared


class SharedWeight(Base):
    """Two blocks whose layers, modules of their own, have one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[3].inner.weight = self.layers[0].inner.weight


class BlockTiedToHead(Base):
    """The head has the weight of a layer in the last block."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[3].table = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.layers[3].table.weight


class Images(Base):
    """Convolutions: gradients that are not contiguous."""

    class Convolution(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.depth = nn.Conv2d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH)
            self.norm, self.mix = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, image: torch.Tensor) -> torch.Tensor:
            mixed = self.mix(F.gelu(self.norm(self.depth(image).permute(0, 2, 3, 1))))
            return mixed.permute(0, 3, 1, 2)

    block = Convolution

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        grid = self.words(tokens).view(len(tokens), 2, LENGTH // 2, WIDTH).permute(0, 3, 1, 2)
        return self.head(self.run(grid).flatten(2).transpose(1, 2))


class Fields(Base):
    """Returns an object that nests its logits."""

    @dataclass
    class Output:
        parts: dict[str, Any]

    def forward(self, tokens: torch.Tensor) -> Output:
        return self.Output(parts={"inner": self.Output(parts={"logits": super().forward(tokens)})})


class Tied(Base):
    """A head that is the embedding, detached, beside one that is trained."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.run(self.words(tokens))
        return self.head(hidden) + hidden @ self.words.weight.detach().T


class ByteCache(Base):
    """A plain attribute, no buffer, that is kept inside a module which is used before the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.words.scale = torch.full((WIDTH,), 0.3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.run(self.words(tokens), self.words.scale))


class ValueResidual(Base):
    """Every block reads what the first one has computed beside its hidden state."""

    class Pair(Block):
        def forward(  # type: ignore[override]
            self, hidden: torch.Tensor, first: torch.Tensor | None = None
        ) -> tuple[torch.Tensor, torch.Tensor]:
            value = self.inner(hidden)[..., :WIDTH]
            mixed = value if first is None else (value + first) / 2
            return Block.forward(self, hidden, mixed), value if first is None else first

    block = Pair

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden, first = self.words(tokens), None
        for layer in self.layers:
            hidden, first = layer(hidden, first)
        return self.head(hidden)


# What follows cannot be cut.
class DetachedSkip(Base):
    """The end reads a hidden state from the middle, detached."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden, kept = self.words(tokens), []
        for layer in self.layers:
            hidden = layer(hidden)
            kept.append(hidden.detach())
        return self.head(hidden + kept[1])


class ThroughDict(Base):
    """Blocks hand on a tensor by a dict that they fill."""

    class Keeper(Block):
        def forward(self, hidden: torch.Tensor, kept: dict[str, torch.Tensor]) -> torch.Tensor:  # type: ignore[override]
            out = super().forward(hidden, kept.get("first"))
            kept.setdefault("first", out)
            return out

    block = Keeper

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.run(self.words(tokens), {}))


class PooledStates(Base):
    """A buffer of the model follows the hidden states between blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("pooled", torch.zeros(WIDTH))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.words(tokens)
        for layer in self.layers:
            self.pooled.lerp_(hidden.detach().mean((0, 1)), 0.1)
            hidden = layer(hidden)
        return self.head(hidden)


class LateBuffer(StepCount):
    """A buffer that is written after the blocks and read by them in the next step."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.run(self.words(tokens), self.steps.clone())
        self.steps += hidden.detach().mean()
        return self.head(hidden)


class Reassigned(StepCount):
    """A buffer that is replaced by another tensor."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.steps = self.steps + 1
        return Base.forward(self, tokens)


class SharedCount(Base):
    """A count inside of a part that all blocks share."""

    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return hidden / self.calls.clone()

    block = SharedBlock

    def __init__(self) -> None:
        super().__init__()
        shared = self.Counter()
        for layer in self.layers:
            layer.shared = shared


class NoiseAtBothEnds(Base):
    """Random numbers that are drawn before the blocks and read after them."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        noise = torch.rand(tokens.shape)[..., None]
        return self.head(self.run(self.words(tokens) * noise) * noise)


class Branches(Base):
    """Goes by values: of inputs, behind the blocks, and of hidden states before them, which choose weights."""

    def __init__(self) -> None:
        super().__init__()
        self.other, self.shift = nn.Linear(WIDTH, WORDS), nn.Parameter(torch.randn(WIDTH))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        start = self.words(tokens)
        is_large = bool(start.detach()[0, 0].abs().sum() > 1e-3)
        hidden = self.run(start)
        if not (tokens > WORDS).any():
            hidden = hidden + start * self.shift
        logits = self.head(hidden) if (tokens < 0).any() else self.other(hidden)
        return logits * (2.0 if is_large else 1.0)


class BranchBetween(Base):
    """Skips a block where hidden states are large."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.words(tokens)
        for layer in self.layers:
            if hidden.detach().abs().max() < 1e6:
                hidden = layer(hidden)
        return self.head(hidden)


class DropsLayers(Base):
    """Seldom leaves a block out, by numbers that every stage would draw."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.words(tokens)
        for layer in self.layers:
            if not self.training or torch.rand(()) > 1e-6:
                hidden = layer(hidden)
        return self.head(hidden)


class DrawsByPython(Base):
    """Scales its input by numbers of Python's own."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.run(self.words(tokens) * (1.0 + random.random())))  # noqa: S311


class Headed(nn.Module):
    """Attention of two heads whose values are mixed with those of the first block; returns both in some form."""

    form: str = "tuple"

    @dataclass
    class Pair:
        hidden: torch.Tensor
        value: torch.Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor, first: torch.Tensor | None = None) -> Any:
        normed = self.norm(hidden)
        query, key, value = (
            layer(normed).unflatten(-1, (2, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        mixed = value if first is None else (value + first) / 2
        attended = F.scaled_dot_product_attention(query, key, mixed)
        hidden = hidden + self.out(attended.transpose(1, 2).flatten(2))
        if self.form == "dict":
            return {"hidden": hidden, "value": value}
        return self.Pair(hidden, value) if self.form == "dataclass" else (hidden, value)


class HeadedDict(Headed):
    form = "dict"


class HeadedFields(Headed):
    form = "dataclass"


class OneKeyHead(nn.Module):
    """Attention of four heads of queries to one of keys and values, which code repeats for as many as it finds."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.key, self.value = nn.Linear(WIDTH, WIDTH // 4), nn.Linear(WIDTH, WIDTH // 4)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            layer(hidden).unflatten(-1, (-1, WIDTH // 4)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return hidden + self.out(attended.transpose(1, 2).flatten(2))


class MultiQuery(Base):
    block = OneKeyHead


class ValuesOfHeads(Base):
    """The values of the first block's heads, in every block; the last one's are read by the end."""

    block = Headed

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden, first, value = self.words(tokens), None, None
        for layer in self.layers:
            output = layer(hidden, first)
            if isinstance(output, tuple):
                hidden, value = output
            else:
                fields = output if isinstance(output, dict) else vars(output)
                hidden, value = fields["hidden"], fields["value"]
            first = value if first is None else first
        return self.head(hidden + value.transpose(1, 2).flatten(2))


class ValuesInDict(ValuesOfHeads):
    block = HeadedDict


class ValuesInFields(ValuesOfHeads):
    block = HeadedFields


class ValuesUnread(ValuesOfHeads):
    """Nothing reads the values."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.words(tokens)
        for layer in self.layers:
            hidden, _ = layer(hidden)
        return self.head(hidden)


SPLIT: tuple[type[Base], ...] = (MultiQuery, ValuesOfHeads, ValuesInDict, ValuesInFields, ValuesUnread)
SOUND: tuple[type[Base], ...] = (
    *(FrozenTower, TrainedTower, TowerByMethod, DetachedPrior, ByData, Chosen, Unused, IntegerPath, InputSkip),
    *(InPlaceBlocks, StepCount, WarmUp, MeanOfWords, FrozenAverage, Normed, NormedEnds, SharedPart, Images, Fields),
    *(Tied, ByteCache, SharedWeight, BlockTiedToHead, Branches, Keeping, ValueResidual),
)
REFUSED: dict[type[Base], str] = {
    DetachedSkip: "reads the hidden state that enters block layers.2",
    ThroughDict: "block layers.1 reads",
    PooledStates: "pooled is written between or after the blocks",
    LateBuffer: "steps is written between or after the blocks",
    Reassigned: "another tensor in the place of steps",
    SharedCount: "block layers.1 reads what block layers.0 computes beside",
    NoiseAtBothEnds: "random numbers drawn outside",
    BranchBetween: "branches on a value of hidden states",
    DropsLayers: "branches on random numbers",
    DrawsByPython: "draws random numbers by Python's random",
}


@dataclass(frozen=True)
class Run:
    """What one rank has after a training: losses, first gradients, parameters and buffers by name."""

    losses: list[float]
    gradients: dict[str, torch.Tensor]
    parameters: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]


def loss_of(outputs: Any, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy of logits, however deep they lie in the outputs."""
    while not isinstance(outputs, torch.Tensor):
        outputs = next(iter(outputs.parts.values() if hasattr(outputs, "parts") else outputs.values()))
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def trained(job: runtime.Job, model: nn.Module) -> Run:
    """Train `model` for a few steps under the plan of `job`, on the same data on every rank."""
    engine = job.prepare(
        model,
        loss_fn=loss_of,
        optimizer=lambda held: torch.optim.SGD([one for one in held if one.requires_grad], lr=0.2, momentum=0.9),
        example_inputs=torch.zeros(2, LENGTH, dtype=torch.long),
        verify="off",  # the comparison with one process is the test
    )
    generator = torch.Generator().manual_seed(5)
    losses, gradients = [], {}
    for step in range(NUM_STEPS):
        tokens, targets = torch.randint(WORDS, (2, BATCH, LENGTH), generator=generator)
        share = BATCH // job.plan.dp
        mine = slice(job.mesh.coordinate("dp") * share, (job.mesh.coordinate("dp") + 1) * share)
        losses.append(engine.step(tokens[mine], targets[mine]).item())
        if not step:
            gradients = {
                name: engine.whole(name, held.grad).clone()
                for name, held in engine.parameters.items()
                if held.grad is not None
            }
    return Run(
        losses=losses,
        gradients=gradients,
        parameters={name: engine.whole(name).clone() for name in engine.parameters},
        buffers={name: held.clone() for name, held in engine._part.buffers.items()},
    )


def made(kind: type[Base]) -> Base:
    """Return the model of this kind, with the same weights on every rank."""
    torch.manual_seed(0)
    model = kind()
    with torch.no_grad():
        for held in model.parameters():
            if held.is_floating_point() and held.ndim == 1:
                held.add_(torch.randn_like(held) * 0.1)
    return model


def train_all(kinds: list[type[Base]], plans: list[ParallelPlan]) -> list[list[Run | str]]:
    """Return the training of each model under each plan, or the words of the refusal."""
    found: list[list[Run | str]] = []
    for plan in plans:
        job = runtime.init(plan, shows_progress=False)
        found.append([])
        for kind in kinds:
            try:
                found[-1].append(trained(job, made(kind)))
            except ParaplanError as refusal:
                found[-1].append(str(refusal))
    return found


def difference(run: Run, reference: Run) -> dict[str, float]:
    """Return the relative errors of a run that are not rounding: of losses, gradients, parameters and buffers."""
    pairs = {f"loss {step}": pair for step, pair in enumerate(zip(run.losses, reference.losses, strict=True))}
    errors = {name: abs(one / other - 1) for name, (one, other) in pairs.items()}
    for what in ("gradients", "parameters", "buffers"):
        expected = getattr(reference, what)
        for name, value in getattr(run, what).items():
            if name not in expected:
                errors[f"{what} {name}"] = float("inf")
                continue
            scale = max(float(expected[name].abs().max()), 1e-3)
            errors[f"{what} {name}"] = float((value - expected[name]).abs().max()) / scale
    return {name: error for name, error in errors.items() if not error < 2e-5}
