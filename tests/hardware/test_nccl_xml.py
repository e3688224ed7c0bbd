"""NCCL's topology XML: trees, links through switches, NICs, and files that mean harm."""

from __future__ import annotations

import pytest

from paraplan.errors import TopologyError
from paraplan.hardware.readers.any_text import read_topology
from paraplan.hardware.readers.nccl_xml import cpus_of_mask
from paraplan.hardware.topology import LinkType, NodeTopology


def read(text: str) -> NodeTopology:
    return read_topology(text, source="test")


def gpu(number: int, links: str = "", *, sm: int = 80, dev: int | None = None) -> str:
    return (
        f'<pci busid="0000:{number + 16:02x}:00.0" class="0x030200" link_speed="16 GT/s" link_width="16">'
        f'<gpu dev="{number if dev is None else dev}" sm="{sm}" rank="{number}" gdr="1">{links}</gpu></pci>'
    )


def nic(number: int, name: str, *, speed: int = 200000) -> str:
    return (
        f'<pci busid="0000:{number + 160:02x}:00.0" class="0x020700"><nic>'
        f'<net name="{name}" dev="{number}" speed="{speed}" port="1" gdr="1"/></nic></pci>'
    )


def switch(number: int, *inside: str) -> str:
    return f'<pci busid="0000:{number:02x}:00.0" class="0x060400">{"".join(inside)}</pci>'


def cpu(numa: int | str, *inside: str, mask: str = "0000ffff") -> str:
    return f'<cpu numaid="{numa}" affinity="{mask}" arch="x86_64">{"".join(inside)}</cpu>'


def system(*cpus: str) -> str:
    return f'<?xml version="1.0"?>\n<!-- made for a test -->\n<system version="1">{"".join(cpus)}</system>'


NVSWITCH = "".join(f'<nvlink target="0000:{bus}:00.0" count="6" tclass="0x068000"/>' for bus in ("c4", "c5"))


def test_gpus_behind_nvswitches_are_joined_by_all_their_links() -> None:
    node = read(system(cpu(0, gpu(0, NVSWITCH), gpu(1, NVSWITCH)), cpu(1, gpu(2, NVSWITCH))))
    assert node.nvlink_all_to_all
    assert {link.nvlink_count for link in node.links} == {12}
    assert {link.bandwidth_bytes_per_s for link in node.links} == {300e9}
    assert node.numa_groups == {0: [0, 1], 1: [2]}
    assert node.gpus[0].cpu_affinity == "0-15"
    assert node.gpus[0].compute_capability == "8.0"


def test_direct_links_join_the_gpus_that_they_name_by_bus_id() -> None:
    bridge = '<nvlink target="0000:12:00.0" count="4" tclass="0x030200"/>'
    node = read(system(cpu(0, gpu(0, bridge, sm=86), gpu(1, sm=86)), cpu(1, gpu(2, sm=86))))
    assert node.nvlink_islands == [[0, 2]]
    assert node.link(0, 2).nvlink_count == 4  # type: ignore[union-attr]
    assert node.link(0, 1).link_type is LinkType.PHB  # type: ignore[union-attr]
    assert node.link(1, 2).link_type is LinkType.SYS  # type: ignore[union-attr]


def test_links_to_itself_to_the_cpu_and_to_strangers_join_nothing() -> None:
    itself = '<nvlink target="0000:10:00.0" count="12" tclass="0x030200"/>'
    to_cpu = '<nvlink target="0004:04:00.0" count="3" tclass="0x068001"/>'
    stranger = '<nvlink target="0000:bd:00.0" count="4" tclass="0x030000"/>'
    node = read(system(cpu(0, gpu(0, itself), gpu(1, to_cpu), gpu(2, stranger))))
    assert node.nvlink_islands == []
    assert node.gpus[1].nvlink_to_cpu_count == 3
    assert any("itself" in warning for warning in node.warnings)
    assert any("0000:bd:00.0" in warning for warning in node.warnings)


def test_the_pci_tree_tells_one_switch_from_several_and_from_the_cpu() -> None:
    inner = switch(2, gpu(0), nic(0, "mlx5_0")), switch(3, gpu(1))
    node = read(system(cpu(0, switch(1, *inner), switch(4, gpu(2))), cpu(1, nic(1, "mlx5_1"))))
    first, second = node.nics
    assert first.gpu_links == {0: LinkType.PIX, 1: LinkType.PXB, 2: LinkType.PHB}
    assert set(second.gpu_links.values()) == {LinkType.SYS}
    assert first.nic_links == {"mlx5_1": LinkType.SYS}
    assert first.rate_bytes_per_s == 25e9
    assert node.link(0, 1).link_type is LinkType.PXB  # type: ignore[union-attr]


def test_a_file_of_a_cloud_image_has_gpus_but_says_nothing_of_their_links() -> None:
    plain = '<pci busid="0000:10:1c.0" class="0x030200"/><pci busid="0000:10:1d.0" class="0x030200"/>'
    efa = '<pci busid="0000:10:1b.0" class="0x020000"/>'
    node = read(system(cpu(0, switch(1, plain, efa)), cpu(1, switch(2, plain.replace(":10:", ":20:")))))
    assert len(node.gpus) == 4
    assert node.links == ()
    assert any("NVLinks are not in it" in warning for warning in node.warnings)
    assert node.nics[0].pix_gpus == [0, 1]


def test_devices_without_a_class_are_gpus_where_their_bus_ids_are_in_a_row() -> None:
    slots = "".join(f'<pci busid="0000:00:{slot:02x}.0"/>' for slot in (22, 23, 24, 31))
    node = read(system(cpu(0, slots)))
    assert [one.pci_bus_id for one in node.gpus] == ["0000:00:16.0", "0000:00:17.0", "0000:00:18.0"]
    assert [one.name for one in node.nics] == ["0000:00:1f.0"]
    assert any("does not say" in warning for warning in node.warnings)


def test_xgmi_links_are_those_of_amd() -> None:
    def amd(number: int, target: int) -> str:
        link = f'<xgmi target="0000:{target + 16:02x}:00.0" count="2" tclass="0x038000"/>'
        return (
            f'<pci busid="0000:{number + 16:02x}:00.0" class="0x038000">'
            f'<gpu dev="{number}" sm="110" gcn="90a" rank="{number}" gdr="1">{link}</gpu></pci>'
        )

    node = read(system(cpu(0, amd(0, 1), amd(1, 0))))
    assert node.link(0, 1).link_type is LinkType.XGMI  # type: ignore[union-attr]
    assert node.link(0, 1).bandwidth_bytes_per_s == 100e9  # type: ignore[union-attr]
    assert node.gpus[0].compute_capability is None


def test_gpus_are_numbered_as_the_file_numbers_them() -> None:
    node = read(system(cpu(0, gpu(0, dev=3), gpu(1, dev=1))))
    assert [(one.index, one.pci_bus_id) for one in node.gpus] == [(1, "0000:11:00.0"), (3, "0000:10:00.0")]


def test_two_ports_of_one_name_are_told_apart_by_their_number() -> None:
    ports = "".join(f'<net name="mlx5_0" speed="100000" port="{port}"/>' for port in (1, 2))
    node = read(system(cpu(0, gpu(0), f'<pci busid="0000:a0:00.0" class="0x020000"><nic>{ports}</nic></pci>')))
    assert [one.name for one in node.nics] == ["mlx5_0", "mlx5_0:2"]


def test_unknown_numa_nodes_and_impossible_speeds_are_none() -> None:
    node = read(system(cpu(-1, gpu(0), nic(0, "cxi0", speed=200_000_000))))
    assert node.gpus[0].numa_node is None
    assert node.nics[0].rate_bytes_per_s is None
    assert any("cxi0" in warning for warning in node.warnings)


def test_a_file_that_breaks_off_gives_what_was_there_and_a_warning() -> None:
    text = system(cpu(0, gpu(0), gpu(1)), cpu(1, gpu(2)))
    node = read(text[: text.rindex("<gpu") - 3])
    assert [one.index for one in node.gpus] == [0, 1]
    assert any("breaks off" in warning for warning in node.warnings)


BOMB = (
    '<?xml version="1.0"?><!DOCTYPE system [<!ENTITY a "ha"><!ENTITY b "&a;&a;&a;&a;&a;&a;&a;&a;">'
    '<!ENTITY c "&b;&b;&b;&b;&b;&b;&b;&b;">]><system version="1"><cpu numaid="&c;"/></system>'
)


@pytest.mark.parametrize(
    "text",
    [
        BOMB,
        '<!DOCTYPE system SYSTEM "file:///etc/hostname"><system/>',
        '<!DOCTYPE s [<!ENTITY x SYSTEM "file:///etc/hostname">]><system><cpu numaid="0">&x;</cpu></system>',
        '<!DOCTYPE s [<!ENTITY % p "x">]><system/>',
    ],
)
def test_document_types_and_entities_are_refused(text: str) -> None:
    with pytest.raises(TopologyError, match="document type or entities"):
        read(text)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("<html><body>not here</body></html>", "no NCCL topology"),
        ("<graphs version='1'><graph id='0'/></graphs>", "no NCCL topology"),
        (system(cpu(0)), "0 GPUs"),
        ("<system", "no XML"),
        ("<pci>" * 2000, "levels"),
        ("<system>" + "<pci/>" * 60_000 + "</system>", "elements"),
        (f'<system a="{"x" * 5000}"/>', "characters"),
    ],
)
def test_other_xml_is_an_error_that_says_why(text: str, says: str) -> None:
    with pytest.raises(TopologyError, match=says):
        read(text)


@pytest.mark.parametrize(
    ("mask", "cpus"),
    [
        ("00000000,00ffffff", "0-23"),
        ("ff,00000000,000000f1", "0,4-7,64-71"),
        ("0", None),
        ("", None),
        ("xyz", None),
        ("80000000", "31"),
    ],
)
def test_masks_become_ranges_of_cpus(mask: str, cpus: str | None) -> None:
    assert cpus_of_mask(mask) == cpus
