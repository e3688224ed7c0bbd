"""Predictions, and metrics of evaluations: those of one process under every plan, on every rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import islice
from typing import Any

import pytest
import torch
from case_selection import with_all
from rank_harness import RankHarness, RanksFailedError
from torch import nn
from torch.utils import _pytree as pytree
from training_cases import GLOBAL_BATCH, HIDDEN, MODELS, TOKENS, VOCABULARY, Layer, TokenPairs, Transformer
from training_cases import loss_fn as cross_entropy

from paraplan import runtime
from paraplan.errors import UsageError
from paraplan.plan.parallel import ParallelPlan

PLANS = {
    "ddp": ("decoder", ParallelPlan(dp=2, micro_batch_size=3, num_microbatches=2)),
    "zero 3": ("two blocks", ParallelPlan(dp=2, zero_stage=3, micro_batch_size=6)),
    "split layers": ("two blocks", ParallelPlan(tp=2, sequence_parallel=True, micro_batch_size=6, num_microbatches=2)),
    "split odd vocabulary": ("odd vocabulary", ParallelPlan(tp=2, micro_batch_size=12)),
    "split tokens": ("two blocks", ParallelPlan(cp=2, micro_batch_size=6, num_microbatches=2)),
    "pipeline": (
        "keyword",
        ParallelPlan(pp=2, pipeline_schedule="1f1b", micro_batch_size=4, num_microbatches=3),
    ),
    "stages and layers": (
        "two blocks",
        ParallelPlan(tp=2, pp=2, pipeline_schedule="zero_bubble", micro_batch_size=6, num_microbatches=2),
    ),
    "stages, layers, shards": (
        "two blocks",
        ParallelPlan(
            dp=2, tp=2, pp=2, zero_stage=1, pipeline_schedule="zero_bubble", micro_batch_size=3, num_microbatches=2
        ),
    ),
    "stages and tokens": (
        "two blocks",
        ParallelPlan(cp=2, pp=2, pipeline_schedule="gpipe", micro_batch_size=6, num_microbatches=2),
    ),
}
AS_OTHERS = {"ddp", "split odd vocabulary", "split layers", "stages, layers, shards", "stages and tokens"}
"""Cases whose parts others have."""


class Tagged(nn.Module):
    """A model that returns what it computes beside other things."""

    def __init__(self, model: nn.Module, extra: Any = None) -> None:
        super().__init__()
        self.model, self.extra = model, extra

    def forward(self, tokens: torch.Tensor) -> Any:
        logits = self.model(tokens)
        best = logits.argmax(-1).short()
        return {"logits": logits, "best": (best, "text", 3), "cache": object(), "extra": self.extra}


def loss_with_accuracy(outputs: Any, targets: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
    logits = outputs["logits"] if isinstance(outputs, dict) else outputs
    right = (targets == 1).float()
    return cross_entropy(outputs, targets), {
        "ones": right.mean(),
        "share": (right.sum(), right.numel()),
        "entropy": cross_entropy(logits, targets),
    }


def prepared(job: runtime.Job, model: nn.Module, *, as_dict: bool = False) -> Any:
    example = torch.zeros(2, TOKENS, dtype=torch.long)
    return job.prepare(
        model,
        loss_fn=loss_with_accuracy,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        example_inputs={"tokens": example, "mask": torch.ones(2, TOKENS)} if as_dict else example,
        verify="off",  # the comparison with one process is the test
    )


def model_of(name: str) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = MODELS[name]()
    return model


@dataclass
class Answer:
    inputs: Any
    outputs: Any
    metrics: list[dict[str, float]]
    needs_gradient: bool


def predict_and_evaluate(name: str, plan: ParallelPlan | None) -> Answer:
    with runtime.init(plan) as job:
        as_dict = name == "keyword"
        engine = prepared(job, model_of(name), as_dict=as_dict)
        batches = iter(job.shard(TokenPairs(as_dict=as_dict), batch_size=GLOBAL_BATCH, seed=3))
        inputs, _ = next(batches)
        outputs = engine.predict(inputs)
        metrics = []
        for inputs_then, targets in islice(batches, 2):
            engine.eval_step(inputs_then, targets)
            metrics.append({key: float(value) for key, value in engine.metrics.items()})
        leaves = pytree.tree_leaves(outputs)
        return Answer(inputs, outputs, metrics, any(leaf.requires_grad for leaf in leaves))


@pytest.fixture(scope="module")
def one_process(ranks: RankHarness) -> Callable[[str], Answer]:
    """Return the answer of a model in one process, run once for each."""
    return cache(lambda name: ranks.run_alone(predict_and_evaluate, name, None))


@pytest.mark.ranks
@pytest.mark.parametrize(
    "case",
    [pytest.param(name, marks=[pytest.mark.with_all] * (name in AS_OTHERS)) for name, (_, plan) in PLANS.items()],
)
def test_predictions_and_metrics_are_those_of_one_process(
    case: str, ranks: RankHarness, one_process: Callable[[str], Answer]
) -> None:
    name, plan = PLANS[case]
    model = model_of(name).eval()
    alone = one_process(name)
    for answer in ranks.run(predict_and_evaluate, name, plan, size=plan.world_size):
        with torch.no_grad():
            expected = model(**answer.inputs) if isinstance(answer.inputs, dict) else model(answer.inputs)
        assert type(answer.outputs) is type(expected)
        torch.testing.assert_close(answer.outputs, expected, rtol=1e-5, atol=1e-5)
        assert not answer.needs_gradient
        for metrics, whole in zip(answer.metrics, alone.metrics, strict=True):
            assert metrics == pytest.approx(whole, rel=1e-5)
            assert metrics["ones"] == pytest.approx(metrics["share"])


def predict_nests(plan: ParallelPlan | None, size: int) -> Any:
    with runtime.init(plan) as job:
        engine = prepared(job, Tagged(model_of("attention")))
        tokens = torch.arange(size * TOKENS).view(size, TOKENS) % VOCABULARY
        share = tokens[job.dp_rank * 6 : job.dp_rank * 6 + 6]
        return share, engine.predict(share)


@pytest.mark.ranks
def test_outputs_in_nests_reach_every_stage_also_of_a_short_batch(ranks: RankHarness) -> None:
    plan = ParallelPlan(dp=2, pp=2, pipeline_schedule="1f1b", micro_batch_size=3, num_microbatches=2)
    model = model_of("attention").eval()
    for size in (7, *with_all([12, 6])):
        answers = ranks.run(predict_nests, plan, size, size=4)
        assert sorted(len(share) for share, _ in answers) == sorted([6, 6, size - 6, size - 6])
        for share, outputs in answers:
            logits = model(share)
            torch.testing.assert_close(outputs["logits"], logits.detach(), rtol=1e-5, atol=1e-5)
            best, *rest = outputs["best"]
            assert torch.equal(best, logits.argmax(-1).short())
            assert (rest, outputs["cache"], outputs["extra"]) == (["text", 3], None, None)


class ShowsBlocks(nn.Module):
    """Returns the hidden state behind its first block too, which the last stage of a pipeline does not have."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.head = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden, first = self.embedding(tokens), None
        for layer in self.layers:
            hidden = layer(hidden)
            first = hidden if first is None else first
        return {"logits": self.head(hidden), "first": first}


def predict_blocks() -> Any:
    with runtime.init(ParallelPlan(pp=2, pipeline_schedule="gpipe", micro_batch_size=6, num_microbatches=2)) as job:
        torch.manual_seed(0)
        engine = prepared(job, ShowsBlocks())
        return engine.predict(torch.zeros(12, TOKENS, dtype=torch.long))


@pytest.mark.ranks
def test_what_only_another_stage_has_is_not_made_up(ranks: RankHarness) -> None:
    with pytest.raises(RanksFailedError, match="hidden state"):
        ranks.run(predict_blocks, size=2)


def test_outputs_of_micro_batches_that_cannot_be_joined_are_refused() -> None:
    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = Transformer(num_layers=1)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.model(tokens).mean()

    with runtime.init(ParallelPlan(num_microbatches=2, micro_batch_size=2)) as job:
        engine = prepared(job, Mean())
        with pytest.raises(UsageError, match=r"shape \(\) for 2 sequences, and those of 2 micro-batches"):
            engine.predict(torch.zeros(4, TOKENS, dtype=torch.long))


def test_a_model_output_of_transformers_comes_back_as_one() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    model = transformers.LlamaForCausalLM(config)
    with runtime.init(ParallelPlan(num_microbatches=2, micro_batch_size=2)) as job:
        engine = prepared(job, model)
        ids = torch.arange(4 * TOKENS).view(4, TOKENS) % 32
        outputs = engine.predict({"input_ids": ids})
        assert type(outputs).__name__ == "CausalLMOutputWithPast"
        assert outputs.past_key_values is None
        torch.testing.assert_close(outputs.logits, model.eval()(ids).logits.detach())
