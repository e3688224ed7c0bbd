"""What one core of a CPU scores, by the names that Linux and machine profiles have for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from paraplan.hardware.catalogue.profile_files import cluster_from_profile, load_machine, profile_names
from paraplan.hardware.catalogue.real_machines import save_machine
from paraplan.hardware.cpus import load_cpu_scores, one_core_score, this_cpu


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("AMD EPYC 7R13 48-Core Processor", "AMD EPYC 7R13"),
        ("Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz", "Intel Xeon Platinum 8481C"),
        ("INTEL(R) XEON(R) PLATINUM 8581C CPU @ 2.10GHz", "Intel Xeon Platinum 8581C"),
        ("Intel(R) Xeon(R) CPU @ 2.20GHz", "Intel Xeon @ 2.20GHz"),
        ("AMD EPYC-Genoa Processor", "AMD EPYC-Genoa"),
    ],
)
def test_a_cpu_is_known_by_the_name_that_linux_has_for_it(name: str, known: str) -> None:
    assert one_core_score(name) == load_cpu_scores().scores[known]


@pytest.mark.parametrize("name", ["AMD EPYC", "x86_64", "", "AMD EPYC 7R133", "Intel(R) Xeon(R) Platinum 84"])
def test_other_names_have_no_score(name: str) -> None:
    assert one_core_score(name) is None


def test_every_cpu_that_a_machine_profile_names_has_a_score() -> None:
    named = {cpu for name in profile_names("machines") if (cpu := load_machine(name).cpu) is not None}
    assert len(named) > 5
    assert [cpu for cpu in named if one_core_score(cpu) is None] == []


def test_a_machine_keeps_its_cpu_in_its_file(tmp_path: Path) -> None:
    machine = load_machine("aws-p5-48xlarge")
    save_machine(machine, tmp_path / "mine.json")
    assert cluster_from_profile(str(tmp_path / "mine.json"), num_nodes=2).cpu == machine.cpu == "AMD EPYC 7R13"


def test_the_name_of_this_machines_cpu_is_linuxs(tmp_path: Path) -> None:
    told = tmp_path / "cpuinfo"
    told.write_text("processor\t: 0\nmodel name\t: AMD EPYC 7R13 Processor\nprocessor\t: 1\nmodel name\t: other\n")
    assert this_cpu(cpuinfo=told) == "AMD EPYC 7R13 Processor"
    told.write_text("processor\t: 0\n")
    assert this_cpu(cpuinfo=told) == this_cpu(cpuinfo=tmp_path / "none") != ""
