"""A plan does not change the training: every plan that `support.py` admits gives what one process gives."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import cache

import pytest
import torch
from rank_harness import RankHarness
from training_cases import GLOBAL_BATCH, Training, train, train_all

from paraplan.plan.parallel import ParallelPlan
from paraplan.plan.support import unsupported_reason

pytestmark = pytest.mark.ranks

NUM_BLOCKS = 5


def plan_of(**fields: object) -> ParallelPlan:
    """Return a plan whose micro-batches make up the global batch of the test's training."""
    plan = ParallelPlan.model_validate(fields)
    return plan.replace(micro_batch_size=GLOBAL_BATCH // (plan.dp * plan.num_microbatches))


def admitted_plans(
    world_size: int,
    *,
    recompute: tuple[str, ...],
    counts: tuple[int, ...],
    tp: int = 1,
    sequence_parallel: bool = False,
) -> list[ParallelPlan]:
    """Return the plans of every kind that the support table admits for `world_size` ranks and these micro-batches."""
    plans = []
    for pp, zero_stage, schedule, num_microbatches, kept in itertools.product(
        (1, 2, 4), (0, 1, 2, 3), (None, "gpipe", "1f1b"), counts, recompute
    ):
        dp = world_size // (pp * tp)
        is_valid = dp * pp * tp == world_size and (pp > 1) == (schedule is not None)
        is_valid = is_valid and GLOBAL_BATCH % (dp * num_microbatches) == 0
        if not is_valid or (zero_stage and dp == 1) or (zero_stage > 1 and pp > 1):
            continue
        plan = plan_of(
            dp=dp,
            pp=pp,
            tp=tp,
            sequence_parallel=sequence_parallel,
            zero_stage=zero_stage,
            pipeline_schedule=schedule,
            num_microbatches=num_microbatches,
            recompute=kept,
        )
        if unsupported_reason(plan, num_blocks=NUM_BLOCKS) is None:
            plans.append(plan)
    return plans


@pytest.fixture(scope="module")
def one_process(ranks: RankHarness) -> Callable[[str], Training]:
    """Return the training of a model in one process, run once for each."""
    return cache(lambda model: ranks.run_alone(train, model, None))


def assert_same_training(trainings: list[Training], reference: Training) -> None:
    for training in trainings:
        assert training.eval_losses == pytest.approx(reference.eval_losses, rel=1e-5)
        assert training.losses == pytest.approx(reference.losses, rel=1e-5)
        assert training.grad_norms == pytest.approx(reference.grad_norms, rel=1e-5)
        for name, gradient in training.gradients.items():
            assert relative_error(gradient, reference.gradients[name]) < 1e-5, name
        for name, parameter in training.parameters.items():
            assert relative_error(parameter, reference.parameters[name]) < 1e-4, name
    held = {name for training in trainings for name in training.gradients}
    assert held == set(reference.gradients)


def relative_error(value: torch.Tensor, reference: torch.Tensor) -> float:
    return ((value - reference).abs().max() / reference.abs().max()).item()


@pytest.mark.parametrize(
    "plan", admitted_plans(2, recompute=("none", "full"), counts=(1, 3)), ids=ParallelPlan.describe
)
def test_two_ranks_train_as_one_process(plan: ParallelPlan, ranks: RankHarness, one_process) -> None:
    assert_same_training(ranks.run(train, "decoder", plan, size=2), one_process("decoder"))


@pytest.mark.parametrize("plan", admitted_plans(4, recompute=("none",), counts=(3, 6)), ids=ParallelPlan.describe)
def test_four_ranks_train_as_one_process(plan: ParallelPlan, ranks: RankHarness, one_process) -> None:
    assert_same_training(ranks.run(train, "decoder", plan, size=4), one_process("decoder"))


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("model", ["attention", "grouped"])
def test_two_ranks_with_split_layers_train_as_one_process(
    model: str, sequence_parallel: bool, ranks: RankHarness, one_process
) -> None:
    plans = admitted_plans(2, recompute=("none", "full"), counts=(1, 3), tp=2, sequence_parallel=sequence_parallel)
    assert_each_trains_the_same(plans, model, ranks, one_process)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_four_ranks_with_split_layers_train_as_one_process(
    sequence_parallel: bool, ranks: RankHarness, one_process
) -> None:
    plans = admitted_plans(4, recompute=("full",), counts=(3,), tp=2, sequence_parallel=sequence_parallel)
    assert {(plan.dp, plan.pp, plan.zero_stage) for plan in plans} >= {(2, 1, 0), (2, 1, 1), (2, 1, 2), (2, 1, 3)}
    assert_each_trains_the_same(plans, "attention", ranks, one_process)


def test_four_parts_of_each_layer_train_as_one_process(ranks: RankHarness, one_process) -> None:
    plans = admitted_plans(4, recompute=("none",), counts=(2,), tp=4)
    assert_each_trains_the_same(plans, "attention", ranks, one_process)


def test_eight_ranks_in_three_dimensions_train_as_one_process(ranks: RankHarness, one_process) -> None:
    layout = {"dp": 2, "tp": 2, "pp": 2, "pipeline_schedule": "1f1b", "num_microbatches": 3}
    plans = [
        plan_of(**layout),
        plan_of(**layout, zero_stage=1, sequence_parallel=True),
        plan_of(**layout, zero_stage=1, rank_order=("dp", "pp", "cp", "tp")),
    ]
    assert_each_trains_the_same(plans, "attention", ranks, one_process)


def assert_each_trains_the_same(plans: list[ParallelPlan], model: str, ranks: RankHarness, one_process) -> None:
    by_rank = ranks.run(train_all, model, plans, size=plans[0].world_size, timeout_s=120.0)
    for plan, trainings in zip(plans, zip(*by_rank, strict=True), strict=True):
        try:
            assert_same_training(list(trainings), one_process(model))
        except AssertionError as error:
            error.add_note(plan.describe())
            raise


@pytest.mark.parametrize("model", ["tied", "shared scale", "sequential", "keyword"])
@pytest.mark.parametrize(
    "plan",
    [
        plan_of(dp=2, zero_stage=3, num_microbatches=3),
        plan_of(pp=2, pipeline_schedule="1f1b", num_microbatches=3, recompute="full"),
        plan_of(tp=2, num_microbatches=3),
    ],
    ids=ParallelPlan.describe,
)
def test_models_of_every_build_train_as_in_one_process(
    model: str, plan: ParallelPlan, ranks: RankHarness, one_process
) -> None:
    assert_same_training(ranks.run(train, model, plan, size=2), one_process(model))


@pytest.mark.parametrize("model", ["tied", "shared scale"])
@pytest.mark.parametrize("zero_stage", [0, 1])
def test_parameters_on_several_stages_stay_equal_beside_data_parallelism(
    model: str, zero_stage: int, ranks: RankHarness, one_process
) -> None:
    plan = plan_of(dp=2, pp=2, zero_stage=zero_stage, pipeline_schedule="1f1b", num_microbatches=3)
    assert_same_training(ranks.run(train, model, plan, size=4), one_process(model))


def test_ties_across_three_stages_stay_equal(ranks: RankHarness, one_process) -> None:
    plan = plan_of(pp=3, pipeline_schedule="1f1b", num_microbatches=3)
    for model in ("tied", "shared scale"):
        assert_same_training(ranks.run(train, model, plan, size=3), one_process(model))


def test_ranks_with_dp_outermost_train_as_one_process(ranks: RankHarness, one_process) -> None:
    plan = plan_of(
        dp=2,
        pp=2,
        zero_stage=1,
        pipeline_schedule="1f1b",
        num_microbatches=3,
        rank_order=("dp", "pp", "cp", "tp"),
    )
    assert_same_training(ranks.run(train, "decoder", plan, size=4), one_process("decoder"))


def test_stages_of_unequal_lengths_train_as_one_process(ranks: RankHarness, one_process) -> None:
    plan = plan_of(pp=2, pipeline_schedule="gpipe", num_microbatches=3, stage_blocks=(1, 4))
    assert_same_training(ranks.run(train, "decoder", plan, size=2), one_process("decoder"))


def test_plan_on_the_spot_is_ddp_and_trains_as_one_process(ranks: RankHarness, one_process) -> None:
    assert_same_training(ranks.run(train, "decoder", None, size=2), one_process("decoder"))


@pytest.mark.parametrize(
    "plan",
    [
        plan_of(dp=2, zero_stage=0, num_microbatches=3),
        plan_of(dp=2, zero_stage=1, num_microbatches=3),
        plan_of(dp=2, zero_stage=3, num_microbatches=3, recompute="full"),
        plan_of(pp=2, pipeline_schedule="1f1b", num_microbatches=3),
        plan_of(dp=2, pp=2, zero_stage=1, pipeline_schedule="1f1b", num_microbatches=3),
        plan_of(tp=2, num_microbatches=3),
        plan_of(tp=2, dp=2, zero_stage=3, num_microbatches=3),
    ],
    ids=ParallelPlan.describe,
)
def test_bf16_stays_near_fp32(plan: ParallelPlan, ranks: RankHarness, one_process) -> None:
    reference = one_process("decoder")
    for training in ranks.run(_train_in_bf16, plan, size=plan.world_size):
        # bf16 has 8 bits of mantissa: 2**-8 relative for each rounding, a few of which meet in a loss.
        assert training.losses == pytest.approx(reference.losses, rel=2e-2)
        assert training.losses != pytest.approx(reference.losses, rel=1e-6)
        for name, parameter in training.parameters.items():
            assert parameter.dtype == torch.float32, name


def _train_in_bf16(plan: ParallelPlan) -> Training:
    return train("decoder", plan, precision="bf16")
