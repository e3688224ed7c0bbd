"""From any text that describes a machine to its `NodeTopology`: which reader a text is for."""

from __future__ import annotations

import re
from pathlib import Path

from paraplan.errors import TopologyError
from paraplan.hardware.readers.amd_text import looks_like_amd, read_amd_text
from paraplan.hardware.readers.json_topology import read_json
from paraplan.hardware.readers.nccl_xml import read_nccl_xml
from paraplan.hardware.readers.nvidia_smi import read_nvidia_smi
from paraplan.hardware.topology import NodeTopology

MAX_TEXT_BYTES = 32 * 2**20
"""Larger files are refused unread; the largest real ones have about 100 kB."""

_FORMATS = "the output of `nvidia-smi topo -m`, an NCCL topology XML, or the JSON of `paraplan topo --json`"
_HTML = ("<pre", "<code", "<div", "<p>", "<span")  # a table that was copied from a page with its tags


def read_topology_file(path: Path) -> NodeTopology:
    """Return the machine that a file describes. Raises TopologyError for a file that cannot be read or is none."""
    try:
        if path.is_file() and path.stat().st_size > MAX_TEXT_BYTES:
            raise TopologyError(f"{path} has {path.stat().st_size} bytes; a topology has at most {MAX_TEXT_BYTES}")
        data = path.read_bytes()
    except OSError as error:
        raise TopologyError(
            f"cannot read {path}: {error.strerror or error}", hint=f"give a file with {_FORMATS}"
        ) from None
    return read_topology(decode_text(data), source=str(path))


def decode_text(data: bytes) -> str:
    """Return bytes as text: UTF-16 where its mark stands at the start, as Windows writes it, else UTF-8."""
    encoding = "utf-16" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"
    return data.decode(encoding, errors="replace")


def read_topology(text: str, *, source: str) -> NodeTopology:
    """Return the machine that a text describes; `source` says where the text is from and is kept in the result.

    The reader is chosen by what the text looks like, never by the name of a file. Raises TopologyError for a text that
    no reader understands.
    """
    if len(text) > MAX_TEXT_BYTES:
        raise TopologyError(f"{source} has {len(text)} characters; a topology has at most {MAX_TEXT_BYTES}")
    stripped = text.lstrip("\ufeff \t\r\n")
    if not stripped:
        raise TopologyError(f"{source} is empty", hint=f"give {_FORMATS}")
    if stripped.startswith("<") and not stripped.startswith(_HTML):
        return read_nccl_xml(stripped, source=source)
    if re.match(r"\{|\[\s*[\[{\]]", stripped):
        return read_json(stripped, source=source)
    if looks_like_amd(text):
        return read_amd_text(text, source=source)
    return read_nvidia_smi(text, source=source)
