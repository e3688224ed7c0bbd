from xml.etree import ElementTree as ET

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paraplan.hardware.catalogue.profile_files import list_machines, load_machine
from paraplan.hardware.topology import Gpu, GpuLink, LinkType, Nic, NodeTopology
from paraplan.report.topology_layout import Box, homes_of, lay_out
from paraplan.report.topology_svg import TITLE_HEIGHT, GroupRow, render_svg

SVG = "{http://www.w3.org/2000/svg}"


def parsed(node: NodeTopology) -> ET.Element:
    return ET.fromstring(render_svg(node))  # noqa: S314  # our own text


def texts(node: NodeTopology) -> list[str]:
    return ["".join(element.itertext()) for element in parsed(node).iter(f"{SVG}text")]


def link_paths(node: NodeTopology) -> list[ET.Element]:
    return [path for path in parsed(node).iter(f"{SVG}path") if path.get("class") == "link"]


@pytest.mark.parametrize("name", [machine.name for machine in list_machines()])
def test_every_machine_is_drawn_with_all_its_gpus_and_nics(name: str) -> None:
    node = load_machine(name).node
    shown = texts(node)
    for gpu in node.gpus:
        assert shown.count(f"GPU {gpu.index}") == 1
    for nic in node.nics:
        assert nic.name in shown


def test_boxes_lie_inside_the_picture_and_apart() -> None:
    for name in ("dgx-2", "dgx-a100", "aws-p5-48xlarge", "oci-bm-gpu-h100-8", "gh200", "p40-x8"):
        layout = lay_out(load_machine(name).node, top=TITLE_HEIGHT)
        boxes = [*layout.gpus.values(), *layout.switches, *layout.hosts, *(box for box, _ in layout.nics)]
        assert all(box.x >= 0 and box.x + box.width <= layout.width and box.bottom <= layout.height for box in boxes)
        assert not [
            (one, other) for place, one in enumerate(boxes) for other in boxes[place + 1 :] if overlap(one, other)
        ]


def test_a_rack_under_one_fabric_stands_in_rows_with_its_groups() -> None:
    node = load_machine("gb200-nvl72").node
    layout = lay_out(node, top=TITLE_HEIGHT, above=44)
    boxes = list(layout.gpus.values())
    assert layout.width < 1280
    assert layout.height < 900
    assert len(boxes) == 72
    assert all(box.x >= 0 and box.x + box.width <= layout.width and box.bottom <= layout.height for box in boxes)
    taller = [box._replace(y=box.y - 44, height=box.height + 44) for box in boxes]  # with the groups above
    assert not [
        (one, other) for place, one in enumerate(taller) for other in taller[place + 1 :] if overlap(one, other)
    ]
    drawn = render_svg(node, groups=(GroupRow("dp", {gpu.index: gpu.index // 8 for gpu in node.gpus}),))
    assert drawn.count("dp group 8<") == 8


def overlap(one: Box, other: Box) -> bool:
    beside = one.x + one.width <= other.x or other.x + other.width <= one.x
    return not (beside or one.bottom <= other.y or other.bottom <= one.y)


def test_more_nvlinks_are_drawn_wider() -> None:
    widths = {float(path.get("stroke-width", "0")) for path in link_paths(load_machine("dgx-1").node)}
    assert len(widths) == 2
    assert max(widths) > 1.5 * min(widths)


def test_an_nvswitch_is_one_bar_and_bridges_are_arcs() -> None:
    assert any("NVSwitch" in text and "NV18" in text for text in texts(load_machine("dgx-h100").node))
    crossed = load_machine("rtx-3090-x4-crossed").node
    assert texts(crossed).count("NV4") == 2
    assert not any("NVSwitch" in text for text in texts(crossed))
    assert any("xGMI between all pairs" in text for text in texts(load_machine("mi300x-x8").node))


def test_links_over_pcie_are_told_below() -> None:
    assert "GPUs over PCIe: PIX (4 pairs), NODE (8 pairs), SYS (16 pairs)" in texts(load_machine("l40s-x8").node)


def test_mixed_kinds_are_named_in_their_boxes() -> None:
    node = NodeTopology(
        source="a <file> & more",
        gpus=(Gpu(index=0, name="NVIDIA RTX A6000", numa_node=0), Gpu(index=1, name="NVIDIA A40")),
        warnings=("row 3 is cut", "another"),
    )
    shown = texts(node)
    assert "RTX A6000" in shown
    assert "2 GPUs of 2 kinds" in shown
    assert "a <file> & more" in shown
    assert "Warning: row 3 is cut (and 1 more warnings)" in shown


def test_a_nic_of_unknown_numa_node_stands_with_the_gpus_that_it_reaches_within_a_socket() -> None:
    gpus = (Gpu(index=0, numa_node=0), Gpu(index=1, numa_node=1))
    nic = Nic(name="mlx5_0", gpu_links={0: LinkType.SYS, 1: LinkType.NODE})
    homes = homes_of(NodeTopology(source="test", gpus=gpus, nics=(nic,)))
    assert [(home.numa_node, [each.name for each in home.nics]) for home in homes] == [(0, []), (1, ["mlx5_0"])]


def test_a_page_may_be_light_or_dark() -> None:
    assert "prefers-color-scheme:dark" in render_svg(load_machine("cpu").node)


@st.composite
def nodes(draw: st.DrawFn) -> NodeTopology:
    count = draw(st.integers(0, 16))
    numa = st.one_of(st.none(), st.integers(0, 3))
    pairs = [(low, high) for low in range(count) for high in range(low + 1, count)]
    links = draw(st.dictionaries(st.sampled_from(pairs), st.sampled_from(list(LinkType)))) if pairs else {}
    nics = tuple(
        Nic(
            name=f"nic{number}",
            rate_bytes_per_s=draw(st.sampled_from([None, 25e9])),
            numa_node=draw(numa),
            gpu_links=draw(st.dictionaries(st.integers(0, count - 1), st.sampled_from(list(LinkType))))
            if count
            else {},
        )
        for number in range(draw(st.integers(0, 6)))
    )
    return NodeTopology(
        source=draw(st.text(max_size=20)),
        hostname=draw(st.one_of(st.none(), st.text(max_size=300))),
        gpus=tuple(
            Gpu(index=index, name=draw(st.one_of(st.none(), st.text(max_size=40))), numa_node=draw(numa))
            for index in range(count)
        ),
        links=tuple(
            GpuLink(
                gpu_a=low,
                gpu_b=high,
                link_type=kind,
                nvlink_count=draw(st.sampled_from([None, 1, 18])) if kind.is_fast else None,
            )
            for (low, high), kind in links.items()
        ),
        nics=nics,
    )


def test_characters_that_are_no_xml_are_left_out() -> None:
    assert "one two" in texts(NodeTopology(source="\x00one\ufffe t\ud800wo\uffff\x1b"))


@given(nodes())
@settings(max_examples=30, deadline=None)
def test_any_machine_is_drawn_as_well_formed_xml(node: NodeTopology) -> None:
    shown = texts(node)
    assert all(shown.count(f"GPU {gpu.index}") >= 1 for gpu in node.gpus)
    assert all(nic.name in shown for nic in node.nics)
