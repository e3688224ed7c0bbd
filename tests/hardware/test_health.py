"""What stands out among machines that were measured."""

from __future__ import annotations

from itertools import permutations

from paraplan.hardware.measurement.health import (
    GroupHealth,
    HealthReport,
    NodeHealth,
    PairHealth,
    RankHealth,
    with_findings,
)
from paraplan.measure.health import pattern_of, rounds_of_pairs

GIB = 1 << 30


def report_of(
    *,
    hosts: tuple[str, ...],
    matmul: dict[int, float] | None = None,
    pairs: dict[tuple[int, int], float] | None = None,
    wrong: tuple[int, int] | None = None,
    nodes: tuple[NodeHealth, ...] = (),
    device: str = "GPU 0",
    peak: float | None = None,
) -> HealthReport:
    ranks = tuple(
        RankHealth(
            rank=rank,
            host=host,
            device=device,
            kind="H100",
            matmul_flops_per_s=(matmul or {}).get(rank, 700e12),
            memory_bytes_per_s=3e12,
            peak_flops_per_s=peak,
        )
        for rank, host in enumerate(hosts)
    )
    speeds = dict.fromkeys(permutations(range(len(hosts)), 2), 50e9) | (pairs or {})
    return with_findings(
        HealthReport(
            ranks=ranks,
            pairs=tuple(
                PairHealth(sender=a, receiver=b, bytes_per_s=speed, is_right=(a, b) != wrong)
                for (a, b), speed in speeds.items()
            ),
            groups=(GroupHealth(name="all ranks", ranks=tuple(range(len(hosts))), bus_bytes_per_s=40e9),),
            nodes=nodes,
        )
    )


def test_machines_that_are_alike_have_no_findings() -> None:
    report = report_of(hosts=("a", "a", "b", "b"))
    assert not report.findings
    assert report.describe()[-1] == "nothing stands out"


def test_a_gpu_whose_matmuls_are_15_percent_slower_is_named_with_its_host() -> None:
    report = report_of(hosts=("a", "b", "c"), matmul={1: 590e12})
    assert report.bad_hosts == ("b",)
    assert report.findings[0].text == (
        "rank 1 (b, GPU 0): matmuls reach 590 TFLOP/s, the median of the ranks is 700 TFLOP/s"
    )


def test_cpu_ranks_may_differ_by_a_fifth() -> None:
    assert not report_of(hosts=("a", "b", "c"), matmul={1: 560e12}, device="CPU").findings


def test_gpus_that_are_all_far_below_their_data_sheet_are_named() -> None:
    report = report_of(hosts=("a", "a"), matmul={0: 200e12, 1: 200e12}, peak=989e12)
    assert [finding.ranks for finding in report.findings] == [(0,), (1,)]


def test_a_host_that_sends_slowly_is_named_once_and_those_that_wait_for_it_are_not() -> None:
    report = report_of(hosts=("a", "b", "c"), pairs={(2, 0): 1e9, (2, 1): 1e9})
    assert report.bad_hosts == ("c",)
    assert len(report.findings) == 1
    assert "sends at 1.00 GB/s" in report.findings[0].text


def test_of_two_hosts_a_slow_direction_is_named_and_no_host() -> None:
    report = report_of(hosts=("a", "b"), pairs={(1, 0): 1e9})
    assert report.bad_hosts == ()
    assert "what b sends or what a receives is slow" in report.findings[0].text


def test_a_link_inside_a_host_that_is_slow_names_the_host() -> None:
    report = report_of(hosts=("a", "a", "a", "b"), pairs={(0, 2): 5e9})
    assert report.bad_hosts == ("a",)
    assert report.findings[0].ranks == (0, 2)


def test_messages_that_arrive_changed_are_named() -> None:
    report = report_of(hosts=("a", "a"), wrong=(1, 0))
    assert report.findings[0].text == "what rank 1 (a) sends to rank 0 (a) arrives changed"


def test_links_far_below_what_the_cards_are_rated_for_are_named() -> None:
    nodes = tuple(NodeHealth(host=host, network_bytes_per_s=600e9) for host in "ab")
    report = report_of(hosts=("a", "b"), nodes=nodes)
    assert "rated for 600 GB/s" in report.findings[0].text


def test_a_disk_and_a_memory_that_are_much_smaller_than_others_are_named() -> None:
    nodes = tuple(
        NodeHealth(host=host, disk_bytes_per_s=disk, memory_available_bytes=memory)
        for host, disk, memory in (("a", 2e9, 900 * GIB), ("b", 1e8, 900 * GIB), ("c", 2e9, 100 * GIB))
    )
    report = report_of(hosts=("a", "b", "c"), nodes=nodes)
    assert report.bad_hosts == ("b", "c")


def test_everybody_meets_everybody_once_and_nobody_twice_in_a_round() -> None:
    for count in (2, 3, 6, 7):
        rounds = rounds_of_pairs(range(count))
        assert all(len({rank for pair in met for rank in pair}) == 2 * len(met) for met in rounds)
        met = [frozenset(pair) for one in rounds for pair in one]
        assert len(met) == len(set(met)) == count * (count - 1) // 2


def test_no_two_ranks_send_the_same_bytes() -> None:
    assert len({bytes(pattern_of(rank, 4096).tolist()) for rank in range(64)}) == 64
