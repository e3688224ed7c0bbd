"""Reports of steps for loggers: who gets them, when, and that no other step is waited for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_harness import RankHarness
from training_cases import GLOBAL_BATCH, TOKENS, Decoder, TokenPairs
from training_cases import loss_fn as cross_entropy

from paraplan import runtime
from paraplan.errors import UsageError
from paraplan.plan.parallel import ParallelPlan
from paraplan.runtime.step.clocks import HostClock
from paraplan.runtime.step.reports import RunWatch, SpeedBaseline, StepReport

PIPELINE = ParallelPlan(dp=2, pp=2, pipeline_schedule="1f1b", micro_batch_size=3, num_microbatches=2)


class UnreadLoss:
    """A loss that nobody may wait for."""

    def item(self) -> float:
        raise AssertionError("a step that is not reported was waited for")


def loss_with_accuracy(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
    return cross_entropy(logits, targets), {"accuracy": (logits.argmax(-1) == targets).float().mean()}


def reports_of(plan: ParallelPlan | None, path: str | None) -> tuple[list[StepReport], list[int], list[float]]:
    with runtime.init(plan, shows_progress=False, metrics=path, metrics_every=3 if path else None) as job:
        torch.manual_seed(0)
        engine = job.prepare(
            Decoder(num_layers=2),
            loss_fn=loss_with_accuracy,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            max_grad_norm=1.0,
            example_inputs=torch.zeros(2, TOKENS, dtype=torch.long),
        )
        reports: list[StepReport] = []
        on_all: list[int] = []
        engine.on_step(reports.append, every=2)
        engine.on_step(lambda report: on_all.append(report.step), all_ranks=True)
        accuracies = []
        for inputs, targets in job.shard(TokenPairs(), batch_size=GLOBAL_BATCH):
            engine.step(inputs, targets)
            accuracies.append(float(engine.metrics["accuracy"]))
        return reports, on_all, accuracies


@pytest.mark.ranks
def test_rank_0_is_given_reports_with_the_metrics_of_the_global_batch(ranks: RankHarness, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    alone = ranks.run_alone(reports_of, None, None)[0]
    answers = ranks.run(reports_of, PIPELINE, str(path), size=4)
    reports, _, accuracies = answers[0]
    assert [report.step for report in reports] == [2, 4, 6]
    for report, expected in zip(reports, alone, strict=True):
        assert report.loss == pytest.approx(expected.loss, rel=1e-5)
        assert report.metrics == pytest.approx(expected.metrics)
        assert report.metrics["accuracy"] == accuracies[report.step - 1]
    assert [rank_reports for rank_reports, _, _ in answers[1:]] == [[], [], []]
    assert {tuple(on_all) for _, on_all, _ in answers} == {(1, 2, 3, 4, 5, 6)}
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines] == [3, 6]
    assert lines[1]["metrics"] == reports[2].metrics


class UnreadClock(HostClock):
    def times_s(self) -> list[float]:
        raise AssertionError("the clock was waited for")


def test_a_step_that_is_not_reported_is_not_waited_for(tmp_path: Path) -> None:
    watch = RunWatch(
        device=torch.device("cuda"), baseline=SpeedBaseline(num_ranks=1), metrics=tmp_path / "lines", metrics_every=4
    )
    watch.clock = UnreadClock()
    watch.callbacks.append((5, lambda report: None))
    for step in (1, 2, 3, 6):
        watch.begin()
        watch.end(step=step, loss=UnreadLoss(), grad_norm=None, learning_rate=0.1, tokens=8)
    for step in (4, 5):
        with pytest.raises(AssertionError, match="was waited for"):
            watch.end(step=step, loss=UnreadLoss(), grad_norm=None, learning_rate=0.1, tokens=8)


def test_a_number_of_steps_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="metrics_every=0 is not a number of steps"):
        runtime.init(metrics_every=0)
    monkeypatch.setenv("PARAPLAN_METRICS_EVERY", "often")
    with pytest.raises(UsageError, match="PARAPLAN_METRICS_EVERY=often"):
        runtime.init()
    monkeypatch.setenv("PARAPLAN_METRICS_EVERY", "50")
    assert runtime.init().metrics_every == 50
