"""Configurations in YAML or JSON as mappings."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Mapping

from paraplan.errors import PlanError, UsageError

_MOST_VALUES = 100_000
"""Values in a configuration, those behind YAML's aliases counted each time: a few lines of these can name billions."""


def load_document(text: str, source: str, *, hint: str) -> Mapping[str, object]:
    """Return the keys and values of a YAML or JSON text; `hint` says how to get a right one.

    Raises `PlanError` where the text holds none, and `UsageError` where YAML cannot be read here.
    """
    text = text.removeprefix("\ufeff")
    data = parse_json(text, source, hint) if text.lstrip().startswith("{") else _load_yaml(text, source, hint)
    if not isinstance(data, dict):
        raise PlanError(f"{source} holds no keys and values", hint=hint)
    _check_size(data, source, hint)
    return data


def is_document(text: str) -> bool:
    """Return whether a text holds keys and values, or would where YAML could be read here."""
    try:
        load_document(text, "", hint="")
    except PlanError:
        return text.lstrip("\ufeff \n").startswith("{")
    except UsageError:
        return True
    return True


def parse_json(text: str, source: str, hint: str) -> object:
    """Return what a JSON text holds; comments and commas before a bracket are passed over, as DeepSpeed's reader does.

    Raises `PlanError` where it is no JSON.
    """
    try:
        return json.loads(_without_comments(text.removeprefix("\ufeff")))
    except (ValueError, RecursionError) as error:
        raise PlanError(f"{source} is not JSON: {error}", hint=hint) from None


def _without_comments(text: str) -> str:
    """Return a text with blanks for its comments (`#`, `//`, `/* */`) and for commas that nothing follows."""
    kept = "".join(
        part if part.startswith('"') else re.sub(r"[^\n]", " ", part) if part[0] in "#/" else part
        for part in re.findall(_PARTS, text)
    )
    return "".join(
        part if part.startswith('"') else re.sub(r",(?=\s*[}\]])", " ", part) for part in re.findall(_STRINGS, kept)
    )


_PARTS = r'"(?:[^"\\\n]|\\.)*"|#[^\n]*|//[^\n]*|/\*[\s\S]*?\*/|[^"#/]+|[\s\S]'
_STRINGS = r'"(?:[^"\\\n]|\\.)*"|[^"]+|"'


def _check_size(data: object, source: str, hint: str) -> None:
    """Raise `PlanError` for more values than any configuration has, and for aliases that hold themselves."""
    waiting, count = [data], 0
    while waiting:
        value = waiting.pop()
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple | set) else ()
        count += len(inner)
        if count > _MOST_VALUES:
            raise PlanError(f"{source} has more than {_MOST_VALUES:,} values, aliases counted each time", hint=hint)
        waiting.extend(inner)


def _load_yaml(text: str, source: str, hint: str) -> object:
    if importlib.util.find_spec("yaml") is None:
        raise UsageError(f"{source} is YAML, and PyYAML is not installed", hint="pip install pyyaml")
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}" if mark is not None else ""
        problem = getattr(error, "problem", None) or "it cannot be parsed"
        raise PlanError(f"{source} is not YAML{where}: {problem}", hint=hint) from None
    except RecursionError:
        raise PlanError(f"{source} is not YAML: it is nested too deeply", hint=hint) from None
    except (ValueError, LookupError, AttributeError, TypeError) as error:  # dates, numbers and tags that are none
        raise PlanError(f"{source} is not YAML: a value is not of its type ({error})", hint=hint) from None
