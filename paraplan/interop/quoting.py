"""Text that other tools read: YAML, quoted strings of YAML and TOML, and comments that stay comments."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from paraplan.units import one_line

_PLAIN = re.compile(r"[A-Za-z_/][A-Za-z0-9_./-]*")
_NOT_TEXT = frozenset({"y", "n", "yes", "no", "on", "off", "true", "false", "null"})
_LONGEST_KEY = 1024
"""YAML 1.2, section 7.4.2: a key before a colon has at most so many characters; a longer one is marked by `?`."""

_SHORT_ESCAPES = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t"}


def quoted(text: str) -> str:
    """Return `text` as a double-quoted string that YAML 1.1, YAML 1.2 and TOML 1.0 read alike.

    JSON's way of writing characters above U+FFFF, as two halves, is understood by neither.
    """
    return '"' + "".join(_SHORT_ESCAPES.get(character) or _escaped(character) for character in text) + '"'


def to_yaml(value: Mapping[str, object]) -> str:
    """Return a mapping as block-style YAML, keys in their order.

    Values are mappings, sequences, strings, numbers, booleans and None. Written here and not with PyYAML so that an
    export needs no package, has comments, and shows scripts as lines; tests read it back with PyYAML.
    """
    return "\n".join(_lines_of_mapping(value)) + "\n"


def comment(lines: Sequence[str], *, marker: str = "# ") -> str:
    """Return `lines` as comment lines; what would end the comment early (line breaks in a name) becomes a blank."""
    return "".join(f"{marker}{one_line(line)}".rstrip() + "\n" for line in lines)


def _escaped(character: str) -> str:
    code = ord(character)
    if 0x20 <= code < 0x7F:
        return character
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"


def _lines_of_mapping(mapping: Mapping[str, object]) -> list[str]:
    lines = []
    for key, value in mapping.items():
        name = _scalar(key)
        if len(name) > _LONGEST_KEY:
            lines.append(f"? {name}")
            name = ""
        if _is_nested(value):
            lines.append(f"{name}:")
            lines += [f"  {line}" for line in _lines(value)]
        elif isinstance(value, str) and _is_block(value):
            lines.append(f"{name}: |")
            lines += [f"  {line}" if line else "" for line in value.removesuffix("\n").split("\n")]
        else:
            lines.append(f"{name}: {_scalar(value)}")
    return lines


def _lines(value: object) -> list[str]:
    if isinstance(value, Mapping):
        return _lines_of_mapping(value)
    assert isinstance(value, Sequence)
    lines = []
    for item in value:
        inner = _lines(item) if _is_nested(item) else [_scalar(item)]
        lines += [f"- {inner[0]}", *(f"  {line}" for line in inner[1:])]
    return lines


def _is_nested(value: object) -> bool:
    return isinstance(value, Mapping | Sequence) and not isinstance(value, str) and len(value) > 0


def _is_block(text: str) -> bool:
    """Return whether a string may stand as a literal block: printable lines with one line break at their end."""
    body = text.removesuffix("\n")
    return (
        text.endswith("\n")
        and "\n" in body
        and not body.startswith((" ", "\n"))
        and not body.endswith("\n")
        and all(" " <= character <= "~" or character == "\n" for character in body)
    )


def _scalar(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        is_plain = _PLAIN.fullmatch(value) is not None and value.lower() not in _NOT_TEXT
        return value if is_plain else quoted(value)
    if isinstance(value, Mapping):
        return "{}"
    if isinstance(value, Sequence):
        return "[]"
    return repr(value)
