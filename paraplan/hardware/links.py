"""Words for links in the tables of GPU tools, and what one NVLink carries."""

from __future__ import annotations

import re
from typing import NamedTuple

from paraplan.hardware.topology import LinkType

PEER_STATUS_WORDS = ("OK", "CNS", "GNS", "TNS", "NS", "DR", "U")
"""Cells of `nvidia-smi topo -p2p`."""

SELF_WORDS = ("X", "LOC", "SELF", "-")
"""Cells of the diagonal, as the tools of several makers write it."""

CELL = re.compile(
    r"NV\d+|XGMI(?:-\d+)?|MX\d*|PIX|PXB|PHB|NODE|SYS|SOC|LOC|SELF"
    r"|(?:OK|CNS|GNS|TNS|NS|DR|U|X)(?![a-z0-9])|x(?!\w)|-(?!\w)"
)
"""One cell of a link matrix. Words may touch: `PXBNODE` is two cells."""

# Payload of one link in one direction, by architecture. NVIDIA's data sheets give twice the sum over all links:
# P100 160 GB/s over 4 links, V100 300 over 6, TITAN RTX and RTX 8000 100 over 2, A100 600 over 12, RTX 3090 and A6000
# 112.5 over 4, H100 900 over 18, B200 1800 over 18.
_NVLINK_BYTES_PER_S = {
    "6.0": 20e9,
    "7.0": 25e9,
    "7.2": 25e9,
    "7.5": 25e9,
    "8.0": 25e9,
    "8.6": 14.0625e9,
    "9.0": 25e9,
    "10.0": 50e9,
    "10.3": 50e9,
}

_ARCHITECTURE_NAMES = (
    (r"GB[23]00|B[123]00", "10.0"),
    (r"G?H(?:100|200|800|20)", "9.0"),
    (r"A(?:100|800|30)X?", "8.0"),
    (r"RTX A\d{4}|A40|A16|RTX 30[0-9]0(?: Ti)?", "8.6"),
    (r"TITAN RTX|RTX 20[0-9]0(?: Ti)?|Quadro RTX \d{4}", "7.5"),
    (r"V100S?|GV100|TITAN V", "7.0"),
    (r"P100|GP100", "6.0"),
)
_ARCHITECTURE_BY_NAME = re.compile(
    "|".join(rf"(?P<g{number}>\b(?:{names})\b)" for number, (names, _) in enumerate(_ARCHITECTURE_NAMES))
)


_LINK_WORDS = frozenset(LinkType)


class LinkWord(NamedTuple):
    """A cell that names a link: its type, and its number of NVLinks where the word carries one."""

    link_type: LinkType
    nvlink_count: int | None = None


def parse_link_word(word: str) -> LinkWord | None:
    """Return the link that a cell names, None for the diagonal, for a peer status and for an unknown word.

    `SOC` is what drivers before 387 wrote for `SYS`.
    """
    if word == "NV" or (word.startswith("NV") and word[2:].isdigit()):
        return LinkWord(LinkType.NV, int(word[2:]) if word[2:] else None)
    if word.startswith("XGMI"):
        return LinkWord(LinkType.XGMI)
    if word.startswith("MX"):
        return LinkWord(LinkType.MX, int(word[2:]) if word[2:].isdigit() else None)
    if word == "SOC":
        return LinkWord(LinkType.SYS)
    return LinkWord(LinkType(word)) if word in _LINK_WORDS else None


def nvlink_bytes_per_s(*, name: str | None = None, compute_capability: str | None = None) -> float | None:
    """Return the payload of one NVLink of a GPU in one direction, None where the GPU is not known.

    The compute capability decides where it is given; else the name, in which the model number is looked for.
    """
    if compute_capability is None and name is not None:
        found = _ARCHITECTURE_BY_NAME.search(name)
        if found is not None and found.lastgroup is not None:
            compute_capability = _ARCHITECTURE_NAMES[int(found.lastgroup[1:])][1]
    return _NVLINK_BYTES_PER_S.get(compute_capability or "")


# AMD's documentation of MI250X (gfx90a) and MI300 (gfx940 to gfx942): one xGMI link, one direction.
_XGMI_BYTES_PER_S = {"90a": 50e9, "940": 64e9, "941": 64e9, "942": 64e9}


def xgmi_bytes_per_s(gcn: str) -> float | None:
    """Return the rate of one xGMI link in one direction, by the GPU's architecture (`90a`, `gfx942`)."""
    return _XGMI_BYTES_PER_S.get(gcn.lower().removeprefix("gfx").split(":")[0])
