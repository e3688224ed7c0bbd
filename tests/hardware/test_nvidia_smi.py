"""Link matrices in all the forms in which people paste them."""

from __future__ import annotations

import re

import pytest
from smi_tables import SmiTable, bridged_pairs, switched

from paraplan.errors import TopologyError
from paraplan.hardware.readers.nvidia_smi import read_nvidia_smi
from paraplan.hardware.topology import LinkType, NodeTopology


def read(text: str) -> NodeTopology:
    return read_nvidia_smi(text, source="test")


def words(node: NodeTopology) -> dict[tuple[int, int], str]:
    return {(link.gpu_a, link.gpu_b): f"{link.link_type}{link.nvlink_count or ''}" for link in node.links}


BRIDGED = {(0, 1): "NODE", (0, 2): "SYS", (0, 3): "NV4", (1, 2): "NV4", (1, 3): "SYS", (2, 3): "NODE"}


def assert_bridged(node: NodeTopology, *, numa: bool = True, nics: bool = True) -> None:
    assert words(node) == BRIDGED
    assert node.nvlink_islands == [[0, 3], [1, 2]]
    assert not node.nvlink_all_to_all
    if numa:
        assert node.numa_groups == {0: [0, 1], 1: [2, 3]}
        assert [gpu.cpu_affinity for gpu in node.gpus] == ["0-9,20-29"] * 2 + ["10-19,30-39"] * 2
    if nics:
        assert [nic.pix_gpus for nic in node.nics] == [[0], []]
        assert node.nics[1].gpu_links[3] is LinkType.PXB


@pytest.mark.parametrize("text", [bridged_pairs().with_tabs(), bridged_pairs().with_spaces()])
def test_tabs_and_spaces_read_alike(text: str) -> None:
    node = read(text)
    assert_bridged(node)
    assert node.warnings == ()


@pytest.mark.parametrize("tabs", [True, False])
@pytest.mark.parametrize("mark", ["    ", "# ", "//  ", "> ", "\t", ";; ", "* "])
def test_indentation_and_comment_marks_do_not_matter(mark: str, tabs: bool) -> None:
    text = bridged_pairs().with_tabs() if tabs else bridged_pairs().with_spaces()
    assert_bridged(read("\n".join(mark + line for line in text.splitlines())))


def test_the_time_and_name_that_a_log_puts_before_each_line_do_not_matter() -> None:
    for text in (bridged_pairs().with_tabs(), bridged_pairs().with_spaces()):
        assert_bridged(read("\n".join("2024-05-01 12:00:00 INFO | " + line for line in text.splitlines())))


def test_where_blanks_were_squeezed_a_lone_number_is_the_numa_node() -> None:
    table = bridged_pairs()
    table.affinity = [("", "0", "N/A"), ("", "0", "N/A"), ("5", "1", "N/A"), ("5", "1", "N/A")]
    node = read(re.sub(r"[ \t]+", " ", table.with_tabs()))
    assert node.numa_groups == {0: [0, 1], 1: [2, 3]}
    assert [gpu.cpu_affinity for gpu in node.gpus] == [None, None, "5", "5"]


def test_terminal_codes_are_dropped_even_without_their_escape_character() -> None:
    header, rest = bridged_pairs().with_tabs().split("\n", 1)
    for start, end in (("\x1b[4m", "\x1b[0m"), ("[4m", "[0m"), ("^[[4m", "^[[0m")):
        assert_bridged(read("\t" + start + header.lstrip("\t") + end + "\n" + rest))


def test_a_header_that_lost_its_indentation_is_still_the_header() -> None:
    for text in (bridged_pairs().with_tabs(), bridged_pairs().with_spaces()):
        assert_bridged(read(text.lstrip()))


def test_without_a_header_the_diagonal_names_the_columns() -> None:
    for text in (bridged_pairs().with_tabs(), bridged_pairs().with_spaces()):
        node = read(text.split("\n", 1)[1])
        assert_bridged(node)
        assert any("no header" in warning for warning in node.warnings)


def test_columns_glued_together_are_told_apart() -> None:
    text = bridged_pairs().with_tabs()
    assert_bridged(read(text.replace("NODE\tSYS\tNV4\tPIX", "NODESYS\tNV4PIX")))
    header, rest = text.split("\n", 1)
    assert_bridged(read(header.replace("\tGPU", "GPU").replace("\tNIC0", "NIC0") + "\n" + rest))


def test_cpu_and_numa_columns_glued_together_are_told_apart_by_the_width_of_the_ranges() -> None:
    text = bridged_pairs().with_spaces().replace("0-9,20-29       0", "0-9,20-290")
    assert_bridged(read(text))


def test_blank_lines_between_rows_do_not_end_the_table() -> None:
    assert_bridged(read(bridged_pairs().with_spaces().replace("\n", "\n\n")))


def test_windows_line_ends_and_fences_are_no_part_of_the_table() -> None:
    text = "```\n$ nvidia-smi topo -m\n" + bridged_pairs().with_tabs() + "```\n"
    assert_bridged(read(text.replace("\n", "\r\n")))


def test_a_markdown_table_is_a_table() -> None:
    table = bridged_pairs()
    names = ["GPU", *table.labels(), "CPU Affinity", "NUMA Affinity", "GPU NUMA ID"]
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    for number, (label, row) in enumerate(zip(table.labels(), table.rows(), strict=True)):
        affinity = table.affinity[number] if number < 4 else ("", "", "")
        lines.append("| " + " | ".join([f"**{label}**", *row, *affinity]) + " |")
    assert_bridged(read("\n".join(lines)))


def test_rows_that_a_narrow_terminal_wrapped_are_joined_again() -> None:
    lines = switched(8, nics=8).table_with_spaces().splitlines()
    wrapped = "\n".join(line[start : start + 80] for line in lines for start in range(0, len(line), 80))
    node = read(wrapped)
    assert node.nvlink_all_to_all
    assert len(node.gpus) == 8
    assert [nic.pix_gpus for nic in node.nics] == [[number] for number in range(8)]


def test_soc_of_old_drivers_is_sys() -> None:
    text = bridged_pairs(numa=False).with_tabs().replace("SYS", "SOC")
    assert_bridged(read(text), numa=False)


def test_affinity_may_be_missing_empty_a_list_or_typed_by_hand() -> None:
    table = bridged_pairs(numa=False)
    assert [gpu.numa_node for gpu in read(table.with_spaces()).gpus] == [None] * 4
    empty = bridged_pairs()
    empty.affinity = [("", "0", "N/A"), ("5", "0", "N/A"), ("0,2,4-6", "1,18-33", "N/A"), ("", "N/A", "N/A")]
    for text in (empty.with_tabs(), empty.with_spaces()):
        node = read(text)
        assert [gpu.cpu_affinity for gpu in node.gpus] == [None, "5", "0,2,4-6", None]
        assert [gpu.numa_node for gpu in node.gpus] == [0, 0, 1, None]
    by_hand = [
        line + f"    NUMA {number // 2}" if line.startswith("GPU") else line
        for number, line in enumerate(table.table_with_spaces().splitlines(), start=-1)
    ]
    assert read("\n".join(by_hand)).numa_groups == {0: [0, 1], 1: [2, 3]}


def test_the_numa_node_that_gpu_memory_forms_is_kept_apart() -> None:
    table = SmiTable([["X", "NV6"], ["NV6", "X"]], [], [("0-71", "0,2-9", "10"), ("72-143", "1,11-18", "19")])
    for text in (table.with_tabs(), table.with_spaces()):
        node = read(text)
        assert [gpu.numa_node for gpu in node.gpus] == [0, 1]
        assert [gpu.memory_numa_node for gpu in node.gpus] == [10, 19]


def test_the_legend_names_the_nics() -> None:
    text = bridged_pairs().with_tabs() + "\nNIC Legend:\n\n  NIC0: mlx5_3\n  NIC1: rocep49s0\n"
    assert [nic.name for nic in read(text).nics] == ["mlx5_3", "rocep49s0"]
    assert read(text).nics[0].nic_links == {"rocep49s0": LinkType.NODE}


def test_old_tables_name_their_nics_in_the_header() -> None:
    text = bridged_pairs().with_spaces().replace("NIC0  ", "mlx5_0").replace("NIC1  ", "mlx4_1")
    assert [nic.name for nic in read(text).nics] == ["mlx5_0", "mlx4_1"]
    assert_bridged(read(text))


def test_rows_that_were_cut_are_known_from_the_columns_of_the_others() -> None:
    lines = bridged_pairs().with_spaces().splitlines()
    node = read("\n".join(lines[:4]))
    assert len(node.gpus) == 4
    assert words(node) == BRIDGED
    assert any("no row for GPU3" in warning for warning in node.warnings)


def test_a_word_that_lost_its_end_is_read_from_the_other_side_of_the_diagonal() -> None:
    table = switched(8).table_with_spaces()
    last = table.splitlines()[-1]
    cut = table.replace(last, last[: last.rindex("NV18") + 3])
    assert cut.rstrip().endswith("NV1")
    assert {link.nvlink_count for link in read(cut).links} == {18}


def test_links_through_a_switch_are_inferred_for_rows_that_were_cut() -> None:
    lines = switched(16, links=6).with_spaces().splitlines()
    node = read("\n".join(lines[:3]))
    assert len(node.gpus) == 16
    assert node.nvlink_all_to_all
    assert any("inferred" in warning for warning in node.warnings)


def test_nothing_is_inferred_for_gpus_with_few_direct_links() -> None:
    lines = bridged_pairs().with_spaces().splitlines()
    node = read("\n".join(lines[:2]))
    assert words(node) == {(0, 1): "NODE", (0, 2): "SYS", (0, 3): "NV4"}
    assert node.nvlink_islands == [[0, 3]]


def test_a_row_that_slipped_by_a_column_is_read_from_the_other_rows() -> None:
    text = bridged_pairs().with_tabs().replace("GPU1\tNODE\t X ", "GPU1\tNODE\tNODE\t X ")
    node = read(text)
    assert_bridged(node, numa=False)
    assert any("GPU1 is shifted" in warning for warning in node.warnings)


def test_two_cells_that_contradict_each_other_give_the_slower_link_and_a_warning() -> None:
    text = bridged_pairs().with_tabs().replace("GPU3\tNV4", "GPU3\tNV2")
    node = read(text)
    assert words(node)[0, 3] == "NV2"
    assert any("GPU0 and GPU3" in warning for warning in node.warnings)


def test_the_names_of_a_listing_above_the_table_give_the_bandwidth_of_the_links() -> None:
    listing = "\n".join(f"GPU {number}: NVIDIA RTX A6000 (UUID: GPU-0123{number}-aa)" for number in range(4))
    node = read(listing + "\n" + bridged_pairs().with_tabs())
    assert {gpu.name for gpu in node.gpus} == {"NVIDIA RTX A6000"}
    link = node.link(0, 3)
    assert link is not None
    assert link.bandwidth_bytes_per_s == pytest.approx(4 * 14.0625e9)
    assert node.link(0, 1).bandwidth_bytes_per_s is None  # type: ignore[union-attr]


def test_mig_slices_are_read_from_the_listing() -> None:
    text = (
        "GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-00000000-1111-0000-0000-000000000000)\n"
        "  MIG 3g.40gb     Device  0: (UUID: MIG-1)\n  MIG 1g.10gb     Device  1: (UUID: MIG-2)\n"
        "\tGPU0\tCPU Affinity\nGPU0\t X \t0-7\n"
    )
    (gpu,) = read(text).gpus
    assert gpu.mig_enabled
    assert [(one.name, one.uuid) for one in gpu.mig_instances] == [("3g.40gb", "MIG-1"), ("1g.10gb", "MIG-2")]


def test_peer_access_keeps_the_kind_that_the_command_line_names() -> None:
    text = "$ nvidia-smi topo -p2p r\n \tGPU0\tGPU1\t\n GPU0\tX\tGNS\t\n GPU1\tGNS\tX\t\n"
    node = read(text)
    (pair,) = node.peer_access
    assert pair.read == "GNS"
    assert pair.is_allowed is False
    assert node.links == ()


def test_peer_access_beside_a_link_matrix_belongs_to_the_same_machine() -> None:
    peers = "\n \tGPU0\tGPU1\tGPU2\tGPU3\n" + "\n".join(
        f" GPU{a}\t" + "\t".join("X" if a == b else "OK" if a + b == 3 else "CNS" for b in range(4)) for a in range(4)
    )
    node = read(bridged_pairs().with_tabs() + peers)
    assert_bridged(node)
    assert {(pair.gpu_a, pair.gpu_b) for pair in node.peer_access if pair.is_allowed} == {(0, 3), (1, 2)}


def test_nvlink_status_counts_active_links() -> None:
    text = (
        "GPU 0: Tesla V100-SXM2-32GB (UUID: GPU-0aaa-1)\n\t Link 0: 25.781 GB/s\n\t Link 1: <inactive>\n"
        "GPU 1: Tesla V100-SXM2-32GB (UUID: GPU-<masked>)\n"
        "NVML: Unable to retrieve NVLink information as all links are inActive\n"
    )
    node = read(text)
    assert [gpu.nvlink_count for gpu in node.gpus] == [1, 0]
    assert [gpu.uuid for gpu in node.gpus] == ["GPU-0aaa-1", None]


def test_another_makers_links_and_diagonal_are_understood() -> None:
    text = bridged_pairs().with_tabs().replace("NV4", "MX").replace(" X ", "LOC")
    node = read(text)
    assert node.nvlink_islands == [[0, 3], [1, 2]]
    assert node.link(0, 3).link_type is LinkType.MX  # type: ignore[union-attr]


@pytest.mark.parametrize("text", ["", "hello", "GPU", "| Name | Memory |", "X = Self", "{}", "SYS NODE PIX"])
def test_a_text_without_a_table_is_an_error_that_says_what_to_give(text: str) -> None:
    with pytest.raises(TopologyError) as caught:
        read(text)
    assert "nvidia-smi topo -m" in (caught.value.hint or "")


def test_prose_around_the_table_is_no_row() -> None:
    prose = "We saw that GPU0 is slow (SYS is bad).\nMy box has 2 GPUs.\n"
    node = read(prose + bridged_pairs().with_tabs() + "\nGPU0 was fine after a reset, NIC0 too.\n")
    assert_bridged(node)


def test_every_prefix_of_a_table_gives_only_links_of_the_whole_table() -> None:
    text = switched(8, nics=2).table_with_spaces()
    for end in range(0, len(text), 7):
        try:
            node = read(text[:end])
        except TopologyError:
            continue
        assert all(link.link_type is LinkType.NV for link in node.links)
        assert len(node.gpus) <= 8
        assert all(re.fullmatch(r"NIC\d?", nic.name) for nic in node.nics)
