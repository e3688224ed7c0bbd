"""`paraplan topo` as a user calls it: a process with arguments, standard streams and an exit status."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import PATIENCE_S

TABLE = (
    "\tGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tCPU Affinity\tNUMA Affinity\n"
    "GPU0\t X \tSYS\tNV4\tSYS\tPIX\t0-7\t0\n"
    "GPU1\tSYS\t X \tSYS\tNV4\tSYS\t8-15\t1\n"
    "GPU2\tNV4\tSYS\t X \tSYS\tNODE\t0-7\t0\n"
    "GPU3\tSYS\tNV4\tSYS\t X \tSYS\t8-15\t1\n"
    "NIC0\tPIX\tSYS\tNODE\tSYS\t X \n"
    "\nNIC Legend:\n\n  NIC0: mlx5_0\n"
)


def topo(*arguments: str, given: str | None = None, columns: int = 80) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name not in ("FORCE_COLOR", "LD_LIBRARY_PATH")}
    return subprocess.run(
        [sys.executable, "-m", "paraplan", "topo", *arguments],
        input=given,
        env=environment | {"COLUMNS": str(columns)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "capture.txt"
    path.write_text(TABLE)
    return path


def test_json_has_the_names_that_other_programs_rely_on(table: Path) -> None:
    done = topo("--from", str(table), "--json")
    found = json.loads(done.stdout)
    assert done.returncode == 0
    assert found["nvlink_islands"] == [[0, 2], [1, 3]]
    assert found["numa_groups"] == {"0": [0, 2], "1": [1, 3]}
    assert found["nvlink_all_to_all"] is False
    assert found["nics"][0]["name"] == "mlx5_0"
    assert found["nics"][0]["pix_gpus"] == [0]
    assert set(found["gpus"][0]) >= {
        "index",
        "name",
        "uuid",
        "pci_bus_id",
        "memory_total_bytes",
        "compute_capability",
        "numa_node",
    }
    assert found["links"][1] | {"gpu_a": 0, "gpu_b": 2, "link_type": "NV", "nvlink_count": 4} == found["links"][1]
    assert found["source"] == str(table)
    assert (found["hostname"], found["driver_version"], found["warnings"]) == (None, None, [])


def test_standard_input_is_a_file_too() -> None:
    done = topo("--from", "-", "--json", given=TABLE)
    assert json.loads(done.stdout)["nvlink_islands"] == [[0, 2], [1, 3]]


def test_the_tables_show_matrix_islands_numa_nodes_and_nics(table: Path) -> None:
    lines = topo("--from", str(table)).stdout.splitlines()
    assert any(line.split() == ["GPU0", "X", "SYS", "NV4", "SYS", "PIX"] for line in lines)
    assert "Island: GPU 0,2, each pair linked, 4 links a pair" in lines
    assert "NUMA 1: GPU 1,3" in lines
    assert any(line.split() == ["NIC0", "mlx5_0", "PIX", "0"] for line in lines)


@pytest.mark.parametrize("columns", [80, 100])
@pytest.mark.parametrize("how", [(), ("--tree",)])
def test_sixteen_gpus_fit_the_terminal_without_colour(how: tuple[str, ...], columns: int) -> None:
    rows = ["\t" + "\t".join(f"GPU{number}" for number in range(16))]
    rows += [f"GPU{a}\t" + "\t".join(" X " if a == b else "NV6" for b in range(16)) for a in range(16)]
    done = topo("--from", "-", *how, given="\n".join(rows), columns=columns)
    assert done.returncode == 0
    assert max(len(line) for line in done.stdout.splitlines()) <= columns
    assert "\x1b" not in done.stdout
    assert "15" in done.stdout


def test_the_tree_puts_devices_below_their_numa_node_and_switch(table: Path) -> None:
    lines = topo("--from", str(table), "--tree").stdout.splitlines()
    numa = next(number for number, line in enumerate(lines) if "NUMA 0" in line)
    below = "\n".join(lines[numa : numa + 5])
    assert "PCIe switch" in below
    assert "mlx5_0" in below
    assert "GPU 1" not in below


def test_a_machine_can_be_drawn_and_saved_as_a_profile(tmp_path: Path) -> None:
    picture, mine = tmp_path / "mine.svg", tmp_path / "mine.json"
    done = topo("--profile", "dgx-h100", "--gpus", "4", "--svg", str(picture), "--save", str(mine))
    assert done.returncode == 0, done.stderr
    assert picture.read_text().startswith("<svg")
    again = json.loads(topo("--profile", str(mine), "--json").stdout)
    assert [gpu["index"] for gpu in again["gpus"]] == [0, 1, 2, 3]
    assert again["nvlink_all_to_all"] is True


def test_the_verdict_on_the_links_names_the_threshold_that_was_given() -> None:
    lines = " ".join(topo("--profile", "dgx-h100", "--fast-node", "900").stdout.split())
    assert "Links in the node: slow, 450 GB/s" in lines
    assert "fast from 900 GB/s" in lines
    assert "Network: fast, " in lines


def test_a_machine_whose_gpus_nobody_knows_cannot_be_saved(table: Path, tmp_path: Path) -> None:
    done = topo("--from", str(table), "--save", str(tmp_path / "mine.json"))
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "mine.json").exists()


def test_warnings_go_to_standard_error_and_into_the_json() -> None:
    cut = "\n".join(TABLE.splitlines()[:3])
    done = topo("--from", "-", given=cut)
    assert "warning: the table is cut" in done.stderr
    assert "warning" not in done.stdout
    assert json.loads(topo("--from", "-", "--json", given=cut).stdout)["warnings"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--from", "/no/such/file"), "cannot read /no/such/file"),
        (("--from", "-"), "standard input holds no topology"),
        (("--from", "x", "--profile", "y"), "both name a machine"),
        (("--profile", "no-such-machine"), "no-such-machine"),
    ],
)
def test_bad_input_ends_with_status_2_and_a_hint_but_no_traceback(arguments: tuple[str, ...], says: str) -> None:
    done = topo(*arguments, given="hello")
    assert done.returncode == 2
    assert says in done.stderr
    assert "hint:" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_neither_torch_nor_the_driver_is_touched_for_a_capture(table: Path) -> None:
    code = (
        "import sys\nfrom paraplan.cli.main import app\n"
        f"try:\n    app(['topo', '--from', {str(table)!r}, '--json'])\nexcept SystemExit:\n    pass\n"
        "print([name for name in ('torch', 'pynvml', 'numpy') if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    assert done.stderr.strip() == "[]"
