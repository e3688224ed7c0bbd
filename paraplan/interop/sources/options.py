"""Options of a command line as keys and values."""

from __future__ import annotations

import json
import re

_SEVERAL = ("recompute_modules",)
"""Options with several words that are all read."""
_UNSET = re.compile(r"\$\{?\w+(\[[@*]\])?\}?")
"""A variable without a value: behind an option's own word it stands for none, or for more options."""


def options_of(words: list[str]) -> dict[str, object]:
    """Return the options of a command with their values, True for those without one; words that follow are passed."""
    options: dict[str, object] = {}
    name: str | None = None
    for word in words:
        if word.startswith("--") and " " in word and "=" not in word:  # an array's element that the shell splits
            key, _, value = word.partition(" ")
            options[key[2:].replace("-", "_")] = value.strip("'\"")
        elif word.startswith("--") and len(word) > 2:
            key, is_given, value = word.partition("=")
            name = key[2:].replace("-", "_")
            options[name] = value if is_given else True
        elif name is not None and options[name] is True:
            options[name] = word
        elif name in _SEVERAL:
            options[name] = f"{options[name]} {word}"
    return options


def typed_options(words: list[str]) -> dict[str, object]:
    """Return the options of a command with the values that their words stand for, those with several as lists."""
    options = options_of(words)
    several: dict[str, list[str]] = {}
    name = None
    for word in words:
        if word.startswith("--"):
            name = word[2:].partition("=")[0].replace("-", "_")
        elif name is not None and not (name in several and _UNSET.fullmatch(word)):
            several.setdefault(name, []).append(word)
    typed = {key: scalar(value) if isinstance(value, str) else value for key, value in options.items()}
    return typed | {name: list(values) for name, values in several.items() if len(values) > 1}


def scalar(word: str) -> object:
    """Return the value that a word of a command line stands for."""
    try:
        return json.loads(word)
    except ValueError:
        return {"true": True, "false": False}.get(word.lower(), word)
