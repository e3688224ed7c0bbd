"""What forward passes keep beside buffers: averages of weights, attributes, lists. Checks leave them as they were."""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any

import pytest
import torch
from odd_models import BATCH, LENGTH, WIDTH, WORDS, Base, loss_of, made
from rank_harness import RankHarness
from torch import nn

from paraplan import runtime
from paraplan.errors import UnsupportedPlanError
from paraplan.plan.parallel import ParallelPlan
from paraplan.runtime.structure.shaken_weights import shaken_weights

NUM_STEPS = 3
HALVES = ParallelPlan(micro_batch_size=BATCH // 2, num_microbatches=2)


class Averaging(Base):
    """Adds a block whose weights follow those of the first one, which they are in the beginning."""

    def __init__(self) -> None:
        super().__init__()
        self.average = copy.deepcopy(self.layers[0]).requires_grad_(False)

    def run(self, hidden: torch.Tensor, *beside: object) -> torch.Tensor:
        for average, weight in zip(self.average.parameters(), self.layers[0].parameters(), strict=True):
            average.data = 0.9 * average.data + 0.1 * weight.data
        return super().run(hidden + self.average(hidden).detach())


class Remembering(Base):
    """Centers by a moving mean and by a list, which are attributes of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.center: torch.Tensor | None = None
        self.sums = torch.zeros(WIDTH)
        self.seen: list[torch.Tensor] = []

    def run(self, hidden: torch.Tensor, *beside: object) -> torch.Tensor:
        hidden = super().run(hidden)
        mean = hidden.detach().mean((0, 1))
        self.center = mean if self.center is None else 0.5 * (self.center + mean)
        self.sums += mean
        self.seen.append(mean)
        return hidden - self.center - self.sums - sum(self.seen) / len(self.seen)


class Banking(Base):
    """Centers by tensors of a list and of a table, which it writes in place, and by one that it writes as `data`."""

    def __init__(self) -> None:
        super().__init__()
        self.bank, self.table, self.mean = [torch.zeros(WIDTH)], {"mean": torch.zeros(WIDTH)}, torch.zeros(WIDTH)

    def run(self, hidden: torch.Tensor, *beside: object) -> torch.Tensor:
        hidden = super().run(hidden)
        for held in (self.bank[0], self.table["mean"], self.mean.data):
            held.lerp_(hidden.detach().mean((0, 1)), 0.5)
            hidden = hidden - held
        return hidden


class Warming(Base):
    """Scales logits by how often it was called."""

    num_calls = 0

    def run(self, hidden: torch.Tensor, *beside: object) -> torch.Tensor:
        self.num_calls += 1
        return super().run(hidden) * self.num_calls


class Logging(Base):
    """Counts its calls, and keeps its last hidden states, for somebody to look at."""

    num_calls = 0

    def run(self, hidden: torch.Tensor, *beside: object) -> torch.Tensor:
        self.num_calls += 1
        self.last = super().run(hidden)
        return self.last


class Watched(Base):
    """Has hooks installed at its first pass, as transformers does for hidden states, which its loss reads."""

    def run(self, hidden: torch.Tensor, *beside: object) -> torch.Tensor:
        if not hasattr(self, "is_hooked"):
            for layer in self.layers:
                layer.register_forward_hook(lambda _, __, hidden: self.seen.append(hidden))
            self.is_hooked = True
        self.seen: list[torch.Tensor] = []
        hidden = super().run(hidden)
        return hidden + torch.stack(self.seen).sum(0)


class Reshaping(Base):
    """Puts another module in the place of one at its first pass, as BigBird does for short texts; it has dropout."""

    is_reshaped = False

    def __init__(self) -> None:
        super().__init__()
        self.norm: nn.Module = nn.Identity()

    def run(self, hidden: torch.Tensor, *beside: object) -> torch.Tensor:
        if not self.is_reshaped:
            assert isinstance(self.norm, nn.Identity)
            nn.Linear(WIDTH, WIDTH)  # draws random numbers
            self.norm, self.is_reshaped = nn.Tanh(), True
        return super().run(nn.functional.dropout(self.norm(hidden), 0.1, self.training))


class Counted(Base):
    """Counts its passes in a buffer."""

    passes: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("passes", torch.zeros((), dtype=torch.long))

    def run(self, hidden: torch.Tensor, *beside: object) -> torch.Tensor:
        self.passes += 1
        return super().run(hidden, *beside)


class ReadOnly(OrderedDict[str, int]):
    """A table that refuses to be written, as diffusers' configurations are."""

    def update(self, *entries: object, **more: object) -> None:
        raise TypeError


class Configured(Base):
    """Has a configuration of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.configuration = ReadOnly(width=WIDTH)


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)
    return [tuple(torch.randint(WORDS, (2, BATCH, LENGTH), generator=generator)) for _ in range(NUM_STEPS)]


def plainly(kind: type[Base], loss_fn: Any = loss_of) -> list[float]:
    model, losses = made(kind), []
    optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=0.1)
    for tokens, targets in batches():
        optimizer.zero_grad()
        loss = loss_fn(model(tokens), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def train(kind: type[Base], plan: ParallelPlan, **options: Any) -> list[float] | str:
    job = runtime.init(plan, shows_progress=False)
    engine = job.prepare(
        made(kind),
        optimizer=lambda held: torch.optim.SGD([one for one in held if one.requires_grad], lr=0.1),
        example_inputs=torch.zeros(2, LENGTH, dtype=torch.long),
        **({"loss_fn": loss_of} | options),
    )
    mine = slice(job.dp_rank * BATCH // job.dp, (job.dp_rank + 1) * BATCH // job.dp)
    try:
        return [engine.step(tokens[mine], targets[mine]).item() for tokens, targets in batches()]
    except UnsupportedPlanError as refusal:
        return str(refusal)


def test_an_average_of_weights_that_starts_as_they_are_is_found_before_it_moves() -> None:
    assert "the model writes average." in train(Averaging, HALVES, batch_coupling="refuse")
    assert len(train(Averaging, HALVES)) == NUM_STEPS
    assert train(Averaging, ParallelPlan(micro_batch_size=BATCH)) == pytest.approx(plainly(Averaging), rel=1e-6)


@pytest.mark.parametrize("kind", [Remembering, Banking])
def test_attributes_are_as_they_were_after_the_checks_of_a_plan(kind: type[Base]) -> None:
    found = train(kind, ParallelPlan(micro_batch_size=BATCH, recompute="full"))
    assert found == pytest.approx(plainly(kind), rel=1e-6)


@pytest.mark.ranks
def test_attributes_are_as_they_were_on_ranks_that_split_layers(ranks: RankHarness) -> None:
    for found in ranks.run(train, Remembering, ParallelPlan(tp=2, micro_batch_size=BATCH), size=2):
        assert found == pytest.approx(plainly(Remembering), rel=1e-5)


def test_what_a_loss_depends_on_from_one_pass_to_the_next_is_named_where_a_step_has_several() -> None:
    said = train(Warming, HALVES, batch_coupling="refuse")
    assert "the loss depends on the forward passes before it, for which the model keeps num_calls" in said
    assert train(Logging, HALVES) == pytest.approx(plainly(Logging), rel=1e-6)


def test_a_buffer_that_counts_passes_is_told_where_a_step_has_several() -> None:
    said = train(Counted, ParallelPlan(micro_batch_size=BATCH // 2, num_microbatches=2), batch_coupling="refuse")
    assert "passes: there are 2 in a step, one for each micro-batch" in said
    assert len(train(Counted, ParallelPlan(micro_batch_size=BATCH), batch_coupling="refuse")) == NUM_STEPS


@pytest.mark.ranks
def test_replicas_count_alike_and_see_other_data(ranks: RankHarness) -> None:
    plan = ParallelPlan(dp=2, micro_batch_size=BATCH // 2)
    for found in ranks.run(train, Warming, plan, size=2):
        assert found == pytest.approx(plainly(Warming), rel=1e-5)
    for said in ranks.run(refused, plan, size=2):
        assert "the loss depends on the forward passes before it" in said


def refused(plan: ParallelPlan) -> list[float] | str:
    return train(Remembering, plan, batch_coupling="refuse")


_CALLS = 0


def in_closure(losses: Any) -> Any:
    count = 0

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        nonlocal count
        count += 1
        return losses(outputs, targets) * (1 + 0.3 * count)

    return loss


def in_list(losses: Any) -> Any:
    seen: list[float] = []

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        seen.append(1.0)
        return losses(outputs, targets) * (1 + 0.3 * len(seen))

    return loss


def in_global(losses: Any) -> Any:
    global _CALLS
    _CALLS = 0

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        global _CALLS
        _CALLS += 1
        return losses(outputs, targets) * (1 + 0.3 * _CALLS)

    return loss


class Annealed:
    """A loss that counts its calls, as an object or a method of one."""

    def __init__(self, losses: Any) -> None:
        self.losses, self.count = losses, 0

    def __call__(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return self.losses(outputs, targets) * (1 + 0.3 * self.count)


class AnnealedModule(nn.Module):
    """A loss that counts its calls in a buffer."""

    count: torch.Tensor

    def __init__(self, losses: Any) -> None:
        super().__init__()
        self.losses = losses
        self.register_buffer("count", torch.zeros(()))

    def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return self.losses(outputs, targets) * (1 + 0.3 * self.count)


def in_method(losses: Any) -> Any:
    return Annealed(losses).__call__


COUNTING = (in_closure, in_list, in_global, Annealed, AnnealedModule, in_method)


def counted_losses(plan: ParallelPlan) -> list[list[float] | str]:
    return [train(Base, plan, loss_fn=make(loss_of)) for make in COUNTING]


@pytest.mark.ranks
def test_what_a_loss_counts_is_as_it_was_after_checks(ranks: RankHarness) -> None:
    plain = plainly(Base, in_closure(loss_of))
    for found in ranks.run(counted_losses, ParallelPlan(dp=2, micro_batch_size=BATCH // 2), size=2):
        assert found == [pytest.approx(plain, rel=1e-5)] * len(COUNTING)
    again = counted_losses(ParallelPlan(micro_batch_size=BATCH, recompute="full"))
    assert again == [pytest.approx(plain, rel=1e-5)] * len(COUNTING)
    said = train(Base, HALVES, loss_fn=in_closure(loss_of), batch_coupling="refuse")
    assert "the loss depends on the forward passes before it, for which the model keeps in_closure" in said


@pytest.mark.parametrize("kind", [Watched, Configured])
def test_hooks_that_a_pass_installs_are_there_once_and_tables_that_refuse_writes_stay(kind: type[Base]) -> None:
    assert train(kind, HALVES) == pytest.approx(plainly(kind), rel=1e-6)


def test_a_pass_that_makes_modules_at_first_is_no_reason_to_refuse_a_model_with_dropout() -> None:
    assert isinstance(train(Reshaping, ParallelPlan(micro_batch_size=BATCH // 2, num_microbatches=2)), list)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_shaken_weights_are_near_what_they_were_no_more_zero_and_the_same_to_the_bit_after_it(
    dtype: torch.dtype,
) -> None:
    layer = nn.Linear(64, 64).to(dtype)
    nn.init.zeros_(layer.bias)
    before = [one.detach().clone() for one in layer.parameters()]
    with shaken_weights(layer):
        weight, bias = (
            (one.detach() - was).abs().double() for one, was in zip(layer.parameters(), before, strict=True)
        )
        assert 0.0 < weight.mean() <= weight.max() <= 0.04
        assert (bias > 0).double().mean() > 0.9
    assert all(torch.equal(one, was) for one, was in zip(layer.parameters(), before, strict=True))
