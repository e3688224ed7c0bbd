"""Optimizers under a plan: what they look at, and that those of whole tensors step as in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from case_selection import with_all
from rank_harness import RankHarness
from torch import nn
from training_cases import TOKENS, VOCABULARY, Decoder, loss_fn

from paraplan import runtime
from paraplan.errors import ParaplanError, UnsupportedPlanError
from paraplan.plan.parallel import ParallelPlan
from paraplan.runtime.engine import Engine
from paraplan.runtime.optimizers.whole_tensors import (
    Scope,
    check_optimizer,
    check_scheduler,
    scope_of,
)

BATCH = 8
Parameters = list[nn.Parameter]
Make = Callable[[Parameters], torch.optim.Optimizer]


class Lamb(torch.optim.Optimizer):
    """Steps a tensor by Adam's direction, as far as its own norm says."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float = 0.02) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for one in group["params"]:
                if one.grad is None:
                    continue
                state = self.state[one]
                mean = state.setdefault("mean", torch.zeros_like(one)).lerp_(one.grad, 0.1)
                square = state.setdefault("square", torch.zeros_like(one)).lerp_(one.grad.square(), 0.01)
                way = mean / (square.sqrt() + 1e-3)
                one.sub_(way * (group["lr"] * one.norm().clamp(min=0.1) / (way.norm() + 1e-6)))


class Clipping(torch.optim.SGD):
    """Clips the gradient of each tensor by its norm."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for one in group["params"]:
                if one.grad is not None:
                    nn.utils.clip_grad_norm_([one], 0.05)
        super().step()


class Centering(torch.optim.SGD):
    """Takes from the gradient of each row its mean: halves of a tensor along its first dimension have whole rows."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for one in group["params"]:
                if one.grad is not None and one.ndim > 1:
                    one.grad -= one.grad.mean(-1, keepdim=True)
        super().step()


class Coupling(torch.optim.SGD):
    """Steps every tensor by the norm of all gradients."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        nn.utils.clip_grad_norm_([one for group in self.param_groups for one in group["params"]], 0.1)
        super().step()


def muon(parameters: Parameters) -> torch.optim.Optimizer:
    return torch.optim.Muon([one for one in parameters if one.ndim == 2], lr=0.02, weight_decay=0.1)


def hooked(parameters: Parameters) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    optimizer.register_step_pre_hook(lambda one, *_: nn.utils.clip_grad_norm_(one.param_groups[0]["params"], 0.1))
    return optimizer


class OwnAdam(torch.optim.AdamW):
    """Treats every number alike, in a class that nobody knows."""


OPTIMIZERS: dict[str, tuple[Make, Scope]] = {
    "sgd": (lambda given: torch.optim.SGD(given, lr=0.1, momentum=0.9), "numbers"),
    "adamw": (lambda given: torch.optim.AdamW(given, lr=0.01), "numbers"),
    "own adam": (lambda given: OwnAdam(given, lr=0.01), "numbers"),
    "muon": (muon, "tensors"),
    "adafactor": (lambda given: torch.optim.Adafactor(given, lr=0.05), "tensors"),
    "lamb": (Lamb, "tensors"),
    "clipping": (lambda given: Clipping(given, lr=0.5), "tensors"),
    "centering": (lambda given: Centering(given, lr=1.0), "tensors"),
    "coupling": (lambda given: Coupling(given, lr=0.5), "model"),
    "hooked": (hooked, "model"),
}
WHOLE = ("muon", "adafactor", "lamb", "clipping", "centering", "coupling")
TWO_STAGES = ParallelPlan(pp=2, pipeline_schedule="gpipe", num_microbatches=2)


def model_of() -> nn.Module:
    torch.manual_seed(0)
    return Decoder(2)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_trial_shows_what_an_optimizer_looks_at(name: str) -> None:
    make, scope = OPTIMIZERS[name]
    parameters = list(model_of().parameters())
    before = [one.detach().clone() for one in parameters]
    optimizer = make(parameters)
    assert scope_of(optimizer) == scope
    assert not optimizer.state
    assert all(torch.equal(one, value) and one.grad is None for one, value in zip(parameters, before, strict=True))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_pipeline_refuses_an_optimizer_that_couples_parameters(name: str) -> None:
    make, scope = OPTIMIZERS[name]
    optimizer = make(list(model_of().parameters()))
    if scope == "model":
        with pytest.raises(UnsupportedPlanError, match="steps a parameter by what it finds in others, and pp=2 has"):
            check_optimizer(optimizer, TWO_STAGES)
    else:
        assert check_optimizer(optimizer, TWO_STAGES) == "numbers"  # a stage has whole tensors


def test_whole_tensors_are_not_gathered_from_the_host() -> None:
    plan = ParallelPlan(dp=2, zero_stage=2, offload="optimizer")
    with pytest.raises(UnsupportedPlanError, match=r"Lamb looks at whole tensors, .* offload=optimizer"):
        check_optimizer(Lamb(list(model_of().parameters())), plan)


def test_lbfgs_is_refused_in_words() -> None:
    with pytest.raises(UnsupportedPlanError, match="LBFGS computes the loss several times in a step"):
        prepared(ParallelPlan(), torch.optim.LBFGS)


def test_a_scheduler_that_steps_by_a_loss_is_refused_with_what_to_do() -> None:
    words = r"ReduceLROnPlateau steps by a loss .*call its step\(loss\) after engine.eval_step"
    with pytest.raises(UnsupportedPlanError, match=words):
        prepared(ParallelPlan(), Lamb, scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau)
    check_scheduler(torch.optim.lr_scheduler.StepLR(Lamb(model_of().parameters()), 2))


# Steps under plans


def prepared(plan: ParallelPlan, make: Make, **options: Any) -> Engine:
    job = runtime.init(plan, shows_progress=False)
    return job.prepare(model_of(), loss_fn=loss_fn, optimizer=make, verify="off", **options)


def steps(engine: Engine, plan: ParallelPlan, count: int, start: int = 0) -> dict[str, torch.Tensor]:
    """Return the parameters after some steps, of the batches from `start` on."""
    for step in range(start, start + count):
        ids = torch.randint(VOCABULARY, (BATCH, TOKENS + 1), generator=torch.Generator().manual_seed(step))
        size = BATCH // plan.dp
        place = torch.distributed.get_rank() // plan.tp if plan.dp > 1 else 0
        mine = ids[place * size : (place + 1) * size]
        engine.step(mine[:, :-1], mine[:, 1:])
    return {name: engine.whole(name).clone() for name in engine.parameters}


def trained(name: str, plan: ParallelPlan) -> dict[str, torch.Tensor]:
    return steps(prepared(plan, OPTIMIZERS[name][0], max_grad_norm=1.0), plan, 3)


def plan_of(**fields: Any) -> ParallelPlan:
    plan = ParallelPlan.model_validate(fields)
    return plan.replace(micro_batch_size=BATCH // plan.dp)


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], case: str) -> None:
    """Muon multiplies in bf16, which rounds other sums by 2**-8 of a step."""
    tolerance = 2e-3 if "muon" in case else 1e-5
    start = dict(model_of().named_parameters())
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name], value, rtol=1e-4, atol=tolerance, msg=lambda text, name=name: f"{case} {name}: {text}"
        )
        moved = (value - start[name]).abs().max()
        assert moved > 10 * tolerance or ("muon" in case and value.ndim == 1), (case, name)


def train_all(plans: list[ParallelPlan], names: list[str]) -> dict[str, dict[str, torch.Tensor]]:
    return {f"{name} {plan.describe()}": trained(name, plan) for plan in plans for name in names}


@pytest.mark.ranks
@pytest.mark.parametrize(
    "plans",
    [
        # Shards are gathered alike, whatever the stage of ZeRO: parameters have lost more under its last one.
        [plan_of(tp=2), plan_of(dp=2, zero_stage=3), *with_all([plan_of(dp=2, zero_stage=1)])],
        *with_all([[plan_of(dp=2, tp=2, zero_stage=3, rank_order=("pp", "dp", "cp", "tp"))]]),
    ],
    ids=["2 ranks", *with_all(["4 ranks"])],
)
def test_optimizers_of_whole_tensors_step_as_in_one_process(plans: list[ParallelPlan], ranks: RankHarness) -> None:
    """Split layers show what each does with gathered tensors; shards, that they are gathered."""
    size = plans[0].world_size
    expected = {name: trained(name, plan_of()) for name in WHOLE}
    for plan in plans:
        few = ["lamb"] if plan.zero_stage else [*WHOLE]  # what each does with a tensor that was gathered
        for found in ranks.run(train_all, [plan], with_all(WHOLE) or few, size=size):
            for case, parameters in found.items():
                assert_same(parameters, expected[case.split()[0]], case)


def by_shape(given: Parameters) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": [one], "lr": 1 / one.numel()} for one in given])


def by_place(given: Parameters) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": [one], "lr": 0.5**place} for place, one in enumerate(given)])


def by_kind(given: Parameters) -> list[torch.optim.Optimizer]:
    large, small = ([one for one in given if (one.numel() > 200) == is_large] for is_large in (True, False))
    return [torch.optim.SGD(large, lr=0.1), torch.optim.Adam(small)]


def refusals(plan: ParallelPlan) -> list[str]:
    """Return what is said of factories that go by what a plan changes; the last one goes by names."""
    model = model_of()
    head = set(model.head.parameters())

    def by_object(given: Parameters) -> torch.optim.Optimizer:
        return torch.optim.SGD([{"params": [one], "lr": 0.1 if one in head else 0.2} for one in given])

    def by_name(given: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD([{"params": [one], "lr": 0.1 * len(name)} for name, one in given.named()])

    said = []
    for factory in (by_shape, by_place, by_kind, by_object, by_name):
        job = runtime.init(plan, shows_progress=False)
        try:
            job.prepare(model, loss_fn=loss_fn, optimizer=factory, verify="off")
            said.append("")
        except ParaplanError as error:
            said.append(str(error))
        model = model_of()
        head = set(model.head.parameters())
    return said


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("plan", "wrong"),
    [
        (plan_of(tp=2), {"by_shape", "by_kind", "by_object"}),
        (plan_of(dp=2, zero_stage=3), {"by_object"}),
        (plan_of(pp=2, pipeline_schedule="gpipe", num_microbatches=2), {"by_place"}),
    ],
    ids=["tp", "ZeRO-3", "pp"],
)
def test_a_factory_that_goes_by_what_a_plan_changes_is_refused(
    plan: ParallelPlan, wrong: set[str], ranks: RankHarness
) -> None:
    names = ("by_shape", "by_place", "by_kind", "by_object", "by_name")
    for said in ranks.run(refusals, plan, size=2):
        found = {name for name, words in zip(names, said, strict=True) if words}
        assert found == wrong, said
        assert all("choose parameters by params.named()" in words for words in said if words)


def go_on(folder: str) -> None:
    for name in ("lamb", "adafactor"):
        plan = plan_of(tp=2)
        engine = prepared(plan, OPTIMIZERS[name][0])
        engine.load(f"{folder}/{name} 1")
        steps(engine, plan, 2, start=2)
        engine.save(f"{folder}/{name} 2")


@pytest.mark.ranks
def test_state_of_whole_tensors_goes_on_in_one_process_and_back(ranks: RankHarness, tmp_path: Path) -> None:
    expected = {}
    for name in ("lamb", "adafactor"):
        engine = prepared(plan_of(), OPTIMIZERS[name][0])
        steps(engine, plan_of(), 2)
        engine.save(tmp_path / f"{name} 1")
        expected[name] = steps(engine, plan_of(), 4, start=2)
    ranks.run(go_on, str(tmp_path), size=2)
    for name, parameters in expected.items():
        engine = prepared(plan_of(), OPTIMIZERS[name][0])
        engine.load(tmp_path / f"{name} 2")
        assert engine.num_steps == 4
        assert_same(steps(engine, plan_of(), 2, start=4), parameters, name)
