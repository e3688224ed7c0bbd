"""Which reader a text is for, files that cannot be read, and our own JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from smi_tables import bridged_pairs, switched

from paraplan.errors import TopologyError
from paraplan.hardware.readers.any_text import read_topology, read_topology_file


def report() -> dict[str, Any]:
    return read_topology(bridged_pairs().with_tabs(), source="a table").to_report()


def test_a_report_reads_back_as_the_machine_that_it_describes() -> None:
    node = read_topology(bridged_pairs().with_tabs(), source="a table")
    assert read_topology(json.dumps(node.to_report()), source="a report") == node


def test_the_names_of_files_do_not_matter(tmp_path: Path) -> None:
    for name, encoding in (("table.xml", "utf-8"), ("table.json", "utf-16"), ("x", "utf-8-sig")):
        (tmp_path / name).write_text(switched(4).with_spaces(), encoding=encoding)
        assert read_topology_file(tmp_path / name).nvlink_all_to_all


def test_a_table_copied_from_a_page_may_keep_its_tags() -> None:
    node = read_topology(f"<pre><code>{bridged_pairs().with_tabs()}</code></pre>", source="page")
    assert node.nvlink_islands == [[0, 3], [1, 2]]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"gpus": []}, "indices"),
        ({"gpus": [{"index": 0}, {"index": 0}]}, "repeated"),
        ({"gpus": [{"index": "GPU0"}]}, "field gpus.0.index"),
        ({"gpus": [{"index": 0, "memory_total_bytes": "80 GB"}]}, "field gpus.0.memory_total_bytes"),
        ({"surprise": 1}, "field surprise"),
        ({"links": [{"gpu_a": 0, "gpu_b": 9, "link_type": "NV"}]}, "not listed"),
        ({"links": [{"gpu_a": 1, "gpu_b": 0, "link_type": "NV"}]}, "not in order"),
        ({"links": [{"gpu_a": 0, "gpu_b": 1, "link_type": "FAST"}]}, "field links.0.link_type"),
        ({"nics": [3]}, "field nics.0"),
    ],
)
def test_wrong_fields_of_a_report_are_named(change: dict[str, Any], says: str) -> None:
    with pytest.raises(TopologyError, match=says):
        read_topology(json.dumps(report() | change), source="report")


@pytest.mark.parametrize(
    "text", ["{", "[1,", '{"a": NaN', "[" * 100_000, '{"a": ' + "9" * 5000 + "}", "{}", "[{}]", "[[]]"]
)
def test_broken_and_empty_json_is_an_error(text: str) -> None:
    with pytest.raises(TopologyError, match="JSON"):
        read_topology(text, source="file.json")


def test_a_machine_profile_is_told_apart_from_a_report() -> None:
    with pytest.raises(TopologyError) as caught:
        read_topology('{"name": "x", "gpu": "a100", "node": {"gpus": 8}}', source="mine.json")
    assert "--profile mine.json" in (caught.value.hint or "")


def test_missing_files_folders_and_empty_files_are_errors_in_words(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text(" \n\t\n")
    for path, says in (
        (tmp_path / "missing", "No such file"),
        (tmp_path, "Is a directory"),
        (tmp_path / "empty", "is empty"),
    ):
        with pytest.raises(TopologyError, match=says):
            read_topology_file(path)


def test_a_file_of_many_megabytes_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "huge").open("wb") as file:
        file.truncate(64 * 2**20)
    with pytest.raises(TopologyError, match="at most"):
        read_topology_file(tmp_path / "huge")
