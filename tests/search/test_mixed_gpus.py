from __future__ import annotations

from collections.abc import Callable

from paraplan.cost.workload import Workload
from paraplan.search.recommendation import SearchRequest, recommendation
from paraplan.search.search import search

MakeWorkload = Callable[..., Workload]


def test_the_answer_for_two_kinds_says_what_the_faster_takes_alone(workload: MakeWorkload) -> None:
    mixed = workload("llama-3.2-1b", "rtx-3060+rtx-4090", global_batch_size=16)
    answer = recommendation(mixed, SearchRequest(uses_all_gpus=False))
    words = answer.mixed or ""
    assert words.startswith("all ranks wait for the slowest, the NVIDIA GeForce RTX 3060")
    alone = search(workload("llama-3.2-1b", "1xrtx-4090", global_batch_size=16)).best
    is_longer = alone.step.step_time_s > answer.result.best.step.step_time_s
    assert "1 x NVIDIA GeForce RTX 4090 alone takes" in words
    assert ("longer" in words) == is_longer
    assert "--profile 1xrtx-4090" in words


def test_two_kinds_are_as_fast_as_two_of_the_slower(workload: MakeWorkload) -> None:
    mixed = search(workload("gpt2", "rtx-3090+rtx-4090")).best
    same = search(workload("gpt2", "2xrtx-3090")).best
    assert mixed.step.step_time_s == same.step.step_time_s


def test_one_kind_has_no_such_word(workload: MakeWorkload) -> None:
    assert recommendation(workload("gpt2", "2xrtx-3090"), SearchRequest()).mixed is None
