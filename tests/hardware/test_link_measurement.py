"""What follows from measured times: groups, fits, and the figures that a profile keeps."""

from __future__ import annotations

from math import sqrt
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paraplan.hardware.bus_bandwidth import RankGroup, bus_bandwidth, bus_factor
from paraplan.hardware.catalogue.profile_files import cluster_from_profile, load_machine
from paraplan.hardware.catalogue.real_machines import save_machine
from paraplan.hardware.link_speed import load_link_speeds
from paraplan.hardware.measurement.links import (
    GPU_MESSAGE_BYTES,
    LinkReport,
    MeasureRequest,
    MessageTime,
    RankEvent,
    collectives_of,
    fit_times,
    groups_to_measure,
    report_links,
)
from paraplan.hardware.topology import Gpu, NodeTopology
from paraplan.units import KIB, MIB

TABLE = load_link_speeds()


def exact_times(
    sizes: tuple[int, ...], *, latency_s: float, per_byte_s: float, ramp_bytes: float = 0.0
) -> list[MessageTime]:
    times = [latency_s + per_byte_s * (size + sqrt(size * ramp_bytes)) for size in sizes]
    return [
        MessageTime(num_bytes=size, time_s=time_s, bus_bandwidth_bytes_per_s=size / time_s)
        for size, time_s in zip(sizes, times, strict=True)
    ]


@given(
    latency_s=st.floats(1e-6, 1e-3),
    bandwidth=st.floats(1e8, 9e11),
    ramp_mib=st.sampled_from([0, 0.25, 4.0]),
    num_ranks=st.sampled_from([2, 3, 8]),
)
def test_times_that_follow_the_model_give_its_latency_and_bandwidth_back(
    latency_s: float, bandwidth: float, ramp_mib: float, num_ranks: int
) -> None:
    factor = bus_factor("all_reduce", num_ranks)
    sizes = (*GPU_MESSAGE_BYTES, 2**36)
    times = exact_times(sizes, latency_s=latency_s, per_byte_s=factor / bandwidth, ramp_bytes=ramp_mib * 2**20)
    fit = fit_times(times, collective="all_reduce", num_ranks=num_ranks)
    assert fit.error < 1e-3
    assert fit.bus_bandwidth_bytes_per_s == pytest.approx(bandwidth, rel=0.01)


@given(st.lists(st.floats(1e-6, 1.0), min_size=1, max_size=6))
def test_any_times_give_a_fit_of_which_nothing_is_negative_and_no_bandwidth_is_out_of_reach(
    times_s: list[float],
) -> None:
    times = [
        MessageTime(num_bytes=size, time_s=time_s, bus_bandwidth_bytes_per_s=size / time_s)
        for size, time_s in zip(GPU_MESSAGE_BYTES, times_s, strict=False)
    ]
    fit = fit_times(times, collective="send_recv", num_ranks=2)
    best = max(each.bus_bandwidth_bytes_per_s for each in times)
    assert fit.latency_s >= 0
    assert fit.ramp_bytes >= 0
    assert 0 < fit.bus_bandwidth_bytes_per_s <= 2.001 * best


def test_one_time_alone_gives_its_own_bandwidth() -> None:
    alone = MessageTime(num_bytes=10**6, time_s=1e-3, bus_bandwidth_bytes_per_s=1e9)
    fit = fit_times([alone], collective="send_recv", num_ranks=2)
    assert fit.bus_bandwidth_bytes_per_s == pytest.approx(1e9)
    with pytest.raises(ValueError, match="no times"):
        fit_times([], collective="send_recv", num_ranks=2)


def test_bridged_pairs_are_measured_as_islands_beside_all_gpus_and_a_pair_without_a_bridge() -> None:
    groups = {group.gpus: group.title for group in groups_to_measure(load_machine("rtx-3090-x4-bridged").node)}
    assert groups == {
        (0, 1, 2, 3): "all 4 GPUs",
        (0, 1): "NVLink island 0-1",
        (2, 3): "NVLink island 2-3",
        (0, 2): "PHB pair 0-2",
    }


def test_eight_gpus_behind_a_switch_are_measured_whole_by_half_and_in_a_pair() -> None:
    groups = groups_to_measure(load_machine("dgx-h100").node)
    assert [group.gpus for group in groups] == [(0, 1, 2, 3, 4, 5, 6, 7), (0, 1, 2, 3), (0, 1)]


def test_a_hybrid_mesh_has_pairs_with_one_link_with_two_and_with_none() -> None:
    titles = [group.title for group in groups_to_measure(load_machine("dgx-1").node)]
    assert {title.split()[0] for title in titles if "pair" in title} >= {"NV1", "NV2"}


def test_one_gpu_has_nothing_to_measure() -> None:
    assert groups_to_measure(NodeTopology(source="test", gpus=(Gpu(index=0),))) == ()


def test_point_to_point_is_measured_on_pairs_alone() -> None:
    assert "send_recv" in collectives_of(2)
    assert "send_recv" not in collectives_of(4)
    request = MeasureRequest(device="cpu", groups=((0, 1, 2), (0, 1)), message_bytes=(1024, 2048), max_seconds=1)
    assert request.num_timings == 2 * (4 + 5)


def bridged_report(*, pair_factor: float = 1.0) -> LinkReport:
    """Times of bridged 3090s: what the table expects, and a second bridge that takes `pair_factor` times as long."""
    cluster = cluster_from_profile("rtx-3090-x4-bridged")
    groups = groups_to_measure(cluster.node)
    events = []
    for number, group in enumerate(groups):
        for collective in collectives_of(len(group.gpus)):
            speed = bus_bandwidth(cluster, RankGroup(gpus=group.gpus), collective, TABLE)
            slower = pair_factor if group.gpus == (2, 3) else 1.0
            events += [
                RankEvent(group=number, collective=collective, num_bytes=size, time_s=slower * speed.time_s(size))
                for size in GPU_MESSAGE_BYTES
            ]
    return report_links(events, groups=groups, cluster=cluster, table=TABLE, backend="nccl", source="a test")


def test_what_is_expected_stands_beside_what_was_measured() -> None:
    report = bridged_report(pair_factor=2.0)
    shares = {(link.group.gpus, link.collective): link.share_of_expected for link in report.links}
    assert shares[(0, 1), "all_reduce"] == pytest.approx(1.0)
    assert shares[(2, 3), "all_reduce"] == pytest.approx(0.5)


def test_what_is_saved_is_read_back_and_preferred_by_the_cost_of_collectives(tmp_path: Path) -> None:
    machine = load_machine("rtx-3090-x4-bridged").replace(measured=bridged_report(pair_factor=2.0).to_measured())
    save_machine(machine, tmp_path / "mine.json")
    measured = cluster_from_profile(str(tmp_path / "mine.json"))
    assert measured.measured == machine.measured
    plain = cluster_from_profile("rtx-3090-x4-bridged")
    size = 64 * 2**20
    for gpus, ratio in (((0, 1), 2.0), ((0, 1, 2, 3), 1.0), ((0, 2), 1.0)):
        times = [
            bus_bandwidth(cluster, RankGroup(gpus=gpus), "all_gather", TABLE).time_s(size)
            for cluster in (measured, plain)
        ]
        assert times[0] / times[1] == pytest.approx(ratio, rel=0.02), gpus


def test_measured_links_count_for_groups_over_several_nodes_as_well() -> None:
    slow = cluster_from_profile("dgx-h100", num_nodes=2)
    groups = groups_to_measure(slow.node)
    events = [
        RankEvent(group=0, collective="all_gather", num_bytes=size, time_s=size / 1e9) for size in GPU_MESSAGE_BYTES
    ]
    report = report_links(events, groups=groups, cluster=slow, table=TABLE, backend="nccl", source="a test")
    measured = slow.replace(measured=report.to_measured())
    group = RankGroup(gpus=tuple(range(8)), num_nodes=2)
    assert bus_bandwidth(measured, group, "all_gather", TABLE).bus_bandwidth_bytes_per_s < 1.1e9


def test_figures_of_other_links_of_the_same_kind_are_left_alone() -> None:
    cluster = cluster_from_profile("dgx-1")
    groups = groups_to_measure(cluster.node)
    single = next(number for number, group in enumerate(groups) if group.title.startswith("NV1"))
    double = next(number for number, group in enumerate(groups) if group.title.startswith("NV2"))
    events = [
        RankEvent(group=single, collective="all_reduce", num_bytes=size, time_s=size / 1e8)
        for size in GPU_MESSAGE_BYTES
    ]
    report = report_links(events, groups=groups, cluster=cluster, table=TABLE, backend="nccl", source="a test")
    measured = cluster.replace(measured=report.to_measured())
    for number, is_same in ((single, False), (double, True)):
        group = RankGroup(gpus=groups[number].gpus)
        speeds = [bus_bandwidth(each, group, "all_reduce", TABLE) for each in (measured, cluster)]
        assert (speeds[0] == speeds[1]) is is_same


def test_what_was_left_out_is_noted_once_with_its_reason() -> None:
    cluster = cluster_from_profile("cpu")
    groups = groups_to_measure(cluster.node)
    skipped = RankEvent(group=0, collective="all_to_all", skipped="not supported by gloo")
    report = report_links(
        [skipped, skipped], groups=groups, cluster=cluster, table=TABLE, backend="gloo", source="a test"
    )
    assert report.notes == ("all 2 GPUs: all_to_all: not supported by gloo",)
    assert report.links == ()
    assert report.to_measured() == ()


@pytest.mark.parametrize(("sizes", "is_kept"), [((1024,), False), ((1024, 16 * KIB), False), ((1024, MIB), True)])
def test_short_messages_alone_say_no_bandwidth(sizes: tuple[int, ...], is_kept: bool) -> None:
    cluster = cluster_from_profile("cpu")
    groups = groups_to_measure(cluster.node)
    events = [
        RankEvent(group=0, collective="send_recv", num_bytes=size, time_s=1.7e-3 + size / 1e9) for size in sizes
    ] + [RankEvent(group=0, collective="send_recv", skipped="some messages: no time left")]
    report = report_links(events, groups=groups, cluster=cluster, table=TABLE, backend="gloo", source="a test")
    assert len(report.links) == len(report.to_measured()) == int(is_kept)
    assert any("no bandwidth, as no message above" in note for note in report.notes) is not is_kept
    if is_kept:
        assert report.links[0].fit.bus_bandwidth_bytes_per_s == pytest.approx(1e9, rel=0.3)
