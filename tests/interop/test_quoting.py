from __future__ import annotations

import tomllib

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from paraplan.interop.quoting import comment, quoted, to_yaml

TEXTS = st.text(st.characters(exclude_categories=["Cs"])) | st.sampled_from(
    [
        "yes",
        "No",
        "null",
        "~",
        "1e5",
        "0x1F",
        "12:30",
        "- a",
        "a: b",
        "#",
        "",
        " ",
        "a\nb\n",
        "a\n\n b\n",
        "\ta\nb\n",
        "=",
        "<<",
    ]
)
SCALARS = TEXTS | st.integers() | st.booleans() | st.none()
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=12,
)


@given(st.dictionaries(TEXTS, VALUES, min_size=1, max_size=4))
def test_yaml_is_read_back_as_it_was(value: dict[str, object]) -> None:
    assert yaml.safe_load(to_yaml(value)) == value


@pytest.mark.parametrize("value", [1, "two\nlines\n", {"inner": [1, 2]}, [{"a": 1}, 2], "#"])
def test_long_keys_are_read_back(value: object) -> None:
    mapping = {"outer": {"k" * 1023: value, "l" * 3000: value, "last": 1}}
    assert yaml.safe_load(to_yaml(mapping)) == mapping


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_a_quoted_string_is_the_same_in_toml(text: str) -> None:
    assert tomllib.loads(f"key = {quoted(text)}") == {"key": text}


@given(st.lists(st.text(), max_size=3))
def test_a_comment_stays_a_comment(lines: list[str]) -> None:
    written = comment(lines) + "key: 1\n"
    assert yaml.safe_load(written) == {"key": 1}
    assert tomllib.loads(comment(lines)) == {}


def test_a_script_is_shown_as_lines() -> None:
    assert to_yaml({"run": "a\n  b\n"}) == "run: |\n  a\n    b\n"
