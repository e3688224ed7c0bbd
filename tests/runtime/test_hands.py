"""What scripts do by hand between the engine's calls: right on all ranks, or refused at once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from case_selection import with_all
from rank_harness import RankHarness
from test_first_step import PLANS, batch_of, plain, prepared, said_by
from torch import nn

from paraplan.plan.parallel import ParallelPlan
from paraplan.runtime import hands
from paraplan.runtime.engine import Engine

pytestmark = pytest.mark.ranks
DDP = ParallelPlan(dp=2, micro_batch_size=2)
STAGES = ParallelPlan(
    pp=2, pipeline_schedule="interleaved_1f1b", virtual_pipeline_size=2, num_microbatches=2, micro_batch_size=2
)
PLANS = PLANS | {"ddp": DDP}
HALVED = ["tp2", *with_all(["zero3", "pp2", "ddp"])]  # shards bear noise, below


def clip(engine: Engine) -> None:
    torch.nn.utils.clip_grad_norm_([*engine.parameters.values()], 0.1)


def halve(engine: Engine) -> None:
    for one in engine.parameters.values():
        if one.grad is not None:
            one.grad.mul_(0.5)


def add_noise(engine: Engine) -> None:
    dice = torch.Generator().manual_seed(0)
    for one in engine.parameters.values():
        if one.grad is not None:
            one.grad.add_(torch.randn(one.shape, generator=dice))


def called(plan: ParallelPlan) -> str:
    engine = prepared(plan, lambda: plain(4))
    inputs, targets = batch_of(plan)
    engine.step(inputs, targets)
    return said_by(lambda: engine.module(inputs))


def halves(plan: ParallelPlan, change: Callable[[Engine], None]) -> str:
    engine = prepared(plan, verify="off")

    def step() -> None:
        engine.backward(*batch_of(plan))
        change(engine)
        engine.update()

    return said_by(step)


def hooked(plan: ParallelPlan) -> str:
    """Clip by a hook of the optimizer, before its step."""
    engine = prepared(plan, verify="off")
    engine.optimizer.register_step_pre_hook(lambda *_: clip(engine))
    return said_by(lambda: engine.step(*batch_of(plan)))


def stepped(plan: ParallelPlan) -> str:
    engine = prepared(plan)
    inputs, targets = batch_of(plan)
    engine.step(inputs, targets)
    nn.functional.cross_entropy(engine.module(inputs).flatten(0, 1), targets.flatten()).backward()
    return said_by(engine.optimizer.step)


def added(plan: ParallelPlan) -> str:
    engine = prepared(plan)
    engine.step(*batch_of(plan))
    engine.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    return said_by(lambda: engine.step(*batch_of(plan)))


def written(plan: ParallelPlan, *, alike: bool) -> str:
    """Have a script write weights that are whole on every rank, alike or not."""
    engine = prepared(plan)
    engine.step(*batch_of(plan))
    with torch.no_grad():
        for one in engine.parameters.values():
            one.mul_(0.9 if alike or not torch.distributed.get_rank() else 0.8)
    return said_by(lambda: engine.step(*batch_of(plan)))


def parted(plan: ParallelPlan) -> str:
    """Have one replica hold other weights than the other, which is looked for every so many steps."""
    hands._EVERY, before = 3, hands._EVERY
    try:
        engine = prepared(plan)
        engine.step(*batch_of(plan))
        with torch.no_grad():
            next(iter(engine.parameters.values())).add_(1e-3 * torch.distributed.get_rank())
        engine.step(*batch_of(plan))
        return said_by(lambda: engine.step(*batch_of(plan)))
    finally:
        hands._EVERY = before


def all_of_it() -> dict[str, str]:
    clipped = {name: plan for name, plan in PLANS.items() if name in ("tp2", "pp2", "zero3", "ddp") or with_all([name])}
    said = {f"{name} clip": halves(plan, clip) for name, plan in clipped.items()}
    said |= {f"{name} halve": halves(PLANS[name], halve) for name in HALVED}
    said |= {"cp2 called": called(ParallelPlan(cp=2, micro_batch_size=4)), "pp2 called": called(PLANS["pp2"])}
    said |= {"stages called": called(STAGES), "noise": halves(PLANS["zero3"], add_noise)}
    said |= {f"{name} hook": hooked(PLANS[name]) for name in ("tp2", "ddp")}
    said |= {"step": stepped(DDP), "add": added(DDP), "parted": parted(DDP)}
    said |= {f"written {alike}": written(PLANS["tp2"], alike=alike) for alike in (True, False)}
    return said


def test_what_a_script_does_by_hand_is_the_same_on_all_ranks_or_refused(ranks: RankHarness) -> None:
    for said in ranks.run(all_of_it, size=2):
        for name in HALVED:
            assert said[f"{name} halve"] == "no error", name
        for case in ("pp2 called", "cp2 called", "stages called"):
            assert said[case].startswith("UsageError: engine.module is "), case
        for case in ("ddp clip", "ddp hook", "zero3 clip", "written True", "noise"):
            assert said[case] == "no error", case
        for case in ("tp2 clip", "pp2 clip", "tp2 hook"):
            assert said[case].startswith("UsageError: gradients were multiplied by "), case
            assert "job.prepare(max_grad_norm=...) clips by the norm of the whole model" in said[case]
        assert said["step"].startswith("UsageError: the optimizer of an engine was stepped by hand")
        assert "the ranks do not sum the gradients of new ones" in said["add"]
        words = "UsageError: ranks 0 and 1 hold the same part of the model, and other weights"
        assert said["parted"].startswith(words)
        assert said["written False"].startswith(f"{words} that a script has written")
