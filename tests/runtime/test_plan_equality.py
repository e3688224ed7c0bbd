"""A plan does not change the training: every plan that `support.py` admits gives what one process gives."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import cache

import pytest
import torch
from case_selection import thinned, with_all
from rank_harness import RankHarness
from training_cases import GLOBAL_BATCH, MODELS, VOCABULARY, Training, loss_fn, train, train_all

from paraplan import runtime
from paraplan.errors import UnsupportedPlanError
from paraplan.plan.parallel import ParallelPlan
from paraplan.plan.support import unsupported_reason

pytestmark = pytest.mark.ranks

NUM_BLOCKS = 5


def plan_of(**fields: object) -> ParallelPlan:
    """Return a plan whose micro-batches make up the global batch of the test's training."""
    plan = ParallelPlan.model_validate(fields)
    return plan.replace(micro_batch_size=GLOBAL_BATCH // (plan.dp * plan.num_microbatches))


SCHEDULES = ((None, 1), ("gpipe", 1), ("1f1b", 1), ("interleaved_1f1b", 2), ("zero_bubble", 1))


def admitted_plans(
    world_size: int,
    *,
    recompute: tuple[str, ...],
    counts: tuple[int, ...],
    tp: int = 1,
    sequence_parallel: bool = False,
) -> list[ParallelPlan]:
    """Return plans of every kind that the support table admits for `world_size` ranks and these micro-batches.

    They have every value of one field beside every value of another one; with `--all` they are all plans.
    """
    plans = []
    for pp, zero_stage, (schedule, virtual), num_microbatches, kept in itertools.product(
        (1, 2, 4), (0, 1, 2, 3), SCHEDULES, counts, recompute
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
            virtual_pipeline_size=virtual,
            num_microbatches=num_microbatches,
            recompute=kept,
        )
        if unsupported_reason(plan, num_blocks=NUM_BLOCKS) is None:
            plans.append(plan)
    varied = ("pp", "zero_stage", "pipeline_schedule", "num_microbatches", "recompute")
    return thinned(plans, lambda plan: [getattr(plan, name) for name in varied])


def of_few_blocks(plan: ParallelPlan) -> str:
    """Return the attention model with no more blocks than a plan needs; looking for a split takes time for each."""
    return "two blocks" if plan.pp * plan.virtual_pipeline_size <= 2 else "attention"


@pytest.fixture(scope="module")
def one_process(ranks: RankHarness) -> Callable[[str], Training]:
    """Return the training of a model in one process, run once for each."""
    return cache(lambda model: ranks.run_alone(train, model, None))


def assert_same_training(trainings: list[Training], reference: Training) -> None:
    for training in trainings:
        assert training.eval_losses == pytest.approx(reference.eval_losses, rel=1e-5)
        assert training.losses == pytest.approx(reference.losses, rel=1e-5)
        assert training.grad_norms == pytest.approx(reference.grad_norms, rel=1e-5)
        assert training.metrics == trainings[0].metrics
        assert all(value >= 1.0 for value in training.metrics.values()), "loads of the busiest, over the mean"
        for name, gradient in training.gradients.items():
            assert relative_error(gradient, reference.gradients[name]) < 1e-5, name
        for name, parameter in training.parameters.items():
            assert relative_error(parameter, reference.parameters[name]) < 1e-4, name
    held = {name for training in trainings for name in training.gradients}
    assert held == set(reference.gradients)


def relative_error(value: torch.Tensor, reference: torch.Tensor) -> float:
    return ((value - reference).abs().max() / reference.abs().max().clamp(min=1e-30)).item()


def test_two_ranks_train_as_one_process(ranks: RankHarness, one_process) -> None:
    plans = admitted_plans(2, recompute=("none", "full"), counts=(1, 3))
    assert {plan.pipeline_schedule for plan in plans} == {schedule for schedule, _ in SCHEDULES}
    # DDP, GPipe and 1F1B are run below: on the spot, with stages of unequal lengths, and where stages share parameters.
    kinds = (1, None), (3, None), (0, "interleaved_1f1b"), (0, "zero_bubble")
    chosen = [next(plan for plan in plans if (plan.zero_stage, plan.pipeline_schedule) == kind) for kind in kinds]
    chosen += with_all([plan for plan in plans if plan not in chosen])
    assert_each_trains_the_same(chosen, "decoder", ranks, one_process)


@pytest.mark.with_all  # three stages, and shards of experts, are below
def test_four_ranks_train_as_one_process(ranks: RankHarness, one_process) -> None:
    """Pipelines, and replicas of a model with fewer rows of experts than there are shards."""
    plans = admitted_plans(4, recompute=("none",), counts=(3, 6))
    pipelines, replicas = ([plan for plan in plans if (plan.pp > 1) == is_staged] for is_staged in (True, False))
    assert [plan.zero_stage for plan in replicas] == [0, 1, 2, 3]
    # Stages beside replicas have parameters of several stages, below, and in checkpoints GPipe.
    cases = [("experts", replicas[3])]
    cases += with_all([("experts", plan) for plan in replicas[:3]] + [("decoder", plan) for plan in replicas])
    cases += with_all([("decoder", plan) for plan in pipelines])  # three stages are below
    assert_cases_train_the_same(cases, ranks, one_process)


def test_two_ranks_with_split_layers_train_as_one_process(ranks: RankHarness, one_process) -> None:
    plans = [
        plan_of(tp=2, num_microbatches=count, recompute=recompute, sequence_parallel=split)
        for count, recompute, split in itertools.product((1, 3), ("none", "full"), (False, True))
    ]
    cases = thinned(
        [*itertools.product(("two blocks", "grouped"), plans)],
        lambda case: [case[0], case[1].num_microbatches, case[1].recompute, case[1].sequence_parallel],
    )
    few = [("two blocks", plan_of(tp=2, num_microbatches=3))]
    few += [("grouped", plan_of(tp=2, num_microbatches=1, recompute="full", sequence_parallel=True))]
    assert_cases_train_the_same(with_all(cases) or few, ranks, one_process)


def test_four_ranks_with_split_layers_train_as_one_process(ranks: RankHarness, one_process) -> None:
    """What lies beside `tp`, replicas or stages; with `--all` also with sequences that are split as well."""
    plans = [
        plan
        for split in (False, True)
        for plan in admitted_plans(4, recompute=("full",), counts=(3,), tp=2, sequence_parallel=split)
    ]
    layouts = {(plan.dp, plan.pp, plan.zero_stage) for plan in plans}
    assert layouts == {(2, 1, 0), (2, 1, 1), (2, 1, 2), (2, 1, 3), (1, 2, 0)}
    # Split sequences beside stages and beside ZeRO-3 are in three dimensions and with groups of other sizes, below;
    # stages beside split layers where attention is run again and under zero bubble.
    whole = {(None, 0)}
    chosen, others = [], []
    for plan in plans:
        is_chosen = not plan.sequence_parallel and (plan.pipeline_schedule, plan.zero_stage) in whole
        (chosen if is_chosen else others).append(plan)
    assert len(chosen) == len(whole)
    chosen += with_all(others)
    cases = [("attention" if plan.pp > 1 else "two blocks", plan) for plan in chosen]
    assert_cases_train_the_same(cases, ranks, one_process)


@pytest.mark.with_all  # with recompute it stands beside split layers, below
def test_zero_bubble_beside_split_layers_trains_as_one_process(ranks: RankHarness, one_process) -> None:
    """Both halves of a backward pass run the sums of the ranks of a `tp` group in one order."""
    plans = [
        plan_of(tp=2, pp=2, pipeline_schedule="zero_bubble", num_microbatches=count, sequence_parallel=split)
        for count, split in ((2, False), (3, True), (6, False))
    ]
    cases = [*itertools.product(("grouped", "two blocks", "attention"), plans)]
    assert_cases_train_the_same(cases, ranks, one_process)


def test_zero_bubble_with_recompute_trains_as_one_process(ranks: RankHarness, one_process) -> None:
    """What the first half of a backward pass has run again is read by the second half too."""
    options = {"pp": 2, "pipeline_schedule": "zero_bubble", "num_microbatches": 2}
    plans = [
        plan_of(**options, tp=2, recompute="full", sequence_parallel=True),
        plan_of(**options, dp=2, recompute="selective", zero_stage=1),
        plan_of(**options, cp=2, recompute="full"),
        plan_of(pp=4, pipeline_schedule="zero_bubble", num_microbatches=4, recompute="full"),
    ]
    cases = [("mixture", plans[0])]
    cases += with_all([("two blocks", plans[0]), ("mixture", plans[1]), ("two blocks", plans[2])])
    cases += with_all([("attention", plans[1]), ("attention", plans[3])])
    assert_cases_train_the_same(cases, ranks, one_process)


def test_four_parts_of_each_layer_train_as_one_process(ranks: RankHarness, one_process) -> None:
    plans = admitted_plans(4, recompute=("none",), counts=(1,), tp=4)
    assert_each_trains_the_same(plans, "two blocks", ranks, one_process)


def test_eight_ranks_in_three_dimensions_train_as_one_process(ranks: RankHarness, one_process) -> None:
    layout = {"dp": 2, "tp": 2, "pp": 2, "pipeline_schedule": "1f1b", "num_microbatches": 2}
    outermost = {"zero_stage": 1, "rank_order": ("dp", "pp", "cp", "tp"), "offload": "optimizer"}
    plans = [
        plan_of(**layout, **outermost, sequence_parallel=True),
        *with_all(
            [
                plan_of(**layout),
                plan_of(**layout, zero_stage=1, sequence_parallel=True),
                plan_of(**layout, **outermost),
                plan_of(dp=2, pp=2, tp=2, zero_stage=1, pipeline_schedule="zero_bubble", num_microbatches=6),
            ]
        ),
    ]
    assert_cases_train_the_same([(of_few_blocks(plan), plan) for plan in plans], ranks, one_process)


def test_groups_of_other_sizes_in_two_dimensions_train_as_one_process(ranks: RankHarness, one_process) -> None:
    """A group of three beside one of two; with `--all` every kind of plan that gives another way of exchange."""
    few = {"num_microbatches": 3}
    many = {"pipeline_schedule": "zero_bubble", "num_microbatches": 6}
    plans = [
        plan_of(dp=3, tp=2, zero_stage=3, sequence_parallel=True, offload="parameters"),
        *with_all(
            [
                plan_of(dp=4, tp=2, **few, zero_stage=3, sequence_parallel=True, offload="parameters"),
                plan_of(dp=2, cp=4, **few, zero_stage=3, recompute="full"),
                plan_of(dp=2, cp=4, num_microbatches=1, offload="optimizer"),
                plan_of(dp=4, cp=2, **few, zero_stage=3, offload="parameters"),
                plan_of(dp=2, tp=4, **few, zero_stage=2, recompute="selective", offload="optimizer"),
                plan_of(dp=2, pp=4, **many, zero_stage=1, offload="optimizer"),
            ]
        ),
    ]
    for world_size in sorted({plan.world_size for plan in plans}):
        chosen = [(of_few_blocks(plan), plan) for plan in plans if plan.world_size == world_size]
        assert_cases_train_the_same(chosen, ranks, one_process)


@pytest.mark.with_all  # two axes of the three at a time are beside each other below, and three
def test_eight_ranks_with_some_tokens_of_each_sequence_train_as_one_process(ranks: RankHarness, one_process) -> None:
    layers, stages, both = {"dp": 2, "cp": 2, "tp": 2}, {"dp": 2, "cp": 2, "pp": 2}, {"cp": 2, "tp": 2, "pp": 2}
    few = {"num_microbatches": 3}
    outermost = ("dp", "pp", "cp", "tp")
    plans = [
        plan_of(**layers, **few, zero_stage=3, sequence_parallel=True, recompute="full"),
        plan_of(**layers, **few, zero_stage=1, sequence_parallel=True, recompute="full"),
        plan_of(**layers, **few, zero_stage=3),
        plan_of(**stages, **few, pipeline_schedule="interleaved_1f1b", virtual_pipeline_size=2),
        plan_of(**both, num_microbatches=6, pipeline_schedule="zero_bubble", rank_order=outermost),
    ]
    assert_cases_train_the_same([(of_few_blocks(plan), plan) for plan in plans], ranks, one_process)


def assert_each_trains_the_same(
    plans: Sequence[ParallelPlan | None], model: str, ranks: RankHarness, one_process, *, size: int = 0
) -> None:
    assert_cases_train_the_same([(model, plan) for plan in plans], ranks, one_process, size=size)


def assert_cases_train_the_same(
    cases: list[tuple[str, ParallelPlan | None]], ranks: RankHarness, one_process, *, size: int = 0
) -> None:
    """Assert that each model under its plan trains as in one process; all of them on one group of ranks."""
    by_rank = ranks.run(train_all, cases, size=size or cases[0][1].world_size, timeout_s=240.0)
    for (model, plan), trainings in zip(cases, zip(*by_rank, strict=True), strict=True):
        try:
            assert_same_training(list(trainings), one_process(model))
        except AssertionError as error:
            error.add_note(f"{model} under {plan and plan.describe()}")
            raise


def test_experts_over_ranks_train_as_in_one_process(ranks: RankHarness, one_process) -> None:
    """Each kind of expert beside every other axis; copies of experts where `ep` is smaller than `dp x cp`."""
    shared, staged = {"dp": 4, "ep": 2, "num_microbatches": 3}, {"pp": 2, "dp": 2, "ep": 2, "num_microbatches": 2}
    cases = [
        ("routed", plan_of(**shared, zero_stage=3, recompute="full")),
        ("listed", plan_of(**staged, pipeline_schedule="zero_bubble")),
        ("routed", plan_of(tp=2, dp=2, ep=2, sequence_parallel=True)),
        ("named", plan_of(**shared)),
        ("sorted", plan_of(**shared, zero_stage=1)),
    ]
    cases += with_all([("routed", plan_of(cp=2, dp=2, ep=4, zero_stage=1))])
    cases += with_all([("routed", plan_of(tp=2, dp=2, ep=2, sequence_parallel=True, num_microbatches=3))])
    assert_cases_train_the_same([("routed", plan_of(cp=2, ep=2, zero_stage=1))], ranks, one_process)
    cases += with_all([("listed", plan_of(**shared)), ("mixture", plan_of(dp=4, ep=4, zero_stage=2))])
    cases += with_all([("routed", plan_of(**staged, pipeline_schedule="1f1b", zero_stage=1))])
    assert_cases_train_the_same(cases, ranks, one_process)


def test_models_of_every_build_train_as_in_one_process(ranks: RankHarness, one_process) -> None:
    plans = [
        plan_of(dp=2, zero_stage=3, num_microbatches=3),
        plan_of(pp=2, pipeline_schedule="1f1b", num_microbatches=3, recompute="full"),
        plan_of(tp=2),
    ]
    # On stages, see below; names of layers in a list say nothing of a split.
    cases = [("shared scale", plans[0]), ("tied", plans[2]), ("sequential", plans[2]), ("keyword", plans[1])]
    models = ("tied", "shared scale", "sequential", "keyword")
    cases += with_all([case for case in itertools.product(models, plans) if case not in cases])
    assert_cases_train_the_same(cases, ranks, one_process)


def test_experts_of_which_ranks_have_some_inner_units_train_as_in_one_process(ranks: RankHarness, one_process) -> None:
    replicas = [plan_of(dp=2, tp=2, zero_stage=zero_stage) for zero_stage in range(4)]
    two = [
        plan_of(tp=2, recompute="full", sequence_parallel=True),
        *with_all([plan_of(tp=2, num_microbatches=3)]),
    ]
    four = [
        replicas[3],
        # Experts beside stages: under zero bubble with recompute, and with tokens split.
        *with_all([plan_of(tp=2, pp=2, pipeline_schedule="zero_bubble", num_microbatches=6)]),
        *with_all([*replicas[:3], plan_of(tp=2, pp=2, pipeline_schedule="1f1b", num_microbatches=3)]),
    ]
    assert_each_trains_the_same(two, "mixture", ranks, one_process)
    if with_all(four):
        assert_each_trains_the_same(four, "mixture", ranks, one_process)


@pytest.mark.with_all  # the mixture has such a vocabulary, above
def test_a_vocabulary_that_tp_does_not_divide_trains_as_in_one_process(ranks: RankHarness, one_process) -> None:
    plans = [
        plan_of(tp=4, num_microbatches=1, sequence_parallel=True),
        *with_all(
            [
                plan_of(dp=2, tp=2, num_microbatches=2, zero_stage=3),  # which experts have, with this vocabulary
                plan_of(tp=2, pp=2, pipeline_schedule="1f1b", num_microbatches=3),  # its last stage is as above
            ]
        ),
    ]
    assert_each_trains_the_same(plans, "odd vocabulary", ranks, one_process)


def test_parameters_on_several_stages_stay_equal(ranks: RankHarness, one_process) -> None:
    """Those of other ranks, and of the same one: interleaved stages that read one table."""
    plans = [
        plan_of(pp=2, pipeline_schedule=schedule, virtual_pipeline_size=virtual, num_microbatches=3)
        for schedule, virtual in SCHEDULES[3:]
    ]
    assert_cases_train_the_same([*itertools.product(("tied", "shared scale"), plans)], ranks, one_process)


def test_parameters_on_several_stages_stay_equal_beside_data_parallelism(ranks: RankHarness, one_process) -> None:
    plans = [
        plan_of(
            dp=2,
            pp=2,
            zero_stage=zero_stage,
            pipeline_schedule=schedule,
            virtual_pipeline_size=virtual,
            num_microbatches=3,
        )
        for zero_stage, (schedule, virtual) in itertools.product((0, 1), SCHEDULES[2:])
    ]
    schedules = {(plan.zero_stage, plan.pipeline_schedule): plan for plan in plans}
    cases = [("frozen start", schedules[0, "zero_bubble"])]
    cases += with_all(
        [case for case in itertools.product(("tied", "shared scale", "frozen start"), plans) if case not in cases]
    )
    assert_cases_train_the_same(cases, ranks, one_process)


def test_ties_across_three_stages_stay_equal(ranks: RankHarness, one_process) -> None:
    plan = plan_of(pp=3, pipeline_schedule="1f1b", num_microbatches=3)
    assert_cases_train_the_same([("tied", plan), ("shared scale", plan)], ranks, one_process)


@pytest.mark.with_all  # three dimensions have it, above
def test_ranks_with_dp_outermost_train_as_one_process(ranks: RankHarness, one_process) -> None:
    plan = plan_of(
        dp=2,
        pp=2,
        zero_stage=1,
        pipeline_schedule="1f1b",
        num_microbatches=3,
        rank_order=("dp", "pp", "cp", "tp"),
    )
    assert_each_trains_the_same([plan], "decoder", ranks, one_process)


def test_stages_of_unequal_lengths_and_plans_on_the_spot_train_as_one_process(ranks: RankHarness, one_process) -> None:
    uneven = {"pp": 2, "num_microbatches": 3}
    plans = [
        plan_of(**uneven, pipeline_schedule="gpipe", stage_blocks=(1, 4)),
        plan_of(**uneven, pipeline_schedule="interleaved_1f1b", virtual_pipeline_size=2, stage_blocks=(1, 2, 1, 1)),
        None,  # DDP
    ]
    assert_each_trains_the_same(plans, "decoder", ranks, one_process, size=2)


@pytest.mark.parametrize(
    "plans",
    [
        pytest.param(
            [
                plan_of(dp=2, zero_stage=3, num_microbatches=3, recompute="full"),
                plan_of(tp=2, num_microbatches=3),
                *with_all(
                    [
                        plan_of(dp=2, zero_stage=0, num_microbatches=3),
                        plan_of(pp=2, pipeline_schedule="zero_bubble", num_microbatches=3),
                    ]
                ),
            ],
            id="two ranks",
        ),
        pytest.param(
            [
                plan_of(dp=2, pp=2, zero_stage=1, pipeline_schedule="1f1b", num_microbatches=3),
                plan_of(tp=2, dp=2, zero_stage=3, num_microbatches=3),
            ],
            id="four ranks",
            marks=pytest.mark.with_all,  # each axis has its type, and eight ranks in test_context_parallel
        ),
    ],
)
def test_bf16_stays_near_fp32(plans: list[ParallelPlan], ranks: RankHarness, one_process) -> None:
    reference = one_process("decoder")
    cases = [("decoder", plan) for plan in plans]
    for trainings in ranks.run(train_all, cases, "bf16", size=plans[0].world_size, timeout_s=240.0):
        for plan, training in zip(plans, trainings, strict=True):
            # bf16 has 8 bits of mantissa: 2**-8 relative for each rounding, a few of which meet in a loss.
            assert training.losses == pytest.approx(reference.losses, rel=2e-2), plan.describe()
            assert training.losses != pytest.approx(reference.losses, rel=1e-6), plan.describe()
            for name, parameter in training.parameters.items():
                assert parameter.dtype == torch.float32, name


def _lengths_change(plans: list[ParallelPlan]) -> list[list[float]]:
    return [_losses_of_lengths(plan) for plan in plans]


def _losses_of_lengths(plan: ParallelPlan | None) -> list[float]:
    job = runtime.init(plan)
    torch.manual_seed(0)
    engine = job.prepare(
        MODELS["decoder"](),
        loss_fn=loss_fn,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.5),
        verify="off",  # the comparison with one process is the test
        example_inputs=torch.zeros(2, 6, dtype=torch.long),
    )
    losses = []
    for tokens in (6, 4, 6, 2):
        pairs = torch.randint(VOCABULARY, (2, GLOBAL_BATCH, tokens), generator=torch.Generator().manual_seed(tokens))
        losses.append(engine.step(*pairs).item())
    return losses


def test_sequences_may_have_another_length_in_every_step(ranks: RankHarness) -> None:
    plans = [
        plan_of(pp=2, pipeline_schedule=schedule, virtual_pipeline_size=virtual, num_microbatches=2)
        for schedule, virtual in SCHEDULES[1:]
    ]
    # Which send shapes and keep them; schedules differ in their order alone.
    plans = [plans[2], *with_all([*plans[:2], *plans[3:]]), plan_of(tp=2, num_microbatches=2)]
    expected = ranks.run_alone(_losses_of_lengths, None)
    for found in ranks.run(_lengths_change, plans, size=2, timeout_s=120.0):
        for plan, losses in zip(plans, found, strict=True):
            assert losses == pytest.approx(expected, rel=1e-5), plan.describe()


def test_ranks_with_some_tokens_of_each_sequence_train_as_one_process(ranks: RankHarness, one_process) -> None:
    two = [
        plan_of(cp=2, zero_stage=zero_stage, num_microbatches=count, recompute=recompute)
        for zero_stage, count, recompute in (
            (2, 3, "full"),
            *with_all([(3, 1, "selective"), (0, 3, "none"), (1, 1, "selective"), (3, 3, "none"), (0, 1, "full")]),
        )
    ]
    four = [
        plan_of(dp=2, cp=2, zero_stage=3, rank_order=("pp", "cp", "dp", "tp")),
        *with_all([plan_of(dp=2, cp=2, zero_stage=zero_stage, num_microbatches=3) for zero_stage in range(4)]),
    ]
    assert_each_trains_the_same(two, "two blocks", ranks, one_process)
    assert_each_trains_the_same(four, "two blocks", ranks, one_process)


def test_tokens_are_split_beside_layers_and_stages(ranks: RankHarness, one_process) -> None:
    """A layer with experts has the attention of one without, so that each plan is run with one of the two."""
    split = {"cp": 2, "tp": 2}
    staged = {"cp": 2, "pp": 2, "num_microbatches": 2}
    # At the ends of stages the ranks of tp have their tokens together.
    both = plan_of(**split, pp=2, num_microbatches=3, zero_stage=1, pipeline_schedule="1f1b", sequence_parallel=True)
    assert_cases_train_the_same([("two blocks", both)], ranks, one_process)
    cases = [
        *with_all(
            [  # of the first others stand in test_transformers_models
                ("two blocks", plan_of(**split, sequence_parallel=True, zero_stage=1, recompute="full")),
                ("two blocks", plan_of(**staged, pipeline_schedule="1f1b", zero_stage=1, offload="optimizer")),
                ("mixture", plan_of(**split, sequence_parallel=True, zero_stage=1, recompute="full")),
                (
                    "attention",
                    plan_of(
                        **staged,
                        pipeline_schedule="interleaved_1f1b",
                        virtual_pipeline_size=2,
                        recompute="selective",
                    ),
                ),
                ("two blocks", plan_of(**split)),
                ("two blocks", plan_of(**split, sequence_parallel=True, zero_stage=3, offload="parameters")),
                ("two blocks", plan_of(**staged, pipeline_schedule="zero_bubble", zero_stage=1)),
                ("two blocks", plan_of(**split, zero_stage=2, recompute="selective", offload="optimizer")),
                ("attention", plan_of(**staged, pipeline_schedule="gpipe", recompute="full")),
                ("mixture", plan_of(**staged, pipeline_schedule="zero_bubble")),
                ("mixture", plan_of(**staged, pipeline_schedule="1f1b", zero_stage=1, offload="optimizer")),
            ]
        ),
    ]
    if cases:
        assert_cases_train_the_same(cases, ranks, one_process)


def test_hybrid_sharding_trains_as_one_process(ranks: RankHarness, one_process) -> None:
    plans = [plan_of(dp=4, zero_shards=2, zero_stage=stage) for stage in (3, *with_all([1, 2]))]
    assert_each_trains_the_same(plans, "decoder", ranks, one_process)


def test_attention_is_run_again_under_every_kind_of_plan(ranks: RankHarness, one_process) -> None:
    options = {"num_microbatches": 3, "recompute": "selective"}
    two = [
        plan_of(tp=2, sequence_parallel=True, recompute="selective"),
        # Replicas are in test_recompute_policy, and four ranks have this schedule.
        *with_all([plan_of(**options, dp=2), plan_of(**options, pp=2, pipeline_schedule="1f1b")]),
        *with_all([plan_of(**options, pp=2, pipeline_schedule="interleaved_1f1b", virtual_pipeline_size=2)]),
    ]
    four = [
        plan_of(**options, tp=2, pp=2, pipeline_schedule="1f1b", offload="optimizer"),
        *with_all(
            [
                plan_of(**options, dp=2, tp=2, zero_stage=3),  # ZeRO-3 has it beside split tokens, above
                plan_of(**options, dp=2, pp=2, zero_stage=1, pipeline_schedule="1f1b", offload="optimizer"),
            ]
        ),
    ]
    for plans in (two, *with_all([four])):
        assert_cases_train_the_same([(of_few_blocks(plan), plan) for plan in plans], ranks, one_process)


def test_offload_to_the_host_does_not_change_the_training(ranks: RankHarness, one_process) -> None:
    options = {"num_microbatches": 3, "offload": "optimizer"}
    # Shards of the optimizer alone are beside split layers and stages in three dimensions; stages too, above.
    plans = [plan_of(**options, dp=2, zero_stage=zero_stage) for zero_stage in with_all([3, 0, 1, 2])]
    plans += [
        *with_all([plan_of(**options, tp=2), plan_of(**options, pp=2, pipeline_schedule="zero_bubble")]),
        plan_of(num_microbatches=3, dp=2, zero_stage=3, offload="parameters", recompute="full"),
    ]
    cases = [("two blocks" if plan.tp > 1 else "decoder", plan) for plan in plans]
    assert_cases_train_the_same(cases, ranks, one_process)


def test_selective_recompute_of_attention_that_is_written_out_is_refused(ranks: RankHarness) -> None:
    assert "never call torch.nn.functional.scaled_dot_product_attention" in ranks.run_alone(_refused_recompute)


def _refused_recompute() -> str:
    with pytest.raises(UnsupportedPlanError) as refusal:
        train("grouped", plan_of(recompute="selective"))
    return str(refusal.value)
