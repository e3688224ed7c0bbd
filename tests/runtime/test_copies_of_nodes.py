"""Copies in memory over three nodes of one rank each: a node that comes anew takes its part from the others."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from case_selection import with_all
from rank_harness import RankHarness
from torch import nn
from training_cases import GLOBAL_BATCH, MODELS, TOKENS, TokenPairs, loss_fn

from paraplan import runtime
from paraplan.plan.parallel import ParallelPlan
from paraplan.runtime.engine import Engine
from paraplan.shared_memory import COPIES_VARIABLE, STATUS_PAGE_VARIABLE, CopySlots, StatusPage

ZERO_3 = ParallelPlan(dp=3, zero_stage=3, micro_batch_size=4)
DDP = ParallelPlan(dp=3, micro_batch_size=4)


def prepared(job: runtime.Job, folder: str) -> tuple[Engine, bool]:
    torch.manual_seed(0)
    model: nn.Module = MODELS["two blocks"]()
    engine = job.prepare(
        model,
        loss_fn=loss_fn,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, fused=True),
        verify="off",  # trainings without and with a loss are compared
        example_inputs=torch.zeros(2, TOKENS, dtype=torch.long),
    )
    return engine, engine.resume(folder)


def steps(job: runtime.Job, engine: Engine, last: int) -> list[float]:
    batches = job.shard(TokenPairs(), batch_size=GLOBAL_BATCH, seed=3, skip=engine.num_steps)
    return [engine.step(*batch).item() for batch, _ in zip(batches, range(engine.num_steps, last), strict=False)]


def new_memory() -> CopySlots:
    """Have this rank be alone on a node whose launcher has just made memory for copies."""
    slots = CopySlots.make(every=1, num_ranks=1, most_bytes=1 << 24, has_neighbour=True)
    os.environ |= {"LOCAL_RANK": "0", "GROUP_RANK": os.environ["RANK"], COPIES_VARIABLE: slots.text()}
    os.environ[STATUS_PAGE_VARIABLE] = StatusPage.make(1).path
    return slots


def lose_a_node(folder: str, lost: int | None, plan: ParallelPlan) -> tuple[list[float], int, bool]:
    """Train under ZeRO-3, take the memory of one node away, and go on under `plan`."""
    new_memory()
    with runtime.init(ZERO_3) as job:
        losses = steps(job, prepared(job, folder)[0], 3)
    if int(os.environ["RANK"]) == lost:
        new_memory()
    with runtime.init(plan) as job:
        engine, goes_on = prepared(job, folder)
        begun = engine.num_steps
        return losses[:begun] + steps(job, engine, 4), begun, goes_on


@pytest.mark.with_all  # nodes do so in test_neighbour_copies of the launcher
def test_a_new_node_takes_what_the_lost_one_had_from_the_others(ranks: RankHarness, tmp_path: Path) -> None:
    whole = ranks.run(lose_a_node, str(tmp_path / "none"), None, ZERO_3, size=3)
    assert {(begun, goes_on) for _, begun, goes_on in whole} == {(2, True)}
    for plan, lost in ((ZERO_3, 0), *with_all([(DDP, 2)])):  # shards come from some nodes, copies from any
        found = ranks.run(lose_a_node, str(tmp_path / "none"), lost, plan, size=3)
        assert {(begun, goes_on) for _, begun, goes_on in found} == {(2, True)}
        losses = torch.tensor([losses for losses, _, _ in found])
        torch.testing.assert_close(losses, torch.tensor([each for each, _, _ in whole]), atol=1e-6, rtol=0)
    assert not (tmp_path / "none").exists()
