from __future__ import annotations

from pathlib import Path

import pytest

from paraplan.launch.ranks.limits import MemoryKills, count_memory_kills, new_memory_kill


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (
            {
                "proc/self/cgroup": "0::/job/7\n",
                "cgroup/job/7/memory.events": "low 0\nhigh 3\nmax 12\noom 2\noom_kill 2\n",
                "proc/vmstat": "nr_free_pages 5\noom_kill 9\n",
            },
            MemoryKills(in_cgroup=2, on_host=9),
        ),
        (
            {"proc/self/cgroup": "0::/host/path/of/a/container\n", "cgroup/memory.events": "oom_kill 1\n"},
            MemoryKills(in_cgroup=1, on_host=None),
        ),
        (
            {
                "proc/self/cgroup": "5:cpu:/\n4:memory:/job\n0::/\n",
                "cgroup/memory/job/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 4\n",
            },
            MemoryKills(in_cgroup=4, on_host=None),
        ),
        ({}, MemoryKills(in_cgroup=None, on_host=None)),
    ],
)
def test_the_kernels_counts_are_read_under_both_kinds_of_cgroups(
    tmp_path: Path, files: dict[str, str], expected: MemoryKills
) -> None:
    write(tmp_path, files)
    assert count_memory_kills(proc=tmp_path / "proc", cgroup=tmp_path / "cgroup") == expected


@pytest.mark.parametrize(
    ("before", "after", "scope"),
    [((1, 5), (2, 6), "cgroup"), ((1, 5), (1, 6), "host"), ((None, 5), (None, 6), "host"), ((1, 5), (1, 5), None)],
)
def test_a_kill_in_the_cgroup_is_told_from_one_elsewhere_on_the_host(
    before: tuple[int | None, int | None], after: tuple[int | None, int | None], scope: str | None
) -> None:
    assert new_memory_kill(MemoryKills(*before), MemoryKills(*after)) == scope


def test_where_nothing_is_counted_nothing_is_claimed() -> None:
    assert new_memory_kill(MemoryKills(None, None), MemoryKills(None, None)) is None
