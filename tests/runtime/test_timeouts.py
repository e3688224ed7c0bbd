"""A rank that never enters a collective: those that wait say in which one, of which ranks, and for how long."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_harness import RankHarness
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from training_cases import GLOBAL_BATCH, TOKENS, VOCABULARY, Decoder, loss_fn

from paraplan import runtime
from paraplan.plan.parallel import ParallelPlan
from paraplan.runtime.pipeline.execution import PipelineExecution
from paraplan.runtime.timeouts import Collective, CollectiveTimeoutError, default_timeout, timeout_error, waited_s

PATIENCE_S = 240.0
WAIT_S = 20  # for a message that does not come; long enough to make the group that waits so


def sgd(held: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(held, lr=0.1)


class RestIsOverError(Exception):
    """What ends the rank that never came."""


class Prepared(Decoder):
    """A model that calls a function before its forward pass."""

    before: Callable[[], None] = staticmethod(lambda: None)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.before()
        output: torch.Tensor = super().forward(tokens)
        return output


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()


def _take_a_long_rest() -> None:
    _store().set("rests", "yes")
    _store().wait(["is over"], timedelta(seconds=PATIENCE_S))
    raise RestIsOverError


def _wait_for_nobody() -> None:
    """From here on this rank waits for one that never comes: however short the timeout is, it is the right answer."""
    _store().wait(["rests"], timedelta(seconds=PATIENCE_S))
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=2), dist.group.WORLD)


def _never_meet(inside: bool) -> str:
    """Do a step together, then one to which rank 1 does not come, or in which it rests; return what rank 0 is told."""
    job = runtime.init(ParallelPlan(dp=2, micro_batch_size=GLOBAL_BATCH // 2))
    torch.manual_seed(0)
    model = Prepared(2)
    engine = job.prepare(model, loss_fn=loss_fn, optimizer=sgd, verify_every=0)
    ids = torch.randint(VOCABULARY, (GLOBAL_BATCH // 2, TOKENS + 1))
    inputs, targets = ids[:, :-1], ids[:, 1:]
    engine.step(inputs, targets)
    before = _wait_for_nobody if job.is_main else _take_a_long_rest
    if inside:
        model.before = before

    def go_on() -> None:
        if not inside:
            before()
        engine.step(inputs, targets)

    with pytest.raises(CollectiveTimeoutError if job.is_main else RestIsOverError) as end:
        go_on()
    if job.is_main:
        _store().set("is over", "yes")
    return str(end.value)


@pytest.mark.ranks
@pytest.mark.parametrize(("inside", "call"), [(False, "all_gather"), (True, "all_reduce")])
def test_a_collective_that_a_rank_never_enters_is_named_with_its_ranks(
    inside: bool, call: str, ranks: RankHarness
) -> None:
    said, _ = ranks.run(_never_meet, inside, size=2)
    assert said.startswith(f"{call} of ranks 0-1 timed out after 2 s (engine.step after 1 steps): a rank did not enter")


def _never_sent() -> str:
    """Do a step, then one in which the first stage rests; return what the last stage is told, which waits for it."""
    plan = ParallelPlan(pp=2, pipeline_schedule="1f1b", num_microbatches=2, micro_batch_size=GLOBAL_BATCH // 2)
    job = runtime.init(plan)
    torch.manual_seed(0)
    model = Prepared(2)
    engine = job.prepare(model, loss_fn=loss_fn, optimizer=sgd, verify_every=0)
    ids = torch.randint(VOCABULARY, (GLOBAL_BATCH, TOKENS + 1), generator=torch.Generator().manual_seed(1))
    engine.step(ids[:, :-1], ids[:, 1:])
    # The wait for a message ends with the timeout that its group was made with; batches of another shape use this one.
    soon = dist.new_group(timeout=timedelta(seconds=WAIT_S), group_desc="mesh_pp")
    execution = engine._part.execution
    assert isinstance(execution, PipelineExecution)
    execution._mesh = replace(execution._mesh, device_mesh=DeviceMesh.from_group(soon, "cpu", mesh_dim_names=("pp",)))
    if job.is_main:
        model.before = _take_a_long_rest
    with pytest.raises(RestIsOverError if job.is_main else CollectiveTimeoutError) as end:
        engine.step(ids[:, 2:-1], ids[:, 3:])
    if not job.is_main:
        _store().set("is over", "yes")
    return str(end.value)


@pytest.mark.ranks
def test_a_stage_that_never_sends_is_no_collective_that_was_recorded(ranks: RankHarness) -> None:
    _, said = ranks.run(_never_sent, size=2, timeout_s=280.0)
    assert said.startswith(f"a send or receive over pp of ranks 0-1 timed out after {WAIT_S} s (engine.step after 1")


def _timeouts_of_groups() -> list[timedelta]:
    plan = ParallelPlan(dp=2, tp=2, zero_stage=1)
    mesh = runtime.init(plan, timeout_s=321).mesh
    groups: list[Any] = [dist.group.WORLD, mesh.group("dp"), mesh.group("tp")]
    assert default_timeout(torch.device("cpu")) == timedelta(seconds=321)
    return [group._get_backend(torch.device("cpu")).options._timeout for group in groups]


@pytest.mark.ranks
def test_groups_of_every_axis_have_the_timeout_of_the_job(ranks: RankHarness) -> None:
    for found in ranks.run(_timeouts_of_groups, size=4):
        assert found == [timedelta(seconds=321)] * 3


def test_the_error_says_what_is_known_and_where_to_look() -> None:
    error = timeout_error(Collective("all_reduce over dp", (0, 2)), waited_s=600.0, what="engine.step after 4 steps")
    assert error.message == (
        "all_reduce over dp of ranks 0, 2 timed out after 600 s (engine.step after 4 steps): a rank did not enter it, "
        "or the connection to one is lost; paraplan launch reports which rank, and where it was"
    )
    assert error.exit_status == 1
    short = timeout_error(Collective("a collective"), waited_s=0.0, what="engine.save")
    assert short.message.startswith("a collective timed out (engine.save): ")


def test_only_gloos_timeouts_are_explained() -> None:
    said = "[unbound_buffer.cc:78] Timed out waiting 4000ms for recv operation to complete"
    assert waited_s(RuntimeError(said)) == 4.0
    assert waited_s(RuntimeError("Application timeout caused pair closure")) == 0.0
    assert waited_s(RuntimeError("Connection closed by peer [127.0.0.1]:5538")) is None
