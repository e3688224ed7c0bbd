"""Numbers of GPUs beside those asked about: fewer that are faster, the fewest that are in time."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest

from paraplan.api.executors import executor_of
from paraplan.cost.estimate import leaves_room
from paraplan.cost.framework_files import load_framework
from paraplan.cost.workload import Workload
from paraplan.errors import NoPlanFitsError
from paraplan.hardware.cluster import Cluster
from paraplan.plan.executor import OWN_RUNTIME
from paraplan.search.by_date import Deadline, by_date
from paraplan.search.cluster_sizes import (
    counts_between,
    first_between,
    larger_clusters,
    least_time_s,
    part_of,
    smaller_clusters,
)
from paraplan.search.constraints import FREE, Constraints
from paraplan.search.recommendation import SearchRequest, recommendation
from paraplan.search.search import search
from paraplan.units import format_days

MakeWorkload = Callable[..., Workload]


def test_every_number_of_one_machine_and_whole_machines_of_several_lie_between(workload: MakeWorkload) -> None:
    cluster = workload(num_nodes=4).cluster
    assert counts_between(0, cluster) == [1, 2, 3, 4, 5, 6, 7, 8, 16, 24]
    assert counts_between(16, cluster) == [24]
    assert [part_of(cluster, count).num_gpus for count in (3, 24)] == [3, 24]
    assert part_of(cluster, 24).num_nodes == 3


def test_the_fewest_that_suit_are_found_where_more_do_not(workload: MakeWorkload) -> None:
    cluster = workload(num_nodes=1).cluster
    found, tried = first_between(4, cluster, lambda part: part.num_gpus == 6)
    assert found.num_gpus == 6
    assert "each number of GPUs between 4 and 8 GPUs" in tried
    assert first_between(4, cluster, lambda part: False)[0] == cluster


def test_of_very_many_machines_only_some_are_tried_and_it_is_said(workload: MakeWorkload) -> None:
    cluster = workload(num_nodes=512).cluster
    asked: list[int] = []

    def suits(part: Cluster) -> bool:
        asked.append(part.num_nodes)
        return False

    _, tried = first_between(2048, cluster, suits)
    assert len(asked) <= 40
    assert len({second - first for first, second in pairwise(asked)}) == 1
    assert "each 7 machines" in tried


@pytest.mark.parametrize("nodes", [1, 3])
def test_no_plan_takes_less_than_the_least_time(workload: MakeWorkload, nodes: int) -> None:
    made = workload("llama-3-8b", num_nodes=nodes, seq_length=4096, global_batch_size=96)
    step_s = search(made, num_candidates=1, objective="fastest").best.step.step_time_s
    least_s = least_time_s(made, executor=OWN_RUNTIME)
    assert 0.5 * step_s < least_s <= step_s


def test_a_date_that_nothing_meets_is_told_by_the_best_of_all_numbers(workload: MakeWorkload) -> None:
    """Numbers that are looked at first are not the best here: over a slow network few GPUs are faster than many."""
    made = workload("gpt2", profile="rtx-3090-x2")
    plain = Constraints(tp=1, pp=1, cp=1)
    deadline = Deadline(1e12, 0.001, "throughput", OWN_RUNTIME, plain)
    with pytest.raises(NoPlanFitsError) as told:
        by_date(made, deadline)
    clusters = [made.cluster, *smaller_clusters(made.cluster), *larger_clusters(made.cluster)]
    times = {
        one.num_gpus: search(replace(made, cluster=one), num_candidates=1, fixed=plain).best.step.step_time_s
        for one in clusters
        if one.num_gpus <= 64  # each takes one sequence then
    }
    assert times[4] == min(times.values())
    days = 1e12 / made.training.tokens_per_step * times[4] / 86_400
    assert told.value.message.endswith(f"the best takes {format_days(days)}")
    assert not told.value.is_near


def test_three_machines_are_found_between_two_and_four(workload: MakeWorkload) -> None:
    made = workload("llama-2-13b", num_nodes=8, seq_length=4096, global_batch_size=512)
    chosen, words = by_date(made, Deadline(100e9, 14, "throughput", OWN_RUNTIME, FREE))
    assert chosen.cluster.num_gpus == 24
    assert search(chosen).best.step.step_time_s * 100e9 / chosen.training.tokens_per_step <= 14 * 86_400
    assert "24, tried in steps of two, and each number of machines between 16 and 32 GPUs" in (words or "")
    two = replace(made, cluster=made.cluster.replace(num_nodes=2))
    slower = recommendation(two, SearchRequest(tokens=100e9))
    assert slower.budget is not None
    assert slower.budget.seconds > 14 * 86_400


def test_gpus_stay_idle_where_their_number_does_not_divide_the_batch(workload: MakeWorkload) -> None:
    made = workload("llama-3-8b", num_nodes=3, seq_length=4096, global_batch_size=128)
    answer = recommendation(made, SearchRequest(uses_all_gpus=False, fixed=Constraints(pp=1, tp=1, cp=1)))
    assert answer.workload.cluster.num_gpus == answer.result.best.plan.world_size == 16
    assert answer.idle is not None
    assert answer.idle.startswith("uses 16 of 24 GPUs")
    assert "24 GPUs do not divide 128 sequences" in answer.idle


def test_one_machine_is_taken_of_two_that_a_slow_network_joins(workload: MakeWorkload) -> None:
    made = workload("gpt2", "2xrtx-4090", num_nodes=2)
    slow = made.cluster.network.replace(nic_bandwidth_bytes_per_s=1e8)  # type: ignore[union-attr]
    made = replace(made, cluster=made.cluster.replace(network=slow))
    answer = recommendation(made, SearchRequest(uses_all_gpus=False))
    assert answer.workload.cluster.num_gpus == 2
    assert "takes" in (answer.idle or "")
    everything = recommendation(made, SearchRequest())
    assert everything.workload.cluster.num_gpus == 4
    assert everything.idle is None
    assert everything.result.best.step.step_time_s > answer.result.best.step.step_time_s


def test_all_gpus_are_used_where_they_are_fastest(workload: MakeWorkload) -> None:
    made = workload("llama-3-8b", seq_length=4096)
    answer = recommendation(made, SearchRequest(uses_all_gpus=False))
    assert answer.workload.cluster.num_gpus == 8
    assert answer.idle is None


def test_a_framework_without_a_plan_for_all_gpus_gets_one_for_fewer(workload: MakeWorkload) -> None:
    made = workload("llama-3-8b", "gb300-nvl72", gpus=36, seq_length=4096, global_batch_size=128)
    made = replace(made, framework=load_framework("fsdp"))
    request = SearchRequest(uses_all_gpus=False, executor=executor_of(made), framework="fsdp")
    answer = recommendation(made, request)
    assert answer.workload.cluster.num_gpus == 32
    assert "no plan with all 36" in (answer.idle or "")


def test_the_fewest_gpus_with_little_room_say_how_many_leave_more(workload: MakeWorkload) -> None:
    made = workload("llama-3-8b", seq_length=4096, global_batch_size=16)
    answer = recommendation(made, SearchRequest(find="fewest-gpus"))
    assert answer.workload.cluster.num_gpus == 2
    assert "3 GPUs leave room" in (answer.found or "")


def test_the_longest_sequence_with_little_room_says_how_many_tokens_leave_more(workload: MakeWorkload) -> None:
    made = workload("llama-3-8b", seq_length=4096, global_batch_size=8)
    fixed = Constraints(tp=1, pp=1, cp=1, zero_stage=3, offload="none", recompute="none", micro_batch_size=1)
    answer = recommendation(made, SearchRequest(find="longest-sequence", fixed=fixed))
    assert not leaves_room(answer.workload, answer.result.best)
    roomy = re.search(r"; (\d+) tokens leave room", answer.found or "")
    assert roomy is not None
    assert int(roomy[1]) < answer.workload.training.seq_length
    shorter = replace(made, training=made.training.replace(seq_length=int(roomy[1])))
    assert leaves_room(made, search(shorter, objective="memory", fixed=fixed).best)


def test_gpus_counted_without_offload_get_a_plan_without_it(workload: MakeWorkload) -> None:
    made = workload("qwen2.5-14b", profile="8xa100", seq_length=4096, global_batch_size=16)
    answer = recommendation(made, SearchRequest(find="fewest-gpus", fixed=Constraints(tp=1, pp=1, cp=1)))
    assert answer.result.best.plan.offload == "none"
    assert "without offload: 4 of 8" in (answer.found or "")
    assert re.search("with offload [12] do, at the pace of the host", answer.found or "")
