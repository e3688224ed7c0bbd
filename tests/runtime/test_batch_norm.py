"""Buffers that forward passes write: from parts of a batch, and told so, or from the global batch where asked for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from case_selection import with_all
from rank_harness import RankHarness
from torch import nn

from paraplan import runtime
from paraplan.errors import ParaplanError
from paraplan.plan.parallel import ParallelPlan
from paraplan.runtime.engine import Engine

BATCH, NUM_STEPS = 8, 3
Trained = tuple[list[float], dict[str, torch.Tensor], dict[str, torch.Tensor], dict[str, torch.Tensor]]


class Flattened(nn.Module):
    """Takes images of 2 x 4 x 4 as 16 points with 2 channels, normalised."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.inner, self.norm, self.head = nn.Conv1d(2, 6, 3), nn.BatchNorm1d(6, **options), nn.Linear(6, 3)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.inner(images.flatten(2))).relu().mean(-1))


class Images(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4, **options)
        self.rows, self.head = nn.BatchNorm1d(4, **options), nn.Linear(4, 3)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.rows(self.norm(self.first(images)).relu().mean((2, 3))))


class Frozen(Images):
    """The first norm goes by its running statistics, and is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.norm.eval().requires_grad_(False)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(32), nn.Linear(32, 32)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return hidden + self.linear(self.norm(hidden)).relu()


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(Block() for _ in range(3)), nn.Linear(32, 3)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden = images.flatten(1)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


class Counting(nn.Module):
    """Writes a buffer: a number of calls, or an average of what it has seen."""

    def __init__(self, *, by_data: bool) -> None:
        super().__init__()
        self.head, self.by_data = nn.Linear(32, 3), by_data
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen.mul_(0.9).add_(images.detach().mean() if self.by_data else 1.0)
        return self.head(images.flatten(1))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "1d": Flattened,
    "2d": Images,
    "momentum none": lambda: Images(momentum=None),
    "affine false": lambda: Flattened(affine=False),
    "no running statistics": lambda: Images(track_running_stats=False),
    "frozen": Frozen,
    "blocks": Blocks,
    "counter": lambda: Counting(by_data=False),
}


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)
    pairs = []
    for step in range(2 * NUM_STEPS):
        images = torch.randn(BATCH, 2, 4, 4, generator=generator) * (step + 1)
        images[: BATCH // 2] += 3  # ranks see different distributions
        pairs.append((images, torch.randint(3, (BATCH,), generator=generator)))
    return pairs


def prepared(model: nn.Module, plan: ParallelPlan, **options: Any) -> Engine:
    return runtime.init(plan, shows_progress=False).prepare(
        model, loss_fn=F.cross_entropy, optimizer=lambda given: torch.optim.SGD(given, lr=0.1), **options
    )


def model_of(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]()


def share(batch: tuple[torch.Tensor, torch.Tensor], plan: ParallelPlan) -> tuple[torch.Tensor, torch.Tensor]:
    size = BATCH // plan.dp
    start = torch.distributed.get_rank() * size if plan.dp > 1 else 0
    return batch[0][start : start + size], batch[1][start : start + size]


def steps(engine: Engine, plan: ParallelPlan, numbers: range = range(NUM_STEPS)) -> list[float]:
    return [engine.step(*share(batches()[number], plan)).item() for number in numbers]


def buffers(engine: Engine) -> dict[str, torch.Tensor]:
    return {name.removeprefix("module."): one.clone() for name, one in engine.module.named_buffers()}


def trained(name: str, plan: ParallelPlan, **options: Any) -> Trained:
    engine = prepared(model_of(name), plan, **options)
    losses = steps(engine, plan)
    held = {key: value for key, value in engine.parameters.items() if value.requires_grad}
    gradients = {key: engine.whole(key, value.grad).clone() for key, value in held.items()}
    return losses, gradients, {key: engine.whole(key).clone() for key in engine.parameters}, buffers(engine)


def plainly(name: str) -> Trained:
    """Return the same of plain torch, which sees every global batch in one piece."""
    model = model_of(name)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for images, classes in batches()[:NUM_STEPS]:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), classes)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    held = dict(model.named_parameters())
    gradients = {key: value.grad for key, value in held.items() if value.grad is not None}
    return losses, gradients, held, dict(model.named_buffers())


def assert_same(found: Trained, expected: Trained, case: str) -> None:
    assert found[0] == pytest.approx(expected[0], rel=1e-5), case
    for mine, plain in zip(found[1:], expected[1:], strict=True):
        assert mine.keys() == plain.keys(), case
        for name, value in plain.items():
            torch.testing.assert_close(
                mine[name], value, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{case} {name}: {text}"
            )


TWO = ParallelPlan(dp=2, micro_batch_size=4)
FOUR_PARTS = ParallelPlan(dp=2, micro_batch_size=2, num_microbatches=2)


def refusal(model: nn.Module, plan: ParallelPlan, **options: Any) -> str:
    try:
        steps(prepared(model, plan, **options), plan)
    except ParaplanError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def on_ranks(folder: str) -> tuple[dict[str, Trained], dict[str, str], list[Any]]:
    gathers = {"batch_coupling": "gather"}
    by_plan = {name: trained(name, TWO, **gathers) for name in with_all(MODELS) or ("momentum none", "1d", "frozen")}
    by_plan["2d zero3"] = trained("2d", TWO.replace(zero_stage=3), **gathers)
    by_plan["blocks recompute"] = trained("blocks", TWO.replace(recompute="full"), **gathers)
    said = {
        "norm": refusal(model_of("2d"), FOUR_PARTS, batch_coupling="refuse"),
        "gathered norm": refusal(model_of("2d"), FOUR_PARTS, **gathers),
        "average": refusal(Counting(by_data=True), TWO, batch_coupling="refuse"),
        "average, told": refusal(Counting(by_data=True), TWO),
    }
    local = []
    for model in (model_of("2d"), Counting(by_data=True)):
        engine = prepared(model, FOUR_PARTS)
        steps(engine, FOUR_PARTS)
        engine.save(f"{folder}/{type(model).__name__}")
        here = buffers(engine)
        going_on = steps(engine, FOUR_PARTS, range(NUM_STEPS, 2 * NUM_STEPS))
        engine = prepared(type(model)(by_data=True) if isinstance(model, Counting) else Images(), FOUR_PARTS)
        engine.load(f"{folder}/{type(model).__name__}")
        local.append((here, going_on, steps(engine, FOUR_PARTS, range(NUM_STEPS, 2 * NUM_STEPS))))
    return by_plan, said, local


@pytest.mark.ranks
def test_batch_norm_over_ranks_is_that_of_one_process_or_refused_or_of_parts(
    ranks: RankHarness, tmp_path: Path
) -> None:
    by_rank = ranks.run(on_ranks, str(tmp_path), size=2)
    for by_plan, said, local in by_rank:
        for case, found in by_plan.items():
            assert_same(found, plainly(case.removesuffix(" zero3").removesuffix(" recompute")), case)
        assert said["norm"].startswith("UnsupportedPlanError: the model writes norm.running_mean from its batch")
        assert "batch_coupling='gather' needs the outputs of a whole step at once" in said["gathered norm"]
        assert said["average"].startswith("UnsupportedPlanError: the model writes seen from its batch")
        assert said["average, told"] == "no error"
        for _, losses, again in local:
            assert losses == again
    (_, _, first), (_, _, second) = by_rank
    for (mine, *_), (other, *_) in zip(first, second, strict=True):
        assert mine.keys() == other.keys()
        assert all(torch.equal(value, other[name]) for name, value in mine.items())
        assert any(value.abs().sum() > 0 for value in mine.values())


@pytest.mark.parametrize("name", ["2d", "blocks"])
def test_micro_batches_of_a_batch_norm_have_their_own_statistics_and_that_is_told(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    plan = ParallelPlan(micro_batch_size=2, num_microbatches=4)
    engine = prepared(model_of(name), plan)
    caplog.clear()
    steps(engine, plan)
    said = [record.getMessage() for record in caplog.records]
    assert sum(words.startswith("this model compares samples: loss ") for words in said) == 1
    assert all(value > 0 for key, value in buffers(engine).items() if key.endswith("tracked"))


def test_recompute_counts_a_batch_once() -> None:
    plan = ParallelPlan(micro_batch_size=BATCH, recompute="full")
    assert_same(trained("blocks", plan), plainly("blocks"), "recompute")
    engine = prepared(model_of("blocks"), plan.replace(num_microbatches=4, micro_batch_size=2))
    steps(engine, plan)
    assert {value.item() for key, value in buffers(engine).items() if key.endswith("calls")} == {4.0 * NUM_STEPS}


def in_stages() -> list[tuple[str, Trained, Trained]]:
    found = []
    for schedule in ("1f1b", "zero_bubble"):
        plan = ParallelPlan(pp=2, micro_batch_size=2, num_microbatches=4, pipeline_schedule=schedule)
        options = {"example_inputs": torch.zeros(2, 2, 4, 4), "verify": "off"}
        kept, again = (trained("blocks", plan.replace(recompute=how), **options) for how in ("none", "full"))
        found.append((schedule, kept, again))
    return found


@pytest.mark.ranks
def test_recompute_in_a_pipeline_writes_the_buffers_of_blocks_once(ranks: RankHarness) -> None:
    for by_schedule in ranks.run(in_stages, size=2):
        for schedule, kept, again in by_schedule:
            assert_same(again, kept, schedule)
            calls = {value.item() for key, value in again[3].items() if key.endswith("calls")}
            assert calls <= {0.0, 4.0 * NUM_STEPS}  # those of other stages are not run
            assert calls != {0.0}


class Counted(Block):
    """Writes a buffer of the model, where it is given that."""

    def __init__(self, *models: nn.Module) -> None:
        super().__init__()
        self.of_models = list(models)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for model in self.of_models:
            model.seen.add_(1)
        return super().forward(hidden)


class SharedCounter(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))
        self.layers = nn.ModuleList([Counted(self), Counted(), Counted()])


def refused_in_stages() -> str:
    plan = ParallelPlan(pp=2, micro_batch_size=4, num_microbatches=2, pipeline_schedule="1f1b", recompute="full")
    return refusal(SharedCounter(), plan, example_inputs=torch.zeros(2, 2, 4, 4), verify="off")


@pytest.mark.ranks
def test_a_buffer_that_is_not_the_blocks_own_is_refused_under_recompute(ranks: RankHarness) -> None:
    for said in ranks.run(refused_in_stages, size=2):
        assert "blocks write seen, which is not a buffer of theirs" in said
