"""torchtitan's command line: the configuration that it names, with the keys that it sets beside."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

from paraplan.errors import PlanError
from paraplan.interop.sources.options import options_of
from paraplan.interop.sources.shell import Command, command_of

COMMAND = re.compile(r"\btorchtitan[./]train\b|(?<![\w.])(\./|torchtitan/)*run_train\.sh\b")
"""Start of a training's command: the module, or the script of torchtitan that starts it."""
_TRAIN_TOML, _TRAIN_MODULE = (
    "./torchtitan/models/llama3/train_configs/debug_model.toml",
    ("llama3", "llama3_debugmodel"),
)
_RUN_TRAIN_GPUS = "8"
"""GPUs that run_train.sh takes where its variables are not set."""


class Named(NamedTuple):
    """The configuration that a command names."""

    text: str
    path: str
    function: str | None
    """The function of Python's registry; None for TOML."""
    settings: dict[str, object]
    """Keys in sections that the command sets, by their names with a dot."""
    num_gpus: int | None
    notes: list[str]


def named_configuration(script: str, *, source: str, read_file: Callable[[str], str]) -> Named:
    """Return what a script's command trains. Raises `PlanError` where the configuration cannot be found."""
    command = command_of(script, source, COMMAND)
    options, settings = dict[str, object](), dict[str, object]()
    for name, value in options_of(command.words).items():
        (settings if "." in name else options)[name] = value
    path = settings.pop("job.config_file", None) or command.variables.get("CONFIG_FILE")
    settings.pop("job.custom_config_module", None)
    module, function = (options.get(key) or command.variables.get(key.upper()) for key in ("module", "config"))
    if path is None and module is None and function is None:
        path = _TRAIN_TOML if "--job." in script else None
    if path is not None:
        return Named(
            read_file(str(path)), str(path), None, _typed(settings), _num_gpus(command, options), command.notes(source)
        )
    module, function = str(module or _TRAIN_MODULE[0]), str(function or _TRAIN_MODULE[1])
    if "$" in module + function:
        raise PlanError(f"{source}: the shell knows which configuration it trains", hint="name it: FILE.py:NAME")
    for path in (
        f"torchtitan/models/{module.replace('.', '/')}/config_registry.py",
        f"torchtitan/experiments/{module.replace('.', '/')}/config_registry.py",
    ):
        try:
            text = read_file(path)
        except PlanError:
            continue
        return Named(text, path, function, _typed(settings), _num_gpus(command, options), command.notes(source))
    raise PlanError(
        f"{source} trains {function} of {module}, whose config_registry.py is not beside it",
        hint=f"give the file: paraplan import torchtitan/models/{module}/config_registry.py:{function}",
    )


def apply_settings(values: dict[str, object], settings: Mapping[str, object]) -> dict[str, object]:
    """Return a configuration's keys with those that a command sets in place of its own."""
    for name, value in settings.items():
        place = values
        *sections, key = name.split(".")
        for section in sections:
            inner = place.get(section)
            inner = dict(inner) if isinstance(inner, Mapping) else {}
            place[section] = inner
            place = inner
        place[key] = value
    return values


def _typed(settings: Mapping[str, object]) -> dict[str, object]:
    """Return settings with their switches and numbers as a file has them: `--compile.no-enable` is false."""
    typed: dict[str, object] = {}
    for name, value in settings.items():
        section, _, key = name.rpartition(".")
        if value is True and key.startswith("no_"):
            typed[f"{section}.{key[3:]}"] = False
        elif isinstance(value, str) and re.fullmatch(r"-?\d+", value):
            typed[name] = int(value)
        else:
            typed[name] = {"true": True, "false": False}.get(value.lower(), value) if isinstance(value, str) else value
    return typed


def _num_gpus(command: Command, options: Mapping[str, object]) -> int | None:
    """Return the processes of all nodes; of run_train.sh those of $NGPU."""
    is_script = any(word.endswith("run_train.sh") for word in command.words)
    each = options.get("nproc_per_node") or command.variables.get("NGPU") or (_RUN_TRAIN_GPUS if is_script else None)
    counts = [str(each), str(options.get("nnodes", 1))]
    product = 1
    for count in counts:
        product *= int(count) if count.isdigit() else 0
    return product or None
