"""Files in which Megatron-LM's arguments stand as keys: `--yaml-cfg`, and the recipes of its tests and model zoo.

The first has sections by subject (megatron/training/yaml_arguments.py), the second `MODEL_ARGS` with options as a
command line has them, and `ENV_VARS` with values for these (tests/functional_tests of NVIDIA/Megatron-LM).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from paraplan.errors import PlanError
from paraplan.interop.sources.documents import load_document

_SIGNS = re.compile(r"^(?:\s+--[a-z][\w-]*|language_model|model_parallel):(?:\s|$)", flags=re.MULTILINE)
_RENAMED = {"num_moe_experts": "num_experts"}
"""Keys of `--yaml-cfg` that are options by another name."""


def is_megatron_file(text: str) -> bool:
    """Return whether a text has Megatron-LM's arguments as keys."""
    return _SIGNS.search(text) is not None


def as_arguments(text: str, source: str) -> str:
    """Return a command line for a file of such keys, and any other text as it is.

    Raises `PlanError` where the file cannot be read, or trains nothing.
    """
    if not is_megatron_file(text):
        return text
    held = load_document(text, source, hint="examples/gpt3/gpt_config.yaml of Megatron-LM is one")
    if held.get("MODE") == "inference":
        raise PlanError(f"{source}: MODE inference trains nothing", hint="give a file that trains")
    variables = held.get("ENV_VARS")
    known = {str(name): str(value) for name, value in variables.items()} if isinstance(variables, Mapping) else {}
    options = held.get("MODEL_ARGS")
    words = " ".join(_words(options if isinstance(options, Mapping) else held))
    return re.sub(r"\$\{(\w+)\}", lambda found: known.get(found.group(1), found.group(0)), words)


def _words(held: Mapping[Any, object]) -> Iterator[str]:
    for key, value in held.items():
        if isinstance(value, Mapping):
            yield from _words(value)
        elif value not in (None, False):
            name = str(key).removeprefix("--").replace("-", "_")
            yield f"--{_RENAMED.get(name, name).replace('_', '-')}"
            values = value if isinstance(value, list) else [value]
            yield from () if value is True else (shlex.quote(str(one)) for one in values)
