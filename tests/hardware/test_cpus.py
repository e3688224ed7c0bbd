"""The names that Linux and machine profiles have for a CPU."""

from __future__ import annotations

from pathlib import Path

from paraplan.hardware.catalogue.profile_files import load_machine
from paraplan.hardware.catalogue.real_machines import save_machine
from paraplan.hardware.cpus import this_cpu


def test_a_machine_keeps_its_cpu_in_its_file(tmp_path: Path) -> None:
    machine = load_machine("aws-p5-48xlarge")
    save_machine(machine, tmp_path / "mine.json")
    assert load_machine(str(tmp_path / "mine.json")).cpu == machine.cpu == "AMD EPYC 7R13"


def test_the_name_of_this_machines_cpu_is_linuxs(tmp_path: Path) -> None:
    told = tmp_path / "cpuinfo"
    told.write_text("processor\t: 0\nmodel name\t: AMD EPYC 7R13 Processor\nprocessor\t: 1\nmodel name\t: other\n")
    assert this_cpu(cpuinfo=told) == "AMD EPYC 7R13 Processor"
    told.write_text("processor\t: 0\n")
    assert this_cpu(cpuinfo=told) == this_cpu(cpuinfo=tmp_path / "none") != ""
