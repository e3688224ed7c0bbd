"""Bad input by the thousand: a clear error or a partial answer with warnings, never anything else."""

from __future__ import annotations

import json
import random
import time
import tracemalloc
from collections.abc import Iterator
from itertools import chain

import pytest
from case_selection import with_all
from hypothesis import given, settings
from hypothesis import strategies as st
from smi_tables import SmiTable, bridged_pairs, switched

from paraplan.errors import TopologyError
from paraplan.hardware.readers.any_text import decode_text, read_topology
from paraplan.hardware.topology import NodeTopology

ROCM = (
    "======== ROCm System Management Interface ========\n======== Link Type between two GPUs ========\n"
    "       GPU0         GPU1         \nGPU0   0            XGMI         \nGPU1   XGMI         0            \n"
    "GPU[0]\t\t: (Topology) Numa Node: 0\nGPU[1]\t\t: (Topology) Numa Node: 1\n"
)
AMD_SMI = (
    "LINK TYPE TABLE:\n             0000:05:00.0 0000:26:00.0\n0000:05:00.0 SELF         XGMI\n"
    "0000:26:00.0 XGMI         SELF\nLINK METRIC TABLE:\n bdf bit_rate max_bandwidth link_type 05:00.0 26:00.0\n"
    "GPU0 05:00.0 32 Gb/s 512 Gb/s XGMI\n Read N/A 12 KB\n"
)
XML = (
    '<system version="1">\n<cpu numaid="0" affinity="ffff" arch="x86_64">\n'
    '<pci busid="0000:01:00.0" class="0x060400">\n'
    '<pci busid="0000:02:00.0" class="0x030200">\n<gpu dev="0" sm="90" rank="0" gdr="1">\n'
    '<nvlink target="0000:c4:00.0" count="18" tclass="0x068000"/>\n</gpu>\n</pci>\n'
    '<pci busid="0000:03:00.0" class="0x020700">\n<nic><net name="mlx5_0" speed="400000"/></nic>\n</pci>\n</pci>\n'
    '<pci busid="0000:05:00.0" class="0x030200"><gpu dev="1" sm="90"/></pci>\n</cpu>\n</system>\n'
)
LISTING = (
    "GPU 0: NVIDIA H100 (UUID: GPU-aa)\n\t Link 0: 26.562 GB/s\n"
    "GPU 1: NVIDIA H100 (UUID: GPU-bb)\n\t Link 0: <inactive>\n"
)
PEERS = "$ nvidia-smi topo -p2p n\n \tGPU0\tGPU1\t\n GPU0\tX\tOK\t\n GPU1\tOK\tX\t\n"


def documents() -> list[str]:
    """Return a whole text of each format."""
    tables: list[SmiTable] = [bridged_pairs(), bridged_pairs(numa=False), switched(8, nics=10), switched(16, links=6)]
    texts = [form for table in tables for form in (table.with_tabs(), table.with_spaces())]
    report = json.dumps(read_topology(bridged_pairs().with_tabs(), source="x").to_report(), indent=1)
    cards = json.dumps({"card0": {"PCI Bus": "0000:05:00.0"}, "system": {"Driver version": "6"}}, indent=1)
    return [*texts, ROCM, AMD_SMI, XML, LISTING + bridged_pairs().with_tabs(), PEERS, report, cards]


def truncations(text: str) -> Iterator[str]:
    """Yield a text cut after each line and, through all its lines, at each tenth column; large ones less often."""
    lines = text.split("\n")
    some = 3 if "GPU4" in text and not with_all([text]) else 1
    for count in range(0, len(lines), some):
        yield "\n".join(lines[:count])
    for column in range(0, max(map(len, lines)), 10 * some):
        yield "\n".join(line[:column] for line in lines)


def mutations(text: str, dice: random.Random, *, count: int) -> Iterator[str]:
    """Yield a text with pieces dropped, doubled, swapped or overwritten."""
    pieces = [
        "\t",
        " ",
        "\n",
        "GPU0",
        "GPU999",
        "NV18",
        "X",
        "SYS",
        "|",
        "\x1b[4m",
        "<",
        "&x;",
        '"',
        "{",
        "-1",
        "9" * 30,
        "\x00",
    ]
    for _ in range(count):
        changed = text
        for _ in range(dice.randint(1, 6)):
            start = dice.randrange(len(changed) + 1)
            end = min(len(changed), start + dice.randint(0, 12))
            piece = dice.choice([dice.choice(pieces), changed[end : end + dice.randint(0, 40)], ""])
            changed = changed[:start] + piece + changed[end:]
        yield changed


def num_mutations(text: str) -> int:
    """Return how often a text is damaged: the tables of large machines less often, each takes 5 ms to read."""
    times = 24 if with_all([text]) else 1
    if "GPU0" not in text:
        return 40 * times
    return (20 if "GPU4" not in text else 4) * times


def read_or_refuse(text: str) -> NodeTopology | None:
    """Return the machine of a text, None where it is refused; check what holds for every machine."""
    try:
        node = read_topology(text, source="x")
    except TopologyError:
        return None
    indices = [gpu.index for gpu in node.gpus]
    assert 0 < len(indices) <= 256
    assert indices == sorted(set(indices))
    pairs = [(link.gpu_a, link.gpu_b) for link in node.links]
    assert len(set(pairs)) == len(pairs)
    assert all(a < b and a in indices and b in indices for a, b in pairs)
    assert len({nic.name for nic in node.nics}) == len(node.nics)
    json.dumps(node.to_report())
    return node


def test_truncated_and_damaged_texts_are_read_in_part_or_refused_and_quickly() -> None:
    dice = random.Random(20240917)  # noqa: S311  # the same damage in each run
    texts = documents()
    damaged = chain(
        chain.from_iterable(truncations(text) for text in texts),
        chain.from_iterable(mutations(text, dice, count=num_mutations(text)) for text in texts),
    )
    count = read = 0
    slowest_s = 0.0
    for text in damaged:
        start_s = time.process_time()
        read += read_or_refuse(text) is not None
        slowest_s = max(slowest_s, time.process_time() - start_s)
        count += 1
    assert count >= (9_000 if with_all(texts) else 400)
    assert read > count // 4
    assert slowest_s < 30.0


def test_reading_again_and_again_keeps_no_memory() -> None:
    texts = [text for document in documents() for text in truncations(document)]
    for text in texts[::12]:
        read_or_refuse(text)
    tracemalloc.start()
    for text in texts[1::12]:
        read_or_refuse(text)
    kept_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept_bytes < 2**20


@settings(max_examples=50, deadline=None)
@given(st.binary(max_size=400))
def test_any_bytes_are_refused_or_read(data: bytes) -> None:
    read_or_refuse(decode_text(data))


WORDS = st.sampled_from(
    ["GPU0", "GPU1", "GPU17", "NIC0", "mlx5_0", "X", "NV4", "NV18", "SYS", "PIX", "NODE", "CPU Affinity", "NUMA", "0-7",
     "1", "N/A", "\t", "  ", "\n", "\n", "|", "#", "=", ":", "XGMI", "PCIE", "0000:05:00.0", "LINK TYPE TABLE:", "OK"]
)  # fmt: skip


@settings(max_examples=50, deadline=None)
@given(st.lists(WORDS, max_size=60), st.sampled_from(["", " ", "\t"]))
def test_any_heap_of_known_words_is_refused_or_read(words: list[str], between: str) -> None:
    read_or_refuse(between.join(words))


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
REPORT_FIELDS = ["gpus", "links", "nics", "source", "warnings", "hostname", "peer_access", "numa_groups", "extra"]


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(REPORT_FIELDS), JSON_VALUES)
def test_a_report_with_any_value_in_any_field_is_refused_or_read(field: str, value: object) -> None:
    report = read_topology(bridged_pairs().with_tabs(), source="x").to_report()
    read_or_refuse(json.dumps(report | {field: value}))


@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.dictionaries(st.sampled_from(["gpu", "bdf", "links", "link_type", "weight", "hops"]), JSON_VALUES),
        max_size=3,
    )
)
def test_any_list_of_amd_gpus_is_refused_or_read(entries: list[dict[str, object]]) -> None:
    read_or_refuse(json.dumps(entries))


@pytest.mark.parametrize(
    "text",
    [
        "GPU0 " * 150_000,
        "GPU0\tX\t" + "NV18\t" * 150_000,
        "\n".join(f"GPU{number}\tX" for number in range(10_000)),
        "|" * 300_000,
        "\x1b[" * 150_000,
        "#" * 300_000,
        "GPU0 X " + "0-1," * 100_000,
        "<" * 300_000,
        "<pci " + 'a="b" ' * 30_000,
        "<system>" + "<cpu>" * 300_000,
        "[" * 300_000,
        "mlx5_" + "a_" * 150_000 + "\tX",
        "GPU0 GPU1 " + "a" * 4000 + "\nGPU0 X SYS\nGPU1 SYS X",
        "(Topology) Numa " + "GPU[0] : " * 60_000,
    ],
)
def test_texts_made_to_be_slow_are_not(text: str) -> None:
    start_s = time.process_time()
    read_or_refuse(text)
    assert time.process_time() - start_s < 15.0
