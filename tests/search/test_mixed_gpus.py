from __future__ import annotations

from collections.abc import Callable

import pytest
from case_selection import with_all

from paraplan.cost.workload import Workload
from paraplan.report.recommendation_json import commands
from paraplan.report.short_text import recommendation_lines
from paraplan.search.constraints import Constraints
from paraplan.search.recommendation import SearchRequest, recommendation
from paraplan.search.search import search

MakeWorkload = Callable[..., Workload]


def test_the_answer_for_two_kinds_says_what_the_faster_takes_alone(workload: MakeWorkload) -> None:
    mixed = workload("llama-3.2-1b", "rtx-3060+rtx-4090", global_batch_size=16)
    answer = recommendation(mixed, SearchRequest())
    words = answer.mixed or ""
    assert words.startswith("all ranks wait for the slowest, the NVIDIA GeForce RTX 3060")
    alone = search(workload("llama-3.2-1b", "1xrtx-4090", global_batch_size=16)).best
    is_longer = alone.step.step_time_s > answer.result.best.step.step_time_s
    assert "1 x NVIDIA GeForce RTX 4090 alone takes" in words
    assert ("longer" in words) == is_longer
    assert "--profile 1xrtx-4090" in words


@pytest.mark.parametrize(
    ("machine", "fast", "indices"),
    [
        ("2xrtx-3080+2xrtx-4090", "2xrtx-4090", (2, 3)),
        *with_all([("rtx-3080+2xrtx-3090+rtx-4090", "2xrtx-3090+1xrtx-4090", (1, 2, 3))]),
    ],
)
def test_slower_gpus_stay_idle_where_the_others_take_clearly_less(
    workload: MakeWorkload, machine: str, fast: str, indices: tuple[int, ...]
) -> None:
    job = {"train": "lora:r=16", "base_weights": "nf4:double", "seq_length": 2048, "global_batch_size": 36}
    mixed = workload("llama-2-7b", machine, **job)
    answer = recommendation(mixed, SearchRequest(uses_all_gpus=False))
    alone = search(workload("llama-2-7b", fast, **job)).best
    all_of_them = search(mixed).best
    best = answer.result.best
    assert (best.plan, best.step.step_time_s) == (alone.plan, pytest.approx(alone.step.step_time_s))
    assert best.step.step_time_s < 0.9 * all_of_them.step.step_time_s
    assert answer.placement.local_gpus == indices
    assert answer.workload.cluster.num_gpus == len(indices)
    words = answer.idle or ""
    assert words.startswith(f"uses {len(indices)} of 4 GPUs, ")
    assert words.endswith("with all 4, where each rank waits for the NVIDIA GeForce RTX 3080")
    assert next(line.text for line in recommendation_lines(answer) if line.label == "GPUs") == words
    torchrun = commands(answer, None)["torchrun"]
    visible = ",".join(map(str, indices))
    assert torchrun.startswith(f"CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES={visible} torchrun")
    assert recommendation(mixed, SearchRequest(uses_all_gpus=True)).workload.cluster.num_gpus == 4


def test_where_no_plan_takes_all_kinds_the_faster_are_planned_for(workload: MakeWorkload) -> None:
    mixed = workload("llama-3-8b", "2xrtx-3080+2xrtx-4090", seq_length=2048, global_batch_size=32, train="lora:r=16")
    fixed = Constraints(dp=2, tp=1, pp=1, cp=1)
    answer = recommendation(mixed, SearchRequest(uses_all_gpus=False, fixed=fixed))
    assert answer.result.best.plan.world_size == 2
    assert answer.placement.local_gpus == (2, 3)
    assert "no plan with all 4" in (answer.idle or "")


def test_two_kinds_are_as_fast_as_two_of_the_slower(workload: MakeWorkload) -> None:
    mixed = search(workload("gpt2", "rtx-3090+rtx-4090")).best
    same = search(workload("gpt2", "2xrtx-3090")).best
    assert mixed.step.step_time_s == same.step.step_time_s


def test_one_kind_has_no_such_word(workload: MakeWorkload) -> None:
    assert recommendation(workload("gpt2", "2xrtx-3090"), SearchRequest()).mixed is None
