"""What paraplan topo tells of a machine beyond its topology."""

from __future__ import annotations

import pytest
from smi_tables import bridged_pairs

from paraplan.errors import UsageError
from paraplan.hardware.catalogue.profile_files import load_machine
from paraplan.hardware.interconnect import InterconnectThresholds
from paraplan.hardware.readers.any_text import read_topology
from paraplan.hardware.survey import survey_node
from paraplan.hardware.topology import NodeTopology


def capture() -> NodeTopology:
    return read_topology(bridged_pairs().with_tabs(), source="test")


def named_capture() -> NodeTopology:
    listing = "\n".join(f"GPU {number}: NVIDIA RTX A6000 (UUID: GPU-{number}aaa)" for number in range(4))
    return read_topology(listing + "\n" + bridged_pairs().with_tabs(), source="test")


def test_a_capture_without_names_has_no_verdict_and_no_view_of_cuda() -> None:
    survey = survey_node(capture())
    assert survey.machine is None
    assert survey.interconnect is None
    assert survey.to_report()["cuda"] is None


def test_names_find_the_profile_by_which_links_are_judged() -> None:
    survey = survey_node(named_capture())
    assert survey.machine is not None
    assert survey.interconnect is not None
    assert survey.interconnect.node is not None
    assert not survey.interconnect.node.is_fast


def test_thresholds_decide_what_is_fast() -> None:
    strict = InterconnectThresholds(node_bytes_per_s=500e9, network_bytes_per_s=100e9)
    machine = load_machine("dgx-h100")
    for thresholds, fast in ((InterconnectThresholds(), True), (strict, False)):
        report = survey_node(machine.node, machine=machine, thresholds=thresholds).interconnect
        assert report is not None
        assert report.node is not None
        assert report.network is not None
        assert (report.node.is_fast, report.network.is_fast) == (fast, fast)


def test_a_selection_keeps_order_links_and_nic_paths_of_the_chosen_gpus() -> None:
    node = survey_node(capture(), gpus="3,0").node
    assert [gpu.index for gpu in node.gpus] == [3, 0]
    assert [(link.gpu_a, link.gpu_b) for link in node.links] == [(0, 3)]
    assert set(node.nics[0].gpu_links) == {0, 3}
    assert [gpu.index for gpu in survey_node(capture(), gpus="2").node.gpus] == [0, 1]


def test_a_selection_of_this_machine_counts_as_cuda_does() -> None:
    environment = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": "2,1"}
    survey = survey_node(named_capture(), environment=environment, gpus="0,")
    assert survey.cuda is not None
    assert [device.nvml_index for device in survey.cuda.devices] == [2, 1]
    with pytest.raises(UsageError):
        survey_node(named_capture(), environment=environment, gpus="0,3")
    by_index = survey_node(named_capture(), environment=environment, gpus="1,")
    assert [gpu.index for gpu in by_index.node.gpus] == [1]
