"""Linear layers in float8: under every plan the training that one process does with the same layers."""

from __future__ import annotations

import re
import sys
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from case_selection import with_all
from rank_harness import RankHarness
from tiny_transformers import TOKENS, VOCABULARY, build

from paraplan import runtime
from paraplan.errors import ParaplanError, UnsupportedPlanError, UsageError
from paraplan.plan.files import PlanFile
from paraplan.plan.parallel import ParallelPlan
from paraplan.plan.support import training_reason
from paraplan.plan.training import TrainingSpec
from paraplan.runtime.structure.float8 import convert_products

BATCH = 8
ONE = ParallelPlan(num_microbatches=2, micro_batch_size=4)
PLANS = [
    ParallelPlan(dp=2, zero_stage=3, num_microbatches=2, micro_batch_size=2),
    ParallelPlan(tp=2, sequence_parallel=True, num_microbatches=2, micro_batch_size=4),
    ParallelPlan(pp=2, pipeline_schedule="1f1b", num_microbatches=2, micro_batch_size=4),
    ParallelPlan(cp=2, num_microbatches=2, micro_batch_size=4),
]
MIXES = [
    ParallelPlan(dp=2, tp=2, zero_stage=3, recompute="full", num_microbatches=2, micro_batch_size=2),
    *with_all(
        [
            ParallelPlan(tp=2, pp=2, pipeline_schedule="1f1b", num_microbatches=2, micro_batch_size=4),
            ParallelPlan(cp=2, tp=2, sequence_parallel=True, num_microbatches=2, micro_batch_size=4),
            ParallelPlan(dp=2, cp=2, zero_stage=1, num_microbatches=2, micro_batch_size=2),
        ]
    ),
]


def in_float8(recipe: str, **fields: Any) -> torch.nn.Module:
    """Return a small model whose layers torchao has converted, which a CPU multiplies with rounded operands."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    torch.manual_seed(0)
    model = build("llama", hidden_size=64, intermediate_size=128)
    config: Any = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=True, **fields)
    convert_to_float8_training(model, config=config, module_filter_fn=lambda _, name: "lm_head" not in name)
    return model


def trained(
    plan: ParallelPlan | PlanFile, recipe: str | None, compile_backend: str | None = None
) -> tuple[float, dict[str, torch.Tensor], list[str]]:
    """Return the loss of a step, its gradients, and the kinds of its linear layers."""
    warnings.simplefilter("ignore")  # of torchao
    job = runtime.init(plan, shows_progress=False)
    torch.manual_seed(0)
    model = build("llama", hidden_size=64, intermediate_size=128) if recipe is None else in_float8(recipe)
    ids = torch.randint(1, VOCABULARY, (BATCH, TOKENS), generator=torch.Generator().manual_seed(1))
    share = BATCH // job.dp
    own = ids[job.dp_rank * share :][:share]
    engine = job.prepare(
        model,
        loss_fn=lambda outputs, _: outputs.loss,
        optimizer=lambda held: torch.optim.SGD(held, lr=0.0),
        compile_backend=compile_backend,
    )
    loss = engine.step({"input_ids": own, "labels": own}, own).item()
    held = {name: one.grad for name, one in engine.parameters.items() if one.grad is not None}
    kinds = [type(one).__name__ for one in model.modules() if isinstance(one, torch.nn.Linear)]
    return loss, {name: engine.whole(name, one).clone() for name, one in held.items()}, kinds


def trained_all(cases: list[tuple[Any, str | None]]) -> list[tuple[float, dict[str, torch.Tensor], list[str]]]:
    return [trained(*case) for case in cases]


def farthest(ranks: RankHarness, plans: list[ParallelPlan], recipe: str) -> float:
    """Return by how much of itself a gradient is off, at most, of what one process makes with the same layers."""
    ((loss, expected, _),) = ranks.run_alone(trained_all, [(ONE, recipe)])
    worst = 0.0
    for answers in ranks.run(trained_all, [(plan, recipe) for plan in plans], size=plans[0].world_size):
        for found, gradients, _ in answers:
            assert found == pytest.approx(loss, rel=1e-3)
            for name, gradient in gradients.items():
                worst = max(worst, float((gradient - expected[name]).norm() / expected[name].norm()))
    return worst


@pytest.mark.ranks
def test_rows_scaled_by_themselves_train_as_in_one_process(ranks: RankHarness) -> None:
    assert farthest(ranks, PLANS, "rowwise") < 1e-4
    assert farthest(ranks, MIXES, "rowwise") < 1e-4


@pytest.mark.ranks
def test_tensors_scaled_as_a_whole_differ_by_what_the_format_rounds(ranks: RankHarness) -> None:
    assert 1e-4 < farthest(ranks, PLANS, "tensorwise") < 0.25  # e5m2 keeps two bits of a gradient


@pytest.mark.ranks
def test_compiled_blocks_multiply_in_float8_too(ranks: RankHarness) -> None:
    ((_, expected, _),) = ranks.run_alone(trained_all, [(ONE, "rowwise")])
    for _, gradients, _ in ranks.run(trained, PLANS[1], "rowwise", "aot_eager", size=2):
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, expected[name], rtol=1e-3, atol=1e-5)


def file_of(plan: ParallelPlan, **more: Any) -> PlanFile:
    training = TrainingSpec(
        global_batch_size=BATCH, seq_length=TOKENS, precision="bf16", linear_precision="fp8", **more
    )
    return PlanFile(plan=plan, training=training)


@pytest.mark.ranks
def test_a_plan_in_float8_puts_the_layers_in(ranks: RankHarness) -> None:
    plan = file_of(PLANS[1], fp8_recipe="rowwise")
    ((loss, expected, kinds),) = ranks.run_alone(trained_all, [(file_of(ONE, fp8_recipe="rowwise"), None)])
    assert kinds.count("Float8Linear") == len(kinds) - 1  # the head is no block
    for found, gradients, split in ranks.run(trained, plan, None, size=2):
        assert (found, split) == (pytest.approx(loss, rel=1e-2), kinds)
        for name, gradient in gradients.items():
            assert float((gradient - expected[name]).norm() / expected[name].norm()) < 0.1, name


def test_torchao_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(UsageError, match="torchao is not installed"):
        convert_products(torch.nn.Linear(16, 16), None, file_of(ONE).training, torch.device("cpu"))


def test_weights_gathered_in_8_bits_are_refused() -> None:
    job = runtime.init(ONE, shows_progress=False)
    model = in_float8("tensorwise", enable_fsdp_float8_all_gather=True)
    with pytest.raises(UnsupportedPlanError, match="enable_fsdp_float8_all_gather"):
        job.prepare(model, loss_fn=lambda outputs, _: outputs.loss, optimizer=torch.optim.SGD)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"linear_precision": "mxfp8"}, "mxfp8"),
        ({"linear_precision": "fp8", "fp8_recipe": "delayed"}, "delayed"),
        ({"linear_precision": "fp8", "fp8_gather": True}, "fp8.gather"),
        ({"linear_precision": "fp8", "fp8_recipe": "rowwise"}, None),
        ({"linear_precision": "fp8"}, None),
    ],
)
def test_formats_that_torchao_has_not_are_refused_before_anything_starts(fields: Any, words: str | None) -> None:
    reason = training_reason(TrainingSpec(global_batch_size=8, seq_length=8, precision="bf16", **fields))
    assert reason is None if words is None else re.search(words, str(reason))
    if words is not None:
        with pytest.raises(ParaplanError, match=words):
            runtime.init(file_of(ONE).replace(training=TrainingSpec(global_batch_size=8, seq_length=8, **fields)))
