"""Reader of the texts of AMD's tools: `rocm-smi --showtopo`, `amd-smi topology`, `amd-smi xgmi`, TransferBench."""

from __future__ import annotations

import re

from paraplan.errors import TopologyError
from paraplan.hardware.pci import normal_bus_id
from paraplan.hardware.readers.amd_links import AmdMachine
from paraplan.hardware.readers.smi_lines import clean_lines
from paraplan.hardware.topology import NodeTopology

_BUS_ID = r"(?:[0-9a-fA-F]{4,8}:)?[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-9a-fA-F]"
_LABEL = re.compile(rf"GPU[ _]?\d{{1,3}}|{_BUS_ID}")
_ROW = re.compile(rf"^\s*({_LABEL.pattern})(?:\s+|$)(.*)$")
_VALUE = re.compile(
    r"^\s*GPU\s?\[?\s?(\d{1,3})\s?\]?\s*:\s*(?:\(Topology\)\s*)?([A-Za-z][^:]{0,60}):\s*(\S.{0,80}?)\s*$"
)
_MARKS = re.compile(
    r"ROCm System Management|\bROCm SMI\b|between two GPUs|\(Topology\) Numa|"
    r"^[ \t]*(?:ACCESS|WEIGHT|HOPS|LINK TYPE|NUMA BW|CACHE COHER[AE]NCY|ATOMICS|DMA|BI-DIRECTIONAL|LINK METRIC) TABLE|"
    r"\bXGMI-\d\b|\bgfx\d{3,4}|^[ \t]*GPU\[\d+\]|^[ \t]*GPU\d+\s.*\b(?:XGMI|PCIE)\b",
    re.MULTILINE,
)
_TITLES = (
    ("type_word", re.compile(r"link type (?:between|table)", re.IGNORECASE)),
    ("weight", re.compile(r"weight (?:between|table)", re.IGNORECASE)),
    ("hops", re.compile(r"hops (?:between|table)", re.IGNORECASE)),
    ("megabytes_per_s", re.compile(r"numa bw table", re.IGNORECASE)),
    ("access", re.compile(r"access table", re.IGNORECASE)),
    ("", re.compile(r"(?:coher[ae]ncy|atomics|dma|directional) table", re.IGNORECASE)),
)
_NAMES_OF_VALUES = {
    "numa node": "numa_node",
    "pci bus": "bus_id",
    "card series": "name",
    "unique id": "uuid",
    "vram total memory (b)": "memory_bytes",
    "vram total used memory (b)": "memory_used_bytes",
}
_DRIVER = re.compile(r"Driver version:\s*(\d[\w.\-]{0,20})")
_CONCISE_ROW = re.compile(r"^(\d{1,3})\s+\[0x[0-9a-f]+\s*:")
_QUERIED_GPU = re.compile(r"^\[GPU (\d{1,3})\]\s+(AMD .{1,60}?)\s*$")


def looks_like_amd(text: str) -> bool:
    """Tell whether a text has words that only AMD's tools print."""
    return _MARKS.search(text) is not None


def read_amd_text(text: str, *, source: str) -> NodeTopology:
    """Return the machine that a text of rocm-smi, amd-smi or TransferBench describes.

    GPUs are those of the tables' rows and columns, numbered by their label or, where they are named by bus id, by their
    order. Raises TopologyError where no GPU is named.
    """
    machine = AmdMachine()
    lines = clean_lines(text)
    _read_values(lines, machine)
    if any("PCIe Bus ID" in line for line in lines):
        _read_transfer_bench(lines, machine)
    elif any("LINK METRIC TABLE" in line for line in lines):
        _read_xgmi_metrics(lines, machine)
    else:
        _read_tables(lines, machine)
    if not machine.gpus:
        raise TopologyError(
            f"{source} is of AMD's tools, but names no GPU", hint="give the output of `rocm-smi --showtopo`"
        )
    return machine.topology(source)


def _read_values(lines: list[str], machine: AmdMachine) -> None:
    """Read the lines about one GPU each: `GPU[0] : (Topology) Numa Node: 3`."""
    affinities: dict[int, str] = {}
    previous: int | None = None
    for line in lines:
        if driver := _DRIVER.search(line):
            machine.driver_version = machine.driver_version or driver[1]
        if value := _VALUE.match(line):
            name = _NAMES_OF_VALUES.get(value[2].strip().lower())
            machine.add_gpu(int(value[1]), **({name: value[3]} if name else {}))
            if value[2].strip().lower() == "numa affinity":
                affinities[int(value[1])] = value[3]
        elif concise := _CONCISE_ROW.match(line):
            previous = int(concise[1])
            machine.add_gpu(previous)
            continue
        elif previous is not None and re.match(r"^\s+AMD \S", line):
            machine.add_gpu(previous, name=line.strip()[:60])
        elif queried := _QUERIED_GPU.match(line):
            machine.add_gpu(int(queried[1]), name=queried[2])
        previous = None
    apart = [index for index, node in affinities.items() if machine.gpus.get(index, {}).get("numa_node", node) != node]
    if apart and any(affinities[index] != "-1" for index in apart):
        machine.warnings.append(f"NUMA node and NUMA affinity differ for {len(apart)} GPUs; the node is used")


def _read_tables(lines: list[str], machine: AmdMachine) -> None:
    """Read the matrices: a line of labels, and below it a row for each of them; the title above says of what."""
    columns: list[str] = []
    kind: str | None = None
    for line in lines:
        title = next((name for name, pattern in _TITLES if pattern.search(line)), None)
        labels = _LABEL.findall(line)
        row = _ROW.match(line)
        if title is not None:
            kind, columns = title, []
        elif labels and _LABEL.sub("", line).strip() == "" and not (columns and len(labels) == 1):
            columns = labels
            for label in labels:
                _add_labelled(label, machine, columns)
        elif row and (columns or _is_type_row(row[2])):
            _read_row(row[1], row[2].split(), columns, kind, machine)


def _is_type_row(rest: str) -> bool:
    return re.search(r"\b(?:XGMI|PCIE)\b", rest) is not None


def _read_row(label: str, cells: list[str], columns: list[str], kind: str | None, machine: AmdMachine) -> None:
    index = _add_labelled(label, machine, columns)
    if any(cell in ("XGMI", "PCIE", "XXXX") for cell in cells):
        kind = "type_word"  # a table may stand under the title of another that failed
    if not kind:
        return
    for position, cell in enumerate(cells):
        other = _add_labelled(columns[position], machine, columns) if position < len(columns) else position
        if position < len(columns) or columns == []:
            machine.add_gpu(other)
            machine.add_cell(index, other, kind=kind, text=cell)


def _add_labelled(label: str, machine: AmdMachine, columns: list[str]) -> int:
    """Note the GPU that a label names and return its index: its number, or the place of its bus id in the table."""
    if label.startswith("GPU"):
        index = int(re.sub(r"\D", "", label))
        machine.add_gpu(index)
        return index
    bus_id = normal_bus_id(label) or label
    for index, values in machine.gpus.items():
        if normal_bus_id(values.get("bus_id", "")) == bus_id:
            return index
    index = columns.index(label) if label in columns else len(machine.gpus)
    machine.add_gpu(index, bus_id=bus_id)
    return index


def _read_xgmi_metrics(lines: list[str], machine: AmdMachine) -> None:
    """Read `amd-smi xgmi`: what each GPU has read from each other over xGMI; a cell with an amount is a link."""
    header = next((line for line in lines if "bit_rate" in line and _LABEL.search(line)), "")
    columns = _LABEL.findall(header)
    for number, label in enumerate(columns):
        machine.add_gpu(number, bus_id=normal_bus_id(label) or label)
    current: int | None = None
    full_rows: list[int] = []
    for line in lines:
        if found := re.match(rf"^\s*GPU(\d{{1,3}})\s+{_BUS_ID}\s.*XGMI", line):
            current = int(found[1])
        elif current is not None and re.match(r"^\s*Read\s", line):
            cells = re.findall(r"N/A|\d[\d.]*\s*[KMGT]?B", line)
            linked = [position for position, cell in enumerate(cells) if cell != "N/A"]
            for position in linked:
                machine.add_cell(current, position, kind="type_word", text="XGMI")
            full_rows.append(current) if len(linked) >= len(columns) - 1 else None
            current = None
    rows_lost = len(columns) - len(full_rows)
    if full_rows and rows_lost and len(machine.pairs) == _pairs_of(full_rows, len(columns)):
        for first in range(len(columns)):
            for second in range(first + 1, len(columns)):
                machine.add_cell(first, second, kind="type_word", text="XGMI")
        machine.warnings.append(
            f"the table is cut: {rows_lost} rows are missing and taken to be like the others, which link to every GPU"
        )


def _pairs_of(rows: list[int], count: int) -> int:
    """Return how many pairs have at least one of `rows` in them."""
    others = count - len(rows)
    return count * (count - 1) // 2 - others * (others - 1) // 2


def _read_transfer_bench(lines: list[str], machine: AmdMachine) -> None:
    """Read TransferBench's table of GPUs: link and hops to each other GPU, bus id, nearest NUMA node."""
    names: list[str] = []
    rows: list[tuple[int, list[str]]] = []
    for line in lines:
        cells = [cell.strip() for cell in line.split("\t")]
        if any(cell == "PCIe Bus ID" for cell in cells):
            names = cells
        elif names and (found := re.fullmatch(r"GPU\s*(\d{1,3})", cells[0])):
            machine.add_gpu(int(found[1]))
            rows.append((int(found[1]), cells))
    for index, cells in rows:
        # The header has no name above the rows' labels.
        for name, cell in zip(names if len(names) == len(cells) else ["", *names], cells, strict=False):
            if name == "PCIe Bus ID":
                machine.add_gpu(index, bus_id=cell)
            elif name == "Closest NUMA":
                machine.add_gpu(index, numa_node=cell)
            elif (other := re.fullmatch(r"GPU\s*(\d{1,3})", name)) and (link := re.fullmatch(r"(\w+)-(\d)", cell)):
                machine.add_gpu(int(other[1]))
                if link[1] != "XGMI" or link[2] == "1":
                    machine.add_cell(index, int(other[1]), kind="type_word", text=link[1])
