"""What scripts do by hand between the engine's calls: right on all ranks, or refused at once."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

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


def written_whole(plan: ParallelPlan, *, alike: bool) -> str:
    """Have a script write whole weights, the same on every rank or not."""
    engine = prepared(plan)
    engine.step(*batch_of(plan))
    for name in engine.parameters:
        engine.set_whole(name, engine.whole(name) * (0.9 if alike or not torch.distributed.get_rank() else 0.8))
    return said_by(lambda: engine.step(*batch_of(plan)))


def misshapen(plan: ParallelPlan) -> str:
    engine = prepared(plan)
    return said_by(lambda: engine.set_whole("embedding.weight", torch.zeros(3, 4)))


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


def set_data(engine: Engine) -> None:
    for one in engine.parameters.values():
        one.data = one.data * 0.5


def swap_for_evaluation(engine: Engine) -> None:
    """Evaluate an average, as scripts do, that is in the weights' place for a while."""
    kept = {name: one.data for name, one in engine.parameters.items()}
    set_data(engine)
    engine.module(batch_of(DDP)[0])
    for name, one in engine.parameters.items():
        one.data = kept[name] * 0.9


def write_after_evaluation(engine: Engine) -> None:
    engine.eval_step(*batch_of(DDP))
    with torch.no_grad():
        for one in engine.parameters.values():
            one.mul_(0.9)


def write_whole(engine: Engine) -> None:
    for name in engine.parameters:
        whole = engine.whole(name).clone()
        whole[0] = 0
        engine.set_whole(name, whole - whole.mean())


def mask(engine: Engine) -> None:
    """Multiply by plain tensors, which are whole."""
    with torch.no_grad():
        for one in engine.parameters.values():
            one.mul_((torch.arange(one.numel()) % 3).view(one.shape))


def set_gradients(engine: Engine) -> None:
    for one in engine.parameters.values():
        if one.grad is not None:
            one.grad.data = one.grad.data * 0.5


def zero_a_row(engine: Engine) -> None:
    with torch.no_grad():
        engine.parameters["embedding.weight"][3].zero_()


def scale_by_norm(engine: Engine) -> None:
    for one in engine.parameters.values():
        one.data.div_(1 + one.norm().item())


def replace_one(engine: Engine) -> None:
    engine.module.norm.weight = nn.Parameter(torch.ones(16))  # type: ignore[union-attr]
    engine.step(*batch_of(DDP))


def zero_a_row_by_callback(engine: Engine) -> None:
    engine.on_step(lambda _: zero_a_row(engine), all_ranks=True)
    engine.step(*batch_of(DDP))


RIGHT = [set_data, swap_for_evaluation, write_after_evaluation, write_whole, mask, set_gradients, halve]
REFUSED = {
    zero_a_row: "rows or other parts were taken of a sharded tensor",
    zero_a_row_by_callback: "rows or other parts were taken of a sharded tensor",
    scale_by_norm: "a number over a sharded tensor was read",
    replace_one: "norm.weight is another object than in job.prepare",
}


def changed(plan: ParallelPlan, change: Callable[[Engine], None]) -> dict[str, torch.Tensor]:
    """Return what trains on after two steps, with a change between or within them."""
    engine = prepared(plan, verify="off")
    for seed in range(2):
        inputs, targets = batch_of(DDP, seed + 2 * torch.distributed.get_rank())
        if change in (set_gradients, halve):
            engine.backward(inputs, targets)
            change(engine)
            engine.update()
        else:
            engine.step(inputs, targets)
            change(engine)
    engine.step(*batch_of(DDP, torch.distributed.get_rank()))
    return {name: engine.whole(name).clone() for name in engine.parameters}


def written_shards() -> tuple[list[tuple[str, float]], dict[str, str]]:
    """Return how far shards are from replicas after each change, and what is said of those that go wrong."""
    far = []
    for plan in (PLANS["zero3"], *with_all([ParallelPlan(dp=2, zero_stage=1, micro_batch_size=2)])):
        for change in RIGHT:
            replicas = changed(DDP, halve if change is set_gradients else change)
            if change is set_gradients:
                far.append(("replicas", apart(replicas, changed(DDP, change))))
            far.append((change.__name__, apart(replicas, changed(plan, change))))
    return far, {change.__name__: said_by(partial(changed, PLANS["zero3"], change)) for change in REFUSED}


def apart(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> float:
    return max(float((first[name] - second[name]).abs().max()) for name in first)


def test_shards_that_a_script_writes_train_as_whole_weights_do_or_are_refused(ranks: RankHarness) -> None:
    for far, said in ranks.run(written_shards, size=2):
        for change, distance in far:
            assert distance < 1e-5, change
        for refused, words in REFUSED.items():
            assert said[refused.__name__].startswith(f"UsageError: {words}"), refused


def all_of_it() -> dict[str, str]:
    clipped = {name: plan for name, plan in PLANS.items() if name in ("tp2", "pp2", "zero3", "ddp") or with_all([name])}
    said = {f"{name} clip": halves(plan, clip) for name, plan in clipped.items()}
    said |= {f"{name} halve": halves(PLANS[name], halve) for name in HALVED}
    said |= {"cp2 called": called(ParallelPlan(cp=2, micro_batch_size=4)), "pp2 called": called(PLANS["pp2"])}
    said |= {"stages called": called(STAGES), "noise": halves(PLANS["zero3"], add_noise)}
    said |= {f"{name} hook": hooked(PLANS[name]) for name in ("tp2", "ddp")}
    said |= {"step": stepped(DDP), "add": added(DDP), "parted": parted(DDP)}
    said |= {f"written {alike}": written(PLANS["tp2"], alike=alike) for alike in (True, False)}
    said |= {f"whole {alike}": written_whole(PLANS["tp2"], alike=alike) for alike in (True, False)}
    said |= {f"shape {name}": misshapen(PLANS[name]) for name in ("tp2", "zero3")}
    return said


def test_what_a_script_does_by_hand_is_the_same_on_all_ranks_or_refused(ranks: RankHarness) -> None:
    for said in ranks.run(all_of_it, size=2):
        for name in HALVED:
            assert said[f"{name} halve"] == "no error", name
        for case in ("pp2 called", "cp2 called", "stages called"):
            assert said[case].startswith("UsageError: engine.module is "), case
        for case in ("ddp clip", "ddp hook", "zero3 clip", "written True", "whole True", "noise"):
            assert said[case] == "no error", case
        for case in ("tp2 clip", "pp2 clip", "tp2 hook"):
            assert said[case].startswith("UsageError: gradients were multiplied by "), case
            assert "job.prepare(max_grad_norm=...) clips by the norm of the whole model" in said[case]
        assert said["step"].startswith("UsageError: the optimizer of an engine was stepped by hand")
        assert "the ranks do not sum the gradients of new ones" in said["add"]
        words = "UsageError: ranks 0 and 1 hold the same part of the model, and other weights"
        assert said["parted"].startswith(words)
        for case in ("written False", "whole False"):
            assert said[case].startswith(f"{words} that a script has written"), case
        for case in ("shape tp2", "shape zero3"):
            assert said[case].startswith(
                "UsageError: engine.set_whole: (3, 4) is not the shape of embedding.weight, (24,"
            )
