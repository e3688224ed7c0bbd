from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paraplan.hardware.topology import Gpu
from paraplan.launch.preflight import check_cores
from paraplan.launch.ranks.limits import cpus_of_ranks, machine_cores, parse_cpus, threads_per_rank, usable_cores


@given(cores=st.integers(1, 512), ranks=st.integers(1, 64))
def test_ranks_never_get_more_threads_than_there_are_cores_unless_each_has_one(cores: int, ranks: int) -> None:
    threads = threads_per_rank(num_cores=cores, ranks_per_node=ranks)
    assert threads >= 1
    assert threads == 1 or threads * ranks <= cores


def test_hardware_threads_of_one_core_count_once(tmp_path: Path) -> None:
    for cpu in os.sched_getaffinity(0):
        folder = tmp_path / "cpus" / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text("0-1023\n")
    assert usable_cores(cpu_folder=tmp_path / "cpus", cgroup=tmp_path) == 1


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"cpu.max": "100000 100000"}, 1),
        ({"cpu.max": "50000 100000"}, 1),
        ({"cpu/cpu.cfs_quota_us": "100000", "cpu/cpu.cfs_period_us": "100000"}, 1),
        ({"cpu.max": "max 100000"}, None),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ({}, None),
    ],
)
def test_a_cpu_quota_limits_the_cores(tmp_path: Path, files: dict[str, str], cores: int | None) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    expected = cores if cores is not None else len(os.sched_getaffinity(0))
    assert usable_cores(cpu_folder=tmp_path / "none", cgroup=tmp_path) == expected


def test_ranks_that_outnumber_the_cores_they_were_left_are_warned_of() -> None:
    (warning,) = check_cores(8, num_cores=1, of_machine=96, system="slurm").warnings
    assert "8 ranks and what loads their data have 1 of this machine's 96 cores" in warning
    assert "--exclusive" in warning
    assert not check_cores(8, num_cores=8, of_machine=96, system="slurm").warnings
    assert not check_cores(8, num_cores=2, of_machine=2, system=None).warnings  # nobody holds them back
    assert machine_cores() >= usable_cores()


def test_ranks_are_kept_on_the_cpus_next_to_their_gpus_where_these_differ() -> None:
    gpus = [Gpu(index=0, cpu_affinity="0-1,8-9"), Gpu(index=1, cpu_affinity="2-3,10-11")]
    allowed = set(range(10))
    assert cpus_of_ranks(gpus, num_ranks=2, allowed=allowed) == {0: (0, 1, 8, 9), 1: (2, 3)}
    assert cpus_of_ranks(gpus[:1], num_ranks=1, allowed=allowed) == {}
    assert cpus_of_ranks([Gpu(index=0), Gpu(index=1)], num_ranks=2, allowed=allowed) == {}
    assert cpus_of_ranks(gpus, num_ranks=2, allowed={0, 1}) == {}


@pytest.mark.parametrize(("text", "cpus"), [("3", {3}), ("0-2,5", {0, 1, 2, 5}), ("", set()), ("all", set())])
def test_lists_of_cpus_are_read(text: str, cpus: set[int]) -> None:
    assert parse_cpus(text) == cpus
