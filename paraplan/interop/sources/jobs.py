"""Files of jobs (SkyPilot, Kubernetes, Beaker and their kin), which hold the command that starts a training."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from paraplan.errors import PlanError
from paraplan.interop.sources.documents import load_document

_STARTS = re.compile(
    r"\b(accelerate|torchrun|deepspeed|axolotl|trl|swift|megatron|llamafactory-cli|python[\d.]*)(?![\w.-])"
)
_ARGUMENTS = ("args", "arguments")
_VARIABLES = ("envs", "env", "envVars", "environment")


def script_of_job(text: str, source: str) -> str | None:
    """Return the commands that a job's file gives to a shell, behind the variables that it sets; None for other texts.

    A number of GPUs that stands in SkyPilot's `resources` is in the variables that SkyPilot sets.
    """
    if _STARTS.search(text) is None:
        return None
    try:
        held = load_document(text, source, hint="")
    except PlanError:
        return None
    commands = [command for command in _commands(held) if _STARTS.search(command)]
    if not commands:
        return None
    variables = dict([*_of_skypilot(held), *_variables(held)])
    lines = [f"{name}={shlex.quote(value)}" for name, value in variables.items()]

    def filled(command: str) -> str:
        """Return a command with the shell's spelling of what Kubernetes writes as `$(NAME)`."""
        return re.sub(r"\$\((\w+)\)", lambda found: f"${{{found[1]}}}" if found[1] in variables else found[0], command)

    return "\n".join([*lines, *map(filled, commands)])


def _commands(value: object) -> Iterator[str]:
    if isinstance(value, Mapping):
        words = [*_words(value.get("command")), *(word for key in _ARGUMENTS for word in _words(value.get(key)))]
        if words:
            is_shell = any(re.fullmatch(r"-\w*c", word) for word in words[:-1])
            quoted = (f'"{word}"' if re.search(r"\s", word) else word for word in words)
            yield words[-1] if is_shell or len(words) == 1 else " ".join(quoted)
        for key, item in value.items():
            if key not in ("command", *_ARGUMENTS, *_VARIABLES):
                yield from _commands(item)
    elif isinstance(value, list):
        for item in value:
            yield from _commands(item)
    elif isinstance(value, str):
        yield value


def _words(value: object) -> list[str]:
    return [str(word) for word in value] if isinstance(value, list) else [] if value is None else [str(value)]


def _variables(value: object) -> Iterator[tuple[str, str]]:
    """Yield the variables of an environment, as keys or as a list of names and values, wherever it stands."""
    if isinstance(value, list):
        for item in value:
            yield from _variables(item)
    if not isinstance(value, Mapping):
        return
    for key, item in value.items():
        if key not in _VARIABLES:
            yield from _variables(item)
            continue
        pairs: list[tuple[Any, Any]] = []
        if isinstance(item, Mapping):
            pairs = list(item.items())
        elif isinstance(item, list):
            pairs = [(one.get("name"), one.get("value")) for one in item if isinstance(one, Mapping)]
        yield from (
            (str(name), str(given))
            for name, given in pairs
            if isinstance(given, str | int) and re.fullmatch(r"[A-Za-z_]\w*", str(name))
        )


def _of_skypilot(held: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    resources = held.get("resources")
    wanted = resources.get("accelerators") if isinstance(resources, Mapping) else None
    found = re.fullmatch(r"[\w.-]+:(\d+)", str(wanted))
    if found is not None:
        yield "SKYPILOT_NUM_GPUS_PER_NODE", found.group(1)
        yield "SKYPILOT_NUM_NODES", str(held.get("num_nodes") or 1)
