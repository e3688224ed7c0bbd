"""Reader of what `nvidia-smi` prints: `topo -m`, `topo -p2p`, `nvlink -s` and `-L`, alone or pasted together."""

from __future__ import annotations

import re

from paraplan.errors import TopologyError
from paraplan.hardware.architecture import LinkRates
from paraplan.hardware.readers.link_words import PEER_STATUS_WORDS, parse_link_word
from paraplan.hardware.readers.smi_affinity import Affinity, read_affinity
from paraplan.hardware.readers.smi_devices import ListedGpu, read_listed_gpus
from paraplan.hardware.readers.smi_lines import TableLines, clean_lines, find_tables
from paraplan.hardware.readers.smi_matrix import LinkMatrix, gpu_number, read_matrix
from paraplan.hardware.topology import Gpu, GpuLink, LinkType, Nic, NodeTopology, PeerAccess

MAX_GPUS = 256

_NIC_LEGEND = re.compile(r"^\s*[-*]?\s*(NIC\d{1,3})\s*[:=]\s*(\S{1,60})\s*$")
_DRIVER = re.compile(r"driver version\s*[:=]\s*(\d{3}\.[\d.]{1,12})", re.IGNORECASE)
_CUDA = re.compile(r"CUDA Version\s*[:=]\s*(\d{1,2}\.\d{1,2})\b", re.IGNORECASE)
_PEER_KIND = re.compile(r"-p2p\s+([rwnap])\b")
_PEER_FIELDS = {"r": "read", "w": "write", "n": "nvlink", "a": "atomics", "p": "pcie"}

# An H100 or B200 has 18 NVLinks; no GPU has more.
_MOST_NVLINKS_OF_A_GPU = 18


def read_nvidia_smi(text: str, *, source: str) -> NodeTopology:
    """Return the machine that a text printed by nvidia-smi describes.

    Links come from `topo -m`, names and UUIDs from `-L` or `nvlink -s`, numbers of active links from `nvlink -s`, peer
    access from `topo -p2p`; whatever is not in the text is None. Damage is mended where the table itself shows how,
    and said in `warnings`. Raises TopologyError for a text without any of the four.
    """
    lines = clean_lines(text)
    listed = read_listed_gpus(lines)
    tables = find_tables(lines)
    link_tables = [table for table in tables if not _is_peer_table(table)]
    peer_tables = [table for table in tables if _is_peer_table(table)]
    link_tables = [table for table in link_tables if table.rows] or link_tables
    if not tables and not listed:
        raise TopologyError(
            f"{source} holds no topology: no line starts with GPU0 or the like",
            hint="give the output of `nvidia-smi topo -m`, an NCCL topology XML, or the JSON of `paraplan topo --json`",
        )
    matrix = read_matrix(link_tables[0]) if link_tables else LinkMatrix(columns=[])
    warnings = matrix.warnings
    if len(link_tables) > 1:
        warnings.append(f"the text holds {len(link_tables)} tables; the first one is read")
    if len(matrix.gpu_labels) > MAX_GPUS:
        raise TopologyError(f"{source} names {len(matrix.gpu_labels)} GPUs; a machine has 1 to {MAX_GPUS}")
    affinities = _read_affinities(link_tables[0]) if link_tables else {}
    gpus = _make_gpus(matrix, affinities, listed, warnings, peers=_peer_labels(peer_tables))
    if not gpus or len(gpus) > MAX_GPUS:
        raise TopologyError(f"{source} names {len(gpus)} GPUs; a machine has 1 to {MAX_GPUS}")
    joined = "\n".join(lines)
    return NodeTopology(
        source=source,
        driver_version=_first(_DRIVER, joined),
        cuda_version=_first(_CUDA, joined),
        gpus=gpus,
        links=_make_links(matrix, gpus, warnings),
        nics=_make_nics(matrix, lines),
        peer_access=_make_peer_access(peer_tables),
        warnings=tuple(dict.fromkeys(warnings)),
    )


def _read_affinities(table: TableLines) -> dict[str, Affinity]:
    values = [len(row.tail.split()) for row in table.rows]
    return {
        row.label: read_affinity(row, table.header, ends_early=row is table.rows[-1] and values[-1] < max(values))
        for row in table.rows
    }


def _first(pattern: re.Pattern[str], text: str) -> str | None:
    found = pattern.search(text)
    return found[1] if found else None


def _is_peer_table(table: TableLines) -> bool:
    words = {word for row in table.rows for word in row.cells}
    return bool(words & set(PEER_STATUS_WORDS)) or (words <= {"X"} and "-p2p" in table.before)


def _make_gpus(
    matrix: LinkMatrix,
    affinities: dict[str, Affinity],
    listed: dict[int, ListedGpu],
    warnings: list[str],
    *,
    peers: set[int],
) -> tuple[Gpu, ...]:
    by_index = {gpu_number(label): affinities.get(label, Affinity()) for label in matrix.gpu_labels}
    lists = sorted({affinity.numa for affinity in by_index.values() if affinity.numa and not affinity.numa.isdigit()})
    if lists:
        warnings.append(f"NUMA affinity is a list of nodes ({'; '.join(lists[:4])}); the first of each is taken")
    cut = [index for index, affinity in by_index.items() if affinity.is_cut]
    if cut:
        warnings.append(f"the table is cut: no CPU and NUMA affinity for {len(cut)} GPUs")
    gpus = []
    for index in sorted({*by_index, *listed, *peers}):
        affinity, entry = by_index.get(index, Affinity()), listed.get(index, ListedGpu())
        gpus.append(
            Gpu(
                index=index,
                name=entry.name,
                uuid=entry.uuid,
                numa_node=affinity.numa_node,
                memory_numa_node=affinity.memory_numa,
                cpu_affinity=affinity.cpu,
                nvlink_count=entry.nvlink_count,
                mig_enabled=True if entry.mig_instances else None,
                mig_instances=entry.mig_instances,
            )
        )
    return tuple(gpus)


def _make_links(matrix: LinkMatrix, gpus: tuple[Gpu, ...], warnings: list[str]) -> tuple[GpuLink, ...]:
    of_link = LinkRates()
    rates = {gpu.index: of_link.nvlink(name=gpu.name) for gpu in gpus}
    words: dict[tuple[int, int], tuple[LinkType, int | None]] = {}
    unknown = set()
    labels = matrix.gpu_labels
    for position, first in enumerate(labels):
        for second in labels[position + 1 :]:
            word = matrix.word(first, second)
            link = parse_link_word(word) if word else None
            if link:
                words[gpu_number(first), gpu_number(second)] = (link.link_type, link.nvlink_count)
            elif word:
                unknown.add(word)
    if unknown:
        warnings.append(f"unknown kinds of link are left out: {', '.join(sorted(unknown))}")
    _add_links_behind_a_switch(words, [gpu_number(label) for label in labels], warnings)
    links = []
    for (first_index, second_index), (link_type, count) in sorted(words.items()):
        rate_a, rate_b = rates.get(first_index), rates.get(second_index)
        payload = min(rate_a, rate_b) * count if link_type is LinkType.NV and rate_a and rate_b and count else None
        links.append(
            GpuLink(
                gpu_a=first_index,
                gpu_b=second_index,
                link_type=link_type,
                nvlink_count=count,
                bandwidth_bytes_per_s=payload,
            )
        )
    return tuple(links)


def _add_links_behind_a_switch(
    words: dict[tuple[int, int], tuple[LinkType, int | None]], indices: list[int], warnings: list[str]
) -> None:
    """Add the pairs that a cut table does not show but that must be linked, since NVSwitches join their GPUs.

    A GPU whose NVLinks to others sum to more than a GPU has reaches them through switches, and a switch joins all that
    it reaches with one another.
    """
    counts: dict[int, dict[int, int]] = {index: {} for index in indices}
    for (first, second), (link_type, count) in words.items():
        if link_type is LinkType.NV and count:
            counts[first][second] = counts[second][first] = count
    behind: dict[int, int] = {}
    for index, peers in counts.items():
        if sum(peers.values()) > _MOST_NVLINKS_OF_A_GPU and len(set(peers.values())) == 1:
            for member in (index, *peers):
                behind[member] = min(behind.get(member, 10**6), *peers.values())
    members = sorted(behind)
    added = 0
    for position, first in enumerate(members):
        for second in members[position + 1 :]:
            if (first, second) not in words:
                words[first, second] = (LinkType.NV, min(behind[first], behind[second]))
                added += 1
    if added:
        warnings.append(f"{added} NVLink pairs that the table does not show are inferred: an NVSwitch joins these GPUs")


def _make_nics(matrix: LinkMatrix, lines: list[str]) -> tuple[Nic, ...]:
    names = {found[1]: found[2] for line in lines if (found := _NIC_LEGEND.match(line))}
    labels = matrix.nic_labels[:MAX_GPUS]
    if len({names.get(label, label) for label in labels}) < len(labels):
        names = {}  # the legend was cut, so that names look alike
    return tuple(
        Nic(
            name=names.get(label, label),
            gpu_links={
                gpu_number(gpu): link.link_type
                for gpu in matrix.gpu_labels
                if (link := parse_link_word(matrix.word(label, gpu) or ""))
            },
            nic_links={
                names.get(other, other): link.link_type
                for other in labels
                if other != label and (link := parse_link_word(matrix.word(label, other) or ""))
            },
        )
        for label in labels
    )


def _peer_labels(tables: list[TableLines]) -> set[int]:
    return {gpu_number(label) for table in tables for label in read_matrix(table).gpu_labels}


def _make_peer_access(tables: list[TableLines]) -> tuple[PeerAccess, ...]:
    statuses: dict[tuple[int, int], dict[str, str]] = {}
    for table in tables:
        kind = _PEER_KIND.search(table.before)
        field = _PEER_FIELDS[kind[1]] if kind else "unnamed"
        matrix = read_matrix(table)
        labels = matrix.gpu_labels
        for position, first in enumerate(labels):
            for second in labels[position + 1 :]:
                word = matrix.word(first, second)
                if word in PEER_STATUS_WORDS:
                    statuses.setdefault((gpu_number(first), gpu_number(second)), {}).setdefault(field, word)
    return tuple(
        PeerAccess.model_validate({"gpu_a": first, "gpu_b": second, **fields})
        for (first, second), fields in sorted(statuses.items())
    )
