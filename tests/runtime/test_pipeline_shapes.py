"""A pipeline runs the model without values to know what travels between its stages: once for each shape of inputs."""

from __future__ import annotations

import pytest
import torch
from rank_harness import RankHarness
from training_cases import GLOBAL_BATCH, Decoder, loss_fn

from paraplan import runtime
from paraplan.plan.parallel import ParallelPlan


class Counted(Decoder):
    num_runs_without_values = 0

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        Counted.num_runs_without_values += tokens.is_meta
        return super().forward(tokens)


def _runs_without_values() -> list[int]:
    plan = ParallelPlan(pp=2, pipeline_schedule="1f1b", num_microbatches=2, micro_batch_size=GLOBAL_BATCH // 2)
    job = runtime.init(plan)
    engine = job.prepare(
        Counted(),
        loss_fn=loss_fn,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        verify="off",
        example_inputs=torch.zeros(2, 8, dtype=torch.long),
    )
    long, short = (torch.zeros(GLOBAL_BATCH, tokens, dtype=torch.long) for tokens in (8, 4))
    found = []
    for inputs, trains in ((long, False), (long, True), (long, True), (short, True)):
        (engine.step if trains else engine.eval_step)(inputs, inputs)
        found.append(Counted.num_runs_without_values)
    return found


@pytest.mark.ranks
def test_training_takes_the_shapes_that_evaluation_has_found(ranks: RankHarness) -> None:
    for evaluated, trained, again, of_another_length in ranks.run(_runs_without_values, size=2):
        assert evaluated == trained == again
        assert of_another_length == again + 1
