"""Reader of JSON: our own `paraplan topo --json`, `rocm-smi --json`, `amd-smi topology --json`."""

from __future__ import annotations

import json
import re
from typing import Any

from pydantic import ValidationError

from paraplan.errors import TopologyError
from paraplan.hardware.readers.amd_links import AmdMachine
from paraplan.hardware.topology import NodeTopology

_DERIVED = ("nvlink_islands", "numa_groups", "nvlink_all_to_all", "cuda", "interconnect", "measurement", "states")
"""Keys that `paraplan topo --json` shows beside the machine: it is computed, or measured, again."""
_PAIR = re.compile(r"\(Topology\) (Weight|Hops|Link type) between DRM devices (\d{1,3}) and (\d{1,3})")
_PAIR_KINDS = {"Weight": "weight", "Hops": "hops", "Link type": "type_word"}
_CARD_VALUES = {
    "numa_node": ("(Topology) Numa Node",),
    "bus_id": ("PCI Bus",),
    "name": ("Card Series", "Card series", "Device Name"),
    "uuid": ("Unique ID",),
    "memory_bytes": ("VRAM Total Memory (B)",),
    "memory_used_bytes": ("VRAM Total Used Memory (B)",),
}
_AMD_SMI_TABLES = {
    "link_accessibility": "access",
    "weight": "weight",
    "hops": "hops",
    "link_type": "type_word",
    "numa_bandwidth": "megabytes_per_s",
}
_AMD_SMI_CELLS = {
    "link_status": "access",
    "weight": "weight",
    "num_hops": "hops",
    "link_type": "type_word",
    "bandwidth": "megabytes_per_s",
}
_FORMS = "the JSON of `paraplan topo --json`, `rocm-smi --showtopo --json` or `amd-smi topology --json`"


def read_json(text: str, *, source: str) -> NodeTopology:
    """Return the machine that a JSON text describes. Raises TopologyError for broken JSON and for any other content."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = str(error) if isinstance(error, json.JSONDecodeError) else "it is nested too deep or has huge numbers"
        raise TopologyError(f"{source} is not valid JSON: {reason}", hint=f"give {_FORMS}") from None
    if isinstance(data, dict) and isinstance(data.get("gpus"), list):
        return read_report(data, source=source)
    if isinstance(data, dict) and isinstance(data.get("node"), dict) and "gpu" in data:
        raise TopologyError(f"{source} is a machine profile", hint=f"show it with --profile {source}")
    machine = AmdMachine()
    if isinstance(data, dict):
        _read_cards(data, machine)
    elif isinstance(data, list):
        _read_amd_smi(data, machine)
    if not machine.gpus:
        raise TopologyError(f"{source} is JSON, but describes no machine", hint=f"give {_FORMS}")
    return machine.topology(source)


def read_report(data: dict[str, Any], *, source: str) -> NodeTopology:
    """Return the machine of a report that `NodeTopology.to_report` made.

    What follows from the rest (islands, NUMA groups) is computed again. Raises TopologyError for unknown or wrong
    fields and for links of GPUs that are not listed.
    """
    values = {name: value for name, value in data.items() if name not in _DERIVED}
    if isinstance(values.get("nics"), list):
        values["nics"] = [
            {name: value for name, value in nic.items() if name != "pix_gpus"} if isinstance(nic, dict) else nic
            for nic in values["nics"]
        ]
    try:
        node = NodeTopology.model_validate({"source": source} | values)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        field = ".".join(str(part) for part in first["loc"])
        raise TopologyError(f"{source}: field {field}: {first['msg']}", hint=f"give {_FORMS}") from None
    indices = [gpu.index for gpu in node.gpus]
    pairs = [(link.gpu_a, link.gpu_b) for link in node.links]
    if not indices or len(set(indices)) < len(indices) or min(indices) < 0:
        raise TopologyError(f"{source}: GPU indices are missing, negative or repeated: {sorted(indices)[:16]}")
    if any(not (a < b and a in indices and b in indices) for a, b in pairs) or len(set(pairs)) < len(pairs):
        raise TopologyError(f"{source}: a link is repeated, or joins GPUs that are not listed or not in order")
    if len({nic.name for nic in node.nics}) < len(node.nics):
        raise TopologyError(f"{source}: two NICs have one name")
    return node


def _text(value: object) -> str | None:
    return str(value) if isinstance(value, str | int | float) and not isinstance(value, bool) else None


def _read_cards(data: dict[str, Any], machine: AmdMachine) -> None:
    """Read rocm-smi's JSON: an object for each card, and one for the system with the pairs."""
    for key, card in data.items():
        found = re.fullmatch(r"card(\d{1,3})", key)
        if found and isinstance(card, dict):
            texts = {
                name: text
                for name, keys in _CARD_VALUES.items()
                for candidate in keys
                if (text := _text(card.get(candidate))) and text != "N/A"
            }
            machine.add_gpu(int(found[1]), **texts)
    system = data.get("system")
    if not isinstance(system, dict):
        return
    machine.driver_version = _text(system.get("Driver version"))
    for key, value in system.items():
        if (pair := _PAIR.fullmatch(key)) and (text := _text(value)):
            machine.add_cell(int(pair[2]), int(pair[3]), kind=_PAIR_KINDS[pair[1]], text=text)


def _read_amd_smi(data: list[Any], machine: AmdMachine) -> None:
    """Read amd-smi's JSON: a list of GPUs, each with its links or, in the older form, with a table of each kind."""
    gpus = [entry for entry in data if isinstance(entry, dict) and isinstance(entry.get("gpu"), int)]
    for entry in gpus:
        bus_id = _text(entry.get("bdf"))
        machine.add_gpu(entry["gpu"], **({"bus_id": bus_id} if bus_id else {}))
    for entry in gpus:
        links = entry.get("links")
        for link in links if isinstance(links, list) else ():
            if isinstance(link, dict) and isinstance(link.get("gpu"), int):
                for name, kind in _AMD_SMI_CELLS.items():
                    if text := _text(link.get(name)):
                        machine.add_cell(entry["gpu"], link["gpu"], kind=kind, text=text)
        for name, kind in _AMD_SMI_TABLES.items():
            table = entry.get(name)
            for label, cell in table.items() if isinstance(table, dict) else ():
                other = re.fullmatch(r"gpu_(\d{1,3})", str(label))
                if other and (text := _text(cell)):
                    machine.add_cell(entry["gpu"], int(other[1]), kind=kind, text=text)
