"""Parameters that take no part in some steps, or in none, train as in one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from case_selection import with_all
from rank_harness import RankHarness
from torch import nn
from training_cases import HIDDEN, TOKENS, VOCABULARY, Layer, loss_fn

from paraplan import runtime
from paraplan.errors import UnsupportedPlanError
from paraplan.plan.parallel import ParallelPlan

BATCH = 8
# Which sequences of the batch go through the conditional layer in each step: those of one rank, of both, or none.
STEPS = ([], [1], [1, 6], [], [7], [])
Trained = tuple[list[float], dict[str, torch.Tensor], list[bool]]


class Conditional(nn.Module):
    """Sends sequences that begin with token 0 through a layer of their own; has one more that nothing goes through."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, HIDDEN), nn.Linear(HIDDEN, VOCABULARY)
        self.other, self.never = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden, is_extra = self.embedding(tokens), tokens[:, 0] == 0
        if is_extra.any():
            hidden = hidden + self.other(hidden) * is_extra[:, None, None]
        return self.head(hidden)


def batch_of(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(1, VOCABULARY, (BATCH, TOKENS + 1), generator=torch.Generator().manual_seed(step))
    ids[STEPS[step], 0] = 0
    return ids[:, :-1], ids[:, 1:]


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.02, weight_decay=0.5)


def trained(plans: list[ParallelPlan]) -> list[Trained]:
    results = []
    for plan in plans:
        torch.manual_seed(0)
        job = runtime.init(plan, shows_progress=False)
        unused = {"find_unused": True} if plan.zero_stage else {}
        engine = job.prepare(Conditional(), loss_fn=loss_fn, optimizer=adamw, **unused)
        place = torch.distributed.get_rank() if plan.dp > 1 else 0
        rows = slice(place * BATCH // plan.dp, (place + 1) * BATCH // plan.dp)
        losses, has_gradient = [], []
        for step in range(len(STEPS)):
            inputs, targets = batch_of(step)
            losses.append(engine.step(inputs[rows], targets[rows]).item())
            has_gradient.append(engine.parameters["other.weight"].grad is not None)
            assert engine.parameters["never.weight"].grad is None
        results.append((losses, {name: engine.whole(name).clone() for name in engine.parameters}, has_gradient))
    return results


def repeated(folder: str) -> list[list[bool]]:
    """Return which repeats of one step, after a checkpoint, have a gradient of the layer that they use or leave out."""
    plan, found = ParallelPlan(dp=2, micro_batch_size=4), []
    for _ in range(2):
        engine = runtime.init(plan, shows_progress=False).prepare(Conditional(), loss_fn=loss_fn, optimizer=adamw)
        engine.save(folder)
        seen = []
        for step in (0, 1, 4, 0, 2):
            engine.load(folder)
            inputs, targets = batch_of(step)
            rows = slice(4 * torch.distributed.get_rank(), 4 * torch.distributed.get_rank() + 4)
            engine.step(inputs[rows], targets[rows])
            seen.append(engine.parameters["other.weight"].grad is not None)
        found.append(seen)
    return found


@pytest.mark.ranks
def test_a_step_that_is_done_again_forgets_what_it_left_out_before(ranks: RankHarness, tmp_path: Path) -> None:
    expected = [[False, True, True, False, True]] * 2
    assert ranks.run(repeated, str(tmp_path / "checkpoint"), size=2) == [expected] * 2


def plainly() -> tuple[list[float], dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    model, losses = Conditional(), []
    optimizer = adamw(list(model.parameters()))
    for step in range(len(STEPS)):
        optimizer.zero_grad()
        loss = loss_fn(model(batch_of(step)[0]), batch_of(step)[1])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, dict(model.named_parameters())


@pytest.mark.ranks
def test_layers_that_some_steps_or_all_leave_out_train_as_in_one_process(ranks: RankHarness) -> None:
    plans = [
        ParallelPlan(dp=2, num_microbatches=count, micro_batch_size=4 // count) for count in (2, *with_all([1, 4]))
    ]
    plans += [
        ParallelPlan(dp=2, zero_stage=stage, num_microbatches=2, micro_batch_size=2) for stage in (3, *with_all([2]))
    ]
    losses, parameters = plainly()
    for results in [
        trained([ParallelPlan(num_microbatches=4, micro_batch_size=2)]),
        *ranks.run(trained, plans, size=2),
    ]:
        for found, values, has_gradient in results:
            assert found == pytest.approx(losses, rel=1e-5)
            assert has_gradient == [bool(sequences) for sequences in STEPS]
            for name, value in parameters.items():
                torch.testing.assert_close(values[name], value, rtol=1e-4, atol=1e-5)


def untold() -> str:
    """Leave a layer out on one rank of ZeRO, which nobody has said may be."""
    plan = ParallelPlan(dp=2, zero_stage=3, micro_batch_size=BATCH // 2)
    engine = runtime.init(plan, shows_progress=False).prepare(Conditional(), loss_fn=loss_fn, optimizer=adamw)
    place, said = torch.distributed.get_rank(), "no error"
    rows = slice(place * BATCH // 2, (place + 1) * BATCH // 2)
    for step in range(len(STEPS)):
        inputs, targets = batch_of(step)
        try:
            engine.step(inputs[rows], targets[rows])
        except UnsupportedPlanError as refusal:
            said = f"{step}: {refusal}"
            break
    return said


@pytest.mark.ranks
def test_layers_that_one_rank_of_zero_leaves_out_are_named_in_the_next_step(ranks: RankHarness) -> None:
    for said in ranks.run(untold, size=2):
        assert said.startswith("2: ranks 0 and 1 have run other blocks in the last call, or trained others")
        assert "job.prepare(find_unused=True)" in said


class WithAFlag(nn.Module):
    """A layer before the blocks that a flag beside the tokens switches off.

    The embedding is that of the head too, or is read by every stage without a gradient.
    """

    def __init__(self, *, is_tied: bool) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, HIDDEN), nn.Linear(HIDDEN, VOCABULARY, bias=False)
        self.is_tied = is_tied
        if is_tied:
            self.head.weight = self.embedding.weight
        self.sometimes = nn.Linear(HIDDEN, HIDDEN)
        self.layers = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, tokens: torch.Tensor, flag: bool = True) -> torch.Tensor:
        hidden = self.embedding(tokens)
        scale = None if self.is_tied else 1.0 + hidden.detach()
        if flag:
            hidden = hidden + self.sometimes(hidden)
        for layer in self.layers:
            hidden = layer(hidden, scale)
        return self.head(hidden)


def flagged(plan: ParallelPlan | None, is_tied: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    job = runtime.init(plan, shows_progress=False)
    engine = job.prepare(
        WithAFlag(is_tied=is_tied),
        loss_fn=loss_fn,
        optimizer=adamw,
        example_inputs={"tokens": torch.zeros(2, TOKENS, dtype=torch.long), "flag": True},
    )
    rows, losses = slice(job.dp_rank * BATCH // job.dp, (job.dp_rank + 1) * BATCH // job.dp), []
    for step, flag in enumerate((True, False, True)):
        inputs, targets = batch_of(step)
        losses.append(engine.step({"tokens": inputs[rows], "flag": flag}, targets[rows]).item())
    return losses, {name: engine.whole(name).clone() for name in engine.parameters}


@pytest.mark.ranks
@pytest.mark.parametrize("is_tied", [True, *with_all([False])])
def test_layers_that_a_step_of_a_pipeline_leaves_out_train_as_in_one_process(ranks: RankHarness, is_tied: bool) -> None:
    plan = ParallelPlan(dp=2, pp=2, pipeline_schedule="1f1b", num_microbatches=2, micro_batch_size=2)
    losses, parameters = ranks.run_alone(flagged, None, is_tied)
    for found, values in ranks.run(flagged, plan, is_tied, size=4):
        assert found == pytest.approx(losses, rel=1e-5)
        for name, value in values.items():
            torch.testing.assert_close(value, parameters[name], rtol=1e-4, atol=1e-5)
