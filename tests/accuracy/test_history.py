from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paraplan.accuracy.history import History, effect_of_history, history_in_words
from paraplan.accuracy.ranges import out_of_memory_risk, step_range
from paraplan.accuracy.shared_errors import SourceErrors, fit_shared_errors, left_out, load_shared_errors
from paraplan.cost.correction import NUM_SIZES, learned
from paraplan.cost.estimate import evaluate_plan
from paraplan.cost.plain_prediction import plain_prediction
from paraplan.cost.workload import Workload
from paraplan.plan.kept_runs import KeptRun
from paraplan.plan.parallel import ParallelPlan

MakeWorkload = Callable[..., Workload]
PLAN = ParallelPlan(dp=8, num_microbatches=8)
OTHER = ParallelPlan(dp=4, tp=2, num_microbatches=16, recompute="full")
FAR = ParallelPlan(dp=1, tp=8, micro_batch_size=16, num_microbatches=4, recompute="full")
RATIOS = st.lists(st.floats(0.3, 3.0), min_size=1, max_size=5)


def kept(
    workload: Workload, plan: ParallelPlan, ratio: float, *, memory: float | None = None, day: str = ""
) -> KeptRun:
    predicted = plain_prediction(workload, evaluate_plan(workload, plan))
    assert predicted is not None
    peak = None if memory is None else memory * predicted.peak_memory_bytes
    return KeptRun(predicted=predicted, step_time_s=ratio * predicted.step_time_s, peak_memory_bytes=peak, day=day)


def corrected(workload: Workload, *runs: KeptRun) -> Workload:
    return History(tuple(runs)).applied_to(workload)


@pytest.fixture(scope="module")
def plain(workload: MakeWorkload) -> Workload:
    return workload("gpt2-xl", profile="dgx-h100")


@settings(max_examples=settings().max_examples // 3)
@given(ratios=RATIOS)
def test_the_order_of_runs_does_not_matter(plain: Workload, ratios: list[float]) -> None:
    plans = (PLAN, OTHER, FAR, PLAN, OTHER)
    runs = [kept(plain, plan, ratio) for plan, ratio in zip(plans, ratios, strict=False)]
    effects = [effect_of_history(corrected(plain, *each), PLAN) for each in (runs, runs[::-1])]
    assert effects[0] is not None
    assert effects[1] is not None
    assert effects[0].step_time_factor == pytest.approx(effects[1].step_time_factor, rel=1e-9)
    assert effects[0].step_time_width == pytest.approx(effects[1].step_time_width, rel=1e-9)


@settings(max_examples=settings().max_examples // 3)
@given(ratio=st.floats(0.2, 5.0), count=st.integers(1, 6))
def test_more_runs_that_agree_narrow_the_range_and_come_nearer_to_what_they_say(
    plain: Workload, ratio: float, count: int
) -> None:
    found = []
    for number in (count, count + 1):
        effect = effect_of_history(corrected(plain, *[kept(plain, PLAN, ratio)] * number), PLAN)
        assert effect is not None
        found.append(effect)
    before, after = found
    assert after.step_time_width < before.step_time_width
    for effect in found:  # between what is predicted and what is measured
        assert 0 <= math.log(effect.step_time_factor) / math.log(ratio) <= 1 if ratio != 1 else True
    assert abs(math.log(after.step_time_factor / ratio)) <= abs(math.log(before.step_time_factor / ratio)) + 1e-12


def test_runs_as_predicted_change_nothing_but_the_range(plain: Workload) -> None:
    sure = corrected(plain, *[kept(plain, PLAN, 1.0, memory=1.0)] * 3)
    before, after = evaluate_plan(plain, PLAN), evaluate_plan(sure, PLAN)
    assert after == before
    wide, narrow = step_range(plain, before), step_range(sure, after)
    assert wide is not None
    assert narrow is not None
    assert wide.low_s < narrow.low_s < after.step.step_time_s < narrow.high_s < wide.high_s
    assert "corrected by 3 runs here: x1.00; range from those" in narrow.in_words


@settings(max_examples=settings().max_examples // 3)
@given(ratio=st.floats(0.5, 2.0), scale=st.floats(0.5, 2.0))
def test_factors_are_powers_of_what_was_measured(plain: Workload, ratio: float, scale: float) -> None:
    effects = [effect_of_history(corrected(plain, kept(plain, PLAN, each)), OTHER) for each in (ratio, ratio**scale)]
    assert effects[0] is not None
    assert effects[1] is not None
    assert effects[1].step_time_factor == pytest.approx(effects[0].step_time_factor ** scale)


def test_nearer_plans_are_corrected_more_and_parts_still_sum(plain: Workload) -> None:
    other = corrected(plain, kept(plain, PLAN, 1.5))
    factors = [
        evaluate_plan(other, plan).step.step_time_s / evaluate_plan(plain, plan).step.step_time_s
        for plan in (PLAN, OTHER, FAR)
    ]
    assert 1.5 > factors[0] > factors[1] > factors[2] > 1.0


def test_memory_is_corrected_with_what_fits_and_the_risk(plain: Workload) -> None:
    other = corrected(plain, *[kept(plain, PLAN, 1.0, memory=1.3)] * 3)
    before, after = evaluate_plan(plain, PLAN), evaluate_plan(other, PLAN)
    assert 1.2 < after.peak_memory_bytes / before.peak_memory_bytes < 1.3
    stage = after.memory[0]
    parts = (
        stage.parameter_bytes + stage.gradient_bytes + stage.optimizer_state_bytes + stage.activation_bytes
    ) + stage.workspace_bytes
    assert stage.total_bytes == pytest.approx(parts, abs=8)
    words = history_in_words(effect_of_history(other, PLAN))
    assert words is not None
    assert words.startswith("corrected by 3 runs here: x1.00, memory x1.2")
    assert (out_of_memory_risk(other, after) or 0) < 0.5


def test_a_prediction_is_kept_without_what_runs_corrected_of_it(plain: Workload) -> None:
    other = corrected(plain, kept(plain, PLAN, 1.5, memory=1.2))
    again = plain_prediction(other, evaluate_plan(other, PLAN))
    first = plain_prediction(plain, evaluate_plan(plain, PLAN))
    assert again is not None
    assert first is not None
    assert again.step_time_s == pytest.approx(first.step_time_s)
    assert again.peak_memory_bytes == pytest.approx(first.peak_memory_bytes, rel=1e-6)
    assert again.replace(step_time_s=1, peak_memory_bytes=1) == first.replace(step_time_s=1, peak_memory_bytes=1)


def test_another_gpu_and_another_framework_are_not_corrected(workload: MakeWorkload, plain: Workload) -> None:
    history = History((kept(plain, PLAN, 1.5),))
    elsewhere = workload("gpt2-xl", profile="dgx-a100")
    assert history.applied_to(elsewhere).correction is None
    assert effect_of_history(history.applied_to(elsewhere), PLAN) is None
    more_machines = workload("gpt2-xl", profile="dgx-h100", num_nodes=2)
    assert history.applied_to(more_machines).correction is not None


def test_runs_of_another_release_and_of_other_cpus_are_left_out_and_counted(workload: MakeWorkload) -> None:
    on_cpus = workload("gpt2", profile="cpu")
    run = kept(on_cpus, ParallelPlan(num_microbatches=64), 2.0).replace(host="there")
    here = History((run,), host="here")
    assert here.applied_to(on_cpus).correction is None
    assert here.left_out(on_cpus) == (
        "1 kept run on this kind of machine is left out: they ran on the CPUs of there, and this is here",
    )
    later = History((run, run), host="there", version="9.9")
    assert later.applied_to(on_cpus).correction is None
    (sentence,) = later.left_out(on_cpus)
    assert sentence.startswith("2 kept runs on this kind of machine are left out: ")
    assert "9.9" in sentence
    assert History((run,), host="there").left_out(on_cpus) == ()
    assert History((run,), host="there").applied_to(on_cpus).correction is not None


def test_runs_that_contradict_each_other_widen_the_range(plain: Workload) -> None:
    agree = effect_of_history(corrected(plain, kept(plain, PLAN, 1.2), kept(plain, PLAN, 1.2)), PLAN)
    differ = effect_of_history(corrected(plain, kept(plain, PLAN, 0.6), kept(plain, PLAN, 2.4)), PLAN)
    assert agree is not None
    assert differ is not None
    assert differ.step_time_width > 2 * agree.step_time_width


def source(name: str, generator: np.random.Generator, *, common: float, own: float, rows: int = 6) -> SourceErrors:
    sizes = np.zeros((rows, NUM_SIZES))  # one plan again and again
    logs = common * generator.normal() + own * generator.normal(size=rows)
    return SourceErrors(
        source=name,
        kinds=("k",) * rows,
        sizes=tuple(map(tuple, sizes.tolist())),
        logs=tuple(logs.tolist()),
        ranges=((math.exp(-0.4), math.exp(0.4)),) * rows,
    )


def test_spreads_are_found_again_in_made_up_sources() -> None:
    generator = np.random.default_rng(1)
    sources = [source(str(number), generator, common=0.3, own=0.05) for number in range(16)]
    shared = fit_shared_errors(sources)
    assert shared.log_sd == pytest.approx(0.3, rel=0.3)
    assert shared.own_log_sd == pytest.approx(0.05, rel=0.3)
    none, two = (left_out(sources, shared, known=known) for known in (0, 2))
    assert two.error < 0.3 * none.error
    assert two.width < none.width


def test_what_comes_with_paraplan_is_of_usual_size() -> None:
    found = load_shared_errors()
    for shared in (found.step_time, found.memory):
        assert 0.05 < shared.own_log_sd < shared.log_sd < 0.6
    with pytest.raises(ValueError, match="no source has 4 rows"):
        fit_shared_errors([])


def test_one_run_of_the_plan_itself_counts_by_the_two_spreads() -> None:
    shared = load_shared_errors().step_time
    sizes = np.ones((1, NUM_SIZES))
    correction = learned(shared, "k", sizes, np.array([0.2]))
    expected = 0.2 * shared.log_sd**2 / (shared.log_sd**2 + shared.own_log_sd**2)
    assert np.log(correction.factors(sizes, "k"))[0] == pytest.approx(expected)
    assert correction.factors(sizes, "other")[0] == 1
