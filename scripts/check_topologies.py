#!/usr/bin/env python3
"""Compare what paraplan reads from a folder of captures with the folder's index.csv; exit status 1 for a miss.

Usage: check_topologies.py FOLDER [--verbose]

Compared are the number of GPUs, the NVLink (xGMI) islands, whether every pair is linked, and the NUMA groups, each
where the index states it. An index may state more than the text shows: of a capture that it marks as truncated, GPUs
whose row is cut may be missing from the NUMA groups.
"""

from __future__ import annotations

import csv
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from paraplan.errors import ParaplanError
from paraplan.hardware.readers.any_text import read_topology_file
from paraplan.hardware.topology import NodeTopology

KINDS = ("topo -m", "look-alike", "nccl xml", "rocm-smi / amd-smi", "nvlink-s.txt", "topo-p2p.txt", "L.txt")
GROUP = re.compile(r"(?:NUMA|cpu)?\s*(?P<name>[^:;]*):\s*(?P<members>[\d,\- ]+)")


def main() -> int:
    """Check the folder named on the command line and return the exit status."""
    arguments = [argument for argument in sys.argv[1:] if not argument.startswith("-")]
    if len(arguments) != 1:
        print(__doc__, file=sys.stderr)
        return 2
    folder = Path(arguments[0])
    try:
        with (folder / "index.csv").open(newline="") as file:
            listed = list(csv.DictReader(file))
    except OSError as error:
        print(f"error: cannot read {folder / 'index.csv'}: {error.strerror}", file=sys.stderr)
        return 2
    rows = [row for row in listed if row.get("kind") in KINDS and row.get("gpu_count")]
    hits = facts = 0
    for row in rows:
        found = list(check(folder, row))
        misses = [text for hit, text in found if not hit]
        facts += len(found)
        hits += len(found) - len(misses)
        if misses:
            print(f"MISS {row['file']}: {'; '.join(misses)}")
        elif "--verbose" in sys.argv:
            print(f"hit  {row['file']}: {len(found)} facts")
    rate = hits / facts if facts else 0.0
    print(f"{len(listed) - len(rows)} other files of the index have no links or no count of GPUs and are passed over")
    print(f"{len(rows)} captures, {facts} facts: {hits} hits, {facts - hits} misses, {rate:.2%}")
    return 0 if facts and hits == facts else 1


def check(folder: Path, row: dict[str, str]) -> Iterator[tuple[bool, str]]:
    """Yield a hit or miss, with what was expected and found, for each fact that the index states of a capture."""
    try:
        node = read_topology_file(folder / row["file"])
    except ParaplanError as error:
        yield False, f"not read: {error}"
        return
    yield len(node.gpus) == int(row["gpu_count"]), f"GPUs {row['gpu_count']} != {len(node.gpus)}"
    islands = parse_islands(row["nvlink_groups"])
    if islands is not None:
        yield node.nvlink_islands == islands, f"islands {row['nvlink_groups']} != {node.nvlink_islands}"
    every = row["nvlink_all_to_all"].split(" ")[0]
    if every in ("yes", "no") and islands is not None:
        yield node.nvlink_all_to_all == (every == "yes"), f"all-to-all {every} != {node.nvlink_all_to_all}"
    groups = parse_groups(row["numa_split"], int(row["gpu_count"]))
    if groups is not None:
        found = numa_groups(node, by_cpu="cpu " in row["numa_split"])
        same = covers(groups, found) if "truncated" in row["capture"] else found == groups
        yield same, f"NUMA {row['numa_split']} != {sorted(map(sorted, found))}"


def parse_members(text: str) -> list[int]:
    """Return the numbers of a list such as `0-3,6`."""
    members: list[int] = []
    for part in re.findall(r"\d+(?:-\d+)?", text):
        first, _, last = part.partition("-")
        members.extend(range(int(first), int(last or first) + 1))
    return members


def parse_islands(text: str) -> list[list[int]] | None:
    """Return the islands that the index states, None where it leaves them open."""
    text = re.sub(r"^xGMI ", "", text.split(" (")[0].strip())
    if text.startswith("none"):
        return []
    if not re.fullmatch(r"[\d,;\-]+", text):
        return None
    return sorted(members for part in text.split(";") if len(members := parse_members(part)) > 1)


def parse_groups(text: str, gpu_count: int) -> set[frozenset[int]] | None:
    """Return the sets of GPUs that share a NUMA node or CPUs, None where the index states none."""
    listed = re.fullmatch(r"NUMA ([\d,]+) for GPU .*", text)
    if listed:
        nodes = listed[1].split(",")
        return {frozenset(gpu for gpu, other in enumerate(nodes) if other == node) for node in nodes}
    if text == "NUMA i: GPU i":
        return {frozenset((gpu,)) for gpu in range(gpu_count)}
    if not text.startswith(("NUMA ", "cpu ", "not printed (cpu ")) or "devices" in text or "wrong" in text:
        return None
    text = re.sub(r"^not printed \(|\((order in file|rest cut).*?\)|\)$", "", text)
    return {
        frozenset(parse_members(found["members"]))
        for found in GROUP.finditer(text)
        if found["name"].strip() not in ("N/A", "-1", "")
    }


def numa_groups(node: NodeTopology, *, by_cpu: bool) -> set[frozenset[int]]:
    """Return the sets of GPUs that share a NUMA node, or a CPU list where the capture has only those."""
    shared: dict[object, set[int]] = {}
    for gpu in node.gpus:
        key = gpu.cpu_affinity if by_cpu else gpu.numa_node
        if key is not None:
            shared.setdefault(key, set()).add(gpu.index)
    return {frozenset(members) for members in shared.values()}


def covers(groups: set[frozenset[int]], found: set[frozenset[int]]) -> bool:
    """Tell whether there is a found group for each stated one, and each is part of its own."""
    homes = {next((group for group in groups if members <= group), None) for members in found}
    return homes == groups and len(found) == len(groups)


if __name__ == "__main__":
    sys.exit(main())
