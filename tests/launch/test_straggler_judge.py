"""Who is named as slow, from steps whose times are known."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from paraplan.launch.stragglers.causes import Cause, describe, find_cause
from paraplan.launch.stragglers.host_state import HostState, read_host
from paraplan.launch.stragglers.judge import Judge, Lateness
from paraplan.launch.stragglers.steps import Step, as_rows, of_rows

BASE_S, TRANSFER_S = 0.1, 0.01
Work = Callable[[int, int], float]


def step_of(number: int, *, work_s: float, period_s: float) -> Step:
    return Step(
        step=number,
        ended_s=number * period_s,
        period_s=period_s,
        wait_s=period_s - work_s,
        loader_s=0.0,
        backward_s=work_s / 2,
        optimizer_s=0.0,
        cpu_s=work_s,
        loader_cpu_s=0.0,
        queue_s=0.0,
        gc_s=0.0,
        major_faults=0,
        num_waits=1,
    )


def judged(
    work_s: Work,
    *,
    ranks: int = 4,
    steps: int = 60,
    per_host: int = 0,
    transfer_s: Work = lambda r, s: TRANSFER_S,
    is_asked_always: bool = False,
    stride: int = 1,
) -> tuple[Judge, list[Lateness]]:
    """Return the judge after `steps` steps in which ranks meet, and what it says then, or after each step.

    Every `stride`-th step is noted.
    """
    found = list[Lateness]()
    judge = Judge({rank: f"node{rank // per_host}" if per_host else "node0" for rank in range(ranks)})
    dice = random.Random(7)  # noqa: S311
    for number in range(stride, steps + 1, stride):
        works = [work_s(rank, number) * dice.uniform(0.97, 1.03) for rank in range(ranks)]
        period_s = max(works) + transfer_s(0, number)
        for rank in range(ranks):
            judge.add(rank, [step_of(number, work_s=works[rank], period_s=period_s)])
        if is_asked_always or number + stride > steps:
            found += judge.judge()
    return judge, found


def test_a_rank_that_is_30_percent_slower_is_named_with_its_cost_and_the_step_where_it_began() -> None:
    _, found = judged(lambda rank, step: BASE_S * (1.3 if rank == 2 and step >= 35 else 1.0))
    assert [(case.kind, case.ranks) for case in found] == [("rank", (2,))]
    assert abs(found[0].slower - 0.3) < 0.04
    assert abs(found[0].cost - 0.03 / (0.13 + TRANSFER_S)) < 0.04
    assert abs(found[0].since_step - 35) <= 2


def test_a_rank_is_named_where_every_fourth_of_short_steps_is_noted() -> None:
    base_s = 0.01
    _, found = judged(
        lambda rank, step: base_s * (1.4 if rank == 2 and step >= 200 else 1.0),
        steps=280,
        stride=4,
        transfer_s=lambda rank, step: base_s / 10,
    )
    assert [case.ranks for case in found] == [(2,)]
    assert abs(found[0].since_step - 200) <= 8


def test_ranks_that_are_equal_name_nobody() -> None:
    for ranks in (2, 3, 8):
        assert not judged(lambda rank, step: BASE_S, ranks=ranks)[1]


def test_one_long_step_of_a_rank_names_nobody() -> None:
    assert not judged(lambda rank, step: BASE_S * (20 if rank == 0 and step == 50 else 1))[1]


def test_all_ranks_of_a_host_are_one_case() -> None:
    _, found = judged(lambda rank, step: BASE_S * (1.4 if rank >= 2 else 1.0), per_host=2)
    assert [(case.kind, case.ranks, case.host) for case in found] == [("host", (2, 3), "node1")]


def test_pauses_now_and_then_name_the_rank_that_has_them_all() -> None:
    _, found = judged(lambda rank, step: BASE_S * (2.5 if rank == 1 and step % 3 == 0 else 1.0))
    assert [(case.ranks, case.is_burst) for case in found] == [((1,), True)]


def test_few_pauses_are_a_suspicion_and_more_of_them_a_certainty() -> None:
    for steps, certainties in ((45, [False]), (60, [True])):
        _, found = judged(
            lambda rank, step: BASE_S * (3 if rank == 1 and step > 33 and step % 3 == 0 else 1), ranks=2, steps=steps
        )
        assert [case.is_sure for case in found] == certainties, f"{steps} steps"


def test_pauses_of_any_rank_are_jitter_and_name_nobody() -> None:
    dice = random.Random(3)  # noqa: S311
    struck = [dice.randrange(4) if dice.random() < 0.5 else None for _ in range(61)]
    _, found = judged(lambda rank, step: BASE_S * (2.5 if struck[step] == rank else 1.0))
    assert [(case.kind, case.ranks) for case in found] == [("jitter", ())]


def test_the_last_pauses_of_jitter_are_not_those_of_a_rank_though_all_of_them_are() -> None:
    struck = [1 if 50 <= step < 60 else step % 2 if 20 <= step < 60 else None for step in range(100)]
    _, found = judged(
        lambda rank, step: BASE_S * (1.8 if struck[step] == rank else 1.0), ranks=2, steps=99, is_asked_always=True
    )
    assert {case.subject for case in found} == {("jitter", ())}


def test_transfers_between_hosts_that_take_longer_than_before_are_a_link() -> None:
    _, found = judged(lambda rank, step: BASE_S, per_host=2, transfer_s=lambda rank, step: 0.01 if step < 40 else 0.05)
    assert [case.kind for case in found] == ["link"]
    assert abs(found[0].since_step - 40) <= 1
    assert 3 < found[0].slower < 5


def test_stages_of_a_pipeline_are_no_peers() -> None:
    judge = Judge(dict.fromkeys(range(4), "node0"), [(0, 1), (2, 3)])
    for number in range(1, 60):
        for rank in range(4):
            work_s = BASE_S * (2 if rank >= 2 else 1)
            judge.add(rank, [step_of(number, work_s=work_s, period_s=0.21)])
    assert not judge.judge()


def test_time_in_which_others_had_the_core_is_no_lateness() -> None:
    judge = Judge(dict.fromkeys(range(2), "node0"))
    for number in range(1, 60):
        judge.add(0, [step_of(number, work_s=0.1, period_s=0.21)])
        judge.add(1, [replace(step_of(number, work_s=0.2, period_s=0.21), queue_s=0.1, cpu_s=0.1)])
    assert not judge.judge()


def test_the_part_of_the_step_that_is_longer_is_the_cause() -> None:
    late = Lateness("rank", (1,), 1, slower=0.5, cost=0.2)
    usual = step_of(1, work_s=0.1, period_s=0.16)
    slow = step_of(1, work_s=0.15, period_s=0.16)
    parts = {
        "compute": slow,
        "loader": replace(slow, loader_s=0.05, cpu_s=0.1),
        "collection": replace(slow, gc_s=0.05),
        "wait": replace(slow, cpu_s=0.1, backward_s=0.05),
        "pause": replace(slow, cpu_s=0.1),
        "swap": replace(slow, cpu_s=0.1, major_faults=12),
    }
    found = {part: find_cause(late, [{0: usual, 1: step}], (0, 1)).part for part, step in parts.items()}
    assert found == {part: part for part in parts}


def test_the_line_names_rank_host_gpu_part_step_reason_and_cost() -> None:
    late = Lateness("rank", (5,), 1200, slower=0.31, cost=0.14)
    places, states = {5: "gpu-b, GPU 1"}, {"gpu-b": HostState(steal_s=12, cpu_s=100)}
    text = describe(late, Cause("compute", "in compute"), places=places, states=states)
    assert text == (
        "rank 5 (gpu-b, GPU 1) is 31 % slower in compute since step 1,200 (CPU steal 12 %); it costs the job 14 %"
    )


def test_steps_pass_between_nodes_and_those_of_another_version_are_left_out() -> None:
    step = step_of(3, work_s=0.1, period_s=0.25)
    assert of_rows(as_rows([step])) == [step]
    assert of_rows([[1.0, 2.0]]) == []


def test_a_kernel_that_counts_otherwise_counts_nothing(tmp_path: Path) -> None:
    assert read_host(tmp_path) == HostState()
    (tmp_path / "proc").mkdir()
    for text in ("cpu  1 2 three\n", "cpu\n", ""):
        (tmp_path / "proc/stat").write_text(text)
        assert read_host(tmp_path) == HostState()
    (tmp_path / "proc/stat").write_text("cpu  100 0 0 100 0 0 0 50 0 0\n")
    assert read_host(tmp_path).steal_s > 0
