"""A rank that raises in a call, or reads its data in vain: the others end at once, in its words."""

from __future__ import annotations

import socket
import time
from typing import Any

import pytest
import torch
from case_selection import with_all
from rank_harness import RankHarness
from test_first_step import PLANS, batch_of, plain, prepared, said_by, sgd
from torch import nn
from training_cases import TOKENS, loss_fn

from paraplan import runtime
from paraplan.errors import UnsupportedPlanError
from paraplan.plan.parallel import ParallelPlan
from paraplan.runtime.connections import Connections
from paraplan.runtime.step.faults import FaultContext, explained_failures

PLANS = PLANS | {
    "ddp": ParallelPlan(dp=2, micro_batch_size=2),
    "tp2 ddp2": ParallelPlan(tp=2, dp=2, micro_batch_size=2),
}
CASES = [*zip(PLANS, ("loss", "backward", "backward", "loss", "loss"), strict=True)]
LONGEST_S = 15.0  # on a busy machine; a collective would wait for 600


class Failing:
    """Raises on rank 1 when it is switched on: in a loss, or in the backward pass of a layer."""

    is_on = False

    def check(self) -> None:
        if self.is_on and torch.distributed.get_rank() == 1:
            raise ValueError("no such column")

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self.check()
        return loss_fn(outputs, targets)

    def model(self) -> nn.Module:
        made = plain()
        made.norm.register_full_backward_hook(lambda *_: self.check())
        return made


def fails(plan: ParallelPlan, place: str) -> tuple[str, float, str]:
    """Return what a step says in which rank 1 fails, how long it took, and what the next one says."""
    failing = Failing()
    engine = prepared(plan, loss_fn=failing.loss) if place == "loss" else prepared(plan, failing.model)
    engine.step(*batch_of(plan))
    engine.step(*batch_of(plan))
    failing.is_on = True
    started_s = time.monotonic()
    said = said_by(lambda: engine.step(*batch_of(plan)))
    took_s = time.monotonic() - started_s
    return said, took_s, said_by(lambda: engine.step(*batch_of(plan)))


class Broken(torch.utils.data.Dataset[Any]):
    """Has no sample beyond the first ones on rank 1."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if index > 8 and torch.distributed.get_rank() == 1:
            raise OSError("the disk is gone")
        return torch.zeros(TOKENS, dtype=torch.long), torch.ones(TOKENS, dtype=torch.long)


def reads() -> str:
    job = runtime.init(PLANS["ddp"], shows_progress=False)
    engine = job.prepare(plain(), loss_fn=loss_fn, optimizer=sgd)

    def loop() -> None:
        for inputs, targets in job.shard(Broken(), batch_size=4, shuffle=False):
            engine.step(inputs, targets)

    return said_by(loop)


@pytest.mark.ranks
@pytest.mark.parametrize(("name", "place"), CASES[1::2] + with_all(CASES[::2]))
def test_what_one_rank_raises_in_a_step_ends_the_others_at_once(ranks: RankHarness, name: str, place: str) -> None:
    for rank, (said, took_s, after) in enumerate(ranks.run(fails, PLANS[name], place, size=PLANS[name].world_size)):
        own, told = "ValueError: no such column", "UnsupportedPlanError: rank 1 ended engine.step after 2 steps: "
        assert said == (own if rank == 1 else told + own)
        assert took_s < LONGEST_S
        assert after.startswith(
            "UsageError: engine.step after 2 steps after an error in which the ranks of the job have"
        )


@pytest.mark.ranks
def test_a_sample_that_one_rank_cannot_read_ends_the_others(ranks: RankHarness) -> None:
    first, second = ranks.run(reads, size=2)
    assert second == "OSError: the disk is gone"
    assert first.startswith("UnsupportedPlanError: rank 1 ended engine.step after ")
    assert first.endswith("OSError: the disk is gone")


class Alike(Failing):
    def check(self) -> None:
        if self.is_on:
            raise ValueError("no such column")


def alike() -> list[str]:
    """Raise on all ranks, and go on."""
    plan, failing = PLANS["ddp"], Alike()
    engine, said = prepared(plan, loss_fn=failing.loss), []
    for failing.is_on in (False, False, True, True, False):
        said.append(said_by(lambda: engine.step(*batch_of(plan))))
    return said[2:]


@pytest.mark.ranks
def test_what_all_ranks_raise_leaves_them_together(ranks: RankHarness) -> None:
    assert ranks.run(alike, size=2) == [["ValueError: no such column"] * 2 + ["no error"]] * 2


def test_connections_that_were_there_before_stay_open() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as kept:
        connections = Connections()
        accepted, _ = server.accept()
        with connections.noted():
            opened = socket.create_connection(server.getsockname())
        other, _ = server.accept()
        connections.close()
        kept.send(b"x")
        assert (accepted.recv(1), other.recv(1)) == (b"x", b"")
        for one in (accepted, opened, other):
            one.close()


FAILURES: dict[str, tuple[Any, str]] = {
    "shapes": (lambda: torch.ones(2, 3) @ torch.ones(2, 3), "does not run under 'dp2 x tp2"),
    "classes": (
        lambda: nn.functional.cross_entropy(torch.ones(2, 3), torch.ones(3).long()),
        "does not run under 'dp2 x tp2",
    ),
    "one entry": (lambda: nn.BatchNorm1d(3)(torch.ones(1, 3)), "batch norm has one entry for each channel"),
    "twice": (
        lambda: [loss.backward() for loss in [torch.ones(2, requires_grad=True).square().sum()] * 2],
        "kept is used",
    ),
}


@pytest.mark.parametrize("name", FAILURES)
def test_what_torch_cannot_run_is_said_in_a_sentence_with_a_way_out(name: str) -> None:
    work, words = FAILURES[name]
    plan = ParallelPlan(tp=2, dp=2, micro_batch_size=1, num_microbatches=2)
    with pytest.raises(UnsupportedPlanError, match=words) as refusal:
        explained(work, plan)
    assert refusal.value.hint
    assert isinstance(refusal.value.__cause__, (RuntimeError, ValueError))


def test_what_a_script_raises_is_left_to_it() -> None:
    def raising() -> None:
        raise RuntimeError("no such column")

    for plan in (PLANS["tp2"], PLANS["ddp"]):
        with pytest.raises(RuntimeError, match="no such column"):
            explained(raising, plan)
    with pytest.raises(RuntimeError, match="mat1 and mat2"):  # as in one process
        explained(FAILURES["shapes"][0], PLANS["ddp"])


def explained(work: Any, plan: ParallelPlan) -> Any:
    parameters = [nn.Parameter(torch.ones(2))]
    world = runtime.init(ParallelPlan(), shows_progress=False).world
    return explained_failures(work, FaultContext(parameters, sgd(parameters), plan, None, world, step=1))
