"""What optimizers keep beside numbers of a parameter's shape: a matrix for each axis, lists of tensors, masks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from case_selection import with_all
from rank_harness import RankHarness
from test_first_step import PLANS, batch_of, plain
from torch import nn
from training_cases import TOKENS, loss_fn

from paraplan import runtime
from paraplan.errors import UnsupportedPlanError
from paraplan.plan.parallel import ParallelPlan
from paraplan.runtime.structure.parameter_hooks import check_written_tables

PLANS = PLANS | {"zero1": ParallelPlan(dp=2, zero_stage=1, micro_batch_size=2)}
NUM_STEPS = 4


class ByAxis(torch.optim.Optimizer):
    """Keeps a matrix for each axis, as Shampoo and SOAP do, in a list; steps by them from the third step on.

    What it keeps beside them, in dictionaries and tuples, must be as it was.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for held in group["params"]:
                if held.grad is not None:
                    self._step(held, held.grad, group["lr"])

    def _step(self, held: nn.Parameter, gradient: torch.Tensor, rate: float) -> None:
        state = self.state[held]
        if not state:
            state["step"], state["kept"] = 0, {"deep": (torch.zeros(()), [], {3: None}), "betas": [0.9, 0.5]}
            state["axes"] = [torch.zeros(size, size) for size in held.shape] if held.ndim > 1 else []
        state["step"] += 1
        count, empty, numbers = state["kept"]["deep"]
        assert (empty, state["kept"]["betas"], numbers) == ([], [0.9, 0.5], {3: None})
        assert count.add_(1).item() == state["step"]
        for axis, matrix in enumerate(state["axes"]):
            others = [other for other in range(held.ndim) if other != axis]
            matrix.lerp_(torch.tensordot(gradient, gradient, dims=(others, others)), 0.3)
        sizes = [matrix.trace() for matrix in state["axes"]] if state["step"] > 2 else []
        held.sub_(rate * gradient / (1.0 + sum(sizes, torch.zeros(()))))


def rprop(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Rprop(parameters, lr=1e-3)


Make = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {"by axis": ByAxis, "rprop": rprop}


def plainly(make: Make) -> list[float]:
    model, losses = plain(), []
    optimizer = make(model.parameters())
    for step in range(NUM_STEPS):
        inputs, targets = batch_of(ParallelPlan(micro_batch_size=4), step)
        optimizer.zero_grad()
        loss = loss_fn(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def trained(plan: ParallelPlan, make: Make, folder: str) -> list[float]:
    """Train, save and load in the middle, and train on."""
    job = runtime.init(plan, shows_progress=False)
    example = torch.zeros(2, TOKENS, dtype=torch.long)
    engine = job.prepare(plain(), loss_fn=loss_fn, optimizer=make, example_inputs=example)
    losses = []
    for step in range(NUM_STEPS):
        if step == NUM_STEPS - 1:
            engine.save(folder)
            engine.load(folder)
        share = 4 // plan.dp
        rows = slice(job.dp_rank * share, (job.dp_rank + 1) * share)
        inputs, targets = batch_of(ParallelPlan(micro_batch_size=4), step)
        losses.append(engine.step(inputs[rows], targets[rows]).item())
    return losses


def all_of_it(folder: str) -> dict[str, list[float]]:
    return {
        f"{name}, {plan}": trained(PLANS[plan], make, f"{folder}/{name} {plan}")
        for name, make in OPTIMIZERS.items()
        for plan in with_all(PLANS) or ["tp2" if name == "rprop" else "zero3"]  # one that splits tensors, and shards
    }


@pytest.mark.ranks
def test_optimizers_with_matrices_lists_and_masks_train_as_in_one_process_and_go_on(
    ranks: RankHarness, tmp_path: Path
) -> None:
    expected = {name: plainly(make) for name, make in OPTIMIZERS.items()}
    for found in ranks.run(all_of_it, str(tmp_path), size=2):
        for case, losses in found.items():
            assert losses == pytest.approx(expected[case.split(",")[0]], rel=1e-5), case


def test_sparse_gradients_are_refused_under_zero() -> None:
    model = nn.Sequential(nn.Embedding(4, 4, sparse=True))
    check_written_tables(model, ParallelPlan(dp=2, micro_batch_size=1))
    with pytest.raises(UnsupportedPlanError, match="zero_stage=3: 0 has sparse=True"):
        check_written_tables(model, ParallelPlan(dp=2, zero_stage=3, micro_batch_size=1))
