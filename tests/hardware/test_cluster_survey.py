"""Several machines as one cluster to plan for."""

from __future__ import annotations

from paraplan.hardware.catalogue.profile_files import load_machine
from paraplan.hardware.interconnect import InterconnectThresholds
from paraplan.hardware.node_survey import survey_nodes
from paraplan.hardware.topology import NodeTopology

MACHINE = load_machine("dgx-h100").node


def named(driver_name: str, host: str) -> NodeTopology:
    return MACHINE.replace(hostname=host, gpus=tuple(gpu.replace(name=driver_name) for gpu in MACHINE.gpus))


def test_alike_machines_make_a_cluster_of_all_of_them_with_a_verdict_on_the_network() -> None:
    survey = survey_nodes([named("NVIDIA H100 80GB HBM3", host) for host in "abc"])
    assert survey.differences == ()
    assert survey.cluster is not None
    assert (survey.cluster.num_nodes, survey.num_gpus) == (3, 24)
    assert survey.interconnect is not None
    assert survey.interconnect.network is not None
    assert survey.interconnect.network.is_fast
    report = survey.to_report()
    assert (report["num_nodes"], report["num_gpus"], len(report["nodes"])) == (3, 24, 3)


def test_the_threshold_decides_on_the_network() -> None:
    nodes = [named("NVIDIA H100 80GB HBM3", host) for host in "ab"]
    survey = survey_nodes(nodes, InterconnectThresholds(network_bytes_per_s=1e12))
    assert survey.interconnect is not None
    assert survey.interconnect.network is not None
    assert not survey.interconnect.network.is_fast


def test_the_cluster_is_made_of_the_weakest_node_and_the_slowest_kind() -> None:
    h100, a100 = named("NVIDIA H100 80GB HBM3", "a"), named("NVIDIA A100-SXM4-80GB", "b")
    fewer = h100.replace(gpus=h100.gpus[:6])
    survey = survey_nodes([h100, a100, fewer])
    assert survey.cluster is not None
    assert survey.cluster.gpu.name == "a100-sxm-80gb"
    assert survey.cluster.gpus_per_node == 6
    assert survey.num_gpus == 22
    assert any("node 1 (b) has NVIDIA A100-SXM4-80GB" in sentence for sentence in survey.differences)


def test_machines_of_unknown_kind_are_compared_all_the_same() -> None:
    survey = survey_nodes([named("Foo 1", "a"), named("Foo 1", "b").replace(driver_version="1")])
    assert survey.cluster is None
    assert survey.interconnect is None
    assert survey.to_report()["cluster"] is None
