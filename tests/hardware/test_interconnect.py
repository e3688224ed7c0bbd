import pytest

from paraplan.hardware.catalogue.profile_files import cluster_from_profile, list_machines
from paraplan.hardware.interconnect import InterconnectThresholds, describe_interconnect, gpu_nics
from paraplan.hardware.topology import Gpu, GpuLink, LinkType, Nic, NodeTopology


@pytest.mark.parametrize(
    ("machine", "is_fast", "words"),
    [
        ("dgx-h100", True, "450 GB/s per GPU and direction over NV18"),
        ("titan-rtx-x2-nvlink", True, "50.0 GB/s"),
        ("titan-rtx-x2", False, "over PHB"),
        ("rtx-3090-x4-bridged", False, "NVLink only inside 0-1, 2-3"),
        ("dgx-1", True, "50.0 GB/s per GPU and direction over NV2"),
        ("mi300x-x8", True, "448 GB/s per GPU and direction over 7 x XGMI1"),
        ("l40s-x8", False, "over SYS"),
    ],
)
def test_a_node_is_fast_where_a_ring_through_all_gpus_is(machine: str, is_fast: bool, words: str) -> None:
    verdict = describe_interconnect(cluster_from_profile(machine)).node
    assert verdict is not None
    assert verdict.is_fast is is_fast
    assert words in verdict.because
    assert "fast from 40.0 GB/s" in verdict.because


def test_a_threshold_may_be_set() -> None:
    cluster = cluster_from_profile("l40s-x8", num_nodes=2)
    low = InterconnectThresholds(node_bytes_per_s=20e9, network_bytes_per_s=3e9)
    report = describe_interconnect(cluster, low)
    assert report.node is not None
    assert report.node.is_fast
    assert report.network is not None
    assert report.network.is_fast
    default = describe_interconnect(cluster)
    assert default.network is not None
    assert not default.network.is_fast


def test_a_network_is_judged_by_the_share_of_each_gpu() -> None:
    for machine, gpus, rate in (
        ("dgx-h100", 8, 50e9),
        ("dgx-h100", 1, 50e9),
        ("gb200-nvl72", 4, 50e9),
        ("aws-p4d-24xlarge", 8, 6.25e9),
    ):
        cluster = cluster_from_profile(machine, num_nodes=2, gpus_per_node=gpus)
        verdict = describe_interconnect(cluster).network
        assert verdict is not None
        assert verdict.bandwidth_bytes_per_s == rate
        assert verdict.is_fast is (rate > 12.5e9)


def test_one_gpu_and_one_node_have_nothing_to_judge() -> None:
    report = describe_interconnect(cluster_from_profile("gh200"))
    assert report.node is None
    assert report.network is None


def test_gpus_behind_one_switch_share_its_nic() -> None:
    nics = gpu_nics(cluster_from_profile("aws-p4d-24xlarge").node)
    assert nics[2].nics == nics[3].nics == ("rdmap1",)
    assert nics[2].shared_with == (3,)
    assert nics[2].share_bytes_per_s == 12.5e9 / 2
    nics = gpu_nics(cluster_from_profile("dgx-h100").node)
    assert all(each.shared_with == () and each.share_bytes_per_s == 50e9 for each in nics)


def uneven_node() -> NodeTopology:
    return NodeTopology(
        source="test",
        gpus=tuple(
            Gpu(index=index, name="NVIDIA RTX A6000" if index < 2 else "NVIDIA A40", numa_node=index % 2)
            for index in range(3)
        ),
        links=(GpuLink(gpu_a=0, gpu_b=1, link_type=LinkType.NV, nvlink_count=4, bandwidth_bytes_per_s=56e9),),
        nics=(
            Nic(name="a", rate_bytes_per_s=25e9, gpu_links={0: LinkType.PIX, 1: LinkType.SYS, 2: LinkType.SYS}),
            Nic(name="b", rate_bytes_per_s=25e9, gpu_links={0: LinkType.SYS, 1: LinkType.PIX, 2: LinkType.PIX}),
        ),
    )


def test_what_is_odd_about_a_machine_is_said() -> None:
    cluster = cluster_from_profile("rtx-a6000-x2-nvlink").replace(node=uneven_node())
    report = describe_interconnect(cluster)
    remarks = " | ".join(report.remarks)
    assert "2 kinds of GPU (NVIDIA A40, NVIDIA RTX A6000)" in remarks
    assert "0-1 crosses NUMA nodes" in remarks
    assert "links of 2 pairs" in remarks
    assert "12.5 GB/s to 25.0 GB/s" in remarks
    assert report.node is None  # no ring through GPU 2 is known


def test_unequal_nvlinks_are_said() -> None:
    assert any("1 to 2" in remark for remark in describe_interconnect(cluster_from_profile("dgx-1")).remarks)


def test_every_machine_of_several_gpus_is_judged() -> None:
    for machine in list_machines():
        report = describe_interconnect(cluster_from_profile(machine.name, num_nodes=2))
        assert (report.node is not None) == (len(machine.node.gpus) > 1), machine.name
        assert (report.network is not None) == (machine.network is not None), machine.name
