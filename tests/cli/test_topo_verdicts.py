"""The sentences of `paraplan topo`: fast or slow, by which threshold, and which GPUs share a NIC."""

from __future__ import annotations

import io

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from paraplan.cli.topo import app
from paraplan.cli.topology_tables import print_topology, shared_nic_lines
from paraplan.hardware.catalogue.profile_files import load_machine
from paraplan.hardware.interconnect import InterconnectThresholds
from paraplan.hardware.readers.any_text import read_topology
from paraplan.hardware.survey import MachineSurvey, survey_node

WITHOUT_NAMES = (
    "\tGPU0\tGPU1\tNIC0\nGPU0\t X \tPHB\tPIX\nGPU1\tPHB\t X \tPIX\nNIC0\tPIX\tPIX\t X \n\nNIC Legend:\n  NIC0: mlx5_0\n"
)


def shown(survey: MachineSurvey) -> str:
    stream = io.StringIO()
    print_topology(survey, Console(file=stream, width=200))
    return stream.getvalue()


def survey_profile(name: str, *, node: float = 40e9, network: float = 12.5e9) -> MachineSurvey:
    machine = load_machine(name)
    limits = InterconnectThresholds(node_bytes_per_s=node, network_bytes_per_s=network)
    return survey_node(machine.node, machine=machine, thresholds=limits)


def test_both_verdicts_are_shown_with_the_numbers_and_the_threshold_that_decided() -> None:
    text = shown(survey_profile("aws-p4d-24xlarge"))
    assert "Links in the node: fast, 300 GB/s" in text
    assert "Network: slow, 4 x 12.5 GB/s for 8 GPUs = 6.25 GB/s per GPU and direction; fast from 12.5 GB/s" in text


def test_thresholds_turn_both_verdicts() -> None:
    text = shown(survey_profile("aws-p4d-24xlarge", node=301e9, network=6e9))
    assert "Links in the node: slow, 300 GB/s" in text
    assert "Network: fast, " in text


def test_gpus_that_share_a_nic_are_said_with_what_is_left_to_each() -> None:
    assert shared_nic_lines(load_machine("aws-p4d-24xlarge").node)[1] == (
        "Shared NIC: GPU 2-3 use rdmap1, 6.25 GB/s per direction for each"
    )
    assert shared_nic_lines(load_machine("dgx-h100").node) == []


def test_nics_are_shared_in_captures_of_unknown_gpus_too() -> None:
    node = read_topology(WITHOUT_NAMES, source="test")
    assert "Shared NIC: GPU 0-1 use mlx5_0\n" in shown(survey_node(node))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--node-rank", "1"], "--node-rank is for --nnodes"),
        (["--rdzv-endpoint", "a:1"], "--rdzv-endpoint is for --nnodes"),
        (["--nnodes", "2", "--measure", "--rdzv-endpoint", "a:1"], "--measure measures the links of one machine"),
    ],
)
def test_options_that_make_no_sense_together_are_refused(arguments: list[str], says: str) -> None:
    done = CliRunner().invoke(app, arguments)
    assert says in str(done.exception)
    assert not isinstance(done.exception, typer.Exit)
