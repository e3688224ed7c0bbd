"""What is checked before the first step: that a plan trains the model as one process does, and that ranks agree."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from case_selection import with_all
from rank_harness import RankHarness
from torch import nn
from training_cases import HIDDEN, TOKENS, VOCABULARY, Decoder, Layer, loss_fn

from paraplan import runtime
from paraplan.plan.parallel import ParallelPlan
from paraplan.runtime.checks import references
from paraplan.runtime.engine import Engine

PLANS = {
    "tp2": ParallelPlan(tp=2, micro_batch_size=4),
    "pp2": ParallelPlan(pp=2, pipeline_schedule="1f1b", num_microbatches=2, micro_batch_size=2),
    "zero3": ParallelPlan(dp=2, zero_stage=3, micro_batch_size=2),
}


class RankedNorm(nn.LayerNorm):
    """Multiplies by a number of its own on every rank, in training or in evaluation."""

    def __init__(self, *, in_training: bool = True) -> None:
        super().__init__(HIDDEN)
        self.in_training = in_training

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        own = 1 + dist.get_rank() if dist.is_initialized() and self.training is self.in_training else 1
        return super().forward(hidden) * own


class DropoutLayer(Layer):
    def forward(self, hidden: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        return nn.functional.dropout(super().forward(hidden, scale), 0.3, self.training)


def plain(num_layers: int = 2) -> nn.Module:
    torch.manual_seed(0)
    return Decoder(num_layers)


def ranked(*, in_training: bool = True) -> nn.Module:
    model = plain()
    model.norm = RankedNorm(in_training=in_training)
    return model


def with_layers(make: Callable[[], nn.Module]) -> nn.Module:
    model = plain()
    model.layers = nn.ModuleList(make() for _ in range(2))
    return model


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


FINE = {"plain": "zero3", "dropout": "pp2", "eval": "tp2"}
"""Models that train alike everywhere, with the plan of `PLANS` under which they are tried."""
MAKES: dict[str, Callable[[], nn.Module]] = {
    "plain": plain,
    "dropout": partial(with_layers, DropoutLayer),
    "eval": partial(ranked, in_training=False),
}


def prepared(plan: ParallelPlan, make: Callable[[], nn.Module] = plain, **options: Any) -> Engine:
    given = {"loss_fn": loss_fn, "optimizer": sgd, "example_inputs": torch.zeros(2, TOKENS, dtype=torch.long)}
    return runtime.init(plan, shows_progress=False).prepare(make(), **(given | options))


def batch_of(plan: ParallelPlan, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    size = plan.micro_batch_size * plan.num_microbatches
    ids = torch.randint(VOCABULARY, (size, TOKENS + 1), generator=torch.Generator().manual_seed(seed))
    return ids[:, :-1], ids[:, 1:]


def said_by(work: Callable[[], object]) -> str:
    try:
        work()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def first_step(plan: ParallelPlan, make: Callable[[], nn.Module] = plain, **options: Any) -> str:
    """Return what the first step says, and whether it left the parameters alone where it is refused."""
    engine = prepared(plan, make, **options)
    before = {name: engine.whole(name).clone() for name in engine.parameters}
    said = said_by(lambda: engine.step(*batch_of(plan)))
    same = all(torch.equal(engine.whole(name), value) for name, value in before.items())
    return f"{said} unchanged={same}, steps={engine.num_steps}"


def verify(folder: str) -> dict[str, str]:
    said = {}
    for name, plan in PLANS.items():
        said[f"{name} ranked"] = first_step(plan, ranked)
        for kind in FINE:
            if FINE[kind] == name or with_all(FINE):
                said[f"{name} {kind}"] = first_step(plan, MAKES[kind])
    said["off"] = first_step(PLANS["tp2"], ranked, verify="off")
    replicas = ParallelPlan(dp=2, micro_batch_size=2)
    said["replicas auto"] = first_step(replicas, ranked)
    said["replicas full"] = first_step(replicas, ranked, verify="full")
    for name in ("tp2", *with_all(["zero3", "pp2"])):
        plan = PLANS[name]
        engine = prepared(plan)
        with torch.no_grad():
            for parameter in engine.parameters.values():
                parameter.mul_(0.5)
        said[f"{name} changed"] = said_by(lambda: engine.step(*batch_of(plan)))  # noqa: B023 (called at once)
        engine.save(f"{folder}/{name}")
        loaded, refused = prepared(plan), prepared(plan, ranked)
        for one in (loaded, refused):
            one.load(f"{folder}/{name}")
        said[f"{name} loaded"] = said_by(lambda: loaded.step(*batch_of(plan)))  # noqa: B023
        said[f"{name} ranked, loaded"] = said_by(lambda: refused.step(*batch_of(plan)))  # noqa: B023
    return said


@pytest.mark.ranks
def test_a_plan_under_which_a_model_trains_as_another_one_is_refused_on_every_rank(
    ranks: RankHarness, tmp_path: Path
) -> None:
    words = "UnsupportedPlanError: this model does not train under '"
    for said in ranks.run(verify, str(tmp_path), size=2):
        assert len(said) >= 12
        for case, found in said.items():
            if case.endswith("ranked, loaded"):
                assert found.startswith(words), case
            elif case.endswith("ranked"):
                assert found.startswith(words), case
                assert found.endswith("unchanged=True, steps=0"), case
            elif case.endswith(tuple(FINE)):
                assert found == "no error unchanged=False, steps=1", case
            elif case.endswith(("changed", "loaded")):
                assert found == "no error", case
        assert said["off"] == said["replicas auto"] == "no error unchanged=False, steps=1"
        assert said["replicas full"].startswith(words)


def failing(count: int) -> Callable[[Any, Any], torch.Tensor]:
    """Return a loss that raises at its call number `count`."""
    calls: list[int] = []

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        if len(calls) == count:
            raise ValueError("no such column")
        return loss_fn(outputs, targets)

    return loss


def other_layer(width: int) -> nn.Module:
    layer = Layer()
    layer.up, layer.down = nn.Linear(HIDDEN, width), nn.Linear(width, HIDDEN)
    return layer


def disagree() -> dict[str, str]:
    said = {}
    rank = runtime.init(PLANS["tp2"]).world.rank

    def optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        if rank == 1:
            raise ValueError("no such learning rate")
        return sgd(parameters)

    for name in ("tp2", "pp2"):
        plan = PLANS[name]
        engine = prepared(plan)
        before = copy.deepcopy(engine.module.state_dict())
        said[f"{name} batches"] = said_by(lambda: engine.step(*batch_of(plan, seed=rank)))  # noqa: B023
        assert all(torch.equal(value, before[key]) for key, value in engine.module.state_dict().items())
        said[f"{name} optimizer"] = said_by(lambda: prepared(plan, optimizer=optimizer))  # noqa: B023
        said[f"{name} model"] = said_by(lambda: prepared(plan, lambda: with_layers(lambda: other_layer(32 + 2 * rank))))  # noqa: B023
    for count in (1, 3):  # the last stage alone computes a loss
        said[f"loss {count}"] = first_step(PLANS["pp2"], loss_fn=failing(count))
    said["after all"] = first_step(PLANS["pp2"])
    return said


@pytest.mark.ranks
def test_what_one_rank_refuses_is_raised_on_all(ranks: RankHarness) -> None:
    by_rank = ranks.run(disagree, size=2)
    for rank, said in enumerate(by_rank):
        for name in ("tp2", "pp2"):
            assert said[f"{name} batches"].startswith(
                "UsageError: ranks 0 and 1 hold parts of one copy of the model, and bring different batches"
            )
            assert "ranks [1] have built another model than rank 0" in said[f"{name} model"]
            own, told = "ValueError: no such learning rate", "UnsupportedPlanError: rank 1 ended job.prepare: "
            assert said[f"{name} optimizer"] == (own if rank else told + own)
        own, told = "ValueError: no such column", "UnsupportedPlanError: rank 1 ended the check before the first step: "
        for count in (1, 3):
            assert said[f"loss {count}"] == (own if rank else told + own) + " unchanged=True, steps=0"
        assert said["after all"] == "no error unchanged=False, steps=1"


def losses_of_two_steps(makes: list[Callable[[], nn.Module]]) -> list[list[int]]:
    """Return how often the loss is computed by each of two steps of every model."""
    plan = ParallelPlan(dp=2, micro_batch_size=2)
    counts = []
    for make in makes:
        calls: list[int] = []

        def counted(outputs: torch.Tensor, targets: torch.Tensor, calls: list[int] = calls) -> torch.Tensor:
            calls.append(1)
            return loss_fn(outputs, targets)

        engine = prepared(plan, make, loss_fn=counted)
        engine.step(*batch_of(plan))
        first = len(calls)
        engine.step(*batch_of(plan))
        counts.append([first, len(calls) - first])
    return counts


def with_dropout() -> nn.Module:
    return with_layers(DropoutLayer)


@pytest.mark.ranks
def test_one_pass_of_a_piece_shows_all_that_is_asked_of_it(ranks: RankHarness) -> None:
    """Both parts and both together, with weights as they are, with other targets in each half, and with shaken weights.

    With shaken weights gradients are compared too, and in later checks. Dropout is looked for by two seeds, in training
    and in evaluation, and whether it can be held fixed in training.
    """
    first, again = 3 + 2 + 3, 3 + 2
    random = 2 + 2 + 2 + 2 + first
    assert (
        ranks.run(losses_of_two_steps, [plain, with_dropout], size=2)
        == [[[first + 1, again + 1], [random + 1, again + 1]]] * 2
    )


def memory_after_a_step() -> tuple[int, int, int]:
    """Return how many numbers the copy holds that a check compares with, when it was made and after the step."""
    made: list[nn.Module] = []
    copied = references._copied

    def noted(*arguments: Any) -> references.Reference | None:
        found = copied(*arguments)
        assert found is not None
        made.append(found.model)
        return found

    references._copied = noted
    gc.disable()  # a cycle is collected some steps later, and memory is short in these
    job = runtime.init(ParallelPlan(micro_batch_size=4, recompute="full"), shows_progress=False)
    engine = job.prepare(plain(), loss_fn=loss_fn, optimizer=lambda held: torch.optim.SGD(held, lr=0.1))

    def size() -> int:
        tensors = [one for held in made[0].parameters() for one in (held, held.grad) if one is not None]
        return sum(one.untyped_storage().nbytes() // one.element_size() for one in tensors)

    before = size()
    tokens = torch.randint(VOCABULARY, (4, TOKENS))
    engine.step(tokens, tokens)
    job.close()
    return before, size(), len(list(made[0].parameters()))


def test_the_model_that_a_plan_is_checked_by_has_no_memory_but_in_a_check(ranks: RankHarness) -> None:
    before, after, tensors = ranks.run_alone(memory_after_a_step, is_fresh=True)
    assert before == after == tensors  # a placeholder each
