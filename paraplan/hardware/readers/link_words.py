"""Words for links in the tables of GPU tools."""

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
