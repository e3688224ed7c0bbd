from __future__ import annotations

from collections.abc import Callable

import pytest

from paraplan.cost.estimate import estimate_plan
from paraplan.cost.workload import Workload
from paraplan.errors import NoPlanFitsError
from paraplan.search.search import search
from paraplan.search.what_helps import WORTH_SAYING, in_short, what_helps

MakeWorkload = Callable[..., Workload]


def test_options_are_priced_with_the_plan_as_it_is(workload: MakeWorkload) -> None:
    made = workload("llama-3-8b", profile="dgx-h100", seq_length=4096, global_batch_size=64)
    best = search(made, num_candidates=1).best
    helps = what_helps(made, best)
    compiled = next(one for one in helps if one.options == "--compile")
    same = estimate_plan(made.trained_as(made.training.replace(compiled=True)), best.plan)
    assert compiled.is_same_plan
    assert compiled.step_time_s == pytest.approx(same.step.step_time_s)
    assert compiled.saved_s == pytest.approx(best.step.step_time_s - same.step.step_time_s)
    assert compiled.saved_bytes == best.peak_memory_bytes - same.peak_memory_bytes
    assert (in_short(helps) or "").startswith("--compile: ")
    assert not {"-0%", "+0%"} & {one.change_in_words for one in helps}
    assert all(one.share >= WORTH_SAYING or one.saved_bytes > 0 for one in helps)


def test_each_change_gets_its_best_plan_beside_nodes_and_machines(workload: MakeWorkload) -> None:
    made = workload("llama-3-8b", profile="rtx-4090-x4", seq_length=2048, global_batch_size=16)
    best = search(made, num_candidates=1).best
    helps = what_helps(made, best, searches=True)
    options = {one.options: one for one in helps}
    assert "--nodes 2" in options
    assert sum(one.startswith("--profile 4x") for one in options) == 2
    lora = options["--train lora:r=16"]
    found = search(made.trained_as(made.training.replace(train="lora:r=16")), num_candidates=1).best
    assert (lora.plan, lora.step_time_s) == (found.plan, pytest.approx(found.step.step_time_s))
    assert not lora.keeps_training
    assert [one.saved_s for one in helps] == sorted((one.saved_s for one in helps), reverse=True)


def test_what_is_asked_for_already_is_not_offered(workload: MakeWorkload) -> None:
    made = workload("llama-3-8b", profile="dgx-h100", seq_length=4096, global_batch_size=64)
    changed = made.trained_as(made.training.replace(compiled=True, loss="liger", train="lora:r=16"))
    helps = what_helps(changed, search(changed, num_candidates=1).best)
    taken = {"--compile", "--loss liger", "--train lora:r=16", "--optimizer adamw_8bit"}
    assert not taken & {one.options for one in helps}


def test_where_nothing_fits_larger_gpus_that_do_are_named(workload: MakeWorkload) -> None:
    made = workload("llama-3-8b", profile="1xh100", seq_length=8192, global_batch_size=8)
    with pytest.raises(NoPlanFitsError, match="no plan fits") as caught:
        search(made, num_candidates=1)
    assert "--profile 1xh200-sxm-141gb" in (caught.value.hint or "")
