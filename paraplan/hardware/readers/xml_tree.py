"""XML of strangers, safely: a tree of elements without document types, entities, or size without limit."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NoReturn
from xml.parsers import expat

from paraplan.errors import TopologyError

MAX_ELEMENTS = 50_000
MAX_DEPTH = 64
MAX_ATTRIBUTE_CHARACTERS = 4096


@dataclass
class XmlElement:
    """An element: its name, attributes, and the elements inside it. Text between elements is dropped."""

    name: str
    attributes: dict[str, str] = field(default_factory=dict)
    children: list[XmlElement] = field(default_factory=list)

    def number(self, attribute: str) -> int | None:
        """Return a decimal attribute as a number, None where it is missing or something else."""
        text = self.attributes.get(attribute, "").strip()
        return int(text) if len(text) < 12 and text.removeprefix("-").isdecimal() and text.isascii() else None


def parse_xml(text: str, *, source: str) -> tuple[XmlElement, list[str]]:
    """Return an element that holds the text's outermost elements, and warnings.

    A text that ends or breaks off inside gives the elements up to there and a warning. Raises TopologyError for a
    document type or an entity declaration (through which a small file can grow without bound or read other files),
    and beyond the limits of this module.
    """
    top = XmlElement("")
    stack = [top]
    seen = 0

    def start(name: str, attributes: dict[str, str]) -> None:
        nonlocal seen
        seen += 1
        if seen > MAX_ELEMENTS or len(stack) > MAX_DEPTH:
            raise TopologyError(f"{source} has more than {MAX_ELEMENTS} elements or {MAX_DEPTH} levels")
        if any(len(value) > MAX_ATTRIBUTE_CHARACTERS for value in attributes.values()):
            raise TopologyError(f"{source} has an attribute of more than {MAX_ATTRIBUTE_CHARACTERS} characters")
        element = XmlElement(name, attributes)
        stack[-1].children.append(element)
        stack.append(element)

    def end(_name: str) -> None:
        stack.pop()

    def refuse(*_arguments: object) -> NoReturn:
        raise TopologyError(
            f"{source} declares a document type or entities, which no topology has",
            hint="give the XML that NCCL_TOPO_DUMP_FILE names",
        )

    # The standard parser, with its own handlers in the way of every declaration, needs no further package: nothing is
    # ever defined that could be expanded.
    parser = expat.ParserCreate("utf-8")
    parser.StartElementHandler = start
    parser.EndElementHandler = end
    parser.StartDoctypeDeclHandler = refuse
    parser.EntityDeclHandler = refuse
    parser.ExternalEntityRefHandler = refuse
    try:
        parser.Parse(text.encode("utf-8", errors="replace"), True)
    except expat.ExpatError as error:
        if not top.children:
            raise TopologyError(f"{source} is no XML: {error}") from None
        return top, [f"the XML breaks off at line {error.lineno}: {expat.ErrorString(error.code)}"]
    return top, []
