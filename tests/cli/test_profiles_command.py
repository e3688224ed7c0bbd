import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from paraplan.cli.main import app
from paraplan.hardware.catalogue.profile_files import load_gpu, load_machine

runner = CliRunner()


def run(*arguments: str, status: int = 0) -> tuple[str, str]:
    result = runner.invoke(app, ["profiles", *arguments])
    assert result.exit_code == status, result.output
    return result.stdout, result.stderr


def test_list_names_enough_machines_and_kinds_of_gpu() -> None:
    listed = json.loads(run("list", "--json")[0])
    assert len(listed["machines"]) >= 35
    assert len(listed["gpus"]) >= 30
    assert all(profile["source"] for kind in ("machines", "gpus", "networks") for profile in listed[kind])
    assert sum(listed["source_kinds"].values()) == sum(len(listed[kind]) for kind in ("machines", "gpus", "networks"))
    assert listed["source_kinds"]["memory"] > 0
    architectures = {gpu["architecture"] for gpu in listed["gpus"]}
    assert {"Pascal", "Volta", "Turing", "Ampere", "Ada Lovelace", "Hopper", "Blackwell", "CDNA 3"} <= architectures


def test_a_list_may_be_narrowed_by_a_text_and_a_kind() -> None:
    listed = json.loads(run("list", "3090", "--kind", "machine", "--json")[0])
    assert listed["gpus"] == listed["networks"] == []
    assert listed["machines"]
    assert all(machine["gpu"] == "rtx-3090" for machine in listed["machines"])


def test_names_are_not_cut_in_a_pipe() -> None:
    text, _ = run("list")
    assert "azure-nd96isr-mi300x-v5" in text
    assert "NV12 in islands of 2" in text


def test_a_text_that_no_profile_holds_is_an_error() -> None:
    _, message = run("list", "zx-spectrum", status=2)
    assert "zx-spectrum" in message


def test_show_prints_figures_and_their_sources() -> None:
    text, _ = run("show", "h100-pcie-80gb")
    assert "79.6 GiB" in text
    assert "756 TFLOP/s" in text
    assert "source" in text


def test_show_prints_what_collectives_reached_on_a_network() -> None:
    text, _ = run("show", "slingshot-200-2")
    assert "32 ranks" in text
    assert "all_gather 34.9 GB/s" in text


def test_show_finds_a_machine_before_a_gpu_of_the_same_name() -> None:
    assert json.loads(run("show", "h100", "--json")[0])["num_gpus"] == 8
    assert json.loads(run("show", "h100", "--kind", "gpu", "--json")[0])["name"] == "h100-sxm-80gb"
    assert json.loads(run("show", "ethernet-10g", "--json")[0])["nics_per_node"] == 1


@pytest.mark.parametrize("name", ["dgx-a100", "rtx-3090-x4-crossed", "gh200"])
def test_the_json_of_a_machine_is_a_file_that_is_read_again(tmp_path: Path, name: str) -> None:
    path = tmp_path / "mine.json"
    path.write_text(run("show", name, "--json")[0])
    assert load_machine(str(path)) == load_machine(name)
    assert run("show", str(path))[0].startswith(name)


def test_the_json_of_a_gpu_is_a_file_that_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "card.json"
    path.write_text(run("show", "rtx-4090", "--json")[0])
    assert load_gpu(str(path)) == load_gpu("rtx-4090")


def test_an_unknown_name_lists_near_ones_and_ends_with_2() -> None:
    _, message = run("show", "dgx-h10", status=2)
    assert "dgx-h100" in message
