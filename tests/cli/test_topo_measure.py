"""`paraplan topo --measure`: real ranks over gloo, and what is shown of their figures."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner
from waiting import PATIENCE_S

from paraplan.cli.main import app
from paraplan.cli.topo_measure import print_links
from paraplan.hardware.bus_bandwidth import RankGroup, bus_bandwidth
from paraplan.hardware.catalogue.profile_files import cluster_from_profile, load_machine
from paraplan.hardware.link_speed import load_link_speeds
from paraplan.hardware.measurement.links import (
    GPU_MESSAGE_BYTES,
    LinkReport,
    RankEvent,
    collectives_of,
    groups_to_measure,
    report_links,
)

TABLE = load_link_speeds()


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "paraplan", "topo", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)


@pytest.mark.with_all  # paraplan calibrate measures and saves them, too
@pytest.mark.ranks
def test_processes_of_a_machine_without_gpus_are_measured_and_saved_for_the_cost_model(tmp_path: Path) -> None:
    mine = tmp_path / "mine.json"
    done = run("--measure", "--ranks", "2", "--seconds", "1", "--json", "--save", str(mine))
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("saved:")  # no progress in a pipe
    measurement = json.loads(done.stdout)["measurement"]
    assert measurement["backend"] == "gloo"
    assert measurement["links"][0]["group"]["gpus"] == [0, 1]
    saved = load_machine(str(mine)).measured
    assert {each.link for each in saved} == {"loopback"}
    cluster = cluster_from_profile(str(mine))
    speed = bus_bandwidth(cluster, RankGroup(gpus=(0, 1)), saved[0].collective, TABLE)
    assert speed.bus_bandwidth_bytes_per_s == saved[0].bus_bandwidth_bytes_per_s


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--ranks", "2"), "--ranks is for --measure"),
        (("--measure", "--profile", "dgx-h100"), "only this machine can be measured"),
    ],
)
def test_what_cannot_be_measured_is_said(arguments: tuple[str, ...], says: str) -> None:
    done = CliRunner().invoke(app, ["topo", *arguments])
    assert done.exit_code == 2
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def rendered(report: LinkReport) -> str:
    stream = io.StringIO()
    print_links(report, Console(file=stream, width=80))
    return stream.getvalue()


def dgx_report() -> LinkReport:
    cluster = cluster_from_profile("dgx-h100")
    groups = groups_to_measure(cluster.node)
    events = [
        RankEvent(
            group=number,
            collective=collective,
            num_bytes=size,
            time_s=2 * bus_bandwidth(cluster, RankGroup(gpus=group.gpus), collective, TABLE).time_s(size),
        )
        for number, group in enumerate(groups)
        for collective in collectives_of(len(group.gpus))
        for size in GPU_MESSAGE_BYTES
    ]
    events.append(RankEvent(group=0, collective="all_to_all", skipped="some messages: no time left"))
    return report_links(events, groups=groups, cluster=cluster, table=TABLE, backend="nccl", source="a test")


def test_each_group_is_shown_with_its_data_sheet_within_80_columns() -> None:
    text = rendered(dgx_report())
    assert "all 8 GPUs: nvswitch-4, 450 GB/s per GPU and direction" in text
    assert "NV18 pair 0-1" in text
    assert text.count("all_reduce") == 3
    assert text.count("send_recv") == 1
    assert "Left out: all 8 GPUs: all_to_all: some messages: no time left" in text
    assert max(len(line) for line in text.splitlines()) <= 80


def test_what_is_expected_is_twice_what_was_reached_in_twice_the_time() -> None:
    row = next(line for line in rendered(dgx_report()).splitlines() if line.startswith("all_gather"))
    reached, expected = float(row.split()[-4]), float(row.split()[-2])
    assert expected == pytest.approx(2 * reached, rel=0.01)
