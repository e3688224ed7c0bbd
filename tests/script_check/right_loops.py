"""Right training loops of people's own, small: what examples of torch and of papers train, and how."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from right_scripts import CE, Block, Rows, Words, divided, loader, mlp
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

Loss = Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]


def trained(model: Any, loss: Loss, batches: Any = None, optimizer: Any = None, after: Any = None) -> None:
    """Train `model`: `loss` is given it, rows and targets; `after` each step what it was."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-3)
    for rows, targets in loader() if batches is None else batches:
        optimizer.zero_grad()
        found = loss(model, rows, targets)
        found.backward()
        optimizer.step()
        if after is not None:
            after(found)


class Coder(nn.Module):
    """A variational auto-encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(8, 8), nn.Linear(4, 8)

    def forward(self, rows: torch.Tensor, noise: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        mean, log_variance = self.down(rows).chunk(2, dim=-1)
        return self.up(mean + noise * (0.5 * log_variance).exp()), mean, log_variance


def coder(how: str, *, is_sum: bool) -> None:
    torch.manual_seed(0)
    model = divided(Coder(), how)
    torch.manual_seed(5 + dist.get_rank())

    def loss(model: Any, rows: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        found, mean, log_variance = model(rows, torch.randn(len(rows), 4))
        prior = -0.5 * (1 + log_variance - mean.square() - log_variance.exp())
        if is_sum:
            return functional.mse_loss(found, rows, reduction="sum") + prior.sum()
        return functional.mse_loss(found, rows) + prior.mean()

    trained(model, loss)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.lstm, self.head = nn.Embedding(20, 8), nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 20)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(self.embedding(words))[0])


class Patches(nn.Module):
    """A vision transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.token = nn.Conv2d(3, 16, 4, 4), nn.Parameter(torch.zeros(1, 1, 16))
        self.places = nn.Parameter(torch.randn(1, 5, 16) * 0.02)
        self.block, self.head = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), nn.Linear(16, 4)

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        found = self.patches(pictures).flatten(2).transpose(1, 2)
        found = torch.cat([self.token.expand(len(found), -1, -1), found], dim=1) + self.places
        return self.head(self.block(found)[:, 0])


class Experts(nn.Module):
    """A layer of experts, each token by one."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(8, 3), nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.head = nn.Linear(8, 4)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        weights = self.router(rows).softmax(-1)
        best = weights.argmax(-1)
        found = torch.stack([expert(rows) for expert in self.experts], dim=1)
        return self.head((found * functional.one_hot(best, 3)[..., None] * weights[..., None]).sum(1))


class Sharpness(torch.optim.SGD):
    """Steps by the gradient where a first one has moved it to (Foret et al. 2021, "Sharpness-Aware Minimization")."""

    def step(self, closure: Any = None) -> Any:
        each = [one for group in self.param_groups for one in group["params"]]
        shifts = [0.05 * one.grad for one in each]
        with torch.no_grad():
            torch._foreach_add_(each, shifts)
        self.zero_grad()
        found = closure()
        with torch.no_grad():
            torch._foreach_sub_(each, shifts)
        super().step()
        self.zero_grad()
        return found


class Stream(IterableDataset[Any]):
    """Rows that come one after another, every so many for each rank."""

    def __iter__(self) -> Any:
        data = Rows()
        yield from (data[index] for index in range(dist.get_rank(), len(data), dist.get_world_size()))


def policy(how: str, what: str) -> None:
    """Policy gradients: of a group of answers, of an actor and its critic, or clipped around an older policy."""
    model = divided(mlp(), how)
    judge = nn.Linear(8, 1)
    older = copy.deepcopy(mlp()).requires_grad_(False)
    random = torch.Generator().manual_seed(40 + dist.get_rank())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(3):
        states, actions = torch.randn(8, 8, generator=random), torch.randint(0, 4, (8, 1), generator=random)
        rewards = torch.randn(8, generator=random)
        groups = rewards.view(-1, 4)
        with torch.no_grad():
            before = older(states).log_softmax(-1).gather(1, actions)[:, 0]
            value = judge(states)[:, 0]
        advantages = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)
        log = model(states).log_softmax(-1)
        now = log.gather(1, actions)[:, 0]
        ratio = (now - before).exp()
        if what == "grpo":
            gain = torch.min(ratio * advantages.flatten(), ratio.clamp(0.8, 1.2) * advantages.flatten())
            loss = -gain.mean() + 0.04 * ((before - now).exp() - (before - now) - 1).mean()
        else:
            loss = -(now * (rewards - value)).mean() - 0.01 * -(log.exp() * log).sum(-1).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def part_of_a_sequence() -> None:
    """All ranks share one sequence, of which each embeds and predicts its own part."""
    world, rank = dist.get_world_size(), dist.get_rank()
    model = nn.Sequential(nn.Embedding(40, 16), Block(), nn.Linear(16, 40))
    random = torch.Generator().manual_seed(3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(3):
        words = torch.randint(1, 40, (4, 8), generator=random)
        rows, targets = (one.chunk(world, 1)[rank].contiguous() for one in (words, words.roll(-1, 1)))
        optimizer.zero_grad()
        (CE(model(rows).flatten(0, 1), targets.flatten(), reduction="sum") / words.numel()).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()


def tensors_and_shards(what: str) -> None:
    """Tensor parallelism with a loss over parts of the classes, or below FSDP on a mesh of two axes."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        loss_parallel,
        parallelize_module,
    )

    model, world = mlp(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (1, world) if what == "below-fsdp" else (world, 1), mesh_dim_names=("dp", "tp"))
    if what == "classes":
        mesh = init_device_mesh("cpu", (1, world), mesh_dim_names=("dp", "tp"))
        plan = ColwiseParallel(input_layouts=Replicate(), output_layouts=Shard(-1), use_local_output=False)
        parallelize_module(model, mesh["tp"], {"3": plan})
    else:
        parallelize_module(model, mesh["tp"], {"*.a": ColwiseParallel(), "*.b": RowwiseParallel()})
        fully_shard(model, mesh=mesh["dp"])
    torch.manual_seed(3 + (dist.get_rank() if what == "above-fsdp" else 0))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, foreach=False)
    for _ in range(3):
        rows, targets = torch.randn(4, 8), torch.randint(0, 4, (4,))
        if what == "classes":
            with loss_parallel():
                CE(model(rows), targets).backward()
        else:
            CE(model(rows), targets).backward()
        optimizer.step()
        optimizer.zero_grad()


def penalized(model: Any, rows: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    """The loss of a judge whose slope is held near 1."""
    moved = rows.clone().requires_grad_()
    score = model(moved)[:, 0]
    (slope,) = torch.autograd.grad(score.sum(), moved, create_graph=True)
    return score.mean() + 10 * (slope.norm(dim=1) - 1).square().mean()


def noised(model: Any, rows: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    """What a model of diffusion learns."""
    times, noise = torch.rand(len(rows), 1), torch.randn_like(rows)
    return functional.mse_loss(model((1 - times) * rows + times * noise)[:, :4], noise[:, :4])


def loop(how: str, what: str) -> None:  # noqa: C901 - one branch for each loop, read one by one
    """One of the loops that differ in a model, a loss or an optimizer alone."""
    pictures = Rows(shape=(3, 8, 8))

    def plain(model: Any, rows: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return CE(model(rows), targets)

    if what == "sum":  # a number of rows that is written down
        trained(divided(mlp(), how), lambda model, x, y: CE(model(x), y, reduction="sum") / 4)
    elif what == "recurrent":
        random = torch.Generator().manual_seed(dist.get_rank())
        words = [torch.randint(0, 20, (4, 8), generator=random) for _ in range(3)]
        trained(
            divided(Recurrent(), how),
            lambda model, x, y: CE(model(x).flatten(0, 1), y.flatten()),
            [(one[:, :-1], one[:, 1:]) for one in words],
        )
    elif what == "vision":
        trained(divided(Patches(), how), plain, loader(pictures))
    elif what == "pixels":
        model = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.GroupNorm(2, 8), nn.SiLU(), nn.ConvTranspose2d(8, 4, 2, 2))
        trained(divided(model, how), lambda model, x, y: CE(model(x), (x[:, 0] > 0).long() + 1), loader(pictures))
    elif what == "upscale":
        model = nn.Sequential(nn.Conv2d(3, 12, 3, padding=1), nn.PixelShuffle(2))
        half = functional.avg_pool2d
        trained(divided(model, how), lambda model, x, y: functional.l1_loss(model(half(x, 2)), x), loader(pictures))
    elif what == "triplet":
        margin = nn.TripletMarginLoss()
        trained(divided(mlp(), how), lambda model, x, y: margin(model(x), model(x + 0.1), model(x.flip(1))), loader())
    elif what == "pairs":  # the rows that are to win, and behind them those that are to lose

        def ranked(model: Any, rows: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
            better, worse = model(rows)[:, 0].chunk(2)
            return -functional.logsigmoid(better - worse).mean()

        trained(divided(mlp(), how), ranked)
    elif what == "focal":

        def focal(model: Any, rows: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            each = CE(model(rows), targets, reduction="none")
            return ((1 - (-each).exp()).square() * each).mean()

        trained(divided(mlp(), how), focal)
    elif what == "slope":
        trained(divided(mlp(), how), penalized)
    elif what == "diffusion":
        model = divided(mlp(), how)
        torch.manual_seed(9 + dist.get_rank())
        trained(model, noised)
    elif what == "experts":
        trained(divided(Experts(), how), plain)
    elif what == "stream":
        trained(divided(mlp(), how), plain, DataLoader(Stream(), 4))
    elif what == "epochs":
        batches = loader(Rows(8))

        def twice() -> Any:
            for epoch in range(3):
                batches.sampler.set_epoch(epoch)
                yield from batches

        trained(divided(mlp(), how), plain, twice())
    elif what == "mappings":

        def collate(items: list[Any]) -> dict[str, Any]:
            return {"x": torch.stack([x for x, _ in items]), "y": [int(y) for _, y in items], "name": "rows"}

        batches = ((one["x"], torch.tensor(one["y"])) for one in loader(collate_fn=collate))
        trained(divided(mlp(), how), plain, batches)
    elif what == "compiled":
        trained(torch.compile(divided(mlp(), how)), plain)
    elif what == "averaged-weights":
        model = divided(mlp(), how)
        kept = torch.optim.swa_utils.AveragedModel(model)
        trained(model, plain, after=lambda _: kept.update_parameters(model))
    elif what == "plateau":
        model = divided(mlp(), how)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)

        def after(loss: torch.Tensor) -> None:
            shown = loss.detach().clone()
            dist.all_reduce(shown)
            schedule.step(float(shown) / dist.get_world_size())

        trained(model, plain, optimizer=optimizer, after=after)
    elif what in ("closure", "line-search", "steepest"):
        model = divided(mlp(), how)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=1e-2)
        if what != "closure":
            search = "strong_wolfe" if what == "line-search" else None
            optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4, line_search_fn=search)
        for rows, targets in loader():

            def closure(rows: torch.Tensor = rows, targets: torch.Tensor = targets) -> torch.Tensor:
                optimizer.zero_grad()
                loss = CE(model(rows), targets)
                loss.backward()
                return loss

            optimizer.step(closure)
    elif what == "sharpness":
        model = divided(mlp(), how)
        optimizer = Sharpness(model.parameters(), lr=1e-2)
        for rows, targets in loader():

            def again(rows: torch.Tensor = rows, targets: torch.Tensor = targets) -> torch.Tensor:
                loss = CE(model(rows), targets)
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                return loss

            again()
            optimizer.step(closure=again)
    elif what == "scaler":
        model = divided(mlp(), how)
        optimizer, scaler = torch.optim.Adam(model.parameters(), 1e-3), torch.amp.GradScaler("cpu", init_scale=64.0)
        for rows, targets in loader():
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = CE(model(rows), targets)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
    elif what in ("unused", "static", "views"):
        model = nn.Sequential(nn.Linear(8, 16), Block(), nn.Linear(16, 4))
        model.register_module("spare", nn.Linear(3, 3) if what == "unused" else nn.Identity())
        model.forward = lambda rows, layers=list(model)[:3]: layers[2](layers[1](layers[0](rows)))  # type: ignore[method-assign]
        options = {"unused": "find_unused_parameters", "static": "static_graph", "views": "gradient_as_bucket_view"}
        trained(DistributedDataParallel(model, **{options[what]: True}), plain)
    elif what == "muon":
        model = divided(nn.Sequential(nn.Linear(8, 16, bias=False), nn.ReLU(), nn.Linear(16, 4, bias=False)), how)
        trained(model, plain, optimizer=torch.optim.Muon(model.parameters(), lr=1e-2))
    else:
        random = torch.Generator().manual_seed(3 + dist.get_rank())
        pairs = [torch.randint(1, 40, (4, 8), generator=random) for _ in range(3)]
        model = divided(Words(), how)
        teacher = Words().requires_grad_(False).eval()

        def apart(model: Any, rows: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                wanted = teacher(rows).log_softmax(-1)
            found = model(rows).log_softmax(-1)
            return functional.kl_div(found.flatten(0, 1), wanted.flatten(0, 1), log_target=True, reduction="batchmean")

        trained(model, apart, [(one, one) for one in pairs])


PLAIN = ("sum", "recurrent", "vision", "pixels", "upscale", "triplet", "focal", "slope", "diffusion", "experts")
PLAIN += ("stream", "epochs", "mappings", "compiled", "averaged-weights", "plateau", "closure", "scaler", "unused")
PLAIN += ("static", "views", "muon", "word-distill", "pairs", "line-search", "steepest", "sharpness")
LOOPS: dict[str, Callable[[], None]] = {
    **{f"ddp/{what}": lambda what=what: loop("ddp", what) for what in PLAIN},
    **{f"fsdp2/{what}": lambda what=what: loop("fsdp2", what) for what in ("sum", "vision", "scaler", "word-distill")},
    **{f"fsdp1/{what}": lambda what=what: loop("fsdp1", what) for what in ("recurrent", "diffusion")},
    "ddp/vae": lambda: coder("ddp", is_sum=False),
    "ddp/vae-sum": lambda: coder("ddp", is_sum=True),
    **{f"ddp/{what}": lambda what=what: policy("ddp", what) for what in ("grpo", "actor-critic")},
    "by-hand/part-of-a-sequence": part_of_a_sequence,
    "fsdp2/grpo": lambda: policy("fsdp2", "grpo"),
    **{f"tp/{what}": lambda what=what: tensors_and_shards(what) for what in ("classes", "below-fsdp", "above-fsdp")},
}
